"""Random weights and rows of skinny products, and what is right of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.skinny_matmul.reference import Weight, quantize_int4

KINDS = ("bfloat16", "int8", "int4")


def weight_of(
    kind: str, outputs: int, inputs: int, group: int = 128, seed: int = 0
) -> Weight:
    """Of one of ``KINDS``; products with ``rows_of`` are of the order of 1."""
    draw = np.random.default_rng(seed)
    plain = draw.standard_normal((outputs, inputs), dtype=np.float32) / inputs**0.5
    if kind == "bfloat16":
        return Weight(jnp.asarray(plain, jnp.bfloat16))
    if kind == "int4":
        return quantize_int4(jnp.asarray(plain, jnp.float32), group)
    scale = np.abs(plain).max(axis=1) / 127
    codes = np.round(plain / scale[:, None]).astype(np.int8)
    return Weight(jnp.asarray(codes), jnp.asarray(scale, jnp.float32))


def rows_of(count: int, inputs: int, seed: int = 1) -> jax.Array:
    """``[count, inputs]`` float32."""
    draw = np.random.default_rng(seed)
    return jnp.asarray(draw.standard_normal((count, inputs), dtype=np.float32))


def exactly(x: jax.Array, weight: Weight) -> np.ndarray:
    """``[count, outputs]`` in float64, with weights multiplied out."""
    values = np.asarray(weight.values.astype(jnp.float32), np.float64)
    if weight.scale is not None:
        scale = np.atleast_2d(np.asarray(weight.scale, np.float64))
        values = values * np.repeat(scale, weight.group, axis=0).T
    return np.asarray(x.astype(jnp.bfloat16), np.float64) @ values.T
