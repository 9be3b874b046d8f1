"""Experts: every row passes through the few that its router chose.

Nothing here is computed for an expert that no row goes to, nor for a row that is
padding.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.models.config import MoEConfig
from specjax.models.feedforward.activations import relu2
from specjax.models.feedforward.router import Routes
from specjax.models.linear import StackedLinear


class Experts(struct.PyTreeNode):
    """``E`` feed-forwards of one shape.

    In the rows of ``up`` the gate stands first, where there is one.
    """

    config: MoEConfig = struct.field(pytree_node=False)
    up: StackedLinear  # [E, 2 size, in], or [E, size, in] of plain experts
    down: StackedLinear  # [E, in, size]

    def __call__(
        self,
        x: Float[Array, "R in"],
        routes: Routes,
        valid: Bool[Array, " R"] | None = None,
    ) -> Float[Array, "R in"]:
        """The weighted sum of what a row's experts make of it."""
        rows, top_k = routes.experts.shape
        y = jax.lax.map(
            lambda slot: self.one(slot[0], slot[1][None])[0],
            (routes.experts.reshape(-1), jnp.repeat(x, top_k, axis=0)),
        ).reshape(rows, top_k, -1)
        return jnp.sum(y * routes.weights[:, :, None].astype(y.dtype), axis=1)

    def one(
        self, expert: Int[Array, ""], x: Float[Array, "M in"]
    ) -> Float[Array, "M in"]:
        """What one expert makes of some rows."""
        return self.down.at(expert)(activation(self.config, self.up.at(expert)(x)))


def activation(
    config: MoEConfig, hidden: Float[Array, "*rows wide"]
) -> Float[Array, "*rows size"]:
    """From what ``up`` makes of a row to what ``down`` takes."""
    if config.kind == "plain":
        return relu2(hidden)
    gate, up = jnp.split(hidden, 2, axis=-1)
    if config.kind == "gated":
        return jax.nn.silu(gate) * up
    # gpt-oss: a minimum passes a NaN on
    assert config.limit is not None, "clamped experts have a limit"
    gate = jnp.minimum(gate, config.limit)
    up = jnp.clip(up, -config.limit, config.limit)
    return (up + 1.0) * gate * jax.nn.sigmoid(1.702 * gate)
