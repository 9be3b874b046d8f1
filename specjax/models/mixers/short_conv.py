"""LFM2's gated short convolution: a mixer without any longer memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.decoding.types import Acceptance, Window
from specjax.models.axes import BATCH, TIME
from specjax.models.config import ShortConvConfig
from specjax.models.linear import Linear
from specjax.models.mixers.base import Aids
from specjax.models.mixers.convolution import (
    advance,
    convolve,
    flag_rows,
    silent_rows,
    usable_rows,
)


class ShortConvState(struct.PyTreeNode):
    """The last inputs of the convolution."""

    inputs: jax.Array  # [B, conv_width - 1, C], oldest first

    inputs_axes = (BATCH, TIME, "channels")


class ShortConvWindow(struct.PyTreeNode):
    """What a window would add."""

    inputs: jax.Array  # [B, W, C]


class ShortConv(struct.PyTreeNode):
    """``out(C * conv(B * x))``, without an activation (LFM2)."""

    config: ShortConvConfig = struct.field(pytree_node=False)
    inputs: Linear
    """To ``[3 C]``: B, C and x, in this order."""
    taps: jax.Array
    """``[C, conv_width]``, the last on the token itself."""
    conv_bias: jax.Array | None
    """``[C]``."""
    out: Linear

    def init_state(self, batch: int, capacity: int) -> ShortConvState:
        """Zeros; the size does not depend on the capacity."""
        past = (batch, self.config.conv_width - 1, self.config.channels)
        return ShortConvState(inputs=jnp.zeros(past, self.taps.dtype))

    def mix(
        self,
        x: Float[Array, "B W D"],
        window: Window,
        state: ShortConvState,
        lengths: Int[Array, " B"],
        aids: Aids,
    ) -> tuple[Float[Array, "B W D"], ShortConvWindow]:
        """Each row looks at itself and its nearest ancestors."""
        before, after, values = jnp.split(self.inputs(x), 3, axis=-1)
        inputs = before * values
        sound = window.valid & usable_rows(inputs)
        inputs = silent_rows(inputs, sound)
        y = convolve(inputs, window, state.inputs, self.taps, self.conv_bias)
        y = flag_rows(self.out(after * y), window.valid & ~sound)
        return y, ShortConvWindow(inputs=inputs)

    def commit(
        self,
        state: ShortConvState,
        pending: ShortConvWindow,
        acceptance: Acceptance,
        lengths: Int[Array, " B"],
    ) -> ShortConvState:
        """The last inputs after the accepted path."""
        return ShortConvState(inputs=advance(state.inputs, pending.inputs, acceptance))

    def canonical(
        self, state: ShortConvState, lengths: Int[Array, " B"]
    ) -> ShortConvState:
        """The state itself: it holds the committed tokens and nothing else."""
        return state
