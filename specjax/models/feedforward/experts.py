"""Experts: every row passes through the few that its router chose.

Nothing here is computed for an expert that no row goes to, nor for a row that is
padding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from specjax.models.config import MoEConfig
from specjax.models.feedforward import dispatch
from specjax.models.feedforward.activations import relu2, sigmoid, silu
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
        """The weighted sum of what a row's experts make of it.

        Rows that are not ``valid`` are nobody's, and give zero.
        """
        if valid is None:
            valid = jnp.ones(x.shape[:1], bool)
        between = functools.partial(activation, self.config)
        y = jax.lax.platform_dependent(
            self.up,
            self.down,
            x,
            routes.experts,
            valid,
            cpu=functools.partial(dispatch.by_tiles, between),
            default=functools.partial(self._on_accelerators(len(x)), between),
        )
        weights = jnp.where(valid[:, None], routes.weights, 0.0).astype(y.dtype)
        return jnp.sum(y * weights[:, :, None], axis=1)

    def _on_accelerators(self, rows: int) -> Callable[..., jax.Array]:
        """By counting bytes: a gather reads, writes and reads what it copies.

        On CPU neither is of use. With E = 64, top 8, D = 2048 and size 768, one row
        took 15 ms by tiles in bfloat16, 370 ms by gather, and 2600 ms by groups, which
        XLA makes a product of every row by every expert there (float32: 30, 400 and
        7700 ms).
        """
        few = 3 * rows * self.config.router.top_k <= self.config.num_experts
        return dispatch.by_gather if few else dispatch.by_groups


def activation(
    config: MoEConfig, hidden: Float[Array, "*rows wide"]
) -> Float[Array, "*rows size"]:
    """From what ``up`` makes of a row to what ``down`` takes."""
    if config.kind == "plain":
        return relu2(hidden)
    gate, up = jnp.split(hidden, 2, axis=-1)
    if config.kind == "gated":
        return silu(gate) * up
    # gpt-oss: a minimum passes a NaN on
    assert config.limit is not None, "clamped experts have a limit"
    gate = jnp.minimum(gate, config.limit)
    up = jnp.clip(up, -config.limit, config.limit)
    return (up + 1.0) * gate * sigmoid(config.slope * gate)
