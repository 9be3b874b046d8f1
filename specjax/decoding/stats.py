"""Counters of a run and the formulas that every reported figure follows from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.decoding.types import Stats, Window


def empty_stats(batch: int, max_depth: int) -> Stats:
    """All zero. Each counter has a buffer of its own, because states are donated."""
    counters = [jnp.zeros((batch,), jnp.int32) for _ in range(4)]
    by_position = [jnp.zeros((batch, max_depth), jnp.int32) for _ in range(2)]
    return Stats(*counters, *by_position)


def count_round(
    stats: Stats,
    window: Window,
    accepted: Int[Array, " B"],
    committed: Int[Array, " B"],
) -> Stats:
    """Add a round. ``accepted`` and ``committed`` are counts after the cut."""
    max_depth = stats.drafted_by_position.shape[1]
    ran = committed > 0
    drafts = window.valid & (window.depths > 0) & ran[:, None]
    depth = jnp.arange(1, max_depth + 1, dtype=jnp.int32)
    at_depth = jnp.any(
        drafts[:, :, None] & (window.depths[:, :, None] == depth), axis=1
    )
    reached = accepted[:, None] >= depth
    return Stats(
        rounds=stats.rounds + ran.astype(jnp.int32),
        drafted=stats.drafted + drafts.sum(axis=1, dtype=jnp.int32),
        accepted=stats.accepted + accepted,
        committed=stats.committed + committed,
        drafted_by_position=stats.drafted_by_position + at_depth.astype(jnp.int32),
        accepted_by_position=stats.accepted_by_position + reached.astype(jnp.int32),
    )


def tau(committed: int, rounds: int) -> float:
    """Acceptance length: committed tokens a target pass, the bonus token included.

    A ratio of sums; 0 where nothing ran.
    """
    return committed / rounds if rounds else 0.0


def alpha(accepted: int, drafted: int) -> float:
    """Accepted drafts over drafted ones; 0 where nothing was drafted."""
    return accepted / drafted if drafted else 0.0


def total(stats: Stats) -> dict[str, int | list[int]]:
    """The sums over the batch, as plain numbers."""
    summed = jax.tree.map(lambda x: x.sum(axis=0).tolist(), stats)
    return {
        "rounds": summed.rounds,
        "drafted": summed.drafted,
        "accepted": summed.accepted,
        "committed": summed.committed,
        "drafted_by_position": summed.drafted_by_position,
        "accepted_by_position": summed.accepted_by_position,
    }
