"""A large vocabulary costs no copy: a loop reads bfloat16 embeddings row by row."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from specjax.checkpoints import load
from specjax.decoding.windows import chunk_window
from specjax.models.build import WeightType

GEMMA = Path(__file__).resolve().parents[1] / "data/oracles/gemma3"


def carried(step, *arguments) -> str:
    """What the compiled loop around a step carries from one round to the next."""

    def loop(*arguments):
        def body(carry):
            count, tokens = carry
            return count + 1, step(tokens, *arguments)

        start = (jnp.int32(0), jnp.zeros((1, 4), jnp.int32))
        return jax.lax.while_loop(lambda carry: carry[0] < 4, body, start)

    text = jax.jit(loop).lower(*arguments).compile().as_text()
    assert text is not None
    (line,) = re.findall(r"= \((.*)\) while\(", text)
    return line


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of XLA's CPU backend")
def test_a_loop_of_passes_holds_no_float32_embedding():
    decoder = load(GEMMA, WeightType.BFLOAT16, tokenizer=False).decoder
    whole = f"f32[{decoder.vocab_size},{decoder.config.hidden_size}]"

    def ours(tokens, decoder):
        zero = jnp.zeros(1, jnp.int32)
        rows = decoder.ends.embed(chunk_window(tokens, zero, zero + 4, 4).tokens)
        return tokens + jnp.int32(1) + jnp.sum(rows).astype(jnp.int32)

    def naive(tokens, decoder):
        rows = decoder.embedding.at[tokens].get(mode="clip").astype(jnp.float32)
        return tokens + jnp.int32(1) + jnp.sum(rows).astype(jnp.int32)

    assert whole not in carried(ours, decoder)
    # Which loops XLA hoists a conversion out of depends on what the processor can do
    # with bfloat16, so the fault that the test is for may not be seen everywhere.
    if whole not in carried(naive, decoder):
        pytest.skip("XLA hoists nothing here, so there is nothing to see")
