"""Prompt lookup against a search of every place, and where it must draft nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.decoding.types import Context, Proposal, Sampling
from specjax.decoding.windows import draft_window
from specjax.drafters import DRAFTERS, DrafterOptions, NGram

B, T = 4, 24
DRAFTER = NGram(k=4, min_n=2, max_n=3)

propose = jax.jit(lambda drafter, context: drafter.propose(None, context)[0])


def context_of(rows: list[list[int]], garbage: int = -1, capacity: int = T) -> Context:
    tokens = np.full((len(rows), capacity), garbage, np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    batch = len(rows)
    return Context(
        tokens=jnp.asarray(tokens),
        lengths=jnp.asarray([len(row) for row in rows], jnp.int32),
        room=jnp.full((batch,), 99, jnp.int32),
        done=jnp.zeros((batch,), bool),
        seeds=jnp.zeros((batch,), jnp.uint32),
        sampling=Sampling(),
        counts=None,
    )


def search(text: list[int], k: int, min_n: int, max_n: int) -> list[int]:
    """Longest ``n`` first, then the earliest place, every place looked at."""
    for n in range(min(max_n, len(text) - 1), min_n - 1, -1):
        for start in range(len(text) - n):
            if text[start : start + n] == text[-n:]:
                return text[start + n : start + n + k]
    return []


def drafts(proposal: Proposal, row: int) -> list[int]:
    return proposal.tokens[row, : int(proposal.num_nodes[row])].tolist()


texts = st.integers(1, 3).flatmap(
    lambda top: st.lists(st.integers(0, top), min_size=1, max_size=T)
)


@pytest.mark.parametrize("sizes", [(4, 2, 3), (3, 1, 4), (2, 3, 3), (30, 1, 1)])
@given(st.lists(texts, min_size=B, max_size=B))
@settings(max_examples=40)
def test_the_draft_is_what_a_search_of_every_place_finds(sizes, rows):
    got = propose(NGram(*sizes), context_of(rows))
    k = sizes[0]
    chain = [list(range(-1, k - 1))] * B
    assert got.parents.tolist() == chain and got.log_q is None
    for i, text in enumerate(rows):
        drafted = drafts(got, i)
        assert drafted == search(text, *sizes)
        n = len(drafted)
        assert n <= k
        assert any(text[at : at + n] == drafted for at in range(len(text) - n + 1))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ([1, 2, 3, 4, 2, 3], [4, 2, 3]),
        ([1, 2, 3, 4, 5, 6, 2, 3], [4, 5, 6, 2]),  # at most k
        ([7, 7, 7, 7], [7]),  # overlapping itself: up to the end of the text
        ([1, 2, 9, 1, 2, 8, 1, 2], [9, 1, 2, 8]),  # the earliest of two places
        ([5, 1, 2, 9, 4, 1, 2, 8, 4, 1, 2], [8, 4, 1, 2]),  # the longer match
        ([1, 2, 3, 4, 5, 3], []),  # one token is too short a match
        ([1, 2, 3], []),
        ([1, 1], []),
        ([4], []),
    ],
)
def test_examples_by_hand(text, wanted):
    got = propose(DRAFTER, context_of([text] * B))
    assert drafts(got, 0) == wanted


@given(st.lists(texts, min_size=B, max_size=B), st.integers(0, 3))
@settings(max_examples=30)
def test_what_stands_beyond_a_rows_length_changes_nothing(rows, garbage):
    a = propose(DRAFTER, context_of(rows))
    b = propose(DRAFTER, context_of(rows, garbage=garbage))
    for i in range(B):
        assert drafts(a, i) == drafts(b, i)


@given(st.lists(texts, min_size=B, max_size=B))
@settings(max_examples=20)
def test_rows_do_not_see_each_other(rows):
    together = propose(DRAFTER, context_of(rows))
    for i, row in enumerate(rows):
        others = propose(DRAFTER, context_of([row] * B))
        assert drafts(together, i) == drafts(others, 0) == drafts(others, B - 1)


def test_a_text_that_fills_the_capacity_is_drafted_from_like_any_other():
    text = ([1, 2, 3, 4, 5] * 5)[:T]
    got = propose(DRAFTER, context_of([text] * B))
    assert drafts(got, 0) == search(text, 4, 2, 3) != []


def test_a_match_longer_than_the_capacity_is_not_looked_for_in_vain():
    got = propose(NGram(k=2, min_n=1, max_n=9), context_of([[3, 3, 3]], capacity=4))
    assert drafts(got, 0) == search([3, 3, 3], 2, 1, 9)


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ((0, 2, 3), "k = 0"),
        ((4, 0, 3), "min_n = 0"),
        ((4, 4, 3), "min_n = 4, max_n = 3"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(sizes, problem):
    with pytest.raises(ValueError, match=problem):
        NGram(*sizes)


def test_the_registry_builds_it_from_its_options():
    options = DrafterOptions(k=7, min_n=1, max_n=5)
    assert DRAFTERS["ngram"].build(options) == NGram(7, 1, 5)
    assert NGram(7, 1, 5).max_nodes == NGram(7, 1, 5).max_depth == 7
    nothing = DRAFTERS["none"].build(options)
    assert nothing.max_nodes == 0 and not DRAFTERS["none"].drafts
    with pytest.raises(ValueError, match="draft model"):
        DRAFTERS["draft-model"].build(options)


def test_the_null_drafter_proposes_no_node():
    drafter = DRAFTERS["none"].build(DrafterOptions())
    proposal, pending = drafter.propose(None, context_of([[1, 2]] * B))
    assert proposal.tokens.shape == proposal.parents.shape == (B, 0)
    assert proposal.num_nodes.tolist() == [0] * B and pending is None


@pytest.mark.parametrize("room", [0, 1, 2, 3, 9])
def test_drafts_that_a_row_has_no_room_for_are_not_looked_at(room):
    text = [1, 2, 3, 4, 5, 6, 1, 2]
    context = context_of([text] * B)
    proposal = propose(DRAFTER, context)
    window = draft_window(
        context.anchor,
        context.lengths,
        jnp.full((B,), room, jnp.int32),
        proposal,
        vocab_size=9,
    )
    # the target adds a token of its own behind the last draft
    drafted = max(0, min(room - 1, 4))
    assert window.valid[0, 1:].sum() == drafted
    assert window.tokens[0, 1 : 1 + drafted].tolist() == [3, 4, 5, 6][:drafted]
