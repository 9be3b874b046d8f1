"""What sample-then-compare rules share.

At each row the rule names the token the target wants next. If a child of the row is
that token, the child is accepted and the walk goes on from it; if not, the token is the
correction (or, below the last draft, the bonus), and the walk ends.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specjax.acceptance.walk import NO_CHILD, parent_rows, walk
from specjax.decoding.types import Acceptance, Proposal, Window

Choose = Callable[
    [Int[Array, " B"], Int[Array, " B"], Bool[Array, " B"]], Int[Array, " B"]
]
"""``(rows, depths, walking) -> tokens``: what the target wants after these rows."""


def descend(
    proposal: Proposal, window: Window, choose: Choose, *, max_depth: int
) -> Acceptance:
    """Follow the wanted tokens from the anchor; of equal siblings take the first."""
    parents = parent_rows(proposal)

    def visit(rows, depths, walking, carry):
        wanted = choose(rows, depths, walking)
        children = (
            (parents == rows[:, None])
            & window.valid
            & (window.tokens == wanted[:, None])
        )
        child = jnp.argmax(children, axis=1).astype(jnp.int32)
        return jnp.where(jnp.any(children, axis=1), child, NO_CHILD), wanted, carry

    return walk(window, visit, None, max_depth=max_depth)[0]
