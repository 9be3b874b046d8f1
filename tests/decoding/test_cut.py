"""The cut against a walk along the tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.decoding import cut as cutting
from specjax.decoding.types import NO_TOKEN, Acceptance, FinishReason

B, P = 5, 5
LENGTH, CAPACITY = FinishReason.LENGTH, FinishReason.CAPACITY

cut = jax.jit(cutting.cut, static_argnames="eos_ids")


def acceptance_of(tokens: list[list[int]]) -> Acceptance:
    """Rows of tokens of any length up to P; the path is not 0, 1, 2 on purpose."""
    path, filled = np.zeros((2, len(tokens), P), np.int32)
    filled[:] = NO_TOKEN
    for b, row in enumerate(tokens):
        path[b, : len(row)] = np.arange(len(row)) * 2
        filled[b, : len(row)] = row
    return Acceptance(
        path=jnp.asarray(path),
        tokens=jnp.asarray(filled),
        num_tokens=jnp.asarray([len(row) for row in tokens], jnp.int32),
    )


def walk(
    tokens: list[int], room: int, bad: bool, eos: tuple[int, ...], limit: FinishReason
) -> tuple[list[int], FinishReason]:
    """Commit token after token until something ends the row."""
    if room == 0:
        return [], FinishReason.NONE
    if bad:
        return [], FinishReason.NAN
    kept: list[int] = []
    for token in tokens:
        kept.append(token)
        if token in eos:
            return kept, FinishReason.STOP
        if len(kept) == room:
            return kept, limit
    return kept, FinishReason.NONE


@given(
    st.lists(
        st.lists(st.integers(0, 5), min_size=1, max_size=P), min_size=B, max_size=B
    ),
    st.lists(st.integers(0, P + 1), min_size=B, max_size=B),
    st.lists(st.sampled_from([False, False, False, True]), min_size=B, max_size=B),
    st.sampled_from([(), (0,), (3, 4), (5, 0, 1)]),
    st.lists(st.sampled_from([LENGTH, CAPACITY]), min_size=B, max_size=B),
)
@settings(max_examples=80)
def test_cut_is_the_walk_along_the_tokens(tokens, room, bad, eos, limit):
    before = acceptance_of(tokens)
    after, reason = cut(
        before,
        room=jnp.asarray(room, jnp.int32),
        anchor_bad=jnp.asarray(bad),
        eos_ids=eos,
        limit_reason=jnp.asarray([int(x) for x in limit], jnp.int32),
    )
    for b in range(B):
        kept, why = walk(tokens[b], room[b], bad[b], eos, limit[b])
        count = len(kept)
        assert int(after.num_tokens[b]) == count
        assert after.tokens[b].tolist() == kept + [NO_TOKEN] * (P - count)
        assert after.path[b].tolist() == before.path[b, :count].tolist() + [0] * (
            P - count
        )
        assert FinishReason(int(reason[b])) == why


@pytest.mark.parametrize("limit", [LENGTH, CAPACITY])
@pytest.mark.parametrize(
    ("room", "count", "why"),
    [
        (2, 2, "limit"),  # the stop lies beyond the budget
        (3, 3, "stop"),  # the stop is the last token of the budget
        (4, 3, "stop"),
        (1, 1, "limit"),
        (0, 0, "none"),
    ],
)
def test_a_stop_at_the_very_end_of_the_budget_is_a_stop(room, count, why, limit):
    after, reason = cut(
        acceptance_of([[1, 1, 9, 1, 1]]),
        room=jnp.array([room], jnp.int32),
        anchor_bad=jnp.array([False]),
        eos_ids=(9,),
        limit_reason=jnp.array([int(limit)], jnp.int32),
    )
    names = {"limit": limit, "stop": FinishReason.STOP, "none": FinishReason.NONE}
    assert int(after.num_tokens[0]) == count
    assert FinishReason(int(reason[0])) == names[why]


def test_a_sentinel_is_not_taken_for_an_end_of_sequence_id():
    short = acceptance_of([[1, 2]]).replace(tokens=jnp.array([[1, 2, 9, 9, 9]]))
    after, reason = cut(
        short,
        room=jnp.array([10], jnp.int32),
        anchor_bad=jnp.array([False]),
        eos_ids=(9,),
        limit_reason=jnp.array([2], jnp.int32),
    )
    assert after.num_tokens.tolist() == [2] and reason.tolist() == [0]
    assert after.tokens.tolist() == [[1, 2, NO_TOKEN, NO_TOKEN, NO_TOKEN]]


def test_a_row_that_is_not_finite_commits_nothing_though_it_met_a_stop():
    after, reason = cut(
        acceptance_of([[9, 1]]),
        room=jnp.array([1], jnp.int32),
        anchor_bad=jnp.array([True]),
        eos_ids=(9,),
        limit_reason=jnp.array([2], jnp.int32),
    )
    assert after.num_tokens.tolist() == [0]
    assert reason.tolist() == [int(FinishReason.NAN)]
