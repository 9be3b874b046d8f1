"""What a round's parts cost, in units of a plain step."""

from __future__ import annotations

import dataclasses
import math
import statistics
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from specjax.analysis.costs.drafting import no_features
from specjax.analysis.costs.rounds import nobodys_drafts, nobodys_window
from specjax.analysis.costs.timing import compile_all, in_turn, once
from specjax.decoding.draws import RoundDraws
from specjax.decoding.engine import Engine
from specjax.decoding.interfaces import (
    AcceptanceRule,
    Drafter,
    ProposalLaw,
    Target,
)
from specjax.decoding.laws import Laws
from specjax.decoding.requests import Request
from specjax.decoding.round import context_of
from specjax.decoding.types import (
    Acceptance,
    DecodeState,
    Proposal,
    Verdict,
)


@dataclasses.dataclass(frozen=True)
class Costs:
    """In units of a plain step: the target's pass over one token, and the choice."""

    c_draft: float
    """Drafting one proposal, and taking in what a round accepted."""
    c_verify: float
    """Verifying the widest window: the pass, and acceptance."""


def calibrate(engine: Engine, request: Request, repeats: int = 7) -> Costs:
    """Time the parts of a round after this prompt, each compiled by itself.

    The functions are the engine's own: ``drafter.propose`` and ``observe``, and
    ``target.verify`` with ``rule.accept`` over a window of ``max_nodes`` drafts and
    over the anchor alone. The three are timed in turn, and the medians divided. Alone,
    ``observe`` copies the drafter's state, which a round writes in place.
    """
    state = engine.prefill(engine.start([request]))
    nodes, drawn = engine.drafter.max_nodes, engine.drafter.law in DRAWN
    features = no_features(engine.target, engine.drafter, state)
    verify = partial(_verify, engine.target, engine.rule, state)
    parts = [
        once("plain", lambda: verify(nodes=0, drawn=False)),
        once("wide", lambda: verify(nodes=nodes, drawn=drawn)),
        once("draft", lambda: _draft(engine.drafter, state, features)),
    ]
    if nodes == 0:
        return Costs(c_draft=0.0, c_verify=1.0)
    compile_all(parts)
    times = in_turn(parts, 0.0, lambda _: None, least=repeats, most=repeats)
    plain, wide, draft = (statistics.median(times[part.name]) for part in parts)
    return Costs(c_draft=draft / plain, c_verify=wide / plain)


DRAWN = frozenset(ProposalLaw) - {ProposalLaw.DETERMINISTIC}
"""Laws of drafts whose rules read the law that was drawn from."""


@jax.jit
def _draft(
    drafter: Drafter, state: DecodeState, features: dict[int, jax.Array]
) -> tuple[Proposal, Any]:
    """Propose, and take in a round that committed one token of that."""
    context = context_of(state)
    proposal, pending = drafter.propose(state.drafter, context)
    rows, any_id = drafter.max_depth + 1, 2**31 - 1
    window = nobodys_window(state, drafter.max_nodes, any_id)
    acceptance = Acceptance(
        path=jnp.zeros((1, rows), jnp.int32),
        tokens=jnp.zeros((1, rows), jnp.int32),
        num_tokens=jnp.ones((1,), jnp.int32),
    )
    verdict = Verdict(None, features, None, jnp.zeros(window.tokens.shape, bool))
    state_after = drafter.observe(state.drafter, pending, window, verdict, acceptance)
    return proposal, state_after


def _verify_window(
    target: Target, rule: AcceptanceRule, state: DecodeState, nodes: int, drawn: bool
) -> tuple[Acceptance, Any]:
    """A round without drafting and commit."""
    proposal = nobodys_drafts(state, nodes)
    if drawn:
        shape = (1, nodes + 1, target.vocab_size)
        proposal = proposal.replace(log_q=jnp.full(shape, -math.log(shape[2])))
    window = nobodys_window(state, nodes, target.vocab_size)
    verdict = target.verify(state.target, window)
    assert verdict.logits is not None
    laws = Laws(verdict.logits, window, state.sampling, state.counts)
    draws = RoundDraws(state.seeds, window.positions[:, 0])
    accepted = rule.accept(proposal, window, laws, draws, max_depth=nodes)
    return accepted, verdict.pending


_verify = jax.jit(_verify_window, static_argnames=("nodes", "drawn"))
