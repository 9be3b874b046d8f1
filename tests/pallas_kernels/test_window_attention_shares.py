"""The TPU's window attention with a cache read in two shares, emulated."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.window_attention import api, body, interpreted, rows
from pallas_kernels.window_attention.interpreted import (
    BLOCK,
    TOLERANCE,
    by_reference,
)
from pallas_kernels.window_attention.plan import Shapes, make_plan
from pallas_kernels.window_attention.problems import in_pages, random_call
from pallas_kernels.window_attention.specs import MODELS, AttentionSpec

pytestmark = pytest.mark.timeout(240)

CAPACITY = 3 * BLOCK + 20
EDGES = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, CAPACITY)
"""Around a block, around the first block of the second share, and all."""

SMALL = AttentionSpec(q_heads=4, kv_heads=2, dim=64)
SINGLE = AttentionSpec(q_heads=4, kv_heads=1, dim=128)
BFLOAT16 = jnp.dtype(jnp.bfloat16)

by_kernel = functools.partial(interpreted.by_kernel, splits=2)


def check(
    spec: AttentionSpec,
    dtype: Any = jnp.float32,
    size: int | None = None,
    interpret: compat.Interpret = True,
    **more: Any,
) -> None:
    call = {"lengths": EDGES, "width": 3, "capacity": CAPACITY, **more}
    arrays, options = random_call(spec, dtype=dtype, **call)
    wanted = by_reference(arrays, options)
    if size is not None:
        arrays = in_pages(arrays, size)
    got = by_kernel(arrays, options, interpret=interpret)
    assert np.isfinite(wanted).all()
    np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("llama-3-8b", jnp.bfloat16),
        ("gpt-oss-20b", jnp.float32),
        ("deepseek-v3", jnp.bfloat16),
    ],
)
def test_two_shares_are_the_reference_at_real_heads(model, dtype):
    check(MODELS[model], dtype, width=1 if model == "deepseek-v3" else 3)


def test_a_ring_is_shared_out_whatever_it_holds():
    spec = dataclasses.replace(SINGLE, reach=CAPACITY, sinks=True)
    check(spec, lengths=(0, 1, CAPACITY - 1, CAPACITY, 1000))


@pytest.mark.parametrize(
    "reach", [40, *(pytest.param(n, marks=pytest.mark.full) for n in (1, BLOCK + 1))]
)
def test_a_sliding_window_leaves_blocks_and_shares_behind(reach):
    check(dataclasses.replace(SMALL, softcap=3.0), reach=reach)


@pytest.mark.parametrize("size", [pytest.param(16, marks=pytest.mark.full), 128])
def test_pages_are_shared_out(size):
    check(SINGLE, size=size)


@pytest.mark.parametrize(
    "cache", [jnp.int8, pytest.param(jnp.float8_e4m3fn, marks=pytest.mark.full)]
)
def test_narrow_caches_are_shared_out_with_their_scales(cache):
    check(dataclasses.replace(SMALL, dim=128), cache=cache)


def test_on_the_memories_of_a_tpu_in_any_order():
    """Shares begin with memory that is NaN, and may come in either order."""
    spec = dataclasses.replace(SINGLE, sinks=True)
    for seed in (0, 1):
        interpret = compat.tpu_interpret(detect_races=True, seed=seed)
        with compat.without_races():
            check(spec, interpret=interpret, reach=300, lengths=(0, 129, CAPACITY))


def test_a_window_that_both_shares_count_shows(monkeypatch):
    """And so does one that neither counts."""
    arrays, options = random_call(SMALL, lengths=EDGES, width=3, capacity=CAPACITY)
    wanted = by_reference(arrays, options)
    np.testing.assert_allclose(by_kernel(arrays, options), wanted, rtol=0, atol=3e-6)
    for counting in (lambda share: share >= 0, lambda share: share < 0):
        monkeypatch.setattr(body, "has_window", counting)
        jax.clear_caches()
        off = np.abs(by_kernel(arrays, options) - wanted).max(axis=(1, 2, 3))
        assert off[1:].min() > 1e-3  # a row without a cache reads its window twice
    monkeypatch.undo()
    jax.clear_caches()


def test_shares_follow_one_another_and_are_as_long():
    firsts = jnp.asarray([0, 0, 0, 1, 3, 2, 5], jnp.int32)
    behinds = jnp.asarray([0, 1, 2, 4, 8, 2, 3], jnp.int32)
    first, behind = map(np.asarray, rows.shares_of(firsts, behinds, 2))
    np.testing.assert_array_equal(first[0], np.minimum(firsts, behinds))
    np.testing.assert_array_equal(behind[0], first[1])
    np.testing.assert_array_equal(behind[1], behinds)
    sizes = behind - first
    assert (sizes[0] >= sizes[1]).all() and (sizes[0] - sizes[1] <= 1).all()


def test_merging_is_one_softmax_and_nothing_weighs_nothing():
    draw = np.random.default_rng(0)
    scores, values = draw.normal(size=(2, 5, 7)) * 20, draw.normal(size=(2, 7, 3))
    weights = np.exp(scores - scores.max())
    lse = np.log(weights.sum(-1)) + scores.max()
    read = weights @ values / weights.sum(-1, keepdims=True)
    wanted = np.einsum("srt,std->rd", weights, values) / weights.sum((0, 2))[:, None]
    wide = np.repeat(lse[:, :, None], 3, axis=2)

    def merged(read: np.ndarray, lse: np.ndarray) -> list[np.ndarray]:
        shaped = (jnp.asarray(x[:, None, None], jnp.float32) for x in (read, lse))
        return [np.asarray(x)[0, 0] for x in rows.merge(*shaped)]

    got, total = merged(read, wide)
    np.testing.assert_allclose(got, wanted, atol=1e-6)
    np.testing.assert_allclose(total[:, 0], np.logaddexp(*lse), rtol=1e-6)
    for empty in (0, 1):
        read[empty], wide[empty] = 0, body.LOWEST
        np.testing.assert_array_equal(
            merged(read, wide)[0], read[1 - empty].astype(np.float32)
        )
        read[empty], wide[empty] = read[1 - empty], wide[1 - empty]
    nothing = merged(0 * read, np.full_like(wide, body.LOWEST))
    assert np.isfinite(nothing).all() and not nothing[0].any()


@pytest.mark.parametrize("small", [0, 1])
def test_a_share_of_little_weight_keeps_its_digits(small):
    """Where the other's values are 0 it is all that there is."""
    read, lse = np.zeros((2, 2, 1, 1, 1, 3), np.float32)
    read[small], lse[1 - small] = 1, 30
    got, _ = rows.merge(jnp.asarray(read), jnp.asarray(lse))
    np.testing.assert_allclose(np.asarray(got), np.exp(-30), rtol=1e-5)


def test_only_a_large_cache_that_one_core_would_read_is_shared_out():
    def splits(batch: int, width: int, capacity: int, model: str, page=None) -> int:
        spec = MODELS[model]
        heads = spec.q_heads, spec.kv_heads
        shapes = Shapes(batch, width, *heads, spec.dim, spec.dim, capacity, page)
        return make_plan(shapes, BFLOAT16).splits

    assert splits(1, 1, 8192, "llama-3-8b") == 2
    assert splits(1, 8, 8192, "llama-3-8b") == 2
    assert splits(1, 8, 8192, "llama-3-8b", page=128) == 2
    assert splits(1, 1, 8191, "llama-3-8b") == 1  # too little to read
    assert splits(2, 1, 8192, "llama-3-8b") == 1  # a core has a row
    assert splits(1, 16, 8192, "llama-3-8b") == 1  # or some of the heads
    assert splits(1, 2, 32768, "deepseek-v3") == 2
    assert splits(1, 3, 32768, "deepseek-v3") == 1  # or a tile of rows
    assert splits(1, 1, 8192, "deepseek-v3") == 1
    assert splits(1, 1, 1 << 16, "llama-3-8b", page=1 << 16) == 1  # a single block
    with pytest.raises(ValueError, match="splits = 3"):
        make_plan(Shapes(1, 1, 1, 1, 128, 128, 512), BFLOAT16, splits=3)


@pytest.mark.full
def test_the_decoders_call_shares_out_a_large_cache():
    spec = AttentionSpec(q_heads=2, kv_heads=1, dim=128, sinks=True)
    for length in (0, 511, 512, 513, 16384, 32768):
        arrays, options = random_call(spec, lengths=[length], width=2, capacity=32768)
        got = api.window_attention(**arrays, **options, implementation="interpret")
        wanted = by_reference(arrays, options)
        np.testing.assert_allclose(np.asarray(got), wanted, rtol=0, atol=3e-6)


@pytest.mark.full
@pytest.mark.parametrize("width", [1, 8, 17])
@pytest.mark.parametrize("model", MODELS)
def test_every_model_and_width_in_shares(model, width):
    lengths = (0, 127, 130, 1000) if MODELS[model].reach else EDGES
    check(MODELS[model], width=width, lengths=lengths)


@pytest.mark.full
@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("reach", [None, 130])
def test_every_number_of_blocks(blocks, reach):
    capacity = blocks * BLOCK
    lengths = sorted({max(n * BLOCK + d, 0) for n in range(blocks) for d in (-1, 0, 1)})
    check(SINGLE, capacity=capacity, lengths=(*lengths, capacity), reach=reach)
