"""From logits to law, against plain definitions by sorting."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specjax.decoding import laws
from specjax.decoding.laws import Laws
from specjax.decoding.types import Counts, Proposal, Sampling, Window
from specjax.decoding.windows import draft_window

B, V = 4, 9
NEAR = 1e-5  # closer to a cut-off than this, float32 rounding may decide

warp = jax.jit(laws.warp)
adjusted_at = jax.jit(Laws.adjusted_at)


def sampling(**columns: Any) -> Sampling:
    whole = {"top_k": jnp.int32}
    return Sampling(
        **{
            name: jnp.asarray(np.resize(values, B), whole.get(name, jnp.float32))
            for name, values in columns.items()
        }
    )


def by_sorting(
    row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[np.ndarray, float]:
    """The scores that are kept (float64), and the distance to the nearest cut-off."""
    if temperature == 0:
        kept = np.arange(len(row)) == np.argmax(row)
        return np.where(kept, 0.0, -np.inf), np.inf
    scores = row / temperature - np.max(row) / temperature
    order = np.sort(scores)[::-1]
    edge = np.inf
    if 0 < top_k < len(row):
        scores = np.where(scores >= order[top_k - 1], scores, -np.inf)
        order = np.sort(scores)[::-1]
    if top_p < 1:
        mass = np.exp(order) / np.exp(order).sum()
        reached = np.cumsum(mass)
        # ties stand together: only where the score changes can the cut fall
        count = int(np.searchsorted(reached, top_p)) + 1
        count = min(count, len(order))
        edge = min(edge, np.min(np.abs(reached - top_p)))
        scores = np.where(scores >= order[count - 1], scores, -np.inf)
    if min_p > 0:
        floor = np.log(min_p)
        finite = scores[scores > -np.inf]
        edge = min(edge, np.min(np.abs(finite - floor)))
        scores = np.where(scores >= floor, scores, -np.inf)
    return scores, edge


# A coarse grid makes ties common; a bias of -inf excludes a token.
logit = st.one_of(
    st.integers(-9, 9).map(lambda n: n / 3),
    st.integers(-9, 9).map(lambda n: n / 3),
    st.just(-np.inf),
)
logit_rows = st.lists(
    st.lists(logit, min_size=V, max_size=V).filter(lambda row: max(row) > -np.inf),
    min_size=B,
    max_size=B,
)


def column(values: Any) -> Any:
    return st.lists(values, min_size=B, max_size=B)


@settings(max_examples=60)
@given(
    logit_rows,
    column(st.sampled_from([0.0, 0.3, 1.0, 1.7])),
    column(st.integers(0, V + 2)),
    column(st.one_of(st.just(1.0), st.floats(0.01, 0.99))),
    column(st.one_of(st.just(0.0), st.floats(0.01, 0.99), st.just(1.0))),
)
def test_warp_is_the_definition_by_sorting(rows, temperature, top_k, top_p, min_p):
    logits = np.array(rows, np.float32)
    got = warp(
        jnp.asarray(logits),
        sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p),
    )
    assert got.dtype == jnp.float32
    for i in range(B):
        if min_p[i] == 1.0 and temperature[i] > 0:
            min_p[i] = 1.0 - 1e-9  # only what ties with the best: no edge at 0
        wanted, edge = by_sorting(
            logits[i].astype(np.float64), temperature[i], top_k[i], top_p[i], min_p[i]
        )
        if edge < NEAR and min_p[i] < 0.999:
            continue
        np.testing.assert_allclose(got[i], wanted, rtol=1e-5, atol=1e-5)


def test_without_a_temperature_the_law_is_one_hot_on_the_lowest_argmax():
    logits = jnp.array([[0.0, 2.0, 2.0, 1.0]] * 2, jnp.float32)
    wanted = [-np.inf, 0.0, -np.inf, -np.inf]
    np.testing.assert_array_equal(laws.warp(logits, Sampling()), [wanted] * 2)


def test_a_row_at_temperature_0_is_one_hot_whatever_the_other_rows_do():
    logits = jnp.array([[0.0, 2.0, 2.0, 1.0, -1.0, 0.5, 0.0, 0.0, 0.0]] * B)
    got = warp(logits, sampling(temperature=[0.0, 1.0, 0.0, 1e-30]))
    alone = warp(logits, sampling(temperature=[0.0]))
    np.testing.assert_array_equal(got[0], alone[0])
    np.testing.assert_array_equal(got[2], alone[2])
    assert np.flatnonzero(np.isfinite(got[0])).tolist() == [1]
    assert np.flatnonzero(np.isfinite(got[1])).tolist() == list(range(V))


@pytest.mark.parametrize("temperature", [1e-6, 1e-20, 1e-37])
def test_a_tiny_temperature_is_not_a_number_nowhere(temperature: float):
    row = np.array([3.0, 1.0, 3.0, -5.0, 2.999, 0, 0, -np.inf, 2.0], np.float32)
    got = np.asarray(warp(jnp.asarray([row] * B), sampling(temperature=[temperature])))
    assert not np.isnan(got).any()
    law = np.exp(got[0] - got[0].max())
    np.testing.assert_array_equal(law[[0, 2]], [1.0, 1.0])  # a true tie stays one
    assert np.delete(law, [0, 2]).sum() == 0.0


@pytest.mark.parametrize(
    "cut",
    [
        {"top_k": [1]},
        {"top_p": [1e-9]},
        {"top_p": [1e-30]},
        {"min_p": [1.0]},
        {"top_k": [1], "top_p": [0.5], "min_p": [0.5]},
    ],
    ids=str,
)
def test_the_hardest_cut_offs_leave_what_greedy_takes(cut: dict[str, Any]):
    logits = jax.random.normal(jax.random.key(0), (B, V))
    got = warp(logits, sampling(temperature=[1.0, 0.1, 2.0, 30.0], **cut))
    kept = np.isfinite(np.asarray(got))
    assert kept.sum(axis=1).tolist() == [1] * B
    np.testing.assert_array_equal(kept.argmax(axis=1), logits.argmax(axis=1))


@pytest.mark.parametrize("cut", [{"top_k": [1]}, {"top_k": [3]}, {"top_p": [0.05]}])
def test_cut_offs_keep_every_tie_at_their_edge(cut: dict[str, Any]):
    row = np.array([1.0, 5.0, 5.0, 5.0, 0.0, 4.0, 1.0, 5.0, 2.0], np.float32)
    got = warp(jnp.asarray([row] * B), sampling(temperature=[1.0], **cut))
    assert np.flatnonzero(np.isfinite(np.asarray(got[0]))).tolist() == [1, 2, 3, 7]


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.4999, 1), (0.5001, 2), (0.7499, 2), (0.7501, 3), (0.8749, 3), (0.8751, 5)],
)
def test_top_p_keeps_the_fewest_whose_mass_reaches_it(top_p, kept):
    # the last two tie, and stay or go together
    row = np.log(np.array([0.25, 1 / 16, 0.5, 1 / 16, 0.125] + [1e-9] * 4))
    made = sampling(temperature=[1.0], top_p=[top_p])
    got = np.isfinite(np.asarray(warp(jnp.asarray([row] * B, jnp.float32), made)[0]))
    assert set(np.flatnonzero(got)) == set([2, 0, 4, 1, 3][:kept])


@pytest.mark.parametrize("top_p", [1.0, float(np.float32(1.0 - 2.0**-24))])
def test_a_top_p_of_nearly_1_keeps_all_but_excluded_tokens(top_p: float):
    row = np.array([0.0, -np.inf, 0.1, -30.0, 0, 0, 0, 0, 0], np.float32)
    got = warp(jnp.asarray([row] * B), sampling(temperature=[1.0], top_p=[top_p]))
    finite = np.isfinite(np.asarray(got[0]))
    assert not finite[1] and finite[[0, 2, 4, 5, 6, 7, 8]].all()


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=V, max_size=V),
    st.integers(1, V),
)
@example([0] * V, 1)
@example([2**32 - 1] * V, V)
@example([0, 2**32 - 1, 2**31, 2**31 - 1, 1, 2, 3, 4, 5], 3)
@settings(max_examples=30)
def test_the_largest_threshold_for_a_count_is_the_kth_largest_key(keys, k):
    got = _threshold_for_count(jnp.asarray([keys], jnp.uint32), jnp.int32(k))
    assert int(got[0]) == sorted(keys)[-k]


@jax.jit
def _threshold_for_count(keys: jax.Array, k: jax.Array) -> jax.Array:
    return laws._largest_threshold(
        keys, lambda kept: kept.sum(axis=-1, dtype=jnp.int32) >= k
    )


def test_the_largest_threshold_is_0_if_nothing_is_enough_and_all_ones_if_all_is():
    keys = jnp.asarray([[1, 2, 3], [4, 5, 6]], jnp.uint32)
    never = jnp.array([False, False])
    assert laws._largest_threshold(keys, lambda _: never).tolist() == [0, 0]
    assert laws._largest_threshold(keys, lambda _: ~never).tolist() == [2**32 - 1] * 2


@given(
    st.lists(
        st.one_of(
            st.floats(width=32, allow_nan=False, allow_subnormal=False),
            st.sampled_from([0.0, -0.0, np.inf, -np.inf, 2e-38, -2e-38]),
        ),
        min_size=V,
        max_size=V,
    )
)
@settings(max_examples=40)
def test_sortable_keys_have_the_order_of_the_floats(row):
    x = np.array(row, np.float32)
    keys = np.asarray(laws._sortable(jnp.asarray(x[None])))[0].astype(np.int64)
    larger = (x[:, None] > x).astype(int) - (x[:, None] < x).astype(int)
    np.testing.assert_array_equal(np.sign(keys[:, None] - keys), larger)


# -- penalties ------------------------------------------------------------------------

TREE = (-1, -1, 0, 0, 1, 2, 3, 5)
N = len(TREE)


def ancestors_of(node: int) -> list[int]:
    """The node and those above it; not the anchor."""
    return [] if node < 0 else [*ancestors_of(TREE[node]), node]


def tree_laws(
    logits: np.ndarray,
    tokens: list[int],
    prompt: list[int],
    output: list[int],
    **s: Any,
) -> Laws:
    """One batch row; its anchor is the last committed token."""
    committed = [*prompt, *output]
    window = draft_window(
        jnp.array([committed[-1]], jnp.int32),
        jnp.array([len(committed)], jnp.int32),
        jnp.array([99], jnp.int32),
        Proposal(
            tokens=jnp.array([tokens], jnp.int32),
            parents=jnp.array([TREE], jnp.int32),
            num_nodes=jnp.array([N], jnp.int32),
        ),
        V,
    )
    count = {"minlength": V}
    counts = Counts(
        prompt=jnp.asarray(np.bincount(prompt, **count)[None], jnp.int32),
        output=jnp.asarray(
            np.bincount(np.array(output, np.int64), **count)[None], jnp.int32
        ),
    )
    columns = {k: jnp.array([v], jnp.float32) for k, v in s.items()}
    return Laws(jnp.asarray(logits[None]), window, Sampling(**columns), counts)


def penalised(
    row: np.ndarray,
    prompt: list[int],
    output: list[int],
    repetition: float,
    presence: float,
    frequency: float,
) -> np.ndarray:
    """Token by token, from the token lists."""
    wanted = row.astype(np.float64)
    for v in range(len(row)):
        if v in prompt or v in output:
            wanted[v] = (
                wanted[v] / repetition if wanted[v] > 0 else wanted[v] * repetition
            )
        wanted[v] -= frequency * output.count(v) + presence * (v in output)
    return wanted


small_ids = st.integers(0, 3)  # few ids: tokens repeat along a path


@given(
    st.lists(small_ids, min_size=N, max_size=N),
    st.lists(small_ids, min_size=1, max_size=5),
    st.lists(small_ids, max_size=5),
    st.floats(0.5, 2.0),
    st.floats(-2.0, 2.0),
    st.floats(-2.0, 2.0),
    st.integers(0, 10**6),
)
@settings(max_examples=40)
def test_a_node_is_penalised_for_committed_tokens_and_its_ancestors(
    tokens, prompt, output, repetition, presence, frequency, seed
):
    logits = np.random.default_rng(seed).normal(size=(N + 1, V)).astype(np.float32)
    penalties = {
        "repetition": repetition,
        "presence": presence,
        "frequency": frequency,
    }
    made = tree_laws(logits, tokens, prompt, output, **penalties)
    for node in range(-1, N):
        got = adjusted_at(made, jnp.array([node + 1], jnp.int32))
        above = [tokens[a] for a in ancestors_of(node)]
        wanted = penalised(logits[node + 1], prompt, output + above, **penalties)
        np.testing.assert_allclose(got[0], wanted, rtol=1e-5, atol=1e-5)


def test_penalties_of_a_node_do_not_see_siblings_or_descendants():
    logits = np.random.default_rng(0).normal(size=(N + 1, V)).astype(np.float32)
    penalties = {"repetition": 1.3, "presence": 0.4, "frequency": 0.7}
    tokens = [1, 2, 3, 1, 2, 3, 1, 2]
    for node in range(-1, N):
        changed = [
            t if i in ancestors_of(node) else (t + 4) % V for i, t in enumerate(tokens)
        ]
        rows = jnp.array([node + 1], jnp.int32)
        a, b = (
            adjusted_at(tree_laws(logits, t, [5, 1], [2], **penalties), rows)
            for t in (tokens, changed)
        )
        np.testing.assert_array_equal(a, b)


def test_nodes_that_are_not_valid_are_counted_nowhere():
    logits = np.zeros((N + 1, V), np.float32)
    made = tree_laws(logits, [99] * N, [5], [], presence=1.0)
    got = adjusted_at(made, jnp.array([0], jnp.int32))
    np.testing.assert_array_equal(got[0], np.zeros(V))


def test_bias_comes_before_penalties_and_penalties_before_temperature():
    laws_ = Laws(
        logits=jnp.array([[[-1.0, 1.0, 0.0]]], jnp.float32),
        window=_one_row(),
        sampling=Sampling(
            temperature=jnp.array([0.5], jnp.float32),
            repetition=jnp.array([2.0], jnp.float32),
            presence=jnp.array([1.0], jnp.float32),
            bias=jnp.array([[3.0, 0.0, 0.0]], jnp.float32),
        ),
        counts=Counts(
            prompt=jnp.array([[1, 0, 0]], jnp.int32),
            output=jnp.array([[0, 1, 0]], jnp.int32),
        ),
    )
    row = jnp.array([0], jnp.int32)
    # (-1 + 3) / 2 = 1; 1 / 2 - 1 = -0.5; 0
    _, adjusted, scores, log_probs = _all_laws(laws_, row)
    np.testing.assert_allclose(adjusted, [[1.0, -0.5, 0.0]])
    np.testing.assert_allclose(scores, [[0.0, -3.0, -2.0]])
    np.testing.assert_allclose(np.exp(log_probs).sum(), 1.0, rtol=1e-6)
    np.testing.assert_allclose(log_probs - log_probs.max(), scores, atol=1e-6)


def test_top_p_counts_the_mass_that_top_k_leaves():
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1, 0, 0, 0, 0, 0]) + 1e-12)
    made = sampling(temperature=[1.0], top_k=[2], top_p=[0.55])
    got = warp(jnp.asarray([row] * B, jnp.float32), made)
    # of 0.4 and 0.3 the first has 0.571 and is enough; of the whole law it is not
    assert np.flatnonzero(np.isfinite(np.asarray(got[0]))).tolist() == [0]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_laws_are_float32_whatever_the_logits_are(dtype):
    logits = jax.random.normal(jax.random.key(1), (1, 1, V)).astype(dtype)
    full = Sampling(
        temperature=jnp.array([0.7], jnp.float32),
        top_k=jnp.array([5], jnp.int32),
        top_p=jnp.array([0.9], jnp.float32),
        min_p=jnp.array([0.01], jnp.float32),
        frequency=jnp.array([0.5], jnp.float32),
    )
    counts = Counts(
        prompt=jnp.zeros((1, V), jnp.int32), output=jnp.ones((1, V), jnp.int32)
    )
    row = jnp.array([0], jnp.int32)
    for settings_ in (Sampling(), full):
        got = Laws(logits, _one_row(), settings_, counts)
        wide = Laws(logits.astype(jnp.float32), _one_row(), settings_, counts)
        for a, b in zip(_all_laws(got, row), _all_laws(wide, row), strict=True):
            assert a.dtype == jnp.float32
            np.testing.assert_array_equal(a, b)


@jax.jit
def _all_laws(made: Laws, rows: jax.Array) -> tuple[jax.Array, ...]:
    return (
        made.logits_at(rows),
        made.adjusted_at(rows),
        made.scores_at(rows),
        made.log_probs_at(rows),
    )


def _one_row() -> Window:
    return Window(
        tokens=jnp.zeros((1, 1), jnp.int32),
        positions=jnp.zeros((1, 1), jnp.int32),
        ancestors=jnp.ones((1, 1, 1), bool),
        valid=jnp.ones((1, 1), bool),
    )
