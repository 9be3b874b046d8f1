"""The same tokens on a mesh as on one device (C4), and no cache that is gathered."""

import math
import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from specjax.acceptance import RULES
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.loop import run_rounds
from specjax.decoding.requests import Request
from specjax.drafters.ngram import NGram
from specjax.models.axes import BATCH, EXPERT, HEADS, KV_HEADS, MLP, VOCAB
from specjax.models.linear import Linear
from specjax.models.recurrence import Ring
from specjax.models.sharding import make_mesh, partition, shard_decoder, shard_state
from specjax.testing.toy_mixers import toy_attentions, toy_recurrent
from specjax.testing.toys import toy_llama

TOYS = {
    "llama": lambda: toy_llama(vocab_size=64),
    "attentions": lambda: toy_attentions(vocab_size=64),
    "recurrent": lambda: toy_recurrent(vocab_size=64),
    "recurrent-ring": lambda: toy_recurrent(Ring(slots=12), vocab_size=64),
}
SPREAD = {"data": 2, "tensor": 2, "expert": 2}
REQUESTS = [
    Request(
        prompt_ids=[3 + row, 4, 5, 3 + row, 4, 5, 3 + row],
        max_tokens=12 + row,
        seed=row,
        temperature=0.8 * (row % 2),
    )
    for row in range(4)
]


def test_an_axis_goes_where_the_rules_say_if_it_divides():
    mesh = make_mesh({"data": 2, "tensor": 4}, jax.devices("cpu"))
    assert partition((4, 8), (BATCH, None), mesh) == PartitionSpec("data", None)
    assert partition((6, 8), (KV_HEADS, None), mesh) == PartitionSpec(None, None)
    assert partition((8, 8), (HEADS, MLP), mesh) == PartitionSpec("tensor", None)
    assert partition((8, 8), (EXPERT, VOCAB), mesh) == PartitionSpec(None, "tensor")


def test_meshes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="9 devices, and there are 8"):
        make_mesh({"data": 9}, jax.devices("cpu"))
    with pytest.raises(ValueError, match="mesh axis model = 2"):
        make_mesh({"model": 2}, jax.devices("cpu"))
    engine = engine_of(toy_llama().decoder)
    mesh = make_mesh({"data": 8}, jax.devices("cpu"))
    with pytest.raises(ValueError, match="4 rows do not spread over 8"):
        shard_state(engine.start(REQUESTS), mesh)


def test_tokens_are_those_of_one_device(cpu_devices):
    same_tokens("llama", {"data": 2, "tensor": 2})


@pytest.mark.full
@pytest.mark.parametrize("toy", list(TOYS))
@pytest.mark.parametrize("sizes", [SPREAD, {"data": 4}, {"tensor": 8}], ids=str)
def test_tokens_of_every_mixer_are_those_of_one_device(cpu_devices, toy, sizes):
    same_tokens(toy, sizes)


def test_of_shapes_one_learns_where_they_lie_and_no_weight_is_for_a_kernel(
    cpu_devices,
):
    decoder = toy_llama(vocab_size=64).decoder
    mesh = make_mesh(SPREAD, cpu_devices)
    placed, shapes = shard_decoder(decoder, mesh), jax.eval_shape(lambda: decoder)
    told = shard_decoder(shapes, mesh)
    for x, y in zip(jax.tree.leaves(placed), jax.tree.leaves(told), strict=True):
        assert isinstance(y, jax.ShapeDtypeStruct) and x.sharding == y.sharding
    linears = jax.tree.leaves(placed, is_leaf=lambda x: isinstance(x, Linear))
    assert {x.divided for x in linears if isinstance(x, Linear)} == {True}


def engine_of(decoder) -> Engine:
    options = EngineOptions(prefill_width=8, widths=(5,))
    return Engine(decoder, NGram(k=4, min_n=1), RULES["coupled"].build(), options)


def finish(engine: Engine, state) -> np.ndarray:
    state = engine.prefill(state)
    while not bool(np.asarray(state.done).all()):
        state, _ = engine.rounds(state)
    return np.asarray(state.tokens)


def same_tokens(toy: str, sizes: dict[str, int]) -> None:
    decoder = TOYS[toy]().decoder
    engine = engine_of(decoder)
    wanted = finish(engine, engine.start(REQUESTS))
    mesh = make_mesh(sizes, jax.devices("cpu"))
    spread = engine_of(shard_decoder(decoder, mesh))
    state = shard_state(spread.start(REQUESTS), mesh)
    devices = {len(x.sharding.device_set) for x in jax.tree.leaves(state)}
    assert devices == {mesh.size}
    if all(sizes.get("tensor", 1) <= heads for heads in kv_heads(decoder)):
        gathers_no_cache(spread, state)
    np.testing.assert_array_equal(finish(spread, state), wanted)


def kv_heads(decoder) -> list[int]:
    """Of the layers that keep heads: a mesh with more devices replicates them, and XLA
    may then work out a part on each and put the cache together again every round."""
    mixers = [block.mixer for block in decoder.config.blocks]
    return [m.num_kv_heads for m in mixers if hasattr(m, "num_kv_heads")]


def gathers_no_cache(engine: Engine, state) -> None:
    """No all-gather in the rounds makes anything as large as a part of a cache.

    What has a cache's slots on its last axis is scores: those of an indexer are
    gathered, because the largest are found by a call that XLA does not divide.
    """
    caches = [x for x in jax.tree.leaves(state.target.blocks) if x.ndim == 4]
    parts = [math.prod(x.sharding.shard_shape(x.shape)) for x in caches]
    program = run_rounds.lower(
        engine.target,
        engine.drafter,
        engine.rule,
        state,
        options=engine.round_options,
        max_rounds=2,
        kinds=engine.kinds,
    ).compile()
    large = [n for n in parts if n > 2000]
    for line in program.as_text().splitlines():
        found = re.search(r"= \w+\[([\d,]+)\]\S* all-gather", line)
        if found is None or not large:
            continue
        shape = list(map(int, found[1].split(",")))
        if shape[-1] < state.capacity:
            assert math.prod(shape) < min(large), line
