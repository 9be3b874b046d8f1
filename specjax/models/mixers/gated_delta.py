"""The gated delta net: a recurrent mixer with a matrix state and a convolution."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from pallas_kernels.delta_window.api import delta_commit, delta_window
from specjax.decoding.types import Acceptance, Window
from specjax.models.axes import BATCH, HEADS, TIME
from specjax.models.config import GatedDeltaConfig
from specjax.models.linear import Linear
from specjax.models.mixers.base import Aids
from specjax.models.mixers.convolution import advance, convolve, silent_rows
from specjax.models.norms import RMSNorm


class DeltaState(struct.PyTreeNode):
    """What the committed tokens left: one matrix a head, and the last inputs."""

    matrix: jax.Array  # [B, H, dk, dv], float32 or wider
    inputs: jax.Array  # [B, conv_width - 1, C], oldest first

    matrix_axes = (BATCH, HEADS, "key", "value")
    inputs_axes = (BATCH, TIME, "channels")


class WindowDelta(struct.PyTreeNode):
    """What a window would add: enough to fold in any path of it."""

    inputs: jax.Array  # [B, W, C] before the convolution
    k: jax.Array  # [B, W, H, dk]
    updates: jax.Array  # [B, W, H, dv]
    decay: jax.Array  # [B, W, H] log decay along the path to the row


class GatedDelta(struct.PyTreeNode):
    """Queries, keys and values through a convolution and the gated delta rule, then a
    gated norm (Yang, Kautz, Hatamizadeh, 2412.06464; the Qwen3.5 arrangement).
    """

    config: GatedDeltaConfig = struct.field(pytree_node=False)
    qkv: Linear  # channels: queries, keys, values
    gate: Linear  # z
    beta: Linear  # b
    decay: Linear  # a
    taps: jax.Array  # [C, conv_width]
    log_rate: jax.Array  # [H] A_log
    decay_bias: jax.Array  # [H] dt_bias
    norm: RMSNorm  # over each head's values
    out: Linear

    def init_state(self, batch: int, capacity: int) -> DeltaState:
        """Zeros; the size does not depend on the capacity."""
        config = self.config
        shape = (batch, config.num_value_heads, config.key_dim, config.value_dim)
        past = (batch, config.conv_width - 1, config.channels)
        return DeltaState(
            matrix=jnp.zeros(shape, self.taps.dtype),
            inputs=jnp.zeros(past, self.taps.dtype),
        )

    def mix(
        self,
        x: Float[Array, "B W D"],
        window: Window,
        state: DeltaState,
        lengths: Int[Array, " B"],
        aids: Aids,
    ) -> tuple[Float[Array, "B W D"], WindowDelta]:
        """The recurrence over a whole window in matrix form."""
        inputs, beta, decay = self.qkv(x), self.beta(x), self.decay(x)
        finite = [jnp.all(jnp.isfinite(y), axis=-1) for y in (inputs, beta, decay)]
        sound = window.valid & finite[0] & finite[1] & finite[2]
        # what is not finite would reach its neighbours as 0 * NaN; the row itself is
        # flagged by the residual stream, which stays as it is
        inputs = silent_rows(inputs, sound)
        beta = silent_rows(jax.nn.sigmoid(beta), sound)
        rate = -jnp.exp(self.log_rate) * jax.nn.softplus(decay + self.decay_bias)
        q, k, v = self._heads(
            jax.nn.silu(convolve(inputs, window, state.inputs, self.taps))
        )
        y, updates, total = delta_window(
            q, k, v, silent_rows(rate, sound), beta, state.matrix, window.ancestors
        )
        y = self.norm(y) * jax.nn.silu(self.gate(x).reshape(y.shape))
        pending = WindowDelta(inputs=inputs, k=k, updates=updates, decay=total)
        return self.out(y.reshape(*x.shape[:2], -1)), pending

    def commit(
        self,
        state: DeltaState,
        pending: WindowDelta,
        acceptance: Acceptance,
        lengths: Int[Array, " B"],
    ) -> DeltaState:
        """Fold the accepted rows into the matrix and move the convolution's window."""
        matrix = delta_commit(
            state.matrix,
            pending.k,
            pending.updates,
            pending.decay,
            acceptance.path,
            acceptance.num_tokens,
        )
        return DeltaState(
            matrix=matrix, inputs=advance(state.inputs, pending.inputs, acceptance)
        )

    def canonical(self, state: DeltaState, lengths: Int[Array, " B"]) -> DeltaState:
        """The state itself: it holds the committed tokens and nothing else."""
        return state

    def _heads(
        self, mixed: Float[Array, "B W C"]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Split channels into heads; keys and queries of length one, queries scaled."""
        config = self.config
        keys = config.num_key_heads * config.key_dim
        q, k, v = jnp.split(mixed, [keys, 2 * keys], axis=-1)
        lead = mixed.shape[:2]
        repeat = config.num_value_heads // config.num_key_heads

        def unit(x: jax.Array) -> jax.Array:
            x = x.reshape(*lead, config.num_key_heads, config.key_dim)
            x = x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
            return jnp.repeat(x, repeat, axis=2)

        v = v.reshape(*lead, config.num_value_heads, config.value_dim)
        return unit(q) * config.key_dim**-0.5, unit(k), v
