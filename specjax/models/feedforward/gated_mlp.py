"""The gated MLP (SwiGLU: Shazeer, 2002.05202)."""

from __future__ import annotations

import jax
from flax import struct
from jaxtyping import Array, Float

from specjax.models.config import GatedMLPConfig
from specjax.models.linear import Linear


class GatedMLP(struct.PyTreeNode):
    """``down(silu(gate x) * up x)``."""

    config: GatedMLPConfig = struct.field(pytree_node=False)
    gate: Linear
    up: Linear
    down: Linear

    def __call__(self, x: Float[Array, "B W D"]) -> Float[Array, "B W D"]:
        """Row by row."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))
