"""What drafting costs: propose, and take in what the round has accepted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from specjax.acceptance import Coupled
from specjax.analysis.costs.rounds import ROUNDS, nobodys_window
from specjax.analysis.costs.scripted import Scripted, needs_target
from specjax.analysis.costs.timing import Part
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.interfaces import Drafter, Target
from specjax.decoding.requests import Request
from specjax.decoding.round import context_of
from specjax.decoding.types import Acceptance, DecodeState, Verdict
from specjax.decoding.windows import draft_window


def draft_part(
    name: str, target: Target, drafter: Drafter, text: Sequence[int], batch: int
) -> Part:
    """Rounds of drafting alone, each one token further in the text.

    A round commits one token here; a drafter with a memory of its own takes in more
    when more is accepted, which costs the same in the windows of fixed shape that it
    uses. The last ``ROUNDS`` tokens of the text are what is committed.
    """
    before = len(text) - ROUNDS - 1
    if before < 1:
        raise ValueError(f"a text of {len(text)} tokens: give more than {ROUNDS + 1}")
    source = target
    if not needs_target(drafter):
        source = Scripted.of([text] * batch, target.vocab_size)
    engine = Engine(source, drafter, Coupled(), EngineOptions())
    room = ROUNDS * (drafter.max_depth + 2)
    request = Request(prompt_ids=text[:before], max_tokens=room)
    state = engine.prefill(engine.start([request] * batch))
    whole = jnp.broadcast_to(jnp.asarray(text, jnp.int32), (batch, len(text)))
    tokens = state.tokens.at[:, : len(text)].set(whole)
    state = jax.block_until_ready(state.replace(tokens=tokens))
    features = no_features(source, drafter, state)

    def prepare() -> DecodeState:
        return jax.block_until_ready(jax.tree.map(jnp.copy, state))

    def call(copy: DecodeState) -> int:
        after = _draft_rounds(
            drafter, copy, features, kinds=engine.kinds, vocab=target.vocab_size
        )
        jax.block_until_ready(after)
        return ROUNDS

    return Part(name, call, prepare)


def no_features(
    target: Target, drafter: Drafter, state: DecodeState
) -> dict[Any, jax.Array]:
    """Zeros in the shape of what the drafter is shown of a round's window."""
    if not drafter.taps:
        return {}

    def verify() -> Verdict:
        window = nobodys_window(state, drafter.max_nodes, target.vocab_size)
        return target.verify(state.target, window, taps=drafter.taps)

    said = jax.eval_shape(verify).features
    return {tap: jnp.zeros(x.shape, x.dtype) for tap, x in said.items()}


@partial(jax.jit, static_argnames=("kinds", "vocab"), donate_argnames=("state",))
def _draft_rounds(
    drafter: Drafter,
    state: DecodeState,
    features: dict[Any, jax.Array],
    *,
    kinds: Any,
    vocab: int,
) -> tuple[DecodeState, jax.Array]:
    """Each round's tokens are added up, or XLA would leave the drafting out."""
    batch = state.lengths.shape[0]

    def body(
        index: jax.Array, carry: tuple[DecodeState, jax.Array]
    ) -> tuple[DecodeState, jax.Array]:
        state, seen = carry
        context = context_of(state)
        proposal, pending = drafter.propose(state.drafter, context)
        window = draft_window(
            context.anchor, context.lengths, context.room, proposal, vocab
        )
        following = jnp.take_along_axis(
            state.tokens, state.lengths[:, None], axis=1, mode="clip"
        )
        rows = jnp.arange(drafter.max_depth + 1, dtype=jnp.int32)
        acceptance = Acceptance(
            path=jnp.zeros((batch, rows.shape[0]), jnp.int32),
            tokens=jnp.where(rows == 0, following, -1),
            num_tokens=jnp.ones((batch,), jnp.int32),
        )
        fine = jnp.zeros(window.tokens.shape, bool)
        verdict = Verdict(None, features, None, fine)
        after = drafter.observe(state.drafter, pending, window, verdict, acceptance)
        seen = (
            seen
            + proposal.tokens.sum(dtype=jnp.int32)
            + proposal.num_nodes.sum(dtype=jnp.int32)
        )
        return state.replace(drafter=after, lengths=state.lengths + 1), seen

    return jax.lax.fori_loop(0, ROUNDS, body, (state, jnp.int32(0)))
