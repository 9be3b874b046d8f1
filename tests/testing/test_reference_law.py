"""The reference's law against the definition, token by token, and against jax."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.decoding import laws
from specjax.decoding.types import Sampling
from specjax.testing.reference import Settings, adjusted, law

NONE: list[int] = []


def brute_force(scores: np.ndarray, settings: Settings) -> np.ndarray:
    """Whether to keep a token is asked of each token by itself."""
    vocab = range(len(scores))
    kept = [w for w in vocab if scores[w] > -np.inf]
    if settings.top_k:
        kept = [
            v for v in kept if sum(scores[w] > scores[v] for w in kept) < settings.top_k
        ]
    if settings.top_p < 1:
        weight = {v: np.exp(scores[v] - max(scores)) for v in kept}
        total = sum(weight.values())
        kept = [
            v
            for v in kept
            if sum(weight[w] for w in kept if scores[w] > scores[v])
            < settings.top_p * total
        ]
    kept = [v for v in kept if np.exp(scores[v] - max(scores)) >= settings.min_p]
    mass = np.zeros(len(scores))
    mass[kept] = np.exp(scores[kept] - max(scores))
    return mass / mass.sum()


# Few different values, so that ties are common; enough of a grid for a law.
rows = st.lists(st.integers(-12, 12).map(lambda n: n / 3), min_size=1, max_size=12).map(
    lambda row: np.array(row, np.float64)
)
cut_offs = st.builds(
    Settings,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.integers(0, 14),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 0.99)),
)


@given(rows, cut_offs)
def test_law_is_the_definition(row, settings):
    p = law(row, settings, NONE, NONE)
    if 0 < p.edge < 1e-9:
        return  # rounding decides
    expected = brute_force(row / settings.temperature, settings)
    np.testing.assert_allclose(p.probabilities, expected, rtol=1e-12, atol=0)


@given(rows, cut_offs, st.data())
def test_within_the_edge_nothing_changes(row, settings, data):
    p = law(row, settings, NONE, NONE)
    if np.isinf(p.edge) or p.edge < 1e-6:
        return
    # two scores move apart by up to twice the error of each
    error = 0.49 * p.edge * settings.temperature
    signs = data.draw(st.lists(st.sampled_from([-1, 1]), min_size=12, max_size=12))
    moved = row + error * np.array(signs[: len(row)])
    kept = law(moved, settings, NONE, NONE).kept()
    np.testing.assert_array_equal(kept, p.kept())


@given(rows, st.data())
def test_penalties_are_the_definition(row, data):
    number = st.floats(-2.0, 2.0)
    ids = st.lists(st.integers(0, len(row) - 1), max_size=8)
    prompt, output = data.draw(ids), data.draw(ids)
    bias = data.draw(st.dictionaries(st.integers(0, len(row) - 1), number))
    settings = Settings(
        repetition=data.draw(st.floats(0.5, 2.0)),
        presence=data.draw(number),
        frequency=data.draw(number),
        bias=bias,
    )
    expected = []
    for v, z in enumerate(row):
        z = z + bias.get(v, 0.0)
        if v in prompt or v in output:
            r = settings.repetition
            z = z / r if z > 0 else z * r
        z = z - settings.frequency * output.count(v)
        expected.append(z - (settings.presence if v in output else 0.0))
    before = row.copy()
    np.testing.assert_allclose(
        adjusted(row, settings, prompt, output), expected, rtol=1e-12, atol=1e-12
    )
    np.testing.assert_array_equal(row, before)


def test_law_is_the_decoders():
    """Batches of random rows, with everything switched on, away from the edges."""
    draw = np.random.default_rng(0)
    batch, vocab, checked = 64, 50, 0
    logits = draw.normal(0, 3, (batch, vocab)).astype(np.float32)
    settings = [
        Settings(
            temperature=float(draw.choice([0.0, 0.5, 1.0, 1.5])),
            top_k=int(draw.choice([0, 1, 5, 20, 60])),
            top_p=float(draw.choice([0.1, 0.5, 0.9, 1.0])),
            min_p=float(draw.choice([0.0, 0.02, 0.2])),
            repetition=float(draw.choice([1.0, 0.8, 1.3])),
            presence=float(draw.choice([0.0, 0.7, -0.4])),
            frequency=float(draw.choice([0.0, 0.3, -0.2])),
            bias={int(draw.integers(vocab)): float(draw.choice([2.0, -np.inf]))},
        )
        for _ in range(batch)
    ]
    bias = np.zeros((batch, vocab), np.float32)
    counts = np.zeros((2, batch, vocab), np.int32)
    prompts, outputs = draw.integers(0, vocab, (2, batch, 15))
    for b in range(batch):
        for token, value in settings[b].bias.items():
            bias[b, token] = value
        np.add.at(counts[0, b], prompts[b], 1)
        np.add.at(counts[1, b], outputs[b], 1)

    def column(name: str, dtype=jnp.float32):
        return jnp.array([getattr(s, name) for s in settings], dtype)

    sampling = Sampling(
        temperature=column("temperature"),
        top_k=column("top_k", jnp.int32),
        top_p=column("top_p"),
        min_p=column("min_p"),
        repetition=column("repetition"),
        presence=column("presence"),
        frequency=column("frequency"),
    )
    theirs = laws.penalise(
        jnp.array(logits) + bias, sampling, jnp.array(counts[0]), jnp.array(counts[1])
    )
    scores = np.asarray(laws.warp(theirs, sampling), np.float64)
    for b in range(batch):
        p = law(logits[b], settings[b], prompts[b], outputs[b])
        if p.edge < 1e-5:
            continue
        checked += 1
        e = np.exp(scores[b] - scores[b].max())
        np.testing.assert_allclose(p.probabilities, e / e.sum(), rtol=2e-5, atol=1e-9)
    assert checked > 0.9 * batch


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        (Settings(temperature=1.0), [0, 1, 2, 3, 4]),
        (Settings(temperature=1.0, top_k=1), [1]),
        (Settings(temperature=1.0, top_k=2), [1, 2, 3]),  # 2 and 3 tie at the edge
        (Settings(temperature=1.0, top_k=99), [0, 1, 2, 3, 4]),
        (Settings(temperature=1.0, top_p=1e-9), [1]),
        (Settings(temperature=1.0, top_p=0.99999), [0, 1, 2, 3]),
        (Settings(temperature=1.0, min_p=1.0), [1]),
        (Settings(temperature=1.0, min_p=0.3), [1, 2, 3]),
        (Settings(temperature=1.0, bias={1: -np.inf}, top_k=1), [2, 3]),
        (Settings(temperature=1.0, bias={1: -np.inf}), [0, 2, 3, 4]),
        # the law of top-k's survivors, not of all, is what top-p cuts
        (Settings(temperature=1.0, top_k=3, top_p=0.6), [1, 2, 3]),
        (Settings(temperature=1.0, top_k=1, top_p=0.6), [1]),
    ],
)
def test_edge_cases(settings, kept):
    row = np.array([0.0, 3.0, 2.0, 2.0, -20.0])
    p = law(row, settings, NONE, NONE)
    assert np.flatnonzero(p.kept()).tolist() == kept
    assert p.probabilities.sum() == pytest.approx(1.0)
    assert np.flatnonzero(p.probabilities).tolist() == kept


def test_greedy_takes_the_lowest_of_equals_and_ignores_cut_offs():
    row = np.array([1.0, 4.0, 4.0, 0.0])
    p = law(row, Settings(top_k=1, top_p=0.5), NONE, NONE)
    assert p.probabilities.tolist() == [0, 1, 0, 0]
    assert np.isinf(p.edge)


def test_penalties_move_the_argmax_at_temperature_zero():
    row = np.array([1.0, 4.0, 3.9])
    penalties = Settings(repetition=1.5, presence=0.1, frequency=0.1)
    assert law(row, Settings(), [1], [1]).probabilities.tolist() == [0, 1, 0]
    assert law(row, penalties, [1], [1]).probabilities.tolist() == [0, 0, 1]
    assert law(row, penalties, [], []).probabilities.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("settings", "edge"),
    [
        (Settings(temperature=1.0), np.inf),
        (Settings(temperature=1.0, top_k=1), np.log(2)),
        (Settings(temperature=1.0, top_k=3), np.log(4)),
        (Settings(temperature=1.0, top_p=0.51), np.log(0.51 / 0.5)),
        (Settings(temperature=1.0, top_p=0.7), np.log(0.75 / 0.7)),
        (Settings(temperature=1.0, min_p=0.3), np.log(0.4 / 0.3)),
        (Settings(temperature=0.5, top_k=1), 2 * np.log(2)),
    ],
)
def test_distance_to_the_nearest_edge(settings, edge):
    row = np.log([0.5, 0.25, 0.2, 0.05])
    assert law(row, settings, NONE, NONE).edge == pytest.approx(edge)


def test_a_tie_at_the_edge_is_at_the_edge():
    row = np.array([3.0, 2.0, 2.0])
    assert law(row, Settings(temperature=1.0, top_k=2), NONE, NONE).edge < 1e-12


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"top_k": -1},
        {"top_p": 0.0},
        {"min_p": 1.5},
        {"repetition": 0.0},
        {"temperature": float("nan")},
    ],
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match="out of range"):
        Settings(**wrong)


def test_a_law_without_tokens_is_refused():
    settings = Settings(temperature=1.0, bias={0: -np.inf, 1: -np.inf})
    with pytest.raises(ValueError, match="excluded"):
        law(np.zeros(2), settings, NONE, NONE).kept()
