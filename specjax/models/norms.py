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
