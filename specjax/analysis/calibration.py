"""What a round's parts cost, in units of a plain step."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.decoding.draws import RoundDraws
from specjax.decoding.engine import Engine
from specjax.decoding.interfaces import AcceptanceRule, Drafter, Target
from specjax.decoding.laws import Laws
from specjax.decoding.requests import Request
from specjax.decoding.round import context_of
from specjax.decoding.types import Acceptance, Context, DecodeState, Proposal
from specjax.decoding.windows import draft_window


@dataclasses.dataclass(frozen=True)
class Costs:
    """In units of a plain step: the target's pass over one token, and the choice."""

    c_draft: float
    """Drafting one proposal."""
    c_verify: float
    """Verifying the widest window: the pass, and acceptance."""


def calibrate(engine: Engine, request: Request, repeats: int = 7) -> Costs:
    """Time the parts of a round after this prompt, each compiled by itself.

    The functions are the engine's own: ``drafter.propose``, and ``target.verify`` with
    ``rule.accept`` over a window of ``max_nodes`` drafts and over the anchor alone.
    The three are timed in turn, and the medians divided.
    """
    state = engine.prefill(engine.start([request]))
    nodes = engine.drafter.max_nodes
    parts: list[Callable[[], Any]] = [
        lambda: _verify(engine.target, engine.rule, state, nodes=0),
        lambda: _verify(engine.target, engine.rule, state, nodes=nodes),
        lambda: _propose(engine.drafter, state.drafter, context_of(state)),
    ]
    if nodes == 0:
        return Costs(c_draft=0.0, c_verify=1.0)
    plain, wide, draft = _medians(parts, repeats)
    return Costs(c_draft=draft / plain, c_verify=wide / plain)


def _medians(parts: list[Callable[[], Any]], repeats: int) -> list[float]:
    seconds: list[list[float]] = [[] for _ in parts]
    for repeat in range(repeats + 1):
        for part, times in zip(parts, seconds, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(part())
            if repeat:  # the first call compiles
                times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds]


@jax.jit
def _propose(drafter: Drafter, state: Any, context: Context) -> Any:
    return drafter.propose(state, context)


def _verify_window(
    target: Target, rule: AcceptanceRule, state: DecodeState, nodes: int
) -> tuple[Acceptance, Any]:
    """A round without drafting and commit, on drafts that are nobody's."""
    context = context_of(state)
    tokens = jnp.broadcast_to(context.tokens[:, :1], (1, nodes))
    chain = jnp.arange(nodes, dtype=jnp.int32)[None] - 1
    proposal = Proposal(tokens, chain, jnp.full((1,), nodes, jnp.int32))
    window = draft_window(
        context.anchor, context.lengths, context.room, proposal, target.vocab_size
    )
    verdict = target.verify(state.target, window)
    assert verdict.logits is not None
    laws = Laws(verdict.logits, window, state.sampling, state.counts)
    draws = RoundDraws(state.seeds, window.positions[:, 0])
    accepted = rule.accept(proposal, window, laws, draws, max_depth=nodes)
    return accepted, verdict.pending


_verify = jax.jit(_verify_window, static_argnames=("nodes",))
