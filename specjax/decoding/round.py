"""The round: propose, verify, accept, cut, commit, observe. One pure function.

Verify reads, commit writes. Nothing of a rejected draft has been written when it is
rejected, so there is nothing to undo: rollback is the absence of an operation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from specjax.decoding.cut import cut
from specjax.decoding.draws import RoundDraws
from specjax.decoding.interfaces import AcceptanceRule, Drafter, Target
from specjax.decoding.laws import Laws
from specjax.decoding.logprobs import Logprobs, path_logprobs
from specjax.decoding.pairs import check_law
from specjax.decoding.stats import count_round
from specjax.decoding.types import (
    Acceptance,
    Context,
    Counts,
    DecodeState,
    FinishReason,
    Proposal,
    Verdict,
    Window,
)
from specjax.decoding.windows import draft_window, slice_rows, widen


class RoundOptions(struct.PyTreeNode):
    """What is fixed when a round is compiled."""

    widths: tuple[int, ...] = struct.field(pytree_node=False)
    """Window widths to choose from, ascending; the last one holds every proposal."""
    eos_ids: tuple[int, ...] = struct.field(pytree_node=False, default=())
    """Committing one of these ends a row."""
    top_logprobs: int | None = struct.field(pytree_node=False, default=None)
    """Report log-probabilities and this many alternatives; ``None``: neither."""


class RoundLog(struct.PyTreeNode):
    """What one round did, for readers."""

    drafted: jax.Array  # [B] int32
    accepted: jax.Array  # [B] int32
    committed: jax.Array  # [B] int32
    logprobs: Logprobs | None


def empty_log(
    options: RoundOptions, rounds: int, batch: int, max_depth: int
) -> RoundLog:
    """Zeros for ``rounds`` rounds: a ``RoundLog`` with a leading axis on every leaf."""
    counters = [jnp.zeros((rounds, batch), jnp.int32) for _ in range(3)]
    if options.top_logprobs is None:
        return RoundLog(*counters, logprobs=None)
    path = (rounds, batch, max_depth + 1)
    top = (*path, options.top_logprobs)
    return RoundLog(
        *counters,
        logprobs=Logprobs(
            token=jnp.zeros(path, jnp.float32),
            top_ids=jnp.zeros(top, jnp.int32),
            top=jnp.zeros(top, jnp.float32),
        ),
    )


def context_of(state: DecodeState) -> Context:
    """What the drafter may see of a state."""
    room = jnp.where(state.done, 0, jnp.maximum(state.limits - state.lengths, 0))
    return Context(
        tokens=state.tokens,
        lengths=state.lengths,
        room=room,
        done=state.done,
        seeds=state.seeds,
        sampling=state.sampling,
        counts=state.counts,
    )


def round_step(
    target: Target,
    drafter: Drafter,
    rule: AcceptanceRule,
    state: DecodeState,
    options: RoundOptions,
) -> tuple[DecodeState, RoundLog]:
    """One round for the whole batch. Finished rows are frozen."""
    context = context_of(state)
    remaining = context.room
    context = context.replace(room=_room(target, drafter, state, remaining))
    proposal, drafted_pending = drafter.propose(state.drafter, context)
    check_law(drafter, proposal, target.vocab_size)
    window = draft_window(
        context.anchor, context.lengths, context.room, proposal, target.vocab_size
    )

    def at_width(width: int) -> tuple[Verdict, Acceptance, Logprobs | None]:
        narrow = slice_rows(window, width)
        verdict = target.verify(state.target, narrow, taps=drafter.taps)
        return _accept(rule, state, proposal, narrow, verdict, drafter, options)

    verdict, acceptance, logprobs = _at_smallest_width(at_width, window, options.widths)
    drafts_on_path = jnp.maximum(acceptance.num_tokens - 1, 0)
    acceptance, reason = cut(
        acceptance,
        room=context.room,
        remaining=remaining,
        anchor_bad=verdict.bad[:, 0],
        eos_ids=options.eos_ids,
        limit_reason=state.limit_reasons,
    )
    accepted = jnp.minimum(acceptance.num_tokens, drafts_on_path)
    new_state = state.replace(
        target=target.commit(state.target, verdict.pending, acceptance),
        drafter=drafter.observe(
            state.drafter, drafted_pending, window, verdict, acceptance
        ),
        tokens=append(state.tokens, state.lengths, acceptance),
        lengths=state.lengths + acceptance.num_tokens,
        done=state.done | (reason != int(FinishReason.NONE)),
        finish_reason=jnp.where(state.done, state.finish_reason, reason),
        counts=count_tokens(state.counts, acceptance),
        stats=count_round(state.stats, window, accepted, acceptance.num_tokens),
    )
    log = RoundLog(
        drafted=new_state.stats.drafted - state.stats.drafted,
        accepted=accepted,
        committed=acceptance.num_tokens,
        logprobs=logprobs,
    )
    return new_state, log


def _room(
    target: Target, drafter: Drafter, state: DecodeState, remaining: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Tokens that each row may commit in this round.

    A target whose rows share memory says how much of it each may use (``room``).
    """
    room = getattr(target, "room", None)
    most = jnp.minimum(remaining, drafter.max_depth + 1)
    promised = room and room(state.target, most, ~state.done)
    return remaining if promised is None else promised


def _accept(
    rule: AcceptanceRule,
    state: DecodeState,
    proposal: Proposal,
    window: Window,
    verdict: Verdict,
    drafter: Drafter,
    options: RoundOptions,
) -> tuple[Verdict, Acceptance, Logprobs | None]:
    """Accept at one width. The logits stay inside; the rest is widened to leave it."""
    assert verdict.logits is not None
    sound = window.replace(valid=window.valid & ~verdict.bad)
    laws = Laws(verdict.logits, window, state.sampling, state.counts)
    nodes = window.width - 1
    narrow = Proposal(
        tokens=proposal.tokens[:, :nodes],
        parents=proposal.parents[:, :nodes],
        num_nodes=jnp.minimum(proposal.num_nodes, nodes),
        log_q=None if proposal.log_q is None else proposal.log_q[:, : nodes + 1],
    )
    draws = RoundDraws(state.seeds, window.positions[:, 0])
    acceptance = rule.accept(narrow, sound, laws, draws, max_depth=drafter.max_depth)
    logprobs = None
    if options.top_logprobs is not None:
        logprobs = path_logprobs(verdict.logits, acceptance, options.top_logprobs)
    widest = options.widths[-1]
    wide = Verdict(
        logits=None,
        features=widen(verdict.features, widest),
        pending=widen(verdict.pending, widest),
        bad=widen(verdict.bad, widest),
    )
    return wide, acceptance, logprobs


def _at_smallest_width(
    at_width: Callable[[int], Any], window: Window, widths: tuple[int, ...]
) -> Any:
    """Run at the smallest width that holds the batch's largest draft.

    Only the pass is inside the switch; the commit stays outside, where the state's
    buffers can be written in place.
    """
    if len(widths) == 1:
        return at_width(widths[0])
    rows = jnp.arange(1, window.width + 1, dtype=jnp.int32)
    needed = jnp.max(jnp.where(window.valid, rows, 1))
    chosen = jnp.sum(needed > jnp.asarray(widths[:-1], jnp.int32), dtype=jnp.int32)
    return jax.lax.switch(chosen, [partial(at_width, width) for width in widths])


def append(
    tokens: Int[Array, "B T"], lengths: Int[Array, " B"], acceptance: Acceptance
) -> Int[Array, "B T"]:
    """Write the accepted tokens behind the committed ones; never past capacity."""
    batch, capacity = tokens.shape
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    slots = lengths[:, None] + jnp.arange(acceptance.tokens.shape[1], dtype=jnp.int32)
    # an index of T is dropped; -1 would wrap round to the last slot
    slots = jnp.where(acceptance.taken, slots, capacity)
    return tokens.at[rows, slots].set(acceptance.tokens, mode="drop")


def count_tokens(counts: Counts | None, acceptance: Acceptance) -> Counts | None:
    """Add the accepted tokens to the output counts."""
    if counts is None:
        return None
    batch, vocab = counts.output.shape
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    ids = jnp.where(acceptance.taken, acceptance.tokens, vocab)
    return counts.replace(output=counts.output.at[rows, ids].add(1, mode="drop"))
