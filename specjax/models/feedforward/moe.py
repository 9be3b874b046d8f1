"""The mixture of experts (Shazeer et al., 1701.06538; DeepSeekMoE, 2401.06066)."""

from __future__ import annotations

from flax import struct
from jaxtyping import Array, Bool, Float

from specjax.models.config import MoEConfig
from specjax.models.feedforward.activations import sigmoid
from specjax.models.feedforward.experts import Experts
from specjax.models.feedforward.gated_mlp import GatedMLP
from specjax.models.feedforward.plain_mlp import PlainMLP
from specjax.models.feedforward.router import Router
from specjax.models.linear import Linear


class MoE(struct.PyTreeNode):
    """Routed experts, and the shared one that sees every row.

    The router and the shared expert work on the row itself; ``latent_in`` and
    ``latent_out``, where there are any, stand around the routed experts only.
    """

    config: MoEConfig = struct.field(pytree_node=False)
    router: Router
    experts: Experts
    shared: GatedMLP | PlainMLP | None = None
    shared_gate: Linear | None = None  # to one number a row
    latent_in: Linear | None = None
    latent_out: Linear | None = None

    def __call__(
        self, x: Float[Array, "B W D"], valid: Bool[Array, "B W"] | None = None
    ) -> Float[Array, "B W D"]:
        """Row by row. Rows that are not ``valid`` are not routed: experts add zero."""
        rows = x.reshape(-1, x.shape[-1])
        real = None if valid is None else valid.reshape(-1)
        routes = self.router(rows)
        inner = rows if self.latent_in is None else self.latent_in(rows)
        y = self.experts(inner, routes, real)
        if self.latent_out is not None:
            y = self.latent_out(y)
        y = y.reshape(x.shape)
        return y if self.shared is None else y + self._shared(x)

    def _shared(self, x: Float[Array, "B W D"]) -> Float[Array, "B W D"]:
        assert self.shared is not None
        y = self.shared(x)
        if self.shared_gate is None:
            return y
        return y * sigmoid(self.shared_gate(x))
