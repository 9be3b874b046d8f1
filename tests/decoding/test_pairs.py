"""Which drafter goes with which rule: said when they are put together, and why."""

import pytest

from specjax.acceptance import RULES, Block, Coupled, multi_round, rejection
from specjax.decoding.engine import Engine
from specjax.decoding.interfaces import ProposalLaw
from specjax.decoding.pairs import PairError
from specjax.decoding.requests import Request
from specjax.decoding.trees import full
from specjax.drafters import DraftModel, NGram, NullDrafter
from specjax.drafters.draft_tree import DraftTree, Siblings
from specjax.drafters.drawing import Pick
from specjax.testing.markov import markov

TARGET, DRAFT = markov(0, 6), markov(1, 6)
DRAFTERS = {
    "one-hot chain": NGram(3),
    "coupled chain": DraftModel(DRAFT, 3),
    "drawn chain": DraftModel(DRAFT, 3, pick=Pick.DRAWN),
    "best tree": DraftTree(DRAFT, full((2, 2))),
    "i.i.d. tree": DraftTree(DRAFT, full((2, 2)), Siblings.INDEPENDENT),
    "tree without": DraftTree(DRAFT, full((2, 2)), Siblings.WITHOUT_REPLACEMENT),
}
CHAINS = {"one-hot chain", "coupled chain"}
FITS = {
    "greedy": set(DRAFTERS),
    "coupled": set(DRAFTERS),
    "rejection": CHAINS | {"drawn chain", "best tree"},
    "block": CHAINS | {"drawn chain"},
    "deterministic-children": CHAINS | {"best tree"},
    "multi-round": {"drawn chain", "i.i.d. tree"},
    "without-replacement": {"tree without"},
    "traversal": {"drawn chain", "i.i.d. tree"},
    "traversal-without-replacement": {"tree without"},
    "lossy-typical": set(DRAFTERS),
    "lossy-threshold": CHAINS | {"best tree"},
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_takes_what_it_is_exact_for_and_nothing_else(rule):
    taken = set()
    for name, drafter in DRAFTERS.items():
        try:
            Engine(TARGET, drafter, RULES[rule].build())
            taken.add(name)
        except PairError:
            pass
    assert taken == FITS[rule]


@pytest.mark.parametrize("rule", RULES)
def test_plain_decoding_fits_every_rule(rule):
    Engine(TARGET, NullDrafter(), RULES[rule].build())


class HidesItsLaw(DraftModel):
    """Draws its drafts and does not say from what."""

    name = "hides-its-law"

    def propose(self, state, context):
        proposal, pending = super().propose(state, context)
        return proposal.replace(log_q=None), pending


class MisshapenLaw(DraftModel):
    """Gives a law for its nodes alone."""

    name = "misshapen"

    def propose(self, state, context):
        proposal, pending = super().propose(state, context)
        assert proposal.log_q is not None
        return proposal.replace(log_q=proposal.log_q[:, 1:]), pending


class SaysDeterministic(DraftModel):
    """Gives a law and says that it drew nothing."""

    name = "says-deterministic"
    law = ProposalLaw.DETERMINISTIC  # pyright: ignore


@pytest.mark.parametrize("rule", [rejection(), Block(), Coupled()])
def test_drawn_drafts_without_their_law_are_refused_when_the_pair_is_built(rule):
    with pytest.raises(PairError, match="log_q must hold") as error:
        Engine(TARGET, HidesItsLaw(DRAFT, 3, pick=Pick.DRAWN), rule)
    assert "hides-its-law" in str(error.value)


def test_a_law_of_another_shape_is_refused_when_the_pair_is_built():
    with pytest.raises(PairError, match=r"shape \(1, 3, 6\).*\(1, 4, 6\)"):
        Engine(TARGET, MisshapenLaw(DRAFT, 3, pick=Pick.DRAWN), rejection())


def test_a_law_of_drafts_that_were_not_drawn_is_refused_in_the_first_round():
    engine = Engine(TARGET, SaysDeterministic(DRAFT, 3, pick=Pick.DRAWN), rejection())
    state = engine.prefill(engine.start([Request(prompt_ids=(1,), temperature=1.0)]))
    with pytest.raises(PairError, match="leave log_q out"):
        engine.rounds(state)


def test_a_tree_under_a_rule_for_chains_is_refused_with_its_size():
    with pytest.raises(PairError, match="6 nodes and depth 2"):
        Engine(TARGET, DRAFTERS["best tree"], Block())


def test_a_mismatch_says_what_the_rule_takes():
    with pytest.raises(PairError) as error:
        Engine(TARGET, NGram(2), multi_round())
    for part in ("multi-round", "ngram", "deterministic", "i.i.d. children"):
        assert part in str(error.value)
