"""Trees chosen on the device, against every path there is."""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.decoding import trees
from specjax.decoding.trees import Expansion, ScoredTree, Tree, depths_of
from specjax.decoding.types import ANCHOR
from specjax.decoding.windows import draft_window

INF = float("inf")
Path = tuple[int, ...]

from_marginals = jax.jit(trees.from_marginals, static_argnames="num_nodes")
depths = jax.jit(depths_of)
start = jax.jit(trees.start, static_argnames="k")
grow = jax.jit(trees.grow)
window_of = jax.jit(draft_window, static_argnames="vocab_size")
rerank = jax.jit(trees.rerank, static_argnames="num_nodes")

# Few values, for many ties; -0, a subnormal and what is above 0 must behave as 0.
scores = st.sampled_from([0.0, -0.0, -1e-40, 1e-6, -0.5, -1.0, -1.5, -3.0, -INF])


class Node(NamedTuple):
    token: int
    parent: int  # candidate index, or ANCHOR
    score: np.float32


def best_of(candidates: list[Node], num_nodes: int) -> tuple[list[Node], int]:
    """The largest scores, ties to the lower index; by index, the missing last."""
    by_score = sorted(
        range(len(candidates)), key=lambda i: (-float(candidates[i].score), i)
    )
    chosen = by_score[:num_nodes]
    chosen.sort(key=lambda i: (candidates[i].score == -INF, i))
    place = {ANCHOR: ANCHOR} | {index: at for at, index in enumerate(chosen)}
    nodes = [candidates[i] for i in chosen]
    # closed under parent: a KeyError otherwise
    nodes = [node._replace(parent=place[node.parent]) for node in nodes]
    return nodes, sum(bool(node.score > -INF) for node in nodes)


def assert_is(tree: ScoredTree, wanted: list[tuple[list[Node], int]]) -> None:
    for name in ("tokens", "parents"):
        assert getattr(tree, name).dtype == jnp.int32
    assert tree.num_nodes.dtype == jnp.int32 and tree.scores.dtype == jnp.float32
    for b, (nodes, count) in enumerate(wanted):
        assert tree.num_nodes[b] == count
        assert tree.tokens[b].tolist() == [node.token for node in nodes]
        assert tree.parents[b].tolist() == [node.parent for node in nodes]
        assert tree.scores[b].tolist() == [node.score for node in nodes]


def cleaned(log_probs: np.ndarray) -> np.ndarray:
    return np.where(log_probs > -1e-30, np.float32(0), log_probs)


@given(st.lists(st.integers(0, 10**6), min_size=9, max_size=9))
@settings(max_examples=20)
def test_depths_are_those_of_a_static_tree(draws):
    tree = Tree(tuple(x % (node + 1) - 1 for node, x in enumerate(draws)))
    parents = jnp.asarray([tree.parents, Tree(tuple(range(-1, 8))).parents], jnp.int32)
    assert depths(parents).tolist() == [tree.depths.tolist(), [*range(1, 10)]]


# -- marginals ------------------------------------------------------------------------

B, K, M = 2, 3, 3
ALL = M + M**2 + M**3


def every_path(log_probs: np.ndarray, tokens: np.ndarray) -> list[Node]:
    """All of them, by depth and then by ranks."""
    at: dict[Path, int] = {(): ANCHOR}
    nodes: list[Node] = []
    for depth in range(log_probs.shape[0]):
        for path in itertools.product(range(log_probs.shape[1]), repeat=depth + 1):
            parent = at[path[:-1]]
            above = np.float32(0) if parent == ANCHOR else nodes[parent].score
            score = np.float32(above + log_probs[depth, path[-1]])
            at[path] = len(nodes)
            nodes.append(Node(int(tokens[depth, path[-1]]), parent, score))
    return nodes


def check_marginals(log_probs: np.ndarray, num_nodes: int) -> None:
    shape = log_probs.shape
    tokens = np.arange(log_probs.size, dtype=np.int32).reshape(shape) * 7 % 1000
    got = from_marginals(jnp.asarray(log_probs), jnp.asarray(tokens), num_nodes)
    wanted = [
        best_of(every_path(cleaned(row), words), num_nodes)
        for row, words in zip(log_probs, tokens, strict=True)
    ]
    assert_is(got, wanted)


@given(
    st.lists(scores, min_size=B * K * M, max_size=B * K * M),
    st.sampled_from([1, 4, 10, ALL]),
)
@settings(max_examples=40)
def test_marginals_give_the_best_of_all_paths_with_ties(values, num_nodes):
    check_marginals(np.array(values, np.float32).reshape(B, K, M), num_nodes)


@pytest.mark.parametrize(
    ("shape", "num_nodes"),
    [((5, 4, 4), 16), ((3, 1, 5), 5), ((3, 6, 1), 6), ((2, 2, 2), 0)],
)
def test_marginals_give_the_best_of_all_paths_without_ties(shape, num_nodes):
    # Not whole: sums are rounded, so that different ones may come out equal.
    draw = np.random.default_rng(0)
    for scale in (3.0, 1e-7):
        values = -scale * draw.random(shape)
        check_marginals(np.asarray(values, np.float32), num_nodes)


def test_marginals_of_low_precision_are_summed_in_float32():
    log_probs = jnp.asarray([[[-0.5, -1.0], [-0.001, -9.0]]], jnp.bfloat16)
    tokens = jnp.zeros((1, 2, 2), jnp.int32)
    tree = from_marginals(log_probs, tokens, 2)
    wanted = float(log_probs[0, 0, 0]) + float(log_probs[0, 1, 0])
    assert tree.parents.tolist() == [[-1, 0]]
    assert tree.scores[0, 1] == np.float32(wanted)


def test_a_row_of_nan_drafts_nothing_and_harms_no_other():
    draw = np.random.default_rng(1)
    log_probs = jnp.asarray(-draw.random((2, K, M)), jnp.float32)
    tokens = jnp.zeros((2, K, M), jnp.int32)
    well = from_marginals(log_probs, tokens, 10)
    sick = from_marginals(log_probs.at[0].set(jnp.nan), tokens, 10)
    assert sick.num_nodes.tolist() == [0, 10]
    for a, b in zip(jax.tree.leaves(well), jax.tree.leaves(sick), strict=True):
        np.testing.assert_array_equal(a[1], b[1])


def test_more_nodes_than_paths_are_an_error():
    log_probs, tokens = jnp.zeros((1, 2, 3)), jnp.zeros((1, 2, 3), jnp.int32)
    with pytest.raises(ValueError, match=r"num_nodes = 13, but .* only 12 candidates"):
        from_marginals(log_probs, tokens, 13)


def test_a_window_takes_the_nodes_that_exist_and_no_others():
    log_probs = np.full((B, K, M), -INF, np.float32)
    log_probs[:, :, :2] = -1.0
    log_probs[:, 0, 0] = -INF  # only the second child of the anchor, and two below each
    tokens = jnp.ones((B, K, M), jnp.int32)
    tree = from_marginals(jnp.asarray(log_probs), tokens, 10)
    one = jnp.ones((B,), jnp.int32)
    window = window_of(one, one, 9 * one, tree.proposal, vocab_size=5)
    assert tree.num_nodes.tolist() == [1 + 2 + 4] * B
    assert window.valid[0].tolist() == [True] * 8 + [False] * 3


# -- EAGLE-2 --------------------------------------------------------------------------


class Model:
    """A drafter by table: log-probabilities for each path, made on demand."""

    def __init__(self, vocab: int, seed: int, ties: bool):
        self.vocab, self.seed = vocab, seed
        self.values = [0.0, -0.5, -1.0, -1.5, -INF] if ties else None

    @functools.cache  # noqa: B019
    def row(self, path: Path) -> np.ndarray:
        draw = np.random.default_rng([self.seed, len(path), *path])
        if self.values is None:
            return -3 * draw.random(self.vocab, np.float32)
        return draw.choice(self.values, self.vocab).astype(np.float32)


def expand(models: list[Model], k: int, depth: int) -> Expansion:
    """As a drafter does: what each row has read follows its parent's row."""
    expansion = start(jnp.asarray([model.row(()) for model in models]), k=k)
    read: list[list[Path]] = [[()] for _ in models]
    for _ in range(depth - 1):
        tokens, rows = expansion.beam_tokens.tolist(), expansion.beam_rows.tolist()
        read = [
            [(*read[b][row], token) for row, token in zip(rows[b], words, strict=True)]
            for b, words in enumerate(tokens)
        ]
        log_probs = [
            [model.row(path) for path in paths]
            for model, paths in zip(models, read, strict=True)
        ]
        expansion = grow(expansion, jnp.asarray(log_probs))
    return expansion


def candidates_of(model: Model, k: int, depth: int) -> list[Node]:
    """The paper's expansion with lists, sorted stably."""
    nodes: list[Node] = []
    beam: list[tuple[int, Path]] = [(ANCHOR, ())]
    for _ in range(depth):
        first, paths = len(nodes), {}
        for parent, path in beam:
            row = model.row(path)
            above = np.float32(0) if parent == ANCHOR else nodes[parent].score
            for token in np.argsort(-row, kind="stable")[:k]:
                paths[len(nodes)] = (*path, int(token))
                nodes.append(Node(int(token), parent, np.float32(above + row[token])))
        order = sorted(range(first, len(nodes)), key=lambda i: (-nodes[i].score, i))
        beam = [(i, paths[i]) for i in order[:k]]
    return nodes


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize(("vocab", "k", "depth"), [(4, 3, 3), (2, 1, 3)])
def test_rerank_takes_the_best_of_all_candidates(vocab, k, depth, ties):
    for seed in range(4):
        models = [Model(vocab, 10 * seed + b, ties) for b in range(3)]
        expansion = expand(models, k, depth)
        listed = [candidates_of(model, k, depth) for model in models]
        count = k + (depth - 1) * k * k
        assert expansion.candidates.tokens.shape == (3, count)
        for num_nodes in (count // 2, count):
            wanted = [best_of(nodes, num_nodes) for nodes in listed]
            assert_is(rerank(expansion, num_nodes=num_nodes), wanted)


def test_a_beam_as_wide_as_the_tree_finds_the_best_of_all_paths():
    vocab, depth = 5, 3
    models = [Model(vocab, seed, ties=False) for seed in range(5)]
    tree = rerank(expand(models, vocab, depth), num_nodes=vocab)
    for b, model in enumerate(models):
        score: dict[Path, np.float32] = {(): np.float32(0)}
        for length in range(1, depth + 1):
            for path in itertools.product(range(vocab), repeat=length):
                above, row = score[path[:-1]], model.row(path[:-1])
                score[path] = np.float32(above + row[path[-1]])
        del score[()]
        best = sorted(score.values(), reverse=True)[:vocab]
        assert sorted(tree.scores[b].tolist(), reverse=True) == best


def test_a_certain_child_comes_after_its_parent():
    """Parent and child score the same, as in low precision; the parent is first."""
    certain = [0.0, -0.0, 1e-6]
    rows = np.full((3, 4), -INF, np.float32)
    rows[:, 2] = certain
    expansion = start(jnp.asarray(rows), k=3)
    for last in (0.0, certain):
        rows[:, 2] = last
        expansion = grow(expansion, jnp.asarray(np.stack([rows] * 3, axis=1)))
    tree = rerank(expansion, num_nodes=10)
    for b in range(3):
        assert tree.num_nodes[b] == 3
        assert tree.tokens[b, :3].tolist() == [2, 2, 2]
        assert tree.parents[b, :3].tolist() == [-1, 0, 1]
        assert tree.scores[b, :3].tolist() == [0.0, 0.0, 0.0]


def test_missing_candidates_come_last_and_are_not_counted():
    row = jnp.asarray([[-INF, -2.0, -INF, -1.0]] * 3)
    expansion = start(row, k=3)
    assert expansion.beam_tokens.tolist() == [[3, 1, 0]] * 3  # the lower of the missing
    rows = jnp.stack([row, jnp.full_like(row, -INF), jnp.full_like(row, jnp.nan)], 1)
    tree = rerank(grow(expansion, rows), num_nodes=12)
    assert tree.num_nodes.tolist() == [4] * 3
    assert tree.tokens[0, :4].tolist() == [3, 1, 3, 1]
    assert tree.parents[0, :4].tolist() == [-1, -1, 0, 0]
    assert tree.scores[0].tolist() == [-1.0, -2.0, -2.0, -3.0] + [-INF] * 8
    assert np.all(np.asarray(tree.parents[0]) < np.arange(12))


def test_top_k_prefers_the_lower_index():
    """What all of this relies on."""
    draw = np.random.default_rng(0)
    values = draw.choice([0.0, -1.0, -2.0, -INF], (8, 500)).astype(np.float32)
    picked = jax.jit(lambda x: jax.lax.top_k(x, 300)[1])(jnp.asarray(values))
    wanted = np.argsort(-values, axis=1, kind="stable")[:, :300]
    np.testing.assert_array_equal(picked, wanted)


def test_the_whole_expansion_is_one_program_and_agrees_with_marginals():
    @jax.jit
    def tree_of(log_probs: jax.Array) -> ScoredTree:
        expansion = trees.start(log_probs, 3)
        for _ in range(2):
            rows = jnp.repeat(log_probs[:, None], 3, axis=1)
            expansion = trees.grow(expansion, rows)
        return trees.rerank(expansion, 4)

    # The same row after every path; so few nodes that none lies outside the beams.
    log_probs = jnp.asarray([[-3.0, -0.5, -1.0, -2.0], [-1.5, -1.0, -9.0, -0.25]])
    values, tokens = jax.lax.top_k(log_probs, 3)
    values, tokens = (jnp.repeat(x[:, None], K, axis=1) for x in (values, tokens))
    wanted = from_marginals(values, tokens, 4)
    for a, b in zip(*map(jax.tree.leaves, (tree_of(log_probs), wanted)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_wrong_sizes_are_named():
    with pytest.raises(ValueError, match=r"top_k = 5 .* a vocabulary of 4"):
        start(jnp.zeros((1, 4)), k=5)
    with pytest.raises(ValueError, match="k = 0"):
        start(jnp.zeros((1, 4)), k=0)
    expansion = start(jnp.zeros((1, 4)), k=3)
    with pytest.raises(ValueError, match=r"top_k = 3 .* a vocabulary of 2"):
        grow(expansion, jnp.zeros((1, 3, 2)))
    with pytest.raises(ValueError, match="1 rows for a beam of 3"):
        grow(expansion, jnp.zeros((1, 1, 4)))
    with pytest.raises(ValueError, match=r"num_nodes = 4, but .* only 3"):
        rerank(expansion, num_nodes=4)
