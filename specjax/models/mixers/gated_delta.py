"""The gated delta rule, with one decay a head (GDN) or one a channel (KDA)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from pallas_kernels.mesh import Spread
from specjax.decoding.types import Acceptance, Window
from specjax.models.config import GatedDeltaConfig
from specjax.models.feedforward.activations import activate, sigmoid, silu, softplus
from specjax.models.linear import Linear
from specjax.models.mixers.base import Aids
from specjax.models.mixers.convolution import (
    convolve,
    flag_rows,
    silent_rows,
    usable_rows,
)
from specjax.models.norms import RMSNorm
from specjax.models.recurrence.base import Recurrence
from specjax.models.recurrence.layer import (
    LayerState,
    LayerWindow,
    blank_layer,
    canonical_layer,
    commit_layer,
    placed,
)


class LowRank(struct.PyTreeNode):
    """``up(down(x))``: a projection through a narrow layer."""

    down: Linear
    up: Linear

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        """Both products."""
        return self.up(self.down(x))


class GatedDelta(struct.PyTreeNode):
    """Queries, keys and values through a convolution and the gated delta rule, then a
    norm and an output gate.

    GDN (Yang, Kautz, Hatamizadeh, 2412.06464; the Qwen3.5 arrangement) has a decay and
    a ``log_rate`` a value head; KDA (Kimi Linear, 2510.26692) a decay a channel.
    """

    config: GatedDeltaConfig = struct.field(pytree_node=False)
    qkv: Linear
    """To ``config.channels``: queries, keys and values, each head after head."""
    gate: Linear | LowRank
    """To ``[H dv]``: the output gate before its activation (z)."""
    beta: Linear
    """To ``[H]``: before its sigmoid (b)."""
    decay: Linear | LowRank
    """To ``[H]``, or by channel ``[H dk]``: before its softplus (a, or f)."""
    taps: jax.Array
    """``[C, conv_width]``, the last on the token itself; C as ``qkv`` has them."""
    log_rate: jax.Array
    """``[H]`` (A_log)."""
    decay_bias: jax.Array
    """``[H]``, or by channel ``[H, dk]`` (dt_bias)."""
    norm: RMSNorm
    """``[dv]``, over each head's output."""
    out: Linear
    """From ``[H dv]``."""
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
        config = self.config
        inputs, beta, decay = self.qkv(x), self.beta(x), self.decay(x)
        sound = window.valid & usable_rows(inputs, beta, decay)
        inputs = silent_rows(inputs, sound)
        mixed = silu(convolve(inputs, window, state.inputs, self.taps))
        sound = sound & usable_rows(mixed)
        q, k, v = self._heads(silent_rows(mixed, sound))
        y, added = self.recurrence.read(
            state.memory,
            q,
            k,
            v,
            silent_rows(self._log_decay(decay), sound),
            silent_rows(sigmoid(beta), sound),
            window.ancestors,
        )
        y = self.norm(y) * activate(config.gate, self.gate(x)).reshape(y.shape)
        y = flag_rows(self.out(y.reshape(*x.shape[:2], -1)), window.valid & ~sound)
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

    def _log_decay(self, raw: Float[Array, "B W N"]) -> Float[Array, "B W H *dk"]:
        """Log decays, at most 0."""
        floor = self.config.decay_floor
        rate = jnp.exp(self.log_rate)
        if self.config.channel_decay:
            rate = rate[:, None]
        raw = raw.reshape(*raw.shape[:2], *self.decay_bias.shape) + self.decay_bias
        if floor is None:
            return -rate * softplus(raw)
        return floor * sigmoid(rate * raw)

    def _heads(
        self, mixed: Float[Array, "B W C"]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Split channels into heads; keys and queries of length one, queries scaled."""
        config = self.config
        keys = config.num_key_heads * config.key_dim
        q, k, v = jnp.split(mixed, [keys, 2 * keys], axis=-1)
        lead = mixed.shape[:2]

        def unit(x: jax.Array) -> jax.Array:
            x = x.reshape(*lead, config.num_key_heads, config.key_dim)
            return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)

        v = v.reshape(*lead, config.num_value_heads, config.value_dim)
        return unit(q) * config.key_dim**-0.5, unit(k), v
