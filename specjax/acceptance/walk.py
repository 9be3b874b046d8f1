"""Walking down a tree of drafts, from the anchor, one visited row at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specjax.decoding.types import NO_TOKEN, Acceptance, Proposal, Window

NO_CHILD = -1
"""A visit ends the walk: no child of the row is kept."""

Visit = Callable[
    [Int[Array, " B"], Int[Array, " B"], Bool[Array, " B"], Any],
    tuple[Int[Array, " B"], Int[Array, " B"], Any],
]
"""``(rows, depths, walking, carry) -> (child, token, carry)``: the child row to go on
to, or ``NO_CHILD``, and the token that follows the row. Rows that are not ``walking``
have ended; their results are not used, and their part of the carry must stay as it is.
"""


def walk(
    window: Window, visit: Visit, carry: Any, *, max_depth: int
) -> tuple[Acceptance, Any]:
    """The path of the visits, and what they carried.

    The target's law is worked out for one row at a time, so the cost follows the
    accepted path, not the window.
    """
    batch = window.tokens.shape[0]
    slots = max_depth + 1
    start = (
        jnp.int32(0),
        jnp.zeros((batch,), jnp.int32),  # the row the walk stands on
        window.valid[:, 0],  # rows still walking
        jnp.zeros((batch, slots), jnp.int32),
        jnp.full((batch, slots), NO_TOKEN, jnp.int32),
        jnp.zeros((batch,), jnp.int32),
        carry,
    )

    def walking(state):
        depth, _, alive, *_ = state
        return (depth < slots) & jnp.any(alive)

    def step(state):
        depth, rows, alive, path, tokens, num, carry = state
        depths = jnp.broadcast_to(depth, rows.shape)
        child, token, carry = visit(rows, depths, alive, carry)
        path = path.at[:, depth].set(jnp.where(alive, rows, 0))
        tokens = tokens.at[:, depth].set(jnp.where(alive, token, NO_TOKEN))
        num = num + alive.astype(jnp.int32)
        alive = alive & (child != NO_CHILD)
        rows = jnp.where(alive, child, rows)
        return depth + 1, rows, alive, path, tokens, num, carry

    _, _, _, path, tokens, num, carry = jax.lax.while_loop(walking, step, start)
    return Acceptance(path=path, tokens=tokens, num_tokens=num), carry


def parent_rows(proposal: Proposal) -> Int[Array, "B W"]:
    """The parent row of every window row; -1 for the anchor."""
    batch = proposal.parents.shape[0]
    anchor = jnp.full((batch, 1), -1, jnp.int32)
    return jnp.concatenate([anchor, proposal.parents.astype(jnp.int32) + 1], axis=1)


def next_child(
    proposal: Proposal,
    window: Window,
    rows: Int[Array, " B"],
    after: Int[Array, " B"],
) -> Int[Array, " B"]:
    """The first valid child of ``rows`` that stands behind row ``after``.

    Siblings stand in the order in which they were drawn. ``NO_CHILD``: there is none.
    """
    index = jnp.arange(window.width, dtype=jnp.int32)
    is_child = parent_rows(proposal) == rows[:, None]
    left = is_child & window.valid & (index > after[:, None])
    child = jnp.argmax(left, axis=1).astype(jnp.int32)
    return jnp.where(jnp.any(left, axis=1), child, NO_CHILD)


def at_row(values: Array, rows: Int[Array, " B"]) -> Array:
    """``values[b, rows[b]]``; row ``NO_CHILD`` reads row 0."""
    picked = jnp.maximum(rows, 0).reshape(-1, *[1] * (values.ndim - 1))
    return jnp.take_along_axis(values, picked, axis=1, mode="clip")[:, 0]


def along(
    window: Window,
    path: Int[Array, "B P"],
    num: Int[Array, " B"],
    token: Int[Array, " B"],
) -> Acceptance:
    """The first ``num`` rows of a path, each with the token that follows it.

    Behind a row that is the next row's own, and behind the last one ``token``.
    """
    taken = jnp.arange(path.shape[1], dtype=jnp.int32) < num[:, None]
    following = jnp.roll(path, -1, axis=1)
    tokens = jnp.take_along_axis(window.tokens, following, axis=1, mode="clip")
    acceptance = Acceptance(
        path=jnp.where(taken, path, 0),
        tokens=jnp.where(taken, tokens, NO_TOKEN),
        num_tokens=num,
    )
    return with_last_token(acceptance, token)


def with_last_token(acceptance: Acceptance, token: Int[Array, " B"]) -> Acceptance:
    """The path with ``token`` behind its last row."""
    slots = jnp.arange(acceptance.tokens.shape[1], dtype=jnp.int32)
    last = slots == acceptance.num_tokens[:, None] - 1
    return acceptance.replace(tokens=jnp.where(last, token[:, None], acceptance.tokens))
