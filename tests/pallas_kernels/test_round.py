"""The decoder's whole round, compiled for a TPU or a GPU that is not there.

Run where their compilers are installed: pip install -e .[aot-tpu,aot-cuda].
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.aot import cuda, tpu
from pallas_kernels.aot.program import copies
from pallas_kernels.layouts import as_kernels_read
from specjax.acceptance import RULES
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.requests import Request
from specjax.drafters.ngram import NGram
from specjax.models.build import Builder, WeightType
from specjax.models.families import deepseek
from specjax.models.memory import with_recurrence
from specjax.models.recurrence import Replay, Ring
from specjax.models.sharding import make_mesh, shard_decoder, shard_state
from specjax.testing.toys import RandomReader, toy_hybrid, toy_llama


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


def latent_and_state() -> tuple[Engine, Any]:
    """Two blocks of a DeepSeek, with the latents of a real one and 16 heads."""
    raw = {
        "model_type": "deepseek_v3",
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "first_k_dense_replace": 2,  # no block has experts
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "n_group": 1,
        "topk_group": 1,
        "max_position_embeddings": 8192,
    }
    config = deepseek.deepseek_v3(raw)
    decoder = deepseek.build(config, Builder(RandomReader(0), WeightType.BFLOAT16))
    options = EngineOptions(prefill_width=64, widths=(8,))
    engine = Engine(decoder, NGram(k=7, min_n=1), RULES["coupled"].build(), options)
    requests = [Request(prompt_ids=[3, 4, 5] * 50, max_tokens=3900) for _ in range(3)]
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


def check_caches(program: Any, state: Any, count: int) -> None:
    """All are updated in place, and none is copied."""
    caches = [x.shape for x in jax.tree.leaves(state.target.blocks) if x.ndim == 4]
    assert len(caches) == count
    assert copies(program.as_text(), tuple(caches)) == []
    large = sum(2 * int(np.prod(shape)) for shape in caches)
    assert program.memory_analysis().alias_size_in_bytes >= large


needs_tpu = pytest.mark.skipif(tpu.missing() is not None, reason=str(tpu.missing()))
needs_cuda = pytest.mark.skipif(cuda.missing() is not None, reason=str(cuda.missing()))


@pytest.mark.full
@pytest.mark.timeout(600)
@needs_tpu
@pytest.mark.parametrize(("dim", "heads"), [(128, 8), (128, 2), (64, 8)])
@pytest.mark.parametrize("generation", ["v5e", "v6e"])
def test_a_round_calls_its_kernels_and_copies_no_cache(rounds, generation, dim, heads):
    engine, state = engine_and_state(dim, heads)
    program = rounds.compile_for(tpu.device(generation), engine, state)
    text = program.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 2
    check_caches(program, state, count=4)
    assert not [line for line in text.splitlines() if " infeed(" in line]
    assert not [line for line in text.splitlines() if " outfeed(" in line]


@pytest.mark.full
@pytest.mark.timeout(600)
@needs_cuda
@pytest.mark.parametrize(
    ("make", "count"),
    [
        pytest.param(functools.partial(engine_and_state, 128, 8), 4, id="128-8"),
        pytest.param(functools.partial(engine_and_state, 64, 2), 4, id="64-2"),
        pytest.param(
            latent_and_state,
            2,
            id="latent",
            marks=pytest.mark.skipif(
                compat.VERSION < (0, 12), reason="older JAX spills its registers"
            ),
        ),
    ],
)
def test_a_round_on_hopper_calls_its_kernels_and_copies_no_cache(rounds, make, count):
    engine, state = make()
    program = rounds.compile_for(cuda.device("h100"), engine, state)
    assert program.as_text().count('custom_call_target="mosaic_gpu') == 2
    check_caches(program, state, count=count)


@pytest.mark.full
@pytest.mark.timeout(600)
@needs_tpu
@pytest.mark.parametrize("strategy", [Replay(), Ring()], ids=["replay", "ring"])
def test_a_hybrid_round_calls_its_kernels_on_a_mesh(rounds, strategy):
    engine, state = hybrid_and_state(strategy)
    mesh = make_mesh({"data": 2, "tensor": 2}, tpu.devices("v5e"))
    target = shard_decoder(rounds.shapes_of(engine.target), mesh)
    state = shard_state(rounds.shapes_of(state), mesh)
    with jax.set_mesh(mesh):
        text = rounds.compile(engine, target, state).as_text()
    calls = re.findall(r"(\w*)[.\d]* = .*tpu_custom_call", text)
    assert len([name for name in calls if "delta" in name]) >= 2 * 2, calls
    assert any("attention" in name for name in calls), calls
    states = ((2, 4, 128, 128),)  # of a device
    assert copies(text, states, rewritten=True) == []


@pytest.mark.full
@pytest.mark.timeout(600)
@needs_cuda
@pytest.mark.parametrize("strategy", [Replay(), Ring()], ids=["replay", "ring"])
def test_a_hybrid_round_on_hopper_calls_its_kernels_and_copies_no_state(
    rounds, strategy
):
    engine, state = hybrid_and_state(strategy)
    matrix = (4, 4, 128, 128)
    matrices = [x for x in jax.tree.leaves(state.target.blocks) if x.shape == matrix]
    program = rounds.compile_for(cuda.device("h100"), engine, state)
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
