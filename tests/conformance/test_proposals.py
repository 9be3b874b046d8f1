"""Proposals that rounds forgive, and states that lose their shape, are found."""

import jax.numpy as jnp
import pytest

from specjax.acceptance import Greedy
from specjax.decoding.requests import Request
from specjax.drafters import DraftModel, NGram, NullDrafter
from specjax.testing.conformance import Case, Unsuitable, find
from specjax.testing.conformance.c9_proposals import (
    proposals_are_well_formed,
    some_drafts_are_accepted,
    the_drafters_state_keeps_its_shape,
)
from specjax.testing.markov import markov

TARGET = markov(0, 8)
REQUESTS = (
    Request(prompt_ids=(1, 2, 3), max_tokens=12),
    Request(prompt_ids=(4,), max_tokens=9),
)


def case(drafter) -> Case:
    return Case(target=TARGET, drafter=drafter, rule=Greedy(), requests=REQUESTS)


class TooManyNodes(DraftModel):
    def propose(self, state, context):
        proposal, pending = super().propose(state, context)
        return proposal.replace(num_nodes=proposal.num_nodes + 5), pending


class OwnParents(DraftModel):
    def propose(self, state, context):
        proposal, pending = super().propose(state, context)
        return proposal.replace(parents=proposal.parents + 1), pending


class StrangeIds(DraftModel):
    def propose(self, state, context):
        proposal, pending = super().propose(state, context)
        return proposal.replace(tokens=proposal.tokens + 100_000), pending


class LosesItsShape(NGram):
    def init(self, batch, capacity):
        return jnp.zeros((batch,), jnp.int32)

    def propose(self, state, context):
        return super().propose(None, context)

    def observe(self, state, pending, window, verdict, acceptance):
        return jnp.int32(0)


class Fails(NGram):
    def propose(self, state, context):
        raise KeyError("no such thing")


@pytest.mark.parametrize(
    ("drafter", "told"),
    [
        (TooManyNodes(TARGET, 3), "num_nodes = 8, of 3 nodes"),
        (OwnParents(TARGET, 3), "node 0 has parent 0"),
        (StrangeIds(TARGET, 3), "the vocabulary has 8"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_a_malformed_proposal_is_found_though_the_output_is_right(drafter, told):
    with pytest.raises(AssertionError, match=r"C9: round 1, row \d") as error:
        proposals_are_well_formed(case(drafter))
    assert told in str(error.value)


def test_sound_proposals_pass():
    assert "proposals of 2 rows" in proposals_are_well_formed(
        case(DraftModel(TARGET, 3))
    )
    with pytest.raises(Unsuitable):
        proposals_are_well_formed(case(NullDrafter()))


def test_a_state_of_another_shape_is_found_before_anything_runs():
    with pytest.raises(AssertionError, match=r"int32\[2\], observe int32\[\]"):
        the_drafters_state_keeps_its_shape(case(LosesItsShape(2)))
    assert the_drafters_state_keeps_its_shape(case(DraftModel(TARGET, 2)))


def test_a_run_in_which_nothing_is_accepted_says_so():
    wrong = DraftModel(markov(3, 8).replace(table=-TARGET.table), 2)
    with pytest.raises(Unsuitable, match="not put to the test"):
        some_drafts_are_accepted(case(wrong))
    assert some_drafts_are_accepted(case(DraftModel(TARGET, 2)))


def test_a_drafter_that_raises_is_a_finding_and_no_end_of_the_report():
    finding = find(some_drafts_are_accepted, case(Fails(2)), "x")
    assert finding.verdict == "FAILED" and "KeyError" in finding.told
