"""Mamba2: a state space layer with one scalar decay a head."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from pallas_kernels.mesh import Spread
from specjax.decoding.types import Acceptance, Window
from specjax.models.config import Mamba2Config
from specjax.models.feedforward.activations import silu, softplus
from specjax.models.linear import Linear
from specjax.models.mixers.base import Aids
from specjax.models.mixers.convolution import (
    convolve,
    flag_rows,
    silent_rows,
    usable_rows,
)
from specjax.models.norms import GroupedRMSNorm
from specjax.models.recurrence.base import Recurrence
from specjax.models.recurrence.layer import (
    LayerState,
    LayerWindow,
    blank_layer,
    canonical_layer,
    commit_layer,
    placed,
)


class Mamba2(struct.PyTreeNode):
    """``S <- e^(dt A) S + dt B x^T;  y = S^T C + D x``, then a gate and a grouped norm
    (Dao, Gu, 2405.21060; the Nemotron-H arrangement).

    ``dt`` is not clamped: prefill and decoding would differ where only one of them
    does it. A checkpoint's ``in_proj`` is split into its three parts.
    """

    config: Mamba2Config = struct.field(pytree_node=False)
    gate: Linear
    """To ``config.values`` (z); the first rows of ``in_proj``."""
    inputs: Linear
    """To ``config.channels``: x, B and C, each head after head."""
    steps: Linear
    """To ``[H]``: before its softplus (dt); the last rows of ``in_proj``."""
    taps: jax.Array
    """``[C, conv_width]``, the last on the token itself; C as ``inputs`` has them."""
    conv_bias: jax.Array | None
    """``[C]``."""
    log_rate: jax.Array
    """``[H]`` (A_log)."""
    step_bias: jax.Array
    """``[H]`` (dt_bias)."""
    skip: jax.Array
    """``[H]`` (D)."""
    norm: GroupedRMSNorm
    """``[values]`` in ``num_groups`` groups, behind the gate."""
    out: Linear
    """From ``values``."""
    spread: Spread | None = struct.field(pytree_node=False, default=None)
    """How batch rows lie apart, on a mesh."""

    @property
    def recurrence(self) -> Recurrence:
        """The strategy, where this layer is."""
        return placed(self.config.recurrence, self.spread)

    def init_state(self, batch: int, capacity: int) -> LayerState:
        """Zeros; the size does not depend on the capacity."""
        config, dtype = self.config, self.taps.dtype
        past = (batch, config.conv_width - 1, config.channels)
        return LayerState(
            memory=config.recurrence.init(batch, config.matrix_shape, dtype),
            inputs=jnp.zeros(past, dtype),
        )

    def mix(
        self,
        x: Float[Array, "B W D"],
        window: Window,
        state: LayerState,
        lengths: Int[Array, " B"],
        aids: Aids,
    ) -> tuple[Float[Array, "B W D"], LayerWindow]:
        """The recurrence over a whole window."""
        inputs, steps = self.inputs(x), self.steps(x)
        sound = window.valid & usable_rows(inputs, steps)
        inputs = silent_rows(inputs, sound)
        mixed = convolve(inputs, window, state.inputs, self.taps, self.conv_bias)
        mixed = silu(mixed)
        sound = sound & usable_rows(mixed)
        values, written, read = self._heads(silent_rows(mixed, sound))
        steps = silent_rows(softplus(steps + self.step_bias), sound)
        y, added = self.recurrence.read(
            state.memory,
            read,
            written,
            steps[..., None] * values,
            -jnp.exp(self.log_rate) * steps,
            None,
            window.ancestors,
        )
        y = (y + self.skip[:, None] * values).reshape(*x.shape[:2], -1)
        y = self.norm(y * silu(self.gate(x)))
        y = flag_rows(self.out(y), window.valid & ~sound)
        return y, LayerWindow(memory=added, inputs=inputs)

    def commit(
        self,
        state: LayerState,
        pending: LayerWindow,
        acceptance: Acceptance,
        lengths: Int[Array, " B"],
    ) -> LayerState:
        """Fold in the accepted rows and move the convolution's window."""
        return commit_layer(self.recurrence, state, pending, acceptance)

    def canonical(self, state: LayerState, lengths: Int[Array, " B"]) -> LayerState:
        """The matrices, with everything folded in."""
        return canonical_layer(self.recurrence, state)

    def blank(
        self, state: LayerState, lengths: Int[Array, " B"], value: float | jax.Array
    ) -> LayerState:
        """The state with ``value`` in slots of a ring that hold no record."""
        return blank_layer(self.recurrence, state, value)

    def _heads(
        self, mixed: Float[Array, "B W C"]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Channels as ``x [.., H, head_dim]``, ``B`` and ``C [.., G, state_dim]``."""
        config, lead = self.config, mixed.shape[:2]
        states = config.num_groups * config.state_dim
        x, written, read = jnp.split(
            mixed, [config.values, config.values + states], axis=-1
        )
        group = (*lead, config.num_groups, config.state_dim)
        return (
            x.reshape(*lead, config.num_heads, config.head_dim),
            written.reshape(group),
            read.reshape(group),
        )
