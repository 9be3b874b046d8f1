"""Float32 products on matrix units that multiply bfloat16, as exact as float32 is.

A float32 number is the sum of three bfloat16 numbers, 8 bits of its 24 each. Products
of such parts are exact, and are summed in float32. Of the nine, the three smallest are
left out: they are below float32's own rounding. This is what ``Precision.HIGHEST``
does in six products; here the parts are stacked, so that a matrix unit is loaded three
times, or once. Inside kernels only: XLA may take rounding to bfloat16 for nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_HIGH_BITS = -(1 << 16)  # as int32: sign, exponent and 7 bits behind the point


def parts(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Three float32 arrays of bfloat16 numbers, largest first, whose sum is ``x``."""
    high = _truncated(x)
    rest = x - high
    middle = _truncated(rest)
    return high, middle, rest - middle


def dot(
    x: Float[Array, "m k"], y: Float[Array, "a b"], *, transposed: bool = False
) -> Float[Array, "m n"]:
    """``x @ y``, or ``x @ y^T``; ``m`` is best a multiple of 8.

    Each part of ``y`` is loaded once.
    """
    rows, axis = x.shape[0], int(transposed)
    stack = _narrow(jnp.concatenate(parts(x), axis=0))  # [3m, k]
    total = jnp.zeros((rows, y.shape[1 - axis]), jnp.float32)
    for count, part in zip((1, 2, 3), reversed(parts(y)), strict=True):
        # the smallest first: with the part of order j of y go those up to 3 - j of x
        found = _multiply(stack[: count * rows], _narrow(part), 1, axis)
        for order in reversed(range(count)):
            total = total + found[order * rows : (order + 1) * rows]
    return total


def dot_columns(x: Float[Array, "k m"], y: Float[Array, "k n"]) -> Float[Array, "m n"]:
    """``x^T @ y`` for a small ``k``: one product of all pairs of parts."""
    a, b = parts(x), parts(y)
    pairs = [(2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0)]
    left = jnp.concatenate([a[i] for i, _ in pairs], axis=0)
    right = jnp.concatenate([b[j] for _, j in pairs], axis=0)
    return _multiply(_narrow(left), _narrow(right), 0)


def column_sums(x: Float[Array, "k m"], width: int) -> Float[Array, "m n"]:
    """The sum of each column of ``x``, as a row's number ``width`` times over."""
    stack = jnp.concatenate(parts(x)[::-1], axis=0)
    ones = jnp.ones((stack.shape[0], width), jnp.bfloat16)
    return _multiply(_narrow(stack), ones, 0)


def masked_sums(mask: Float[Array, "t s"], x: Float[Array, "s n"]) -> jax.Array:
    """``mask @ x``, ``[t, n]``, for a mask of zeros and ones."""
    left = _narrow(mask)
    low, middle, high = (_multiply(left, _narrow(p), 1) for p in parts(x)[::-1])
    return low + middle + high


def sums_masked(x: Float[Array, "n s"], mask: Float[Array, "t s"]) -> jax.Array:
    """``x @ mask^T``, ``[n, t]``, for a mask of zeros and ones."""
    right = _narrow(mask)
    low, middle, high = (_multiply(_narrow(p), right, 1, 1) for p in parts(x)[::-1])
    return low + middle + high


def _truncated(x: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jax.lax.bitcast_convert_type(bits & jnp.int32(_HIGH_BITS), jnp.float32)


def _narrow(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16)


def _multiply(x: jax.Array, y: jax.Array, of_x: int, of_y: int = 0) -> jax.Array:
    """Over these axes of two matrices, summed in float32."""
    return jax.lax.dot_general(
        x,
        y,
        (((of_x,), (of_y,)), ((), ())),
        preferred_element_type=jnp.float32,
        precision=jax.lax.Precision.DEFAULT,
    )
