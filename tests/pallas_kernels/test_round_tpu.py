"""The decoder's whole round, compiled for a TPU or a GPU that is not there.

Run where their compilers are installed: pip install -e .[aot-tpu,aot-cuda].
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from pallas_kernels import compat
from pallas_kernels.aot import cuda, tpu
from pallas_kernels.aot.program import copies
from pallas_kernels.layouts import as_kernels_read
from specjax.acceptance import RULES
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.loop import run_rounds
from specjax.decoding.requests import Request
from specjax.drafters.ngram import NGram
from specjax.models.build import WeightType
from specjax.models.memory import with_recurrence
from specjax.models.mixers import attention
from specjax.models.recurrence import Replay, Ring
from specjax.models.sharding import make_mesh, shard_decoder, shard_state
from specjax.testing.toys import toy_hybrid, toy_llama


def engine_and_state(dim: int, heads: int) -> tuple[Engine, Any]:
    """Two blocks of a Llama, with real heads and a cache of 4096 slots."""
    toy = toy_llama(
        weights=WeightType.BFLOAT16,
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=2048,
        num_attention_heads=8,
        num_key_value_heads=heads,
        head_dim=dim,
        max_position_embeddings=8192,
    )
    options = EngineOptions(prefill_width=64, widths=(8,))
    rule = RULES["coupled"].build()
    engine = Engine(toy.decoder, NGram(k=7, min_n=1), rule, options)
    prompt = [3, 4, 5] * 50
    requests = [Request(prompt_ids=prompt, max_tokens=3900, seed=i) for i in range(3)]
    return engine, engine.start(requests)


def hybrid_and_state(strategy: Any) -> tuple[Engine, Any]:
    """A hybrid whose recurrent layers have heads of 128 by 128."""
    toy = toy_hybrid(
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    )
    decoder = with_recurrence(toy.decoder, strategy)
    options = EngineOptions(prefill_width=64, widths=(8,))
    rule = RULES["coupled"].build()
    engine = Engine(decoder, NGram(k=7, min_n=1), rule, options)
    requests = [Request(prompt_ids=[3, 4, 5] * 50, max_tokens=300) for _ in range(4)]
    return engine, engine.start(requests)


def shapes_of(tree: Any, sharding: Any = None) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )


def compiled(engine: Engine, target: Any, state: Any) -> Any:
    lowered = run_rounds.lower(
        target,
        engine.drafter,
        engine.rule,
        state,
        options=engine.round_options,
        max_rounds=4,
        kinds=engine.kinds,
    )
    return lowered.compile()


@pytest.fixture
def no_cache():
    """Programs for a device that is not here are looked at, not kept."""
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.full
@pytest.mark.usefixtures("no_cache")
@pytest.mark.timeout(600)
@pytest.mark.skipif(tpu.missing() is not None, reason=str(tpu.missing()))
@pytest.mark.parametrize(("dim", "heads"), [(128, 8), (128, 2), (64, 8)])
@pytest.mark.parametrize("generation", ["v5e", "v6e"])
def test_a_round_calls_its_kernels_and_copies_no_cache(
    monkeypatch, generation, dim, heads
):
    # on CPU, where this runs, a bfloat16 cache would be made float32
    monkeypatch.setattr(attention, "cache_dtype", lambda _: jnp.dtype(jnp.bfloat16))
    engine, state = engine_and_state(dim, heads)
    caches = [x.shape for x in jax.tree.leaves(state.target.blocks) if x.ndim == 4]
    assert len(caches) == 4
    device = tpu.device(generation)
    there = SingleDeviceSharding(device)
    target, state = shapes_of(engine.target, there), shapes_of(state, there)
    with compat.lowering_for("tpu", device.device_kind, device.num_cores):
        program = compiled(engine, target, state)
    text = program.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 2
    assert copies(text, tuple(caches)) == []
    large = sum(2 * int(np.prod(shape)) for shape in caches)
    assert program.memory_analysis().alias_size_in_bytes >= large
    assert not [line for line in text.splitlines() if " infeed(" in line]
    assert not [line for line in text.splitlines() if " outfeed(" in line]


@pytest.mark.full
@pytest.mark.usefixtures("no_cache")
@pytest.mark.timeout(600)
@pytest.mark.skipif(cuda.missing() is not None, reason=str(cuda.missing()))
@pytest.mark.parametrize(("dim", "heads"), [(128, 8), (64, 2)])
def test_a_round_on_hopper_calls_its_kernels_and_copies_no_cache(
    monkeypatch, dim, heads
):
    monkeypatch.setattr(attention, "cache_dtype", lambda _: jnp.dtype(jnp.bfloat16))
    engine, state = engine_and_state(dim, heads)
    caches = [x.shape for x in jax.tree.leaves(state.target.blocks) if x.ndim == 4]
    assert len(caches) == 4
    device = cuda.device("h100")
    there = SingleDeviceSharding(device)
    target, state = shapes_of(engine.target, there), shapes_of(state, there)
    with compat.lowering_for("gpu", device.device_kind, device.core_count):
        program = compiled(engine, target, state)
    text = program.as_text()
    assert text.count('custom_call_target="mosaic_gpu') == 2
    assert copies(text, tuple(caches)) == []
    large = sum(2 * int(np.prod(shape)) for shape in caches)
    assert program.memory_analysis().alias_size_in_bytes >= large


@pytest.mark.full
@pytest.mark.usefixtures("no_cache")
@pytest.mark.timeout(600)
@pytest.mark.skipif(tpu.missing() is not None, reason=str(tpu.missing()))
@pytest.mark.parametrize("strategy", [Replay(), Ring()], ids=["replay", "ring"])
def test_a_hybrid_round_calls_its_kernels_on_a_mesh(strategy):
    engine, state = hybrid_and_state(strategy)
    mesh = make_mesh({"data": 2, "tensor": 2}, tpu.devices("v5e"))
    target = shard_decoder(shapes_of(engine.target), mesh)
    state = shard_state(shapes_of(state), mesh)
    with jax.set_mesh(mesh):
        text = compiled(engine, target, state).as_text()
    calls = re.findall(r"(\w*)[.\d]* = .*tpu_custom_call", text)
    assert len([name for name in calls if "delta" in name]) >= 2 * 2, calls
    assert any("attention" in name for name in calls), calls
    assert copies(text, ((2, 4, 128, 128),)) == []  # of a device's states


@pytest.mark.full
@pytest.mark.usefixtures("no_cache")
@pytest.mark.timeout(600)
@pytest.mark.skipif(cuda.missing() is not None, reason=str(cuda.missing()))
@pytest.mark.parametrize("strategy", [Replay(), Ring()], ids=["replay", "ring"])
def test_a_hybrid_round_on_hopper_calls_its_kernels_and_copies_no_state(
    monkeypatch, strategy
):
    monkeypatch.setattr(attention, "cache_dtype", lambda _: jnp.dtype(jnp.bfloat16))
    engine, state = hybrid_and_state(strategy)
    matrix = (4, 4, 128, 128)
    matrices = [x for x in jax.tree.leaves(state.target.blocks) if x.shape == matrix]
    device = cuda.device("h100")
    there = SingleDeviceSharding(device)
    target, state = shapes_of(engine.target, there), shapes_of(state, there)
    with compat.lowering_for("gpu", device.device_kind, device.core_count):
        program = compiled(engine, target, state)
    text = program.as_text()
    calls = [line for line in text.splitlines() if '"mosaic_gpu' in line]
    assert len([line for line in calls if "delta_window_cuda" in line]) == len(matrices)
    assert copies(text, (matrix,)) == []
    large = sum(x.nbytes for x in matrices)
    assert program.memory_analysis().alias_size_in_bytes >= large


@pytest.mark.parametrize("dim", [128, 64])
def test_rows_for_the_cache_are_laid_out_on_a_tpu_alone(dim):
    rows = jnp.arange(2 * 8 * dim, dtype=jnp.float32).reshape(1, 2, 8, dim)
    np.testing.assert_array_equal(jax.jit(as_kernels_read)(rows), rows)
    traced = jax.jit(as_kernels_read).trace(rows)
    on_tpu = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "LayoutConstraint" in on_tpu
    assert "LayoutConstraint" not in traced.lower().as_text()
