"""The emitted law of whole runs, through the real compiled round: chi-square tests.

Five tokens a row, so that a run spans several rounds: what one round looked at must not
show in the next one's draws.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.acceptance import (
    Block,
    Coupled,
    Traversal,
    deterministic_children,
    multi_round,
    rejection,
    without_replacement,
)
from specjax.acceptance.top_down import TopDown
from specjax.decoding.draws import RoundDraws
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.noise import Stream, gumbel_of, round_keys, row_keys
from specjax.decoding.requests import Request
from specjax.decoding.trees import Tree
from specjax.decoding.types import DecodeState
from specjax.drafters import DraftModel, NullDrafter
from specjax.drafters.draft_tree import DraftTree, Siblings
from specjax.drafters.drawing import Pick, Warping
from specjax.drafters.length import Confidence
from specjax.testing.markov import markov

V, TOKENS, ROWS = 3, 5, 100_000
TARGET, DRAFT = markov(0, V), markov(1, V)
TREE = Tree((-1, -1, 0, 0, 1, 2))
FAR = 6.0
"""Standard deviations of a chi-square that chance does not bring about."""


def emitted(
    drafter, rule, *, target=TARGET, rows: int = ROWS, **settings
) -> np.ndarray:
    """``[rows, TOKENS]``: each row with a seed of its own."""
    options = EngineOptions(prefill_width=1, rounds_per_call=TOKENS)
    engine = Engine(target, drafter, rule, options)
    request = Request(
        prompt_ids=(1,), max_tokens=TOKENS, **({"temperature": 1.0} | settings)
    )
    one = engine.start([request])
    state = engine.prefill(spread(one, drafter, rows))
    while not bool(state.done.all()):
        state, _ = engine.rounds(state)
    return np.asarray(state.tokens)[:, 1 : TOKENS + 1]


def spread(state: DecodeState, drafter, rows: int) -> DecodeState:
    """The state of one row, for many rows that differ in their seeds alone."""

    def repeat(x):
        return jnp.repeat(x, rows, axis=0)

    many = jax.tree.map(repeat, state.replace(target=None, drafter=None))
    return many.replace(
        target=TARGET.init(rows, state.capacity),
        drafter=drafter.init(rows, state.capacity),
        seeds=jnp.arange(rows, dtype=jnp.uint32),
    )


def chain_law(table: np.ndarray, first: int = 1) -> np.ndarray:
    """``[V ** TOKENS]``: of the tokens behind ``first``."""
    p = np.exp(np.asarray(table, np.float64))
    p = p / p.sum(axis=1, keepdims=True)
    law = p[first]
    for _ in range(TOKENS - 1):
        law = (law.reshape(-1, V)[:, :, None] * p[None]).reshape(-1)
    return law


def deviation(tokens: np.ndarray, law: np.ndarray) -> float:
    """How far the counts are from the law, in standard deviations of the chi-square."""
    cells = tokens @ (V ** np.arange(TOKENS - 1, -1, -1))
    counts = np.bincount(cells, minlength=len(law))
    expected = law * len(tokens)
    likely = expected >= 5  # the rest is one cell
    counts = np.append(counts[likely], counts[~likely].sum())
    expected = np.append(expected[likely], expected[~likely].sum() + 1e-9)
    assert counts[-1] <= expected[-1] + 6 * np.sqrt(expected[-1]) + 6
    counts, expected = counts[:-1], expected[:-1]
    chi = ((counts - expected) ** 2 / expected).sum()
    freedom = len(counts) - 1
    return float((chi - freedom) / np.sqrt(2 * freedom))


drawn = functools.partial(DraftModel, DRAFT, 3, pick=Pick.DRAWN)
tree = functools.partial(DraftTree, DRAFT, TREE)
PAIRS = {
    "plain": (NullDrafter(), rejection()),
    "rejection": (drawn(), rejection()),
    "block": (drawn(), Block()),
    "traversal-chain": (drawn(), Traversal()),
    "warped-draft": (drawn(warping=Warping(temperature=0.6, top_k=2)), Block()),
    "early-stop": (drawn(length=Confidence(0.35)), Block()),
    "shared-noise": (DraftModel(DRAFT, 3), rejection()),
    "coupled": (DraftModel(DRAFT, 3), Coupled()),
    "multi-round": (tree(Siblings.INDEPENDENT), multi_round()),
    "traversal": (tree(Siblings.INDEPENDENT), Traversal()),
    "without-replacement": (tree(Siblings.WITHOUT_REPLACEMENT), without_replacement()),
    "traversal-without": (
        tree(Siblings.WITHOUT_REPLACEMENT),
        Traversal(replaced=False),
    ),
    "deterministic": (tree(Siblings.BEST), deterministic_children()),
}


@pytest.mark.parametrize("pair", ["block", "traversal"])
def test_runs_follow_the_targets_law(pair):
    tokens = emitted(*PAIRS[pair], rows=30_000)
    assert abs(deviation(tokens, chain_law(TARGET.table))) < FAR


@pytest.mark.full
@pytest.mark.parametrize("pair", PAIRS)
def test_runs_of_every_pair_follow_the_targets_law(pair):
    tokens = emitted(*PAIRS[pair])
    assert abs(deviation(tokens, chain_law(TARGET.table))) < FAR


@pytest.mark.full
@pytest.mark.parametrize("pair", ["block", "traversal"])
def test_runs_follow_a_law_that_is_warped(pair):
    tokens = emitted(*PAIRS[pair], temperature=0.5, top_k=2)
    table = np.asarray(TARGET.table, np.float64) / 0.5
    table = np.where(table >= np.sort(table, axis=1)[:, [-2]], table, -np.inf)
    assert abs(deviation(tokens, chain_law(table))) < FAR


# -- what must be found wrong ---------------------------------------------------------


class RecoveryWithTheDraftsNoise(RoundDraws):
    """The residual draw takes the noise that the first draft was drawn with."""

    def token(self, weights):
        keys = round_keys(
            self.seeds, self.anchors, Stream.DRAFT, jnp.zeros_like(self.anchors)
        )
        noise = gumbel_of(keys, weights.shape[-1])
        return jnp.argmax(jnp.log(weights) + noise, axis=-1).astype(jnp.int32)


class SharesItsKey(TopDown):
    """Rejection with such draws."""

    def accept(self, proposal, window, laws, draws, *, max_depth):
        wrong = RecoveryWithTheDraftsNoise(draws.seeds, draws.anchors)
        return super().accept(proposal, window, laws, wrong, max_depth=max_depth)


def test_a_key_shared_by_draft_and_recovery_is_found():
    rule = SharesItsKey("shares-its-key", rejection().takes)
    assert deviation(emitted(drawn(), rule), chain_law(TARGET.table)) > 2 * FAR


def test_draft_noise_that_rounds_share_is_found_under_block_verification(monkeypatch):
    """Keyed by the token's position, it is drawn again after block has looked at it."""

    def by_position(context, node, size):
        places = context.lengths + jnp.asarray(node, jnp.int32)
        return gumbel_of(row_keys(context.seeds, places, Stream.DRAFT), size)

    class Reuses(DraftModel):
        pass

    monkeypatch.setattr("specjax.drafters.drawing.draft_noise", by_position)
    target, law = markov(8, V), chain_law(markov(8, V).table)
    reuses = Reuses(markov(9, V), 3, pick=Pick.DRAWN)
    far = deviation(emitted(reuses, Block(), target=target), law)
    assert far > 2 * FAR
    # token by token nothing behind a refused draft is looked at, and it does no harm
    harmless = deviation(emitted(reuses, rejection(), target=target), law)
    assert abs(harmless) < FAR
