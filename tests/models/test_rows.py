"""C4 by many windows: a row's bits are the same wherever it stands in its batch.

XLA works out the end of a small array by other code than the rest. One run may not show
it: each window is another chance.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.elementwise import LANES, whole
from specjax.decoding.interfaces import FINAL
from specjax.decoding.types import Acceptance
from specjax.decoding.windows import chunk_window
from specjax.models.recurrence import Replay, Ring, Snapshot
from specjax.testing.toy_mixers import toy_attentions, toy_recurrent
from specjax.testing.toys import toy_hybrid, toy_llama

TOYS = {
    "attentions": toy_attentions,
    "recurrent-replay": lambda: toy_recurrent(Replay()),
    "recurrent-snapshot": lambda: toy_recurrent(Snapshot()),
    "recurrent-ring": lambda: toy_recurrent(Ring(slots=12)),
    "llama": toy_llama,
    "hybrid": toy_hybrid,
}
QUICK = ("attentions", "recurrent-replay")
ROWS, WIDTH, WINDOWS, RUNS = 3, 9, 3, 25


@jax.jit
def step(decoder, state, tokens, start):
    """A window, and the state that it leaves."""
    begin = jnp.full((ROWS,), start)
    window = chunk_window(tokens, begin, begin + WIDTH, WIDTH)
    taps = (*range(len(decoder.blocks) + 1), FINAL)
    verdict = decoder.verify(state, window, taps=taps)
    path = jnp.broadcast_to(jnp.arange(WIDTH, dtype=jnp.int32), (ROWS, WIDTH))
    taken = Acceptance(path, path, jnp.full((ROWS,), WIDTH, jnp.int32))
    return verdict, decoder.commit(state, verdict.pending, taken)


def run(decoder, ids):
    """All hidden states and logits, row first."""
    state, said = decoder.init(ROWS, WIDTH * WINDOWS), []
    for number in range(WINDOWS):
        start = jnp.int32(number * WIDTH)
        verdict, state = step(decoder, state, jnp.asarray(ids), start)
        said += [*verdict.features.values(), verdict.logits]
    return [np.asarray(x) for x in said]


@pytest.mark.parametrize(
    "toy",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in TOYS],
)
def test_a_row_has_the_same_bits_at_every_place(toy):
    decoder, draw = TOYS[toy]().decoder, np.random.default_rng(0)
    for turn in range(RUNS):
        shape = (ROWS, WIDTH * WINDOWS)
        ids = draw.integers(0, decoder.vocab_size, shape).astype(np.int32)
        order = np.array([1, 2, 0] if turn % 2 else [2, 0, 1])
        for here, there in zip(
            run(decoder, ids), run(decoder, ids[order]), strict=True
        ):
            assert here[order].tobytes() == there.tobytes(), f"text {turn}"


@pytest.mark.parametrize("size", [1, 4, LANES - 1, LANES, LANES + 1])
def test_whole_vectors_change_no_value(size):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, size)), jnp.float32)
    np.testing.assert_allclose(whole(jnp.exp, x), jnp.exp(x), rtol=1e-6)
    law = whole(lambda y: jax.nn.softmax(y, axis=-1), x, fill=-jnp.inf)
    np.testing.assert_allclose(law, jax.nn.softmax(x, axis=-1), rtol=1e-6)
