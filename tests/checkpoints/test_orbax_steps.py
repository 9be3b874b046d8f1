"""Steps of a pytree: whole or not there, strict, and safe beside donation."""

import logging
import random
import threading
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.checkpoints import CheckpointError
from specjax.checkpoints.orbax import StepStore, steps
from specjax.checkpoints.orbax.sums import SUMS


class Pair(NamedTuple):
    k: jax.Array
    v: jax.Array | None


def tree(value: float = 0.0):
    """Every kind of leaf a state may have."""
    return {
        "blocks": [
            Pair(jnp.full((3, 4), float(value)), None),
            Pair(jnp.ones((2,)), None),
        ],
        "half": jnp.asarray([1.5, -0.0, jnp.nan], jnp.bfloat16),
        "none": None,
        "seeds": jnp.asarray([0, 2**32 - 1], jnp.uint32),
        "done": jnp.asarray([True, False]),
        "codes": jnp.asarray([-8, 7], jnp.int4),
        "scalar": jnp.int32(7),
        "nothing": jnp.zeros((2, 0), jnp.int32),
        "key": jax.random.key(5),
    }


def bits(leaf) -> bytes:
    data = jax.random.key_data(leaf) if leaf.dtype == jax.random.key(0).dtype else leaf
    return np.asarray(data).tobytes()


def same(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and bits(x) == bits(y)


@pytest.fixture
def kept(tmp_path) -> Path:
    """Three steps; the last two stay."""
    with StepStore(tmp_path / "steps") as store:
        for step in (4, 8, 12):
            store.save(step, tree(step), {"step": step})
    return tmp_path / "steps"


def test_leaves_of_every_kind_come_back_bit_for_bit(kept):
    with StepStore(kept) as store:
        assert store.steps == [8, 12]
        found = store.restore(tree())
    assert found is not None
    assert (found.step, found.notes) == (12, {"step": 12})
    same(found.tree, tree(12))
    # bound to no device, or every program would be compiled anew
    assert not any(leaf.committed for leaf in jax.tree.leaves(found.tree))


def test_no_thread_is_left(kept):
    before = threading.active_count()
    with StepStore(kept) as store:
        store.save(16, tree(16), None)
        store.restore(tree())
    # a thread that has been told to end may take a moment on a busy machine
    end = time.monotonic() + 30
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_arrays_lie_where_they_are_wanted(kept, cpu_devices):
    spread = NamedSharding(Mesh(np.array(cpu_devices[:4]), ("x",)), PartitionSpec("x"))
    one = {"x": jnp.arange(8), "y": jnp.arange(8)}
    many = one | {"x": jax.device_put(one["x"], spread)}
    with StepStore(kept.parent / "other") as store:
        store.save(1, one, None)
        found = store.restore(many)
        assert found.tree["x"].sharding == spread
        same(found.tree, one)
        store.save(2, many, None)
        found = store.restore(one)
        assert len(found.tree["x"].devices()) == 1
        same(found.tree, one)


def test_a_state_may_be_donated_as_soon_as_save_returns(tmp_path):
    @jax.jit
    def make():
        return {"x": jnp.arange(1 << 20)}

    donate = jax.jit(lambda t: {"x": t["x"] * 3 + 1}, donate_argnums=0)
    state, expected = make(), {}
    with StepStore(tmp_path, keep=3) as store:
        for step in range(3):
            expected[step] = np.array(state["x"])
            store.save(step, state, None)
            for _ in range(3):
                state = donate(state)
    for step in (2, 1, 0):
        with StepStore(tmp_path, keep=3) as store:
            found = store.restore(make())
            assert found.step == step
            np.testing.assert_array_equal(found.tree["x"], expected[step])
        (tmp_path / str(step) / SUMS).unlink()  # so that the next is read


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"blocks": [Pair(jnp.zeros((3, 5)), None), Pair(jnp.ones((2,)), None)]},
            "['blocks'][0].k: found float32[3,4], expected float32[3,5]",
        ),
        (
            {"half": jnp.zeros((3,), jnp.float16)},
            "['half']: found bfloat16[3], expected float16[3]",
        ),
        ({"none": jnp.ones(())}, "['none']: found nothing, expected float32[]"),
        ({"done": None}, "['done']: found bool[2], expected nothing"),
        (
            {"nothing": jnp.zeros((2, 3), jnp.int32)},
            "['nothing']: found int32[2,0], expected int32[2,3]",
        ),
        ({"key": jax.random.key(0, impl="rbg")}, "['key']: found key<fry>[], expected"),
    ],
)
def test_another_tree_is_an_error_that_names_the_leaf(kept, change, said):
    with (
        StepStore(kept) as store,
        pytest.raises(CheckpointError, match="does not fit") as error,
    ):
        store.restore(tree() | change)
    assert said in str(error.value)
    assert "step 12" in str(error.value)


def damage(file: Path, kind: str) -> None:
    data = bytearray(file.read_bytes())
    if kind == "missing":
        file.unlink()
        return
    if kind == "truncated":
        del data[len(data) // 2 :]
    else:
        data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("kind", ["missing", "truncated", "changed"])
def test_a_damaged_step_is_passed_over_with_a_warning(kept, kind, caplog):
    files = [p for p in (kept / "12").rglob("*") if p.is_file()]
    data = [p for p in files if p.name not in steps.WRITTEN_LATER]
    file = random.Random(kind).choice(data)
    damage(file, kind)
    with StepStore(kept) as store, caplog.at_level(logging.WARNING):
        found = store.restore(tree())
        same(found.tree, tree(8))
        assert store.steps == [8]
        name = file.relative_to(kept / "12").as_posix()
        assert "step 12" in caplog.text and name in caplog.text
        assert "going on from step 8" in caplog.text
        store.save(12, tree(12), None)  # its number is free again
        assert store.restore(tree()).step == 12


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1}', '{"a": [1]}', "\xff"])
def test_broken_checksums_are_damage(kept, text, caplog):
    (kept / "12" / "sums.json").write_text(text, "latin-1")
    with StepStore(kept) as store, caplog.at_level(logging.WARNING):
        assert store.restore(tree()).step == 8
    assert "sums.json is broken" in caplog.text


def test_without_a_whole_step_there_is_an_error(kept):
    for step in (8, 12):
        damage(kept / str(step) / "notes" / "metadata", "truncated")
    with StepStore(kept) as store:
        with pytest.raises(CheckpointError, match=r"no step is whole.*notes/metadata"):
            store.restore(tree())
        assert store.steps == [8, 12]  # nothing is removed that may still be of use


def test_what_a_killed_process_left_is_removed(kept):
    half = kept / "16.orbax-checkpoint-tmp"
    (half / "arrays").mkdir(parents=True)
    (half / "arrays" / "d").write_bytes(b"half")
    with StepStore(kept) as store:
        assert store.steps == [8, 12]
        assert store.restore(tree()).step == 12
        store.save(16, tree(16), None)
    assert sorted(p.name for p in kept.iterdir()) == ["12", "16"]


def test_a_save_that_fails_is_an_error_and_harms_no_step(kept, monkeypatch, caplog):
    def full(folder, skip):
        raise OSError("No space left on device")

    monkeypatch.setattr(steps, "write_sums", full)
    said = r"step 16 of .* was not written: .*No space left"
    with (
        caplog.at_level(logging.CRITICAL),
        pytest.raises(CheckpointError, match=said),
        StepStore(kept) as store,
    ):
        store.save(16, tree(16), None)
    monkeypatch.undo()
    with StepStore(kept) as store:
        assert store.steps == [8, 12]


def test_an_error_of_the_run_is_not_hidden_by_the_store(kept):
    def run():
        with StepStore(kept) as store:
            store.save(16, tree(16), None)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    with StepStore(kept) as store:
        assert store.steps == [12, 16]  # the save in flight was waited for


def test_bad_arguments(tmp_path):
    with pytest.raises(CheckpointError, match="keep = 0"):
        StepStore(tmp_path, keep=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be opened"):
        StepStore(tmp_path / "file")
    with StepStore(tmp_path / "none") as store:
        assert store.restore(tree()) is None
