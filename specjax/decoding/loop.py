"""The device loop: prefill by chunks, then rounds inside one ``while_loop``.

The state is donated to each call and updated in place. The host sees a log of what the
rounds of a call did, from which every counter can be recomputed.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from specjax.decoding.interfaces import AcceptanceRule, Drafter, Target
from specjax.decoding.round import RoundLog, RoundOptions, empty_log, round_step
from specjax.decoding.types import Acceptance, DecodeState, FinishReason
from specjax.decoding.windows import chunk_window


class LoopLog(struct.PyTreeNode):
    """The rounds of one call: entries beyond ``rounds`` are zero."""

    rounds: jax.Array  # [] int32
    steps: RoundLog  # every leaf with a leading axis of max_rounds


@partial(jax.jit, static_argnames=("width", "kinds"), donate_argnames=("state",))
def prefill_chunk(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    start: jax.Array,
    *,
    width: int,
    kinds: Hashable = (),
) -> DecodeState:
    """Commit the prompt tokens ``start .. start + width - 1``, all but the last one.

    A chunk is a window like any other: linear, with every row committed. ``start`` is
    a scalar and must grow by ``width`` from call to call, from 0. For ``kinds`` see
    ``specjax.decoding.kinds``: without it classes with equal fields may be mixed up.
    """
    stop = jnp.where(state.done, 0, state.prompt_lengths - 1)
    starts = jnp.broadcast_to(start, stop.shape).astype(jnp.int32)
    window = chunk_window(state.tokens, starts, stop, width)
    verdict = target.verify(state.target, window, taps=drafter.taps, logits="none")
    bad = jnp.any(verdict.bad & window.valid, axis=1)
    num = jnp.where(bad, 0, window.valid.sum(axis=1, dtype=jnp.int32))
    following = jnp.take_along_axis(
        state.tokens, window.positions + 1, axis=1, mode="clip"
    )
    slots = jnp.arange(width, dtype=jnp.int32)
    taken = slots < num[:, None]
    acceptance = Acceptance(
        path=jnp.where(taken, slots, 0),
        tokens=jnp.where(taken, following, -1),
        num_tokens=num,
    )
    return state.replace(
        target=target.commit(state.target, verdict.pending, acceptance),
        drafter=drafter.observe(state.drafter, None, window, verdict, acceptance),
        done=state.done | bad,
        finish_reason=jnp.where(bad, int(FinishReason.NAN), state.finish_reason),
    )


@partial(
    jax.jit,
    static_argnames=("options", "max_rounds", "kinds"),
    donate_argnames=("state",),
)
def run_rounds(
    target: Target,
    drafter: Drafter,
    rule: AcceptanceRule,
    state: DecodeState,
    *,
    options: RoundOptions,
    max_rounds: int,
    kinds: Hashable = (),
) -> tuple[DecodeState, LoopLog]:
    """At most ``max_rounds`` rounds; fewer once every row is done.

    For ``kinds`` see ``prefill_chunk``.
    """
    step = partial(round_step, target, drafter, rule, options=options)
    batch = state.lengths.shape[0]
    empty = empty_log(options, max_rounds, batch, drafter.max_depth)

    def running(carry: tuple[DecodeState, LoopLog]) -> jax.Array:
        state, log = carry
        return (log.rounds < max_rounds) & ~jnp.all(state.done)

    def body(carry: tuple[DecodeState, LoopLog]) -> tuple[DecodeState, LoopLog]:
        state, log = carry
        state, entry = step(state)
        steps = jax.tree.map(lambda all, x: all.at[log.rounds].set(x), log.steps, entry)
        return state, LoopLog(rounds=log.rounds + 1, steps=steps)

    start = LoopLog(rounds=jnp.int32(0), steps=empty)
    return jax.lax.while_loop(running, body, (state, start))
