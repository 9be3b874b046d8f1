"""What a round costs by the rows of its window, drafting left out; and its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax.acceptance import Greedy
from specjax.analysis.costs.timing import Part
from specjax.decoding.draws import RoundDraws
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.interfaces import ProposalLaw, Tap, Target
from specjax.decoding.laws import Laws
from specjax.decoding.requests import Request
from specjax.decoding.round import context_of
from specjax.decoding.types import (
    Acceptance,
    Context,
    DecodeState,
    Proposal,
    Verdict,
    Window,
)
from specjax.decoding.windows import draft_window
from specjax.drafters.null import NullDrafter

ROUNDS = 8
"""Rounds of one call."""


class Nobody(struct.PyTreeNode):
    """Chains that nobody wrote: a window's worth of drafts that cost nothing."""

    name = "nobody"
    law = ProposalLaw.DETERMINISTIC
    taps: tuple[Tap, ...] = struct.field(pytree_node=False, default=())
    max_nodes: int = struct.field(pytree_node=False, default=0)

    @property
    def max_depth(self) -> int:
        """All of them on one path."""
        return self.max_nodes

    def init(self, batch: int, capacity: int) -> None:
        """Nothing to remember."""
        return None

    def propose(self, state: None, context: Context) -> tuple[Proposal, None]:
        """The first token of the text, over and over."""
        batch = context.lengths.shape[0]
        shape = (batch, self.max_nodes)
        parents = jnp.arange(self.max_nodes, dtype=jnp.int32) - 1
        return Proposal(
            tokens=jnp.broadcast_to(context.tokens[:, :1], shape),
            parents=jnp.broadcast_to(parents, shape),
            num_nodes=jnp.full((batch,), self.max_nodes, jnp.int32),
        ), None

    def observe(
        self,
        state: None,
        pending: Any,
        window: Window,
        verdict: Verdict,
        acceptance: Acceptance,
    ) -> None:
        """Nothing to learn."""
        return None


@dataclasses.dataclass(frozen=True)
class Filled:
    """A target, and its state after ``context`` tokens in each of ``batch`` rows."""

    target: Target
    text: tuple[int, ...]
    batch: int
    room: int
    state: DecodeState

    @classmethod
    def make(
        cls, target: Target, text: Sequence[int], batch: int, widest: int
    ) -> Filled:
        """By one prefill. ``widest``: of the windows that will be timed."""
        room = ROUNDS * widest + widest
        engine = Engine(target, NullDrafter(), Greedy())
        requests = [Request(prompt_ids=text, max_tokens=room)] * batch
        state = engine.prefill(engine.start(requests))
        return cls(target, tuple(text), batch, room, jax.block_until_ready(state))

    def start(self, engine: Engine) -> DecodeState:
        """The state for another engine, whose drafter remembers nothing."""
        request = Request(prompt_ids=self.text, max_tokens=self.room)
        fresh = engine.start([request] * self.batch)
        return fresh.replace(target=self.state.target)


def round_part(filled: Filled, rows: int) -> Part:
    """Rounds of one width only: the pass, acceptance, commit, and all else but drafts.

    They run in the loop that decodes. The drafts are rejected, but for luck.
    """
    engine = Engine(
        filled.target,
        Nobody(max_nodes=rows - 1),
        Greedy(),
        EngineOptions(widths=(rows,), rounds_per_call=ROUNDS),
    )
    state = filled.start(engine)

    def prepare() -> DecodeState:
        # rounds consume their state: each call gets a copy of the same one
        return jax.block_until_ready(jax.tree.map(jnp.copy, state))

    def call(copy: DecodeState) -> int:
        after, log = engine.rounds(copy)
        jax.block_until_ready(after)
        return int(log.rounds)

    return Part(f"round {rows}", call, prepare)


def accept_part(filled: Filled, rows: int) -> Part:
    """The acceptance of one window, as calls of their own."""
    target, state = filled.target, filled.state
    window = nobodys_window(state, rows - 1, target.vocab_size)
    logits = jnp.zeros((*window.tokens.shape, target.vocab_size), jnp.float32)

    def call(_: Any) -> int:
        found = None
        for _ in range(ROUNDS):
            found = _accept(Greedy(), state, window, logits)
        jax.block_until_ready(found)
        return ROUNDS

    return Part(f"accept {rows}", call)


def commit_part(filled: Filled, rows: int) -> Part:
    """Commits of one accepted row out of a window's, in a loop."""
    target, state = filled.target, filled.state
    window = nobodys_window(state, rows - 1, target.vocab_size)
    pending = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
        jax.eval_shape(lambda: target.verify(state.target, window).pending),
    )

    def prepare() -> Any:
        return jax.block_until_ready(jax.tree.map(jnp.copy, state.target))

    def call(copy: Any) -> int:
        jax.block_until_ready(_commits(target, copy, pending, rows, filled.batch))
        return ROUNDS

    return Part(f"commit {rows}", call, prepare)


def nobodys_drafts(state: DecodeState, nodes: int) -> Proposal:
    """A chain that nobody wrote."""
    return Nobody(max_nodes=nodes).propose(None, context_of(state))[0]


def nobodys_window(state: DecodeState, nodes: int, vocab_size: int) -> Window:
    """The window of such a chain."""
    context, drafts = context_of(state), nobodys_drafts(state, nodes)
    return draft_window(
        context.anchor, context.lengths, context.room, drafts, vocab_size
    )


@jax.jit
def _accept(
    rule: Greedy, state: DecodeState, window: Window, logits: jax.Array
) -> Acceptance:
    nodes = window.width - 1
    proposal = nobodys_drafts(state, nodes)
    laws = Laws(logits, window, state.sampling, state.counts)
    draws = RoundDraws(state.seeds, window.positions[:, 0])
    return rule.accept(proposal, window, laws, draws, max_depth=nodes)


@partial(jax.jit, static_argnames=("rows", "batch"), donate_argnames=("state",))
def _commits(target: Target, state: Any, pending: Any, rows: int, batch: int) -> Any:
    one = Acceptance(
        path=jnp.zeros((batch, rows), jnp.int32),
        tokens=jnp.zeros((batch, rows), jnp.int32),
        num_tokens=jnp.ones((batch,), jnp.int32),
    )
    body: Callable[[Any, Any], Any] = lambda _, at: target.commit(at, pending, one)  # noqa: E731
    return jax.lax.fori_loop(0, ROUNDS, body, state)
