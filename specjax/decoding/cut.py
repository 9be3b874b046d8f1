"""Where a round ends: end-of-sequence ids, budgets, capacity, rows that are not finite.

This stands between accept and commit, in one place. After it the path has exactly as
many rows as tokens are committed, and commit, observe and the counters see only that.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specjax.decoding.types import NO_TOKEN, Acceptance, FinishReason


def cut(
    acceptance: Acceptance,
    *,
    room: Int[Array, " B"],
    remaining: Int[Array, " B"] | None = None,
    anchor_bad: Bool[Array, " B"],
    eos_ids: tuple[int, ...],
    limit_reason: Int[Array, " B"],
) -> tuple[Acceptance, Int[Array, " B"]]:
    """Cut the path; returns it and each row's finish reason (0 where it goes on).

    ``remaining`` is how many tokens a row may still commit, 0 for finished rows (they
    keep reason 0 here: the caller does not overwrite what they finished with), and
    ``room`` how many in this round (all of them if not told otherwise). A row that has
    tokens left and no room for one ends for want of capacity. ``limit_reason`` is what
    using up the remaining tokens means for the row.
    """
    remaining = room if remaining is None else remaining
    taken = acceptance.taken
    ends = jnp.zeros_like(taken)
    for eos in eos_ids:
        ends = ends | (acceptance.tokens == eos)
    ends = ends & taken
    stops = jnp.any(ends, axis=1)
    until_stop = jnp.argmax(ends, axis=1).astype(jnp.int32) + 1
    num = jnp.where(stops, until_stop, acceptance.num_tokens)
    stopped = stops & (num <= room)
    num = jnp.minimum(num, room)
    full = (num == remaining) & (room > 0) & ~stopped
    stalled = (room == 0) & (remaining > 0)
    nan = anchor_bad & (room > 0)
    num = jnp.where(anchor_bad, 0, num)
    reason = jnp.where(stopped, int(FinishReason.STOP), int(FinishReason.NONE))
    reason = jnp.where(full, limit_reason, reason)
    reason = jnp.where(stalled, int(FinishReason.CAPACITY), reason)
    reason = jnp.where(nan, int(FinishReason.NAN), reason).astype(jnp.int32)
    return keep_first(acceptance, num), reason


def keep_first(acceptance: Acceptance, num: jax.Array) -> Acceptance:
    """The first ``num`` entries of a path, its sentinels behind them."""
    shorter = acceptance.replace(num_tokens=num)
    taken = shorter.taken
    return shorter.replace(
        path=jnp.where(taken, acceptance.path, 0),
        tokens=jnp.where(taken, acceptance.tokens, NO_TOKEN),
    )
