"""Windows against definitions node by node."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.decoding import windows
from specjax.decoding.types import Proposal, Window
from specjax.decoding.windows import (
    ancestor_mask,
    chunk_window,
    keep_valid,
    slice_rows,
    spread_bad,
    widen,
)

B, N, V = 3, 7, 11
W = N + 1

draft_window = jax.jit(windows.draft_window, static_argnames="vocab_size")
ancestors_of = jax.jit(ancestor_mask)


def closure(parent_rows: list[int]) -> np.ndarray:
    """Row by row up to the anchor."""
    width = len(parent_rows) + 1
    mask = np.zeros((width, width), bool)
    for row in range(width):
        at = row
        mask[row, at] = True
        while at > 0:
            at = parent_rows[at - 1]
            mask[row, at] = True
    return mask


@pytest.mark.parametrize("nodes", [0, 1, 2, 3, 7, 15, 16, 17])
def test_ancestor_mask_is_the_closure_of_parents(nodes: int):
    draw = np.random.default_rng(nodes)
    trees = [[int(draw.integers(0, i + 1)) for i in range(nodes)] for _ in range(3)]
    trees.append(list(range(nodes)))  # the chain is the deepest
    trees.append([0] * nodes)  # the star is the flattest
    got = ancestors_of(jnp.asarray(trees, jnp.int32).reshape(len(trees), nodes))
    assert got.dtype == bool
    np.testing.assert_array_equal(got, [closure(tree) for tree in trees])


class Row(NamedTuple):
    """One row of a proposal and what stands around it."""

    tokens: list[int]
    parents: list[int]
    num_nodes: int
    room: int
    length: int
    anchor: int


def node_lists(values: st.SearchStrategy[int]) -> st.SearchStrategy[list[int]]:
    return st.lists(values, min_size=N, max_size=N)


row_of_any_kind = st.builds(
    Row,
    tokens=node_lists(
        st.one_of(
            st.integers(0, V - 1),
            st.integers(0, V - 1),
            st.sampled_from([-1, V, -(2**31), 2**31 - 1]),
        )
    ),
    parents=node_lists(
        st.one_of(
            st.integers(-1, N - 1),
            st.integers(-1, 1),
            st.sampled_from([-2, N, -(2**31), 2**31 - 1]),
        )
    ),
    num_nodes=st.integers(0, N),
    room=st.integers(0, N + 2),
    length=st.integers(1, 50),
    anchor=st.integers(0, V - 1),
)


def window_of(rows: list[Row], nodes: int = N) -> Window:
    def array(name: str) -> jax.Array:
        values = np.array([getattr(row, name) for row in rows], np.int32)
        return jnp.asarray(values[:, :nodes] if values.ndim == 2 else values)

    proposal = Proposal(
        tokens=array("tokens"),
        parents=array("parents"),
        num_nodes=jnp.minimum(array("num_nodes"), nodes),
    )
    return draft_window(
        array("anchor"), array("length"), array("room"), proposal, vocab_size=V
    )


def path_to(row: Row, node: int) -> list[int] | None:
    """Nodes from the anchor's child to this one, if each of them is in order."""
    if node == -1:
        return []
    token, parent = row.tokens[node], row.parents[node]
    if node >= row.num_nodes or not 0 <= token < V or not -1 <= parent < node:
        return None
    above = path_to(row, parent)
    return None if above is None else [*above, node]


@given(st.lists(row_of_any_kind, min_size=B, max_size=B))
@settings(max_examples=80)
def test_a_node_is_valid_if_it_and_all_above_it_are_in_order_and_there_is_room(rows):
    window = jax.tree.map(np.asarray, window_of(rows))
    for b, row in enumerate(rows):
        for node in range(-1, N):
            i = node + 1
            path = path_to(row, node)
            valid = path is not None and len(path) < row.room
            assert window.valid[b, i] == valid
            sees = {0, *(p + 1 for p in path)} if valid and path is not None else {i}
            assert set(np.flatnonzero(window.ancestors[b, i])) == sees
            if not valid or path is None:
                assert window.tokens[b, i] == 0
                others = np.delete(window.ancestors[b, :, i], i)
                assert not others.any()
                continue
            token = row.anchor if node == -1 else row.tokens[node]
            assert window.tokens[b, i] == token
            assert window.positions[b, i] == row.length - 1 + len(path)
        assert (window.tokens[b] >= 0).all() and (window.tokens[b] < V).all()


def test_a_row_without_room_has_no_valid_row_at_all():
    row = Row([1] * N, list(range(-1, N - 1)), N, room=0, length=5, anchor=3)
    assert not window_of([row] * B).valid.any()
    last = row._replace(room=1)
    assert window_of([last] * B).valid.sum(axis=1).tolist() == [1] * B


@pytest.mark.parametrize("room", [1, 2, 4, N, N + 1, N + 2])
def test_a_chain_is_cut_where_the_room_ends(room: int):
    row = Row([1] * N, list(range(-1, N - 1)), N, room=room, length=5, anchor=3)
    assert int(window_of([row] * B).valid[0].sum()) == min(room, W)


@given(st.lists(row_of_any_kind, min_size=B, max_size=B), st.sampled_from([1, 2, 5, W]))
@settings(max_examples=30)
def test_the_first_rows_of_a_window_are_the_window_of_the_first_nodes(rows, width):
    sliced = slice_rows(window_of(rows), width)
    fewer = window_of(rows, nodes=width - 1)
    for a, b in zip(jax.tree.leaves(sliced), jax.tree.leaves(fewer), strict=True):
        np.testing.assert_array_equal(a, b)
    # closed: what a valid row sees is there and valid
    seen = np.asarray(sliced.ancestors) & np.asarray(sliced.valid)[:, :, None]
    assert np.all(~seen | np.asarray(sliced.valid)[:, None, :])


# -- stretches of text ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, 0), (0, 3), (0, 5), (0, 20), (2, 2), (4, 3), (18, 20), (19, 20), (20, 20)],
)
def test_a_chunk_holds_the_tokens_from_start_to_stop_up_to_its_width(start, stop):
    capacity, width = 20, 5
    tokens = np.arange(100, 100 + capacity, dtype=np.int32)
    tokens[stop:] = -1  # no token there
    window = chunk_window(
        jnp.asarray(tokens[None]),
        jnp.array([start], jnp.int32),
        jnp.array([stop], jnp.int32),
        width,
    )
    count = max(0, min(stop - start, width))
    wanted = [*range(100 + start, 100 + start + count), *[0] * (width - count)]
    assert window.tokens[0].tolist() == wanted
    assert window.valid[0].tolist() == [i < count for i in range(width)]
    assert window.positions[0].tolist() == list(range(start, start + width))
    mask = np.eye(width, dtype=bool)
    mask[:count, :count] = np.tril(np.ones((count, count), bool))
    np.testing.assert_array_equal(window.ancestors[0], mask)


def test_rows_of_a_chunk_have_their_own_stretches():
    tokens = jnp.asarray([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]], jnp.int32)
    window = chunk_window(
        tokens, jnp.array([0, 3], jnp.int32), jnp.array([2, 6], jnp.int32), 3
    )
    assert window.tokens.tolist() == [[1, 2, 0], [10, 11, 12]]
    assert window.valid.tolist() == [[True, True, False], [True, True, True]]


# -- the small ones -------------------------------------------------------------------


def test_keep_valid_cuts_padding_out_of_both_sides():
    mask = jnp.ones((1, 3, 3), bool)
    got = keep_valid(mask, jnp.array([[True, False, True]]))
    wanted = [[True, False, True], [False, True, False], [True, False, True]]
    assert got[0].tolist() == wanted


def test_widen_pads_rows_with_zeros_and_leaves_the_rest_alone():
    leaves = {
        "a": jnp.ones((2, 3), bool),
        "b": jnp.ones((2, 3, 4, 5), jnp.bfloat16),
        "none": None,
    }
    wide = widen(leaves, 5)
    assert wide["none"] is None
    for name in ("a", "b"):
        assert wide[name].dtype == leaves[name].dtype
        assert wide[name].shape == (2, 5, *leaves[name].shape[2:])
        assert bool((wide[name][:, :3] == leaves[name]).all())
        assert not wide[name][:, 3:].any()
    assert widen(leaves, 3)["a"] is leaves["a"]


def test_a_bad_row_makes_its_descendants_bad_and_nobody_else():
    parents = [0, 0, 1, 2, 3, 4, 4]
    mask = jnp.asarray([closure(parents)])
    for bad in range(W):
        got = spread_bad(jnp.asarray(np.arange(W)[None] == bad), mask)
        assert got[0].tolist() == closure(parents)[:, bad].tolist()
    assert not spread_bad(jnp.zeros((1, W), bool), mask).any()
