"""Every rule's emitted law, enumerated in float64 through the rule's own code."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.acceptance import (
    Block,
    Coupled,
    Greedy,
    Threshold,
    Traversal,
    Typical,
    deterministic_children,
    multi_round,
    rejection,
    without_replacement,
)
from specjax.decoding.interfaces import ProposalLaw
from specjax.testing.enumeration import (
    EveryDraw,
    EveryToken,
    emitted_law,
    random_conditional,
    target_law,
)

DETERMINISTIC, INDEPENDENT, IID, WITHOUT = (
    ProposalLaw.DETERMINISTIC,
    ProposalLaw.INDEPENDENT,
    ProposalLaw.IID_CHILDREN,
    ProposalLaw.WITHOUT_REPLACEMENT,
)
CHAINS = ((), (-1,), (-1, 0), (-1, 0, 1))
TREES = ((-1, -1), (-1, -1, 0), (-1, -1, 0, 1), (-1, -1, 0, 0), (-1, 0, 0, -1))
MANY_TREES = [
    pytest.param(tree, marks=() if tree in TREES[1:3] else pytest.mark.full)
    for tree in TREES
]
CHAIN_RULES = [
    (rejection, DETERMINISTIC),
    (rejection, INDEPENDENT),
    (Block, DETERMINISTIC),
    (Block, INDEPENDENT),
    (Traversal, INDEPENDENT),
    (multi_round, INDEPENDENT),
]
TREE_RULES = [
    (deterministic_children, DETERMINISTIC),
    (multi_round, IID),
    (Traversal, IID),
    (without_replacement, WITHOUT),
    (lambda: Traversal(replaced=False), WITHOUT),
]
EXACT = 1e-12


def name_of(value):
    return getattr(value, "value", None) or getattr(value, "__name__", str(value))


def distance(rule, parents, law, *, p=None, q=None, vocab_size=3, **wrong):
    """Total variation of what is emitted from what plain decoding emits; E[tokens]."""
    p = p or random_conditional(1, vocab_size)
    q = q or random_conditional(2, vocab_size)
    found = emitted_law(
        rule, p, q, parents=parents, law=law, vocab_size=vocab_size, **wrong
    )
    assert found.total == pytest.approx(1, abs=1e-12)
    wanted = target_law(p, vocab_size, found.law.ndim)
    return np.abs(found.law - wanted).sum() / 2, found.tokens


@pytest.mark.parametrize(("make", "law"), CHAIN_RULES, ids=name_of)
@pytest.mark.parametrize("parents", CHAINS, ids=len)
@pytest.mark.parametrize("vocab_size", [3, pytest.param(5, marks=pytest.mark.full)])
def test_chains_emit_the_targets_law(make, law, parents, vocab_size):
    assert distance(make(), parents, law, vocab_size=vocab_size)[0] < EXACT


@pytest.mark.parametrize(("make", "law"), TREE_RULES, ids=name_of)
@pytest.mark.parametrize("parents", MANY_TREES)
def test_trees_emit_the_targets_law(make, law, parents):
    assert distance(make(), parents, law)[0] < EXACT


# What cut-offs do to a law is take tokens away; temperature 0 leaves one.
@pytest.mark.parametrize(
    ("p_zeros", "q_zeros"), [(1, 0), (0, 1), (1, 1), (2, 0), (0, 2)]
)
@pytest.mark.parametrize(
    ("make", "law", "parents"),
    [(*case, (-1, 0)) for case in CHAIN_RULES]
    + [(*case, (-1, -1, 0)) for case in TREE_RULES],
    ids=name_of,
)
def test_laws_with_tokens_cut_off(make, law, parents, p_zeros, q_zeros):
    p = random_conditional(3, 3, zeros=p_zeros)
    q = random_conditional(4, 3, zeros=q_zeros)
    assert distance(make(), parents, law, p=p, q=q)[0] < EXACT


@given(
    parents=st.lists(st.integers(0, 3), min_size=1, max_size=4).map(
        lambda raw: tuple(r % (i + 1) - 1 for i, r in enumerate(raw))
    ),
    case=st.sampled_from(TREE_RULES),
    seed=st.integers(0, 99),
    zeros=st.tuples(st.integers(0, 2), st.integers(0, 1)),
)
@settings(max_examples=12)
def test_any_tree_and_any_law(parents, case, seed, zeros):
    make, law = case
    # no path deeper than the enumeration is made for, no more siblings than tokens
    depths = [1]
    for parent in parents[1:]:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    siblings = max(parents.count(parent) for parent in parents)
    if max(depths) > 3 or (law in (WITHOUT, DETERMINISTIC) and siblings > 3):
        return
    p = random_conditional(seed, 3, zeros=zeros[0], concentration=0.5)
    q = random_conditional(seed + 1, 3, zeros=zeros[1])
    assert distance(make(), parents, law, p=p, q=q)[0] < EXACT


@pytest.mark.parametrize("parents", [(-1, 0), (-1, -1, 0)])
@pytest.mark.parametrize("law", [INDEPENDENT, DETERMINISTIC])
def test_sample_then_compare_is_exact_however_drafts_came_about(parents, law):
    assert distance(Coupled(), parents, law, draws=EveryToken)[0] < EXACT


@pytest.mark.parametrize("parents", [(-1, 0, 1), (-1, -1, 0)])
def test_every_rule_is_greedy_at_temperature_0(parents):
    p, q = random_conditional(5, 3, zeros=2), random_conditional(6, 3)
    rules = [(Greedy(), DETERMINISTIC), (Typical(), DETERMINISTIC)]
    rules += [(Threshold(), DETERMINISTIC)]
    for rule, law in rules:
        assert distance(rule, parents, law, p=p, q=q)[0] < EXACT


def test_traversal_of_a_chain_is_block_verification():
    found = [
        emitted_law(
            rule,
            random_conditional(1, 3),
            random_conditional(2, 3),
            parents=(-1, 0, 1),
            law=INDEPENDENT,
            vocab_size=3,
        )
        for rule in (Block(), Traversal())
    ]
    assert found[0].tokens == pytest.approx(found[1].tokens, abs=1e-12)


@pytest.mark.parametrize("seed", range(2))
def test_block_and_traversal_accept_no_less_than_top_down(seed):
    p, q = random_conditional(seed, 3), random_conditional(seed + 50, 3)

    def tokens(rule, parents, law):
        return distance(rule, parents, law, p=p, q=q)[1]

    chain, tree = (-1, 0, 1), (-1, -1, 0, 0)
    assert tokens(Block(), chain, INDEPENDENT) > tokens(rejection(), chain, INDEPENDENT)
    assert tokens(Traversal(), tree, IID) > tokens(multi_round(), tree, IID)
    assert tokens(Traversal(replaced=False), tree, WITHOUT) > tokens(
        without_replacement(), tree, WITHOUT
    )


def test_closed_forms():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    alpha = float(np.minimum(p, q).sum())
    for k, parents in enumerate(CHAINS):
        _, tokens = distance(
            rejection(), parents, INDEPENDENT, p=lambda _: p, q=lambda _: q
        )
        assert tokens == pytest.approx(sum(alpha**i for i in range(k + 1)), abs=1e-12)
    # a draft that was chosen is kept as often as the target says it
    _, tokens = distance(
        rejection(), (-1,), DETERMINISTIC, p=lambda _: p, q=lambda _: q
    )
    assert tokens == pytest.approx(1 + p[2], abs=1e-12)
    # and so is one that was drawn, if it is tested like one that was chosen
    _, tokens = distance(
        Coupled(),
        (-1,),
        INDEPENDENT,
        p=lambda _: p,
        q=lambda _: q,
        draws=EveryToken,
    )
    assert tokens == pytest.approx(1 + float((p * q).sum()), abs=1e-12)


# -- what must be found wrong ---------------------------------------------------------


class BonusFromTheWrongRow:
    """Rejection that draws its last token from the anchor's law."""

    takes = frozenset(ProposalLaw)

    def accept(self, proposal, window, laws, draws, *, max_depth):
        anchor = laws.probs_at(proposal.num_nodes * 0)

        class Wrong(type(draws)):
            def token(self, weights):
                return EveryDraw.token(self, anchor)

        draws.__class__ = Wrong
        return rejection().accept(proposal, window, laws, draws, max_depth=max_depth)


def test_a_bonus_from_the_wrong_row_is_found():
    rule = BonusFromTheWrongRow()
    assert distance(rule, (-1, 0), INDEPENDENT)[0] > 0.01


@pytest.mark.parametrize(
    "wrong", [lambda p, q: p, lambda p, q: abs(p - q) / abs(p - q).sum(-1)[:, None]]
)
@pytest.mark.parametrize(
    ("make", "law", "parents"),
    [(rejection, INDEPENDENT, (-1, 0)), (multi_round, IID, (-1, -1))],
)
def test_a_residual_that_is_not_clamped_is_found(
    monkeypatch, wrong, make, law, parents
):
    monkeypatch.setattr("specjax.acceptance.top_down.residual", wrong)
    assert distance(make(), parents, law)[0] > 0.01


@pytest.mark.parametrize(
    ("make", "law", "parents"),
    [(*case, (-1, 0)) for case in CHAIN_RULES if case[1] is INDEPENDENT]
    + [(*case, (-1, -1, 0)) for case in TREE_RULES if case[1] is not DETERMINISTIC],
    ids=name_of,
)
def test_a_q_that_drafts_were_not_drawn_from_is_found(make, law, parents):
    stated = random_conditional(9, 3)
    assert distance(make(), parents, law, stated_q=stated)[0] > 0.01


def test_siblings_drawn_without_replacement_and_tested_as_if_with_are_found():
    tree = (-1, -1)
    assert distance(multi_round(), tree, WITHOUT)[0] > 1e-3
    assert distance(Traversal(), tree, WITHOUT)[0] > 1e-3


@pytest.mark.parametrize("parents", MANY_TREES)
def test_testing_without_replacement_is_exact_for_independent_siblings_too(parents):
    # a repeated sibling is passed over; one that is not is a draw from what is left
    for rule in (without_replacement(), Traversal(replaced=False)):
        assert distance(rule, parents, IID)[0] < EXACT


def test_argmax_drafts_tested_as_if_drawn_are_found():
    # the draft is always token 1, and the accept test believes it drawn from q
    p, q = np.array([0.3, 0.5, 0.2]), np.array([0.4, 0.45, 0.15])
    certain = np.eye(3)[1]
    far, _ = distance(
        rejection(),
        (-1,),
        INDEPENDENT,
        p=lambda _: p,
        q=lambda _: certain,
        stated_q=lambda _: q,
    )
    assert far > 0.01


def test_a_draft_admitted_by_its_own_token_is_biased():
    """Verify only if the draft is token 0: (0.85, 0.15) in the place of (0.7, 0.3)."""
    p, q = np.array([0.7, 0.3]), np.array([0.5, 0.5])
    found = emitted_law(
        rejection(),
        lambda _: p,
        lambda _: q,
        parents=(-1,),
        law=INDEPENDENT,
        vocab_size=2,
        num_nodes=lambda tokens: 1 if tokens[0] == 0 else 0,
    )
    np.testing.assert_allclose(found.law.sum(axis=1), [0.85, 0.15], atol=1e-12)


@pytest.mark.parametrize(("make", "law"), CHAIN_RULES, ids=name_of)
def test_a_length_decided_by_the_tokens_before_is_exact(make, law):
    def first_alone(tokens):
        return 1 if tokens[0] == 0 else 2

    assert distance(make(), (-1, 0), law, num_nodes=first_alone)[0] < EXACT
    # and no drafts at all in some rows, whatever decides it from outside
    assert distance(make(), (-1, 0), law, num_nodes=lambda _: 0)[0] < EXACT


@pytest.mark.parametrize("rule", [Typical(), Threshold()])
def test_lossy_rules_are_lossy_and_say_so(rule):
    assert rule.name.startswith("lossy")
    assert distance(rule, (-1, -1, 0), DETERMINISTIC)[0] > 0.01


def test_thresholds_of_1_are_exact():
    rule = Threshold(single=1.0, accumulated=1.0)
    for parents in TREES[:2]:
        assert distance(rule, parents, DETERMINISTIC)[0] < EXACT


def test_the_enumeration_counts_every_outcome():
    # a rule that looks at nothing: all of its law is the target's first token
    found = emitted_law(
        rejection(),
        random_conditional(1, 3),
        random_conditional(2, 3),
        parents=(),
        law=INDEPENDENT,
        vocab_size=3,
    )
    assert found.tokens == pytest.approx(1) and found.law.ndim == 1
    law = target_law(random_conditional(1, 3), 3, 2)
    for first, second in itertools.product(range(3), repeat=2):
        p = random_conditional(1, 3)
        assert law[first, second] == pytest.approx(p(())[first] * p((first,))[second])
    assert not jax.config.jax_enable_x64 and not jax.config.jax_disable_jit
