"""The decoder's whole round with a narrow cache, compiled for a device not here.

Run where their compilers are installed: pip install -e .[aot-tpu,aot-cuda].
"""

from typing import Any

import jax
import pytest

from pallas_kernels.aot import cuda, tpu
from pallas_kernels.aot.program import copies
from specjax.acceptance import RULES
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.requests import Request
from specjax.drafters.ngram import NGram
from specjax.models.build import WeightType
from specjax.models.memory import with_codec
from specjax.models.mixers.codecs import CODECS
from specjax.testing.conformance import hlo
from specjax.testing.toys import toy_llama


def engine_of(codec: str) -> Engine:
    """Two blocks of a Llama with real heads; no logits have the shape of scales."""
    toy = toy_llama(
        weights=WeightType.BFLOAT16,
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=2048,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=8192,
    )
    options = EngineOptions(prefill_width=64, widths=(8,))
    decoder = with_codec(toy.decoder, CODECS[codec])
    rule = RULES["coupled"].build()
    return Engine(decoder, NGram(k=7, min_n=1), rule, options)


def started(engine: Engine) -> tuple[Any, list[jax.Array]]:
    """A state, and its codes and scales."""
    requests = [
        Request(prompt_ids=[3, 4, 5] * 50, max_tokens=3900, seed=i) for i in range(3)
    ]
    state = engine.start(requests)
    caches = jax.tree.leaves(state.target.blocks)
    assert len(caches) == 8 and len({x.shape for x in caches}) == 2
    return state, caches


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.skipif(cuda.missing() is not None, reason=str(cuda.missing()))
@pytest.mark.parametrize("codec", list(CODECS))
def test_a_round_on_hopper_updates_codes_and_scales_in_place(rounds, codec):
    engine = engine_of(codec)
    state, caches = started(engine)
    program = rounds.compile_for(cuda.device("h100"), engine, state)
    text = program.as_text()
    assert text.count('custom_call_target="mosaic_gpu') == 2
    assert copies(text, tuple(x.shape for x in caches)) == []
    large = sum(x.nbytes for x in caches)
    assert program.memory_analysis().alias_size_in_bytes >= large


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.skipif(tpu.missing() is not None, reason=str(tpu.missing()))
@pytest.mark.parametrize("codec", list(CODECS))
def test_a_round_updates_codes_and_scales_in_place(rounds, codec):
    engine = engine_of(codec)
    state, caches = started(engine)
    kept = {x.shape for x in caches}
    program = rounds.compile_for(tpu.device("v5e"), engine, state)
    text = program.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 2
    # what a fusion computes inside is not stored, so only its result counts
    made = {
        instruction.op
        for instruction in hlo.loop_instructions(hlo.parse(text))
        if kept & set(instruction.shapes)
    }
    assert "dynamic-update-slice" in made
    assert made <= hlo.IN_PLACE
    large = sum(x.nbytes for x in caches)
    assert program.memory_analysis().alias_size_in_bytes >= large
