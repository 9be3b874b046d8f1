"""Cascades, merged trees and caps: what is proposed, and what cannot be combined."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.acceptance import RULES, Coupled
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.generate import generate
from specjax.decoding.interfaces import ProposalLaw
from specjax.decoding.pairs import PairError, check_pair, makes_trees
from specjax.decoding.requests import Request
from specjax.decoding.trees import full
from specjax.decoding.types import ANCHOR, Context, Proposal, Sampling
from specjax.drafters import DRAFTERS, DrafterOptions, DraftModel, NGram, NullDrafter
from specjax.drafters.capped import Capped
from specjax.drafters.cascade import Cascade
from specjax.drafters.combining import keep_nodes, takes_in
from specjax.drafters.draft_tree import DraftTree, Siblings
from specjax.drafters.drawing import Pick
from specjax.drafters.merged import MergedTree
from specjax.drafters.suffix import Suffix
from specjax.testing.conformance import check_drafter
from specjax.testing.forced import Forced
from specjax.testing.markov import markov
from specjax.testing.toys import toy_llama

B, V = 2, 16
TARGET, MODEL = markov(4, V, 0.3), markov(5, V, 0.3)

propose = jax.jit(lambda drafter, state, context: drafter.propose(state, context)[0])


def script(*rows: list[tuple[int, int]], nodes: int = 4) -> Forced:
    """A drafter that proposes these (token, parent) nodes; 99 stands beyond them."""
    tokens = np.full((1, len(rows), nodes), 99, np.int32)
    parents = np.full((1, len(rows), nodes), 77, np.int32)
    for i, row in enumerate(rows):
        for j, (token, parent) in enumerate(row):
            tokens[0, i, j], parents[0, i, j] = token, parent
    num = np.array([[len(row) for row in rows]], np.int32)
    return Forced(jnp.asarray(tokens), jnp.asarray(parents), jnp.asarray(num), nodes)


def chain(*tokens: int) -> list[tuple[int, int]]:
    return [(token, i - 1) for i, token in enumerate(tokens)]


def context_of(lengths=(5, 9), room: int = 9) -> Context:
    return Context(
        tokens=jnp.zeros((B, 12), jnp.int32),
        lengths=jnp.asarray(lengths, jnp.int32),
        room=jnp.full((B,), room, jnp.int32),
        done=jnp.zeros((B,), bool),
        seeds=jnp.arange(B, dtype=jnp.uint32),
        sampling=Sampling(temperature=jnp.ones((B,))),
        counts=None,
    )


def nodes_of(proposal: Proposal, row: int) -> list[tuple[int, int]]:
    n = int(proposal.num_nodes[row])
    parents = proposal.parents[row, :n].tolist()
    return list(zip(proposal.tokens[row, :n].tolist(), parents, strict=True))


def proposed(drafter, **fields) -> Proposal:
    return propose(drafter, drafter.init(B, 12), context_of(**fields))


# cascades


def test_each_row_takes_the_first_drafter_that_says_anything():
    first, second = script([], chain(1, 2)), script(chain(3), chain(4), nodes=2)
    last = script(chain(5, 6, 7, 8, 9, 10), [], nodes=6)
    got = proposed(Cascade((first, second, last)))
    assert [nodes_of(got, row) for row in range(B)] == [chain(3), chain(1, 2)]
    got = proposed(Cascade((script([], []), last)))
    assert [nodes_of(got, row) for row in range(B)] == [chain(5, 6, 7, 8, 9, 10), []]
    assert got.tokens.shape == (B, 6)


def test_every_drafter_keeps_up_whoever_drafted():
    """A draft model behind look-up has taken in every committed token."""
    drafter = Cascade((NGram(2), DraftModel(MODEL, 2)))
    requests = [Request(prompt_ids=(1, 2, 3, 1, 2), max_tokens=20, seed=3)]
    engine = Engine(TARGET, drafter, Coupled(), EngineOptions(rounds_per_call=1))
    state = engine.prefill(engine.start(requests))
    while not bool(state.done.all()):
        before = np.array(state.lengths)
        state, _ = engine.rounds(state)
        assert state.drafter[1].lengths.tolist() == before.tolist()
    assert int(state.stats.accepted.sum()) > 0


def test_drawn_laws_are_passed_on_by_row():
    models = [DraftModel(markov(s, V), 2, pick=Pick.DRAWN) for s in (1, 2)]
    cut = Capped(models[0], max_context=6)  # silent in the second row
    cascade = Cascade((cut, models[1]))
    assert cascade.law is ProposalLaw.INDEPENDENT and cascade.vocab_size == V
    got = proposed(cascade)
    parts = [proposed(drafter) for drafter in (cut, models[1])]
    assert parts[0].num_nodes.tolist() == [1, 0]
    assert got.log_q is not None
    for row, part in ((0, parts[0]), (1, parts[1])):
        assert nodes_of(got, row) == nodes_of(part, row)
        assert part.log_q is not None
        np.testing.assert_array_equal(got.log_q[row], part.log_q[row])


@pytest.mark.parametrize(
    ("drafters", "problem"),
    [
        ((NGram(3),), "of 1 drafters"),
        ((NGram(3), DraftModel(MODEL, 3, pick=Pick.DRAWN)), "different laws"),
        ((NGram(5), DraftModel(MODEL, 3)), "takes in 4: give it a draft of 5"),
        ((NGram(5), Capped(DraftModel(MODEL, 3), 2)), "takes in 4"),
        (
            (DraftModel(markov(0, 4), 2), DraftModel(MODEL, 2)),
            "different vocabularies",
        ),
    ],
)
def test_what_cannot_share_a_round_is_refused(drafters, problem):
    with pytest.raises(ValueError, match=problem):
        Cascade(drafters)


def test_a_longer_draft_that_is_capped_keeps_up():
    capped = Capped(DraftModel(MODEL, 5), 2)
    assert takes_in(capped) == 6 and takes_in(NGram(3)) is None
    cascade = Cascade((NGram(5), capped))
    assert takes_in(cascade) == 6 and (cascade.max_nodes, cascade.max_depth) == (5, 5)


# merged trees


def test_shared_beginnings_stand_once():
    a = script(chain(1, 2, 3), chain(1))
    b = script(chain(1, 2, 4, 5), [])
    c = script([(7, ANCHOR), (1, ANCHOR), (2, 1), (3, 2)], [(1, ANCHOR), (1, 0)])
    got = proposed(MergedTree((a, b, c)))
    assert nodes_of(got, 0) == [(1, -1), (2, 0), (3, 1), (4, 1), (5, 3), (7, -1)]
    assert nodes_of(got, 1) == [(1, -1), (1, 0)]
    few = proposed(MergedTree((a, b, c), nodes=4))
    assert few.tokens.shape == (B, 4) and nodes_of(few, 0) == nodes_of(got, 0)[:4]


def test_what_may_branch_says_so():
    """The number of nodes does not tell: a tree may be as deep as it has nodes."""
    tree, path = Suffix(k=3, tree=True), Suffix(k=3)
    for drafter in (
        tree,
        Capped(tree, 3),
        Cascade((path, tree)),
        MergedTree((path,) * 2),
    ):
        assert makes_trees(drafter)
        with pytest.raises(PairError, match="rule block takes chains"):
            check_pair(TARGET, drafter, RULES["block"].build())
    for drafter in (path, Capped(path, 2), Cascade((path, NGram(3)))):
        assert not makes_trees(drafter)
        check_pair(TARGET, drafter, RULES["block"].build())


def test_a_merged_tree_holds_each_path_of_its_parts_once():
    draw = np.random.default_rng(0)

    def some(nodes: int = 4) -> list[tuple[int, int]]:
        n = int(draw.integers(0, nodes + 1))
        tokens = [int(t) for t in draw.integers(0, 2, n)]
        return [(t, int(draw.integers(-1, i))) for i, t in enumerate(tokens)]

    def paths(nodes) -> list[tuple[int, ...]]:
        to: list[tuple[int, ...]] = []
        for token, parent in nodes:
            to.append((*(to[parent] if parent >= 0 else ()), token))
        return to

    for _ in range(20):
        rows = [[some(), some()] for _ in range(3)]
        got = proposed(MergedTree(tuple(script(*row) for row in rows)))
        for row in range(B):
            every = list(itertools.chain(*(paths(part[row]) for part in rows)))
            assert paths(nodes_of(got, row)) == list(dict.fromkeys(every))


def test_drawn_drafts_are_not_merged():
    drawn = DraftTree(MODEL, full((2,)), Siblings.WITHOUT_REPLACEMENT)
    with pytest.raises(ValueError, match=r"draft-tree makes .* proposals: only"):
        MergedTree((drawn, drawn))
    with pytest.raises(ValueError, match="nodes = 0"):
        MergedTree((NGram(2), Suffix(k=2)), nodes=0)


# caps


def test_a_cap_keeps_what_is_not_too_deep():
    tree = [(1, -1), (2, 0), (3, 1), (4, -1)]
    drafter = script(tree, chain(5, 6, 7)).replace(max_depth=3)
    got = proposed(Capped(drafter, 2))
    assert nodes_of(got, 0) == [(1, -1), (2, 0), (4, -1)]
    assert nodes_of(got, 1) == chain(5, 6)
    chains = Capped(NGram(5), 2)
    assert (chains.max_nodes, chains.max_depth) == (2, 2)
    trees = Capped(DraftTree(MODEL, full((2, 2))), 1)
    assert (trees.max_nodes, trees.max_depth) == (6, 1)


def test_text_and_drafts_end_at_the_context():
    for limit, drafts in [(4, 0), (5, 0), (6, 1), (8, 3), (20, 3)]:
        drafter = Capped(script(chain(1, 2, 3), []), max_context=limit)
        got, _ = drafter.propose(drafter.init(B, 12), context_of())
        assert int(got.num_nodes[0]) == drafts
    got = proposed(Capped(DraftModel(MODEL, 3), max_context=7))
    assert got.num_nodes.tolist() == [2, 0]


def test_kept_nodes_keep_their_laws():
    log_q = jnp.arange(5.0)[None, :, None] * jnp.ones((1, 5, 3))
    proposal = Proposal(
        tokens=jnp.array([[4, 5, 6, 7]], jnp.int32),
        parents=jnp.array([[-1, -1, 1, 2]], jnp.int32),
        num_nodes=jnp.array([4], jnp.int32),
        log_q=log_q,
    )
    got = keep_nodes(proposal, jnp.array([[False, True, True, True]]), 3)
    assert nodes_of(got, 0) == chain(5, 6, 7) and got.log_q is not None
    assert got.log_q[0, :, 0].tolist() == [0, 2, 3, 4]


def test_caps_below_one_are_refused():
    with pytest.raises(ValueError, match="k = 0"):
        Capped(NGram(2), 0)
    with pytest.raises(ValueError, match="max_context = 0"):
        Capped(NGram(2), max_context=0)


# all


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        (
            Cascade(
                (
                    Capped(MergedTree((NGram(2), Suffix(k=2))), 2, max_context=20),
                    DraftModel(MODEL, 2),
                )
            ),
            Coupled(),
        ),
        pytest.param(
            Cascade(
                (
                    Capped(DraftModel(MODEL, 3, pick=Pick.DRAWN), max_context=12),
                    DraftModel(TARGET, 3, pick=Pick.DRAWN),
                )
            ),
            RULES["rejection"].build(),
            marks=pytest.mark.full,
        ),
    ],
)
def test_combinations_change_no_token(drafter, rule):
    """Under rejection at temperature 0, where tokens are the target's as well."""
    warm = 0.8 if isinstance(rule, Coupled) else 0.0
    asked = [
        Request(prompt_ids=(1, 2, 3, 1, 2), max_tokens=24, temperature=warm, seed=1),
        Request(prompt_ids=(7,), max_tokens=20, temperature=warm, seed=2),
    ]
    options = EngineOptions(prefill_width=8, widths=(drafter.max_nodes + 1,))
    rows = generate(Engine(TARGET, drafter, rule, options), asked)
    plain = generate(Engine(TARGET, NullDrafter(), Coupled()), asked)
    assert [row.ids for row in rows] == [row.ids for row in plain]
    assert sum(row.accepted for row in rows) > 5


def test_the_registry_builds_them():
    options = DrafterOptions(k=4, model=MODEL)
    assert DRAFTERS["lookup-tree"].build(options) == MergedTree(
        (Suffix(k=4, tree=True), NGram(4))
    )
    built = DRAFTERS["suffix-or-model"].build(options)
    assert isinstance(built, Cascade) and built.max_depth == 4
    with pytest.raises(ValueError, match="a draft model"):
        DRAFTERS["suffix-or-model"].build(DrafterOptions())


@pytest.mark.full
@pytest.mark.parametrize(
    "drafter",
    [
        Cascade((NGram(3), DraftModel(toy_llama(1).decoder, 3))),
        Capped(MergedTree((NGram(3), Suffix(k=3, tree=True))), 2, max_context=30),
    ],
)
def test_conformance(drafter):
    widths = (drafter.max_nodes + 1,)
    check_drafter(drafter, toy_llama(), Coupled(), widths=widths).assert_ok()
