"""The MLP of two layers."""

from __future__ import annotations

from flax import struct
from jaxtyping import Array, Bool, Float

from specjax.models.config import PlainMLPConfig
from specjax.models.feedforward.activations import activate
from specjax.models.linear import Linear


class PlainMLP(struct.PyTreeNode):
    """``down(activation(up x))``."""

    config: PlainMLPConfig = struct.field(pytree_node=False)
    up: Linear
    down: Linear

    def __call__(
        self, x: Float[Array, "B W D"], valid: Bool[Array, "B W"] | None = None
    ) -> Float[Array, "B W D"]:
        """Row by row; rows that are not valid cost nothing less here."""
        return self.down(activate(self.config.activation, self.up(x)))
