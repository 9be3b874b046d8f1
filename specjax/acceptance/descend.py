"""The walk down the tree that sample-then-compare rules share.

At each row the rule names the token the target wants next. If a child of the row is
that token, the child is accepted and the walk goes on from it; if not, the token is the
correction (or, below the last draft, the bonus), and the walk ends.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.decoding.types import NO_TOKEN, Acceptance, Proposal, Window

Choose = Callable[[Int[Array, " B"], Int[Array, " B"]], Int[Array, " B"]]
"""``(rows, depths) -> tokens``: what the target wants after each of these rows."""


def descend(
    proposal: Proposal, window: Window, choose: Choose, *, max_depth: int
) -> Acceptance:
    """Follow the wanted tokens from the anchor; of equal siblings take the first.

    The target's law is worked out for one row at a time, so the cost follows the
    accepted path, not the window.
    """
    batch = window.tokens.shape[0]
    slots = max_depth + 1
    parents = jnp.concatenate(
        [jnp.full((batch, 1), -1, jnp.int32), proposal.parents + 1], axis=1
    )
    carry = (
        jnp.int32(0),
        jnp.zeros((batch,), jnp.int32),  # the row the walk stands on
        window.valid[:, 0],  # rows still walking
        jnp.zeros((batch, slots), jnp.int32),
        jnp.full((batch, slots), NO_TOKEN, jnp.int32),
        jnp.zeros((batch,), jnp.int32),
    )

    def walking(carry):
        depth, _, alive, *_ = carry
        return (depth < slots) & jnp.any(alive)

    def step(carry):
        depth, rows, alive, path, tokens, num = carry
        wanted = choose(rows, jnp.broadcast_to(depth, rows.shape))
        path = path.at[:, depth].set(jnp.where(alive, rows, 0))
        tokens = tokens.at[:, depth].set(jnp.where(alive, wanted, NO_TOKEN))
        num = num + alive.astype(jnp.int32)
        children = (
            (parents == rows[:, None])
            & window.valid
            & (window.tokens == wanted[:, None])
        )
        alive = alive & jnp.any(children, axis=1)
        child = jnp.argmax(children, axis=1).astype(jnp.int32)
        return depth + 1, jnp.where(alive, child, rows), alive, path, tokens, num

    _, _, _, path, tokens, num = jax.lax.while_loop(walking, step, carry)
    return Acceptance(path=path, tokens=tokens, num_tokens=num)
