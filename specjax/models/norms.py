"""Root-mean-square norms (Zhang, Sennrich, 1910.07467), statistics in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float


class RMSNorm(struct.PyTreeNode):
    """``weight * x / rms(x)`` over the last axis, in at least float32."""

    weight: jax.Array  # [n]
    eps: float = struct.field(pytree_node=False)

    def __call__(self, x: Float[Array, "*rows n"]) -> Float[Array, "*rows n"]:
        """Normalise each row."""
        x = x.astype(np.promote_types(x.dtype, np.float32))
        mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(mean_square + self.eps) * self.weight.astype(x.dtype)


class LayerNorm(struct.PyTreeNode):
    """``weight * (x - mean) / std + bias`` over the last axis, in at least float32
    (Ba, Kiros, Hinton, 1607.06450).
    """

    weight: jax.Array  # [n]
    bias: jax.Array  # [n]
    eps: float = struct.field(pytree_node=False)

    def __call__(self, x: Float[Array, "*rows n"]) -> Float[Array, "*rows n"]:
        """Normalise each row."""
        x = x.astype(np.promote_types(x.dtype, np.float32))
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return x * self.weight.astype(x.dtype) + self.bias.astype(x.dtype)


class GroupedRMSNorm(struct.PyTreeNode):
    """An RMS norm over each of ``groups`` stretches of the last axis, one weight for
    all of it (Mamba2, where it stands behind the gate), in at least float32.
    """

    weight: jax.Array  # [n]
    eps: float = struct.field(pytree_node=False)
    groups: int = struct.field(pytree_node=False)

    def __call__(self, x: Float[Array, "*rows n"]) -> Float[Array, "*rows n"]:
        """Normalise each group of each row."""
        x = x.astype(np.promote_types(x.dtype, np.float32))
        parts = x.reshape(*x.shape[:-1], self.groups, -1)
        mean_square = jnp.mean(parts * parts, axis=-1, keepdims=True)
        parts = parts * jax.lax.rsqrt(mean_square + self.eps)
        return parts.reshape(x.shape) * self.weight.astype(x.dtype)
