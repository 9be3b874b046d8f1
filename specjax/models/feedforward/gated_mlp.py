"""The gated MLP (SwiGLU and its kin: Shazeer, 2002.05202)."""

from __future__ import annotations

from flax import struct
from jaxtyping import Array, Bool, Float

from specjax.models.config import GatedMLPConfig
from specjax.models.feedforward.activations import activate
from specjax.models.linear import Linear


class GatedMLP(struct.PyTreeNode):
    """``down(activation(gate x) * up x)``."""

    config: GatedMLPConfig = struct.field(pytree_node=False)
    gate: Linear
    up: Linear
    down: Linear

    def __call__(
        self, x: Float[Array, "B W D"], valid: Bool[Array, "B W"] | None = None
    ) -> Float[Array, "B W D"]:
        """Row by row; rows that are not valid cost nothing less here."""
        return self.down(activate(self.config.activation, self.gate(x)) * self.up(x))
