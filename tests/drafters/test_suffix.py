"""Suffix drafts against a recount of substrings in plain Python."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.acceptance import Coupled
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.generate import generate
from specjax.decoding.requests import Request
from specjax.decoding.types import Context, Proposal, Sampling
from specjax.drafters import DRAFTERS, DrafterOptions, NullDrafter
from specjax.drafters.past_outputs import PastOutputs
from specjax.drafters.suffix import Suffix
from specjax.drafters.suffix_counts import MOST, largest
from specjax.testing.conformance import check_drafter
from specjax.testing.markov import markov
from specjax.testing.toys import toy_llama

B, T, M = 8, 24, 20

propose = jax.jit(lambda drafter, context: drafter.propose(None, context)[0])


def context_of(rows: list[list[int]], garbage: int = -1, room: int = 99) -> Context:
    tokens = np.full((len(rows), T), garbage, np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    batch = len(rows)
    return Context(
        tokens=jnp.asarray(tokens),
        lengths=jnp.asarray([len(row) for row in rows], jnp.int32),
        room=jnp.full((batch,), room, jnp.int32),
        done=jnp.zeros((batch,), bool),
        seeds=jnp.zeros((batch,), jnp.uint32),
        sampling=Sampling(),
        counts=None,
    )


class Texts:
    """What a suffix tree would be asked, by looking at every place of every text."""

    def __init__(self, texts) -> None:
        self.places = [
            (tuple(text[:end]), tuple(text[end:]))
            for text in texts
            for end in range(1, len(text) + 1)
        ]

    def behind(self, string: tuple, match: int) -> list[int]:
        """The places behind whose first ``match`` tokens the rest of it stands."""
        head, tail = string[:match], string[match:]
        return [
            at
            for at, (before, after) in enumerate(self.places)
            if before[-match:] == head and after[: len(tail)] == tail
        ]

    def count(self, string: tuple, match: int) -> int:
        return len(self.behind(string, match))

    def children(self, string: tuple, match: int) -> list[tuple[int, int, int]]:
        """Counts, latest places and tokens of what stands behind."""
        tokens = {
            self.places[at][1][len(string) - match]
            for at in self.behind(string, match)
            if len(self.places[at][1]) > len(string) - match
        }
        found = []
        for token in tokens:
            places = self.behind((*string, token), match)
            found.append((len(places), max(places), token))
        return found


def best_of(texts: Texts, pattern: tuple, drafter: Suffix):
    """The best draft, as (score, [(token, parent)])."""
    best: tuple[Fraction, list[tuple[int, int]]] = (Fraction(0), [])
    for match in range(1, len(pattern) + 1):
        head = pattern[-match:]
        total = texts.count(head, match)
        if total == 0:
            break
        budget = min(
            drafter.k,
            int(drafter.max_spec_factor * match + drafter.max_spec_offset + 1e-6),
        )
        grow = tree_of if drafter.tree else path_of
        nodes = grow(texts, head, total, budget, drafter)
        score = sum((Fraction(n, total) for n, _, _ in nodes), Fraction(0))
        if score >= best[0]:
            best = score, [(token, parent) for _, token, parent in nodes]
    return best


def probable(count: int, total: int, drafter: Suffix) -> bool:
    return Fraction(count, total) >= Fraction(str(drafter.min_token_prob))


def path_of(texts, string, total, budget, drafter):
    match, nodes = len(string), []
    while len(nodes) < budget and len(string) < drafter.max_tree_depth:
        children = texts.children(string, match)
        if not children or not probable(max(children)[0], total, drafter):
            break
        count, _, token = max(children)
        nodes.append((count, token, len(nodes) - 1))
        string = (*string, token)
    return nodes


def tree_of(texts, string, total, budget, drafter):
    match, nodes = len(string), []
    heap = [(string, -1)]  # strings whose children may come next
    candidates = []
    while len(nodes) < max(budget, 0):
        for above, parent in heap:
            if len(above) < drafter.max_tree_depth:
                for count, latest, token in texts.children(above, match):
                    order = (count, -len(above), latest)
                    candidates.append((order, (*above, token), parent))
        if not candidates or not probable(max(candidates)[0][0], total, drafter):
            break
        best = max(candidates)
        candidates.remove(best)
        nodes.append((best[0][0], best[1][-1], best[2]))
        heap = [(best[1], len(nodes) - 1)]
    return nodes


def oracle(own: list[int], past: list[list[int]], drafter: Suffix):
    pattern = tuple(own[-(drafter.max_tree_depth - 1) :])
    score, nodes = best_of(Texts([own]), pattern, drafter)
    other, theirs = best_of(Texts(past), pattern, drafter)
    return nodes if score >= other else theirs


def drafts(proposal: Proposal, row: int) -> list[tuple[int, int]]:
    n = int(proposal.num_nodes[row])
    parents = proposal.parents[row, :n].tolist()
    return list(zip(proposal.tokens[row, :n].tolist(), parents, strict=True))


# as many places as the texts have: counts are exact
PATH = Suffix(PastOutputs.empty(M), k=5, places=T, max_tree_depth=9)
TREE = PATH.replace(tree=True, max_spec_offset=2)
SEVERAL = [
    PATH,
    PATH.replace(k=6, max_spec_offset=3, min_token_prob=0.4, max_tree_depth=5),
    TREE,
    TREE.replace(k=9, max_spec_offset=9, max_tree_depth=4),
    pytest.param(
        PATH.replace(max_spec_factor=2.5, max_spec_offset=-1.5, max_tree_depth=24),
        marks=pytest.mark.full,
    ),
    pytest.param(
        TREE.replace(max_spec_factor=3, min_token_prob=0.0), marks=pytest.mark.full
    ),
]


def some_texts(draw: np.random.Generator, rows: int) -> list[list[int]]:
    """Random ones over alphabets of one letter to four, of every length."""
    return [
        draw.integers(0, 1 + row % 4, draw.integers(1, T + 1)).tolist()
        for row in range(rows)
    ]


@pytest.mark.parametrize("drafter", SEVERAL)
def test_drafts_are_those_of_recounted_substrings(drafter):
    draw = np.random.default_rng(drafter.k)
    for _ in range(6):
        rows = some_texts(draw, B)
        past = [
            x[: draw.integers(1, 12)] for x in some_texts(draw, int(draw.integers(4)))
        ]
        kept = PastOutputs.empty(M).add(past)
        whole = [list(output) for output in kept.outputs]
        for store, told in ((kept, whole), (PastOutputs.empty(M), [])):
            got = propose(drafter.replace(past=store), context_of(rows))
            for i, text in enumerate(rows):
                assert drafts(got, i) == oracle(text, told, drafter)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4]),  # as long as the match
        ([1, 7, 2, 1, 8, 3, 1, 8, 4, 1], [8]),  # the more frequent one
        ([1, 8, 2, 1, 7, 3, 1], [7]),  # of equals the latest
        # (9, 1) promises 1/2 + 1/2, and (1,) 2/5
        ([9, 1, 5, 3, 1, 7, 1, 7, 9, 1], [5, 3]),
        ([1, 2, 3], []),
        ([4], []),
    ],
)
def test_examples_by_hand(text, wanted):
    got = propose(PATH, context_of([text] * B))
    assert [token for token, _ in drafts(got, 0)] == wanted


def test_a_tree_branches_where_the_text_did():
    text = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 4, 8, 1, 2]
    got = propose(TREE, context_of([text] * B))
    assert drafts(got, 0) == [(4, -1), (3, -1), (8, 0), (9, 0)]


def test_where_places_are_few_the_longest_matches_are_looked_at():
    # [2] stands 6 times, mostly before 5; [1, 2] once before, and there 6 followed
    text = [1, 2, 6, 2, 5, 2, 5, 2, 5, 2, 5, 3, 1, 2]
    few = propose(PATH.replace(k=1, places=1), context_of([text] * B))
    assert drafts(few, 0) == [(6, -1)]
    assert oracle(text, [], PATH.replace(k=1)) == [(5, -1)]


def test_rows_see_neither_garbage_nor_each_other():
    rows = some_texts(np.random.default_rng(5), B)
    for drafter in (PATH, TREE):
        a = propose(drafter, context_of(rows))
        b = propose(drafter, context_of(rows[::-1], garbage=2))
        assert a.num_nodes.sum() > 0
        for i in range(B):
            assert drafts(a, i) == drafts(b, B - 1 - i)


def test_only_a_store_that_is_given_reaches_a_row():
    past = PastOutputs.empty(M).add([[7, 1, 2, 3, 4]])
    row = [5, 7, 1]
    assert drafts(propose(PATH, context_of([row] * B)), 0) == []
    got = propose(PATH.replace(past=past), context_of([row] * B))
    assert [token for token, _ in drafts(got, 0)] == [2, 3]


def test_no_match_runs_from_one_output_into_the_next():
    past = PastOutputs.empty(M).add([[7, 1], [2, 3]])
    context = context_of([[5, 7, 1]] * B)
    assert drafts(propose(PATH.replace(past=past), context), 0) == []
    past = PastOutputs.empty(M).add([[2, 7], [1, 3]])
    got = propose(PATH.replace(past=past), context)
    assert drafts(got, 0) == [(3, -1)]  # a match of one token, not of two


def test_the_oldest_outputs_make_room():
    store = PastOutputs.empty(8).add([[1, 2], [3, 4]])
    assert store.outputs == ((1, 2), (3, 4))
    assert store.add([[5]]).outputs == ((1, 2), (3, 4), (5,))
    assert store.add([[5, 6]]).outputs == ((3, 4), (5, 6))
    assert store.add([range(10, 30)]).outputs == (tuple(range(23, 30)),)
    assert store.add([[], range(7)]).outputs == (tuple(range(7)),)
    assert PastOutputs.empty(4).outputs == ()
    assert store.outputs == ((1, 2), (3, 4))  # a store is a value
    with pytest.raises(ValueError, match="negative id"):
        store.add([[1, -1]])
    with pytest.raises(ValueError, match="size = 1"):
        PastOutputs.empty(1)


@pytest.mark.parametrize("room", [0, 1, 2, 3])
def test_drafts_fit_the_room_that_is_left(room):
    context = context_of([[1, 2, 3, 4, 1, 2]] * B, room=room)
    path = propose(PATH, context)
    assert path.num_nodes.tolist() == [min(2, max(room - 1, 0))] * B
    tree = propose(TREE, context)
    assert tree.num_nodes.tolist() == [4 if room > 1 else 0] * B


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"k": 0}, "k = 0"),
        ({"max_tree_depth": 1}, "max_tree_depth = 1"),
        ({"places": 0}, "places = 0"),
        ({"min_token_prob": 1.5}, "min_token_prob = 1.5"),
        ({"max_spec_factor": -1.0}, "max_spec_factor = -1"),
        ({"max_spec_offset": float("nan")}, "max_spec_offset = nan"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields, problem):
    with pytest.raises(ValueError, match=problem):
        Suffix(**fields)


def test_more_places_than_can_be_ordered_are_refused():
    with pytest.raises(ValueError, match="lower k, places or"):
        Suffix(k=8, places=2**24).propose(None, context_of([[1, 2, 1]] * B))


def test_integers_are_ordered_as_floats_to_both_ends():
    draw = np.random.default_rng(0)
    some = draw.integers(-1, MOST, 40, np.int64)
    values = np.concatenate([some, [-1, 0, 1, 2, MOST - 1, MOST, 2**23, 2**24 + 1]])
    got = largest(jnp.asarray(values[None], jnp.int32), len(values))
    assert got[0].tolist() == sorted(values.tolist(), reverse=True)


def test_a_longer_factor_never_lowers_the_budget():
    budgets = [Suffix(k=9, max_spec_factor=f).budgets for f in (0.1, 0.5, 1.0, 3.0)]
    assert budgets == sorted(budgets)
    assert budgets[0][9] == 1 and budgets[0][8] == 0 and budgets[2][:3] == (1, 2, 3)


def test_the_registry_builds_it():
    assert DRAFTERS["suffix"].build(DrafterOptions(k=7)) == Suffix(k=7)
    assert DRAFTERS["suffix-tree"].build(DrafterOptions(k=7)) == Suffix(k=7, tree=True)


def drafter_for_toys(tree: bool) -> Suffix:
    past = PastOutputs.empty(32).add([[5, 9, 13, 5, 9]])
    return Suffix(past, k=3, tree=tree, max_tree_depth=5, places=12)


def test_tokens_are_those_of_plain_decoding():
    target = markov(3, 7, 0.3)
    options = EngineOptions(prefill_width=8, widths=(4,))
    asked = [
        Request(prompt_ids=(5, 1, 4, 5, 1), max_tokens=24, temperature=0.7, seed=1),
        Request(prompt_ids=(2,), max_tokens=20),
    ]
    rows = generate(Engine(target, drafter_for_toys(True), Coupled(), options), asked)
    plain = generate(Engine(target, NullDrafter(), Coupled()), asked)
    assert [row.ids for row in rows] == [row.ids for row in plain]
    assert sum(row.accepted for row in rows) > 5


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tree", [False, True])
def test_conformance(tree):
    report = check_drafter(drafter_for_toys(tree), toy_llama(), Coupled(), widths=(4,))
    report.assert_ok()
