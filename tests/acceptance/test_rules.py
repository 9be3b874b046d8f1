"""Sample-then-compare rules against a walk down the tree, node by node."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.acceptance import RULES, Coupled, Greedy, default_rule
from specjax.decoding.draws import RoundDraws
from specjax.decoding.interfaces import AcceptanceRule, ProposalLaw
from specjax.decoding.laws import Laws
from specjax.decoding.noise import sample
from specjax.decoding.types import NO_TOKEN, Acceptance, Proposal, Sampling, Window
from specjax.decoding.windows import draft_window

B, N, V = 3, 8, 4
K = N
LENGTHS = (5, 1, 40)
SEEDS = (7, 2**32 - 1, 0)
SIBLINGS = (-1, -1, -1, 0, 0, 1, 3, 3)


def proposal_of(tokens: Any, parents: Any, num_nodes: Any) -> Proposal:
    return Proposal(*(jnp.asarray(x, jnp.int32) for x in (tokens, parents, num_nodes)))


def window_of(proposal: Proposal, room: Any = (99,) * B) -> Window:
    return draft_window(
        jnp.zeros((B,), jnp.int32),
        jnp.asarray(LENGTHS, jnp.int32),
        jnp.asarray(room, jnp.int32),
        proposal,
        V,
    )


def sampling_of(temperature: float) -> Sampling:
    if temperature == 0:
        return Sampling()
    return Sampling(temperature=jnp.full((B,), temperature, jnp.float32))


@jax.jit
def run(
    rule: AcceptanceRule,
    proposal: Proposal,
    window: Window,
    logits: jax.Array,
    sampling: Sampling,
) -> Acceptance:
    laws = Laws(logits, window, sampling, None)
    seeds = jnp.asarray(np.array(SEEDS, np.uint32))
    draws = RoundDraws(seeds, window.positions[:, 0])
    return rule.accept(proposal, window, laws, draws, max_depth=K)


def walk(
    window: Window, parents: np.ndarray, wanted: Any, row: int
) -> tuple[list[int], list[int]]:
    """``wanted(window row, depth)`` is the token the target has next."""
    path, tokens = [], []
    at = 0 if window.valid[row, 0] else None
    while at is not None:
        token = wanted(at, len(path))
        path.append(at)
        tokens.append(token)
        children = [
            i + 1
            for i in range(N)
            if parents[row, i] + 1 == at
            and window.valid[row, i + 1]
            and window.tokens[row, i + 1] == token
        ]
        at = children[0] if children else None
    return path, tokens


def check(got: Acceptance, row: int, path: list[int], tokens: list[int]) -> None:
    rest = K + 1 - len(path)
    assert int(got.num_tokens[row]) == len(path)
    assert got.path[row].tolist() == path + [0] * rest
    assert got.tokens[row].tolist() == tokens + [NO_TOKEN] * rest


# Few tokens, so that siblings are often equal and paths are often accepted.
trees = st.tuples(
    *[
        st.lists(st.lists(values, min_size=N, max_size=N), min_size=B, max_size=B)
        for values in (st.integers(0, V - 1), st.integers(0, N))
    ],
    st.lists(st.integers(0, N), min_size=B, max_size=B),
    st.lists(st.integers(0, N), min_size=B, max_size=B),
    st.integers(0, 10**6),
)


def drawn(tree: Any) -> tuple[Proposal, Window, np.ndarray, np.ndarray]:
    tokens, raw, num_nodes, room, seed = tree
    # parents before children, often the anchor
    parents = np.array([[p % (i + 1) - 1 for i, p in enumerate(row)] for row in raw])
    proposal = proposal_of(tokens, parents, num_nodes)
    window = jax.tree.map(np.asarray, window_of(proposal, room))
    # a coarse grid, so that the argmax is often a tie
    logits = np.random.default_rng(seed).integers(0, 3, (B, N + 1, V))
    return proposal, window, parents, logits.astype(np.float32)


@given(trees)
@settings(max_examples=60)
def test_greedy_follows_the_lowest_argmax(tree):
    proposal, window, parents, logits = drawn(tree)
    got = run(Greedy(), proposal, jax.tree.map(jnp.asarray, window), logits, Sampling())
    for row in range(B):

        def wanted(at: int, depth: int, row: int = row) -> int:
            return int(np.argmax(logits[row, at]))

        check(got, row, *walk(window, parents, wanted, row))


@given(trees, st.sampled_from([0.0, 0.7, 2.0]))
@settings(max_examples=60)
def test_coupled_follows_the_draw_of_each_position(tree, temperature):
    proposal, window, parents, logits = drawn(tree)
    made = sampling_of(temperature)
    got = run(Coupled(), proposal, jax.tree.map(jnp.asarray, window), logits, made)
    for row in range(B):

        def wanted(at: int, depth: int, row: int = row) -> int:
            if temperature == 0:
                return int(np.argmax(logits[row, at]))
            return draw(logits[row, at] / np.float32(temperature), row, depth)

        check(got, row, *walk(window, parents, wanted, row))


def draw(scores: np.ndarray, row: int, depth: int) -> int:
    """The token at the position ``depth + 1`` behind the anchor."""
    seed = jnp.asarray(np.array([SEEDS[row]], np.uint32))
    position = jnp.array([LENGTHS[row] + depth], jnp.int32)
    return int(_sample(jnp.asarray(scores[None]), seed, position)[0])


_sample = jax.jit(sample)


@pytest.mark.parametrize("rule", [Greedy(), Coupled()])
def test_a_path_that_is_no_prefix_of_the_tree_is_found(rule):
    # the target wants 1, 2, 3 and then 0, whatever stands before
    logits = np.full((B, N + 1, V), -1e9, np.float32)
    proposal = proposal_of([[1, 0, 2, 2, 3, 2, 0, 3]] * B, [SIBLINGS] * B, [N] * B)
    window = window_of(proposal)
    for node, depth in enumerate([0, 1, 1, 1, 2, 2, 2, 3, 3]):
        logits[:, node, [1, 2, 3, 0][depth]] = 0
    got = run(rule, proposal, window, logits, sampling_of(1.0))
    for row in range(B):
        check(got, row, [0, 1, 4, 8], [1, 2, 3, 0])


def test_of_equal_siblings_the_first_is_followed_though_the_second_has_the_child():
    tokens, parents = [[1, 1, 2, 0, 0, 0, 0, 0]] * B, [[-1, -1, 1] + [-1] * 5] * B
    logits = np.zeros((B, N + 1, V), np.float32)
    logits[:, 0, 1] = logits[:, 1, 2] = logits[:, 2, 2] = 1
    proposal = proposal_of(tokens, parents, [3] * B)
    got = run(Greedy(), proposal, window_of(proposal), logits, Sampling())
    for row in range(B):
        check(got, row, [0, 1], [1, 2])


def test_rows_that_are_not_sound_are_not_accepted():
    proposal = proposal_of([[1] * N] * B, [list(range(-1, N - 1))] * B, [N] * B)
    window = window_of(proposal)
    logits = np.zeros((B, N + 1, V), np.float32)
    logits[..., 1] = 1
    logits[:, 3] = np.nan
    valid = np.asarray(window.valid) & (np.arange(N + 1) < 3)
    sound = window.replace(valid=jnp.asarray(valid))
    got = run(Greedy(), proposal, sound, logits, Sampling())
    for row in range(B):
        check(got, row, [0, 1, 2], [1, 1, 1])


@pytest.mark.parametrize("rule", [Greedy(), Coupled()])
def test_ids_stay_in_range_if_every_logit_is_nan(rule):
    proposal = proposal_of([[1] * N] * B, [list(range(-1, N - 1))] * B, [N] * B)
    logits = np.full((B, N + 1, V), np.nan, np.float32)
    got = run(rule, proposal, window_of(proposal), logits, sampling_of(1.0))
    taken = np.asarray(got.tokens)[np.asarray(got.taken)]
    assert ((taken >= 0) & (taken < V)).all()


def test_a_coupled_row_at_temperature_0_is_greedy_beside_rows_that_sample():
    logits = np.random.default_rng(0).normal(size=(B, N + 1, V)).astype(np.float32)
    proposal = proposal_of([[1] * N] * B, [list(range(-1, N - 1))] * B, [0] * B)
    made = Sampling(temperature=jnp.array([0.0, 1.0, 0.0], jnp.float32))
    got = run(Coupled(), proposal, window_of(proposal), logits, made)
    greedy = run(Greedy(), proposal, window_of(proposal), logits, made)
    for row in (0, 2):
        assert got.tokens[row].tolist() == greedy.tokens[row].tolist()
    check(got, 1, [0], [draw(logits[1, 0], 1, 0)])


def test_the_registry_names_the_rules():
    for name, entry in RULES.items():
        rule = entry.build()
        assert isinstance(rule, AcceptanceRule)
        assert rule.name == name  # pyright: ignore[reportAttributeAccessIssue]
        assert rule.takes and rule.takes <= frozenset(ProposalLaw)
        assert entry.summary and getattr(rule, "samples", True) == (name != "greedy")
    assert default_rule(0.0) == "greedy"
    assert default_rule(1e-9) == "coupled"


@pytest.mark.parametrize("name", ["rejection", "block", "traversal"])
def test_a_draft_whose_stated_law_is_nan_is_not_taken_for_certain(name):
    # token 1 is impossible for the target, and drafted everywhere
    logits = np.zeros((B, N + 1, V), np.float32)
    logits[..., 1] = -np.inf
    proposal = proposal_of([[1] * N] * B, [list(range(-1, N - 1))] * B, [N] * B)
    proposal = proposal.replace(log_q=jnp.full((B, N + 1, V), jnp.nan, jnp.float32))
    rule = RULES[name].build()
    got = run(rule, proposal, window_of(proposal), logits, sampling_of(1.0))
    for row in range(B):
        taken = np.asarray(got.tokens[row])[np.asarray(got.taken[row])]
        assert len(taken) == 1 and taken[0] != 1
