"""The gated MLP (SwiGLU and its kin: Shazeer, 2002.05202)."""

from __future__ import annotations

import jax
from flax import struct
from jaxtyping import Array, Bool, Float

from pallas_kernels.skinny_matmul.api import Weight, skinny_gated
from specjax.models.config import GatedMLPConfig
from specjax.models.feedforward.activations import activate
from specjax.models.linear import Linear
from specjax.models.tiles import in_tiles


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
        return self.down(self._inner(x))

    def _inner(self, x: Float[Array, "B W D"]) -> Float[Array, "B W F"]:
        gate, up, activation = self.gate, self.up, self.config.activation
        biased = gate.bias is not None or up.bias is not None
        kernel = gate.skinny and up.skinny and not biased
        if not kernel or activation not in ("silu", "gelu_tanh"):
            return activate(activation, gate(x)) * up(x)

        def both(rows: Float[Array, "rows D"]) -> jax.Array:
            weights = Weight(gate.weight), Weight(up.weight)
            return skinny_gated(rows, *weights, activation=activation)

        rows = in_tiles(both, x.reshape(-1, x.shape[-1]), gate.tile)
        return rows.reshape(*x.shape[:-1], gate.out_features)
