"""Trees from a draft model: the same as a chain where they are one, and by rank."""

import jax
import numpy as np
import pytest

from specjax.acceptance import Coupled, Greedy
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.generate import generate
from specjax.decoding.interfaces import ProposalLaw
from specjax.decoding.requests import Request
from specjax.decoding.round import context_of
from specjax.decoding.trees import Tree, chain, full
from specjax.drafters import DraftModel, NullDrafter
from specjax.drafters.draft_tree import DraftTree, Siblings
from specjax.drafters.drawing import Pick
from specjax.testing.markov import markov
from specjax.testing.toys import toy_llama

TARGET, MODEL = markov(4, 16), markov(5, 16)
PROMPTS = ((5, 1, 14, 3, 2, 9, 1, 1, 3), (8,))


def requests(temperature: float = 0.0, tokens: int = 24) -> list[Request]:
    return [
        Request(prompt_ids=p, max_tokens=tokens, temperature=temperature, seed=11 + i)
        for i, p in enumerate(PROMPTS)
    ]


def run(target, drafter, rule, asked):
    """The final state, and for each round what was drafted and accepted."""
    options = EngineOptions(
        prefill_width=8, rounds_per_call=4, widths=(drafter.max_nodes + 1,)
    )
    engine = Engine(target, drafter, rule, options)
    state = engine.prefill(engine.start(asked))
    logs = []
    while not bool(state.done.all()):
        state, log = engine.rounds(state)
        ran = slice(int(log.rounds))
        logs.append([np.asarray(x)[ran] for x in jax.tree.leaves(log.steps)])
    return state, [np.concatenate(x) for x in zip(*logs, strict=True)]


def test_a_tree_that_is_a_chain_is_a_chain_in_ids_acceptance_and_state():
    target = toy_llama().decoder
    noisy = target.replace(
        head=target.head.replace(
            weight=target.head.weight
            + 0.1 * jax.random.normal(jax.random.key(0), target.head.weight.shape)
        )
    )
    as_tree = run(target, DraftTree(noisy, chain(4)), Greedy(), requests())
    as_chain = run(target, DraftModel(noisy, 4, pick=Pick.BEST), Greedy(), requests())
    accepted = as_tree[1][1]
    assert 0 < accepted.sum() < 4 * accepted.size  # some kept, some refused
    for a, b in zip(jax.tree.leaves(as_tree), jax.tree.leaves(as_chain), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("siblings", "temperature"),
    [
        (Siblings.BEST, 0.0),
        (Siblings.BEST, 0.8),
        (Siblings.INDEPENDENT, 0.8),
        (Siblings.WITHOUT_REPLACEMENT, 0.8),
    ],
)
def test_trees_of_a_wrong_model_cost_acceptance_and_nothing_else(siblings, temperature):
    rule = Coupled() if temperature else Greedy()
    asked = requests(temperature)
    drafter = DraftTree(MODEL, full((3, 2)), siblings)
    options = EngineOptions(prefill_width=8)
    rows = generate(Engine(TARGET, drafter, rule, options), asked)
    plain = generate(Engine(TARGET, NullDrafter(), rule, options), asked)
    assert [row.ids for row in rows] == [row.ids for row in plain]


def proposal_of(drafter, temperature: float = 1.0):
    table = markov(0, 6)
    engine = Engine(table, drafter, Coupled())
    state = engine.prefill(
        engine.start([Request(prompt_ids=(1, 4), temperature=temperature, seed=3)])
    )
    return drafter.propose(state.drafter, context_of(state))[0]


def test_siblings_are_the_most_probable_tokens_by_rank():
    table = markov(1, 6)
    # the first and the third candidate below the anchor
    tree = Tree((-1, -1, 0, 1), ranks=(0, 2, 1, 0))
    proposal = proposal_of(DraftTree(table, tree))
    order = np.argsort(-np.asarray(table.table), axis=1, kind="stable")
    first, third = order[4][0], order[4][2]
    wanted = [first, third, order[first][1], order[third][0]]
    assert proposal.tokens[0].tolist() == [int(x) for x in wanted]
    assert proposal.parents[0].tolist() == list(tree.parents)
    assert proposal.log_q is None


@pytest.mark.parametrize(
    "siblings", [Siblings.INDEPENDENT, Siblings.WITHOUT_REPLACEMENT]
)
def test_the_law_of_every_draw_is_given(siblings):
    table = markov(1, 6)
    tree = full((3, 1))
    proposal = proposal_of(DraftTree(table, tree, siblings))
    assert proposal.log_q is not None and proposal.log_q.shape == (1, 7, 6)
    law = np.asarray(jax.nn.log_softmax(table.table, axis=-1))
    tokens = proposal.tokens[0].tolist()
    rows = {0: 4} | {n + 1: tokens[n] for n in range(6) if tree.children(n)}
    for row, last in rows.items():
        np.testing.assert_allclose(proposal.log_q[0, row], law[last], atol=1e-6)
    if siblings is Siblings.WITHOUT_REPLACEMENT:
        assert len(set(tokens[:3])) == 3


def test_a_tree_without_nodes_is_refused():
    with pytest.raises(ValueError, match="at least one node"):
        DraftTree(markov(0, 4), Tree(()))


def test_more_siblings_than_tokens_are_refused():
    table = markov(0, 4)
    for tree in (Tree((-1,) * 5), Tree((-1,), ranks=(9,))):
        with pytest.raises(ValueError, match="vocabulary has 4"):
            DraftTree(table, tree)
    DraftTree(table, Tree((-1,) * 5), Siblings.INDEPENDENT)


def test_a_drawn_tree_without_siblings_is_a_chain_of_draws():
    drawn = DraftTree(markov(0, 4), chain(2), Siblings.WITHOUT_REPLACEMENT)
    assert drawn.law is ProposalLaw.INDEPENDENT
