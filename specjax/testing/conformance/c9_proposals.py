"""C9: a proposal means what it says. Rounds forgive much that none should contain."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np

from specjax.decoding.kinds import kinds
from specjax.decoding.round import context_of, round_step
from specjax.decoding.types import DecodeState, Proposal
from specjax.testing.conformance.case import Case, Unsuitable, record


def the_drafters_state_keeps_its_shape(case: Case) -> str:
    """A round gives back a state of the structure, shapes and dtypes of ``init``."""
    engine = case.engine()
    state = engine.start(case.requests)
    step = partial(
        round_step, case.target, case.drafter, case.rule, options=engine.round_options
    )
    after = jax.eval_shape(lambda state: step(state)[0].drafter, state)
    was, now = (jax.tree.structure(x) for x in (state.drafter, after))
    if was != now:
        raise AssertionError(
            f"C9: init gives a state of structure {was}, observe one of {now}"
        )
    leaves = zip(jax.tree.leaves(state.drafter), jax.tree.leaves(after), strict=True)
    for before, later in leaves:
        if (before.shape, before.dtype) != (later.shape, later.dtype):
            raise AssertionError(
                f"C9: init gives {before.dtype}{list(before.shape)}, observe "
                f"{later.dtype}{list(later.shape)}: a state must keep shape and dtype"
            )
    return f"{len(jax.tree.leaves(after))} arrays"


def proposals_are_well_formed(case: Case) -> str:
    """Ids in the vocabulary, parents before children, no more nodes than there are.

    A round drops what is malformed, and the output stays right: only acceptance shows
    it.
    """
    if getattr(case.drafter, "may_be_malformed", False):
        raise Unsuitable("the drafter proposes rubbish on purpose")
    if case.drafter.max_nodes == 0:
        raise Unsuitable("nothing is drafted")
    propose = jax.jit(_propose, static_argnames="kind")
    made: list[Proposal] = []

    def look(state: DecodeState) -> DecodeState:
        proposal = propose(case.drafter, state, kind=kinds(case.drafter))
        made.append(jax.tree.map(np.asarray, proposal))
        return state

    record(case.engine(), case.requests, look)
    for number, proposal in enumerate(made, start=1):
        for row in range(case.batch):
            problem = _problem(proposal, row, case.target.vocab_size)
            if problem:
                raise AssertionError(f"C9: round {number}, row {row}: {problem}")
    return f"{len(made)} proposals of {case.batch} rows"


def some_drafts_are_accepted(case: Case) -> str:
    """Else nothing that is said here of accepted drafts was put to the test."""
    accepted = int(case.trace.last.stats.accepted.sum())
    drafted = int(case.trace.last.stats.drafted.sum())
    if accepted == 0:
        raise Unsuitable(
            f"none of {drafted} drafts was accepted, so accepted paths were not put "
            "to the test: give requests whose text the drafter can guess, or a target "
            "that it knows"
        )
    return f"{accepted} of {drafted}"


def _propose(drafter, state: DecodeState, *, kind) -> Proposal:
    return drafter.propose(state.drafter, context_of(state))[0]


def _problem(proposal: Proposal, row: int, vocab_size: int) -> str | None:
    """What is wrong with a row's proposal."""
    nodes, count = proposal.tokens.shape[1], int(proposal.num_nodes[row])
    if not 0 <= count <= nodes:
        return f"num_nodes = {count}, of {nodes} nodes"
    for node in range(count):
        token, parent = (
            int(proposal.tokens[row, node]),
            int(proposal.parents[row, node]),
        )
        if not 0 <= token < vocab_size:
            return f"node {node} has token {token}, the vocabulary has {vocab_size}"
        if not -1 <= parent < node:
            return f"node {node} has parent {parent}: a parent comes before, or is -1"
    return None
