"""Counters by hand."""

import jax
import jax.numpy as jnp
import pytest

from specjax.decoding.stats import alpha, count_round, empty_stats, tau, total
from specjax.decoding.types import Proposal, Window
from specjax.decoding.windows import draft_window


def window_of(rows: list[tuple[list[int], int, int]]) -> Window:
    """``(parents, num_nodes, room)`` for each row; every token is in order."""
    batch = len(rows)
    parents = jnp.asarray([row[0] for row in rows], jnp.int32)
    return draft_window(
        jnp.zeros((batch,), jnp.int32),
        jnp.full((batch,), 4, jnp.int32),
        jnp.asarray([row[2] for row in rows], jnp.int32),
        Proposal(
            tokens=jnp.ones_like(parents),
            parents=parents,
            num_nodes=jnp.asarray([row[1] for row in rows], jnp.int32),
        ),
        9,
    )


CHAIN, TREE = [-1, 0, 1], [-1, -1, 1]


def test_counters_after_two_rounds_are_what_a_hand_count_gives():
    stats = empty_stats(4, 3)
    count = jax.jit(count_round)
    # a full accept; a rejected tree; nothing drafted; a finished row
    first = window_of([(CHAIN, 3, 9), (TREE, 3, 9), (CHAIN, 0, 9), (CHAIN, 3, 0)])
    stats = count(
        stats,
        first,
        jnp.array([3, 0, 0, 0], jnp.int32),
        jnp.array([4, 1, 1, 0], jnp.int32),
    )
    # room for two tokens, so one draft; a path of two; two drafts; a bad anchor
    second = window_of([(CHAIN, 3, 2), (TREE, 3, 9), (CHAIN, 2, 9), (CHAIN, 3, 9)])
    stats = count(
        stats,
        second,
        jnp.array([1, 2, 1, 0], jnp.int32),
        jnp.array([2, 3, 2, 0], jnp.int32),
    )
    assert stats.rounds.tolist() == [2, 2, 2, 0]
    assert stats.drafted.tolist() == [3 + 1, 3 + 3, 0 + 2, 0]
    assert stats.accepted.tolist() == [4, 2, 1, 0]
    assert stats.committed.tolist() == [6, 4, 3, 0]
    # rounds that drafted at depth 1, 2, 3: two siblings count once
    assert stats.drafted_by_position.tolist() == [
        [2, 1, 1],
        [2, 2, 0],
        [1, 1, 0],
        [0, 0, 0],
    ]
    assert stats.accepted_by_position.tolist() == [
        [2, 1, 1],
        [1, 1, 0],
        [1, 0, 0],
        [0, 0, 0],
    ]
    assert total(stats) == {
        "rounds": 6,
        "drafted": 12,
        "accepted": 7,
        "committed": 13,
        "drafted_by_position": [5, 4, 1],
        "accepted_by_position": [4, 2, 1],
    }


def test_every_counter_has_a_buffer_of_its_own():
    leaves = jax.tree.leaves(empty_stats(2, 3))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


def test_a_drafter_without_depth_has_counters_without_positions():
    stats = count_round(
        empty_stats(1, 0),
        window_of([([0], 0, 9)]),
        jnp.array([0], jnp.int32),
        jnp.array([1], jnp.int32),
    )
    assert total(stats)["drafted_by_position"] == []
    assert total(stats)["committed"] == 1


@pytest.mark.parametrize(
    ("formula", "counts", "value"),
    [
        (tau, (12, 4), 3.0),  # the bonus token is in: 4 rounds of 2 accepted
        (tau, (0, 0), 0.0),
        (alpha, (8, 12), 2 / 3),
        (alpha, (0, 12), 0.0),
        (alpha, (0, 0), 0.0),
    ],
)
def test_formulas(formula, counts, value):
    assert formula(*counts) == value
