"""What block drafters keep of the target's features, and what they see of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.types import Acceptance, Verdict
from specjax.drafters.block.backbone import Backbone
from specjax.drafters.block.context import BlockAttention
from specjax.models.committed import CommittedState, blank
from specjax.models.stack import mixers_of
from specjax.testing.toy_blocks import toy_block
from specjax.testing.toys import toy_llama

TARGET = toy_llama().decoder
BATCH, LENGTH, CAPACITY = 2, 12, 16
COUNTS = (12, 9)  # committed features of the two rows
ANCHOR = jnp.asarray([3, 41], jnp.int32)
TAPS = (1, 0)


def features(seed: int = 0) -> dict[int, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(TAPS))
    shape = (BATCH, LENGTH, TARGET.config.hidden_size)
    return {t: jax.random.normal(k, shape) for t, k in zip(TAPS, keys, strict=True)}


@jax.jit
def took(
    backbone: Backbone,
    state: CommittedState,
    given: dict[int, jax.Array],
    start: Any,
    num: jax.Array,
) -> CommittedState:
    """The state after ``num`` more rows of the features, from ``start`` on."""
    rows = jnp.arange(LENGTH, dtype=jnp.int32)
    path = jnp.where(rows < num[:, None], (start[:, None] + rows) % LENGTH, 0)
    verdict = Verdict(None, given, None, jnp.zeros((BATCH, LENGTH), bool))
    tokens = jnp.zeros((BATCH, LENGTH), jnp.int32)
    return backbone.take_in(state, verdict, Acceptance(path, tokens, num))


@jax.jit
def block(backbone: Backbone, state: CommittedState, anchor: jax.Array) -> jax.Array:
    return backbone.block(anchor, state)


def at_once(
    backbone: Backbone,
    given: dict[int, jax.Array] | None = None,
    counts: tuple[int, ...] = COUNTS,
) -> CommittedState:
    empty = backbone.init(BATCH, CAPACITY)
    start, num = jnp.zeros((BATCH,), jnp.int32), jnp.asarray(counts, jnp.int32)
    return took(backbone, empty, features() if given is None else given, start, num)


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return toy_block("dflash", TARGET).backbone


@pytest.fixture(scope="module")
def wanted(backbone: Backbone) -> np.ndarray:
    return np.asarray(block(backbone, at_once(backbone), ANCHOR))


def test_context_kept_from_round_to_round_is_context_made_anew(backbone, wanted):
    state = backbone.init(BATCH, CAPACITY)
    # some rows get nothing at times, and the sliding layer's ring goes round
    for step in ((5, 0), (1, 4), (0, 1), (6, 4)):
        num = jnp.asarray(step, jnp.int32)
        state = took(backbone, state, features(), state.lengths, num)
    assert state.lengths.tolist() == list(COUNTS)
    np.testing.assert_allclose(block(backbone, state, ANCHOR), wanted, atol=1e-5)


def test_nothing_at_the_anchor_or_behind_it_is_seen_but_the_anchor(backbone, wanted):
    # rows of the verified window that were not accepted, and slots that hold nothing
    given = features()
    beyond = np.arange(LENGTH) >= np.asarray(COUNTS)[:, None]
    given = {t: jnp.where(beyond[:, :, None], jnp.nan, x) for t, x in given.items()}
    state = blank(mixers_of(backbone.blocks), at_once(backbone, given), jnp.nan)
    assert any(np.isnan(x).any() for x in jax.tree.leaves(state.blocks))
    np.testing.assert_array_equal(block(backbone, state, ANCHOR), wanted)
    other = np.asarray(block(backbone, state, ANCHOR.at[1].set(7)))
    np.testing.assert_array_equal(other[0], wanted[0])
    # every slot sees the anchor
    assert np.abs(other[1] - wanted[1]).max(axis=-1).min() > 1e-2


def test_a_block_leaves_nothing_behind(backbone, wanted):
    state = at_once(backbone)
    before = [np.array(x) for x in jax.tree.leaves(state)]
    block(backbone, state, ANCHOR)
    for old, new in zip(before, jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(old, new)


def cut_taps(backbone: Backbone) -> CommittedState:
    one, zero = features()[1], features()[0]
    return at_once(backbone, {1: zero, 0: one})


def cut_last_row(backbone: Backbone) -> CommittedState:
    return at_once(backbone, counts=tuple(n - 1 for n in COUNTS))


def cut_positions(backbone: Backbone) -> CommittedState:
    state = at_once(backbone)
    return state.replace(lengths=state.lengths + 1)


def cut_stale(backbone: Backbone) -> CommittedState:
    """The last two rows are what another text left there."""
    early = at_once(backbone, counts=tuple(n - 2 for n in COUNTS))
    two = jnp.asarray([2, 2], jnp.int32)
    return took(backbone, early, features(seed=1), early.lengths, two)


@pytest.mark.parametrize("cut", [cut_taps, cut_last_row, cut_positions, cut_stale])
def test_a_wrong_context_shows(cut, backbone, wanted):
    got = np.asarray(block(backbone, cut(backbone), ANCHOR))
    assert np.abs(got - wanted).max(axis=(1, 2)).min() > 1e-2


def test_causal_layers_do_not_see_the_slots_behind(backbone, wanted):
    state = at_once(backbone)  # context does not look at slots

    def with_causal(causal: bool, size: int) -> np.ndarray:
        def turned(x: Any) -> Any:
            is_one = isinstance(x, BlockAttention)
            return x.replace(causal=causal) if is_one else x

        other = jax.tree.map(
            turned, backbone, is_leaf=lambda x: isinstance(x, BlockAttention)
        )
        return np.asarray(block(other.replace(block_size=size), state, ANCHOR))

    both, causal = with_causal(False, 5), with_causal(True, 5)
    assert np.abs(both - wanted).max() > 1e-2 and np.abs(causal - wanted).max() > 1e-2
    # all causal: the anchor's row is what it is without any slot
    alone = with_causal(True, 1)
    np.testing.assert_allclose(causal[:, :1], alone, atol=1e-5)
    assert np.abs(both[:, :1] - alone).max() > 1e-2
