"""The noise draws the laws it is given, independently by position, seed and stream."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from specjax.decoding.laws import warp
from specjax.decoding.noise import Stream, gumbel, sample
from specjax.decoding.types import Sampling

DRAWS = 100_000
ALPHA = 1e-4
ROW = np.array([1.0, 0.2, -0.5, 0.9, -2.0], np.float32)

draw = jax.jit(sample)
noise = jax.jit(gumbel, static_argnums=(2, 3))


def seeds_and_positions(by: str) -> tuple[jax.Array, jax.Array]:
    """The number of the draw as the seed, or as the position."""
    count, fixed = jnp.arange(DRAWS), jnp.full((DRAWS,), 17)
    seeds, positions = (count, fixed) if by == "seed" else (fixed, count)
    return seeds.astype(jnp.uint32), positions.astype(jnp.int32)


def fits(observed: np.ndarray, law: np.ndarray) -> bool:
    """Chi-square over the tokens that the law allows; none other may be drawn."""
    assert observed[law == 0].sum() == 0
    expected = law[law > 0] * observed.sum()
    return bool(stats.chisquare(observed[law > 0], expected).pvalue > ALPHA)


def log_law(kept: list[int], temperature: float) -> np.ndarray:
    """By hand: the law of the tokens that a cut-off keeps."""
    weight = np.zeros(len(ROW))
    weight[kept] = np.exp(ROW[kept] / temperature)
    return weight / weight.sum()


CUTS = {
    "whole": (Sampling(), [0, 1, 2, 3, 4], 1.0),
    "hot": (Sampling(), [0, 1, 2, 3, 4], 3.0),
    "cold": (Sampling(), [0, 1, 2, 3, 4], 0.3),
    "top-k": (Sampling(top_k=jnp.array([3], jnp.int32)), [0, 1, 3], 1.0),
    "top-p": (Sampling(top_p=jnp.array([0.7], jnp.float32)), [0, 3], 1.0),
    "min-p": (Sampling(min_p=jnp.array([0.3], jnp.float32)), [0, 1, 3], 1.0),
}


@pytest.mark.parametrize("by", ["seed", "position"])
@pytest.mark.parametrize("cut", CUTS)
def test_draws_have_the_frequencies_of_the_law(cut: str, by: str):
    settings, kept, temperature = CUTS[cut]
    settings = settings.replace(temperature=jnp.array([temperature], jnp.float32))
    scores = jnp.broadcast_to(warp(jnp.asarray(ROW[None]), settings), (DRAWS, 5))
    tokens = np.asarray(draw(scores, *seeds_and_positions(by)))
    observed = np.bincount(tokens, minlength=5)
    assert fits(observed, log_law(kept, temperature))
    # the same counts do not fit a law that gives its first token five in a hundred more
    wrong = log_law(kept, temperature) * np.array([1.05, 1, 1, 1, 1])
    assert not fits(observed, wrong / wrong.sum())


def test_a_one_hot_law_is_drawn_for_certain():
    scores = jnp.where(jnp.arange(5) == 3, 0.0, -jnp.inf)
    scores = jnp.broadcast_to(scores.astype(jnp.float32), (DRAWS, 5))
    assert set(np.asarray(draw(scores, *seeds_and_positions("seed")))) == {3}


def independent(a: np.ndarray, b: np.ndarray) -> bool:
    """Chi-square of the contingency table."""
    table = np.zeros((5, 5))
    np.add.at(table, (a, b), 1)
    return bool(stats.chi2_contingency(table).pvalue > ALPHA)


def picks(seeds: jax.Array, positions: jax.Array, stream: Stream) -> np.ndarray:
    g = noise(seeds, positions, 5, stream)
    return np.asarray(jnp.argmax(jnp.asarray(ROW) + g, axis=-1))


@pytest.mark.parametrize("by", ["seed", "position"])
def test_successive_positions_and_neighbouring_seeds_are_independent(by: str):
    seeds, positions = seeds_and_positions(by)
    here = picks(seeds, positions, Stream.TARGET)
    assert independent(here, picks(seeds, positions + 1, Stream.TARGET))
    assert independent(here, picks(seeds + jnp.uint32(1), positions, Stream.TARGET))
    # seed s at t and seed s + 1 at t - 1 would coincide if seed and t were added
    other = picks(seeds + jnp.uint32(1), positions - 1, Stream.TARGET)
    assert independent(here, other)


def test_streams_are_independent_of_each_other_and_not_of_themselves():
    seeds, positions = seeds_and_positions("seed")
    drawn = {stream: picks(seeds, positions, stream) for stream in Stream}
    for a in Stream:
        for b in Stream:
            assert independent(drawn[a], drawn[b]) == (a != b)
    # a stream at one position is not the next stream at another
    after = picks(seeds, positions + 1, Stream.TARGET)
    assert independent(after, drawn[Stream.DRAFT])


def test_noise_does_not_depend_on_the_batch_it_is_drawn_in():
    seeds, positions = seeds_and_positions("seed")
    whole = np.asarray(noise(seeds[:64], positions[:64], 5, Stream.TARGET))
    for row in (0, 5, 63):
        alone = noise(seeds[row : row + 1], positions[row : row + 1], 5, Stream.TARGET)
        np.testing.assert_array_equal(alone[0], whole[row])


def test_the_upper_tail_goes_beyond_what_24_bits_can_reach():
    size, rows = 2**21, 16
    seeds = jnp.arange(rows).astype(jnp.uint32)
    positions = jnp.zeros((rows,), jnp.int32)
    thresholds = jnp.array([8.0, 10.0, 12.0, 14.0, 16.64], jnp.float32)

    @jax.jit
    def above(seed: jax.Array, position: jax.Array) -> jax.Array:
        g = gumbel(seed[None], position[None], size)
        return jnp.array([(g > t).sum(dtype=jnp.int32) for t in thresholds])

    counts = sum(np.asarray(above(s, p)) for s, p in zip(seeds, positions, strict=True))
    expected = rows * size * -np.expm1(-np.exp(-np.asarray(thresholds, np.float64)))
    # 16.64 is just above -log(-log(1 - 2**-24)): such a noise never gets there
    for count, mean in zip(counts, expected, strict=True):
        low, high = stats.poisson.interval(1 - ALPHA, mean)
        assert low <= count <= high
    assert counts[-1] > 0


def test_a_tail_of_65k_rare_tokens_is_drawn_as_often_as_it_should_be():
    tail, gap, draws = 2**16, 12.0, 256
    scores = jnp.full((1, tail + 1), -gap, jnp.float32).at[0, 0].set(0.0)
    one = jax.jit(lambda seed: sample(scores, seed[None], jnp.zeros((1,), jnp.int32)))
    hits = [int(one(jnp.uint32(i))[0]) for i in range(draws)]
    mass = tail * np.exp(-gap) / (1 + tail * np.exp(-gap))
    low, high = stats.binom.interval(1 - ALPHA, draws, mass)
    assert low <= np.count_nonzero(hits) <= high
    # and evenly: ids of the tail are not bunched at one end
    where = [h for h in hits if h > 0]
    assert stats.kstest(np.array(where) / tail, "uniform").pvalue > ALPHA


@pytest.mark.device
def test_a_tail_of_262k_tokens_with_a_gap_of_20_is_drawn():
    tail, gap, batch, calls = 2**18, 20.0, 256, 256
    scores = jnp.full((tail + 1,), -gap, jnp.float32).at[0].set(0.0)
    scores = jnp.broadcast_to(scores, (batch, tail + 1))
    zeros = jnp.zeros((batch,), jnp.int32)

    @jax.jit
    def hits(call: jax.Array, scores: jax.Array) -> jax.Array:
        seeds = (call * batch + jnp.arange(batch)).astype(jnp.uint32)
        return (sample(scores, seeds, zeros) > 0).sum(dtype=jnp.int32)

    count = sum(int(hits(jnp.int32(call), scores)) for call in range(calls))
    mass = tail * np.exp(-gap) / (1 + tail * np.exp(-gap))
    low, high = stats.binom.interval(1 - ALPHA, batch * calls, mass)
    assert low <= count <= high
