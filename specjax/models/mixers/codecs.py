"""Keys and values in one byte a number, with a scale a slot and head.

A codec rounds a row once, when a window computes it. The window attends to what was
rounded, and the commit writes the very same codes, so a row looks alike whether it is
read from the window or from the cache. Without that, drafted and plain decoding would
be two models.

Scales are powers of two. Then code times scale is exact in bfloat16 and float32, and
``(q . code) * scale`` are the bits of ``q . (code * scale)``: a kernel may scale behind
its product. A scale of ``largest / 127`` would keep up to one bit more of int8, and
give that up. To float8, which has an exponent in each number, it would give nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Num, Real

_SMALLEST = 27
"""The least exponent of a row, as float32 has it: smaller rows have fewer codes."""


class Codes(struct.PyTreeNode):
    """Rows of a window, as a cache holds them."""

    codes: jax.Array  # [*rows, D]
    scale: jax.Array | None  # [*rows] float32; None where the codes are the numbers


@dataclasses.dataclass(frozen=True)
class Codec:
    """How a row of a head becomes codes of ``dtype`` and one scale.

    ``bits``: the row's largest number has a code from ``2 ** (bits - 1)`` up to, and
    not including, ``2 ** bits``.
    """

    dtype: str
    bits: int
    most: int
    """The largest code."""

    def encode(self, rows: Float[Array, "*rows D"]) -> Codes:
        """The nearest codes; ties go to even. The rows must be finite."""
        largest = jnp.max(jnp.abs(rows), axis=-1).astype(jnp.float32)
        exponent = jax.lax.bitcast_convert_type(largest, jnp.int32) >> 23
        exponent = jnp.maximum(exponent, _SMALLEST) - (self.bits - 1)
        codes = rows * _power(254 - exponent).astype(rows.dtype)[..., None]
        if jnp.issubdtype(jnp.dtype(self.dtype), jnp.integer):
            codes = jnp.round(codes)
        codes = jnp.clip(codes, -self.most, self.most)
        return Codes(codes.astype(self.dtype), _power(exponent))


def _power(exponent: jax.Array) -> jax.Array:
    """Two to a biased exponent, which must be that of a normal float32."""
    return jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)


def decode(
    codes: Real[Array, "*rows D"], scale: Num[Array, "*rows"] | None, dtype: Any
) -> Float[Array, "*rows D"]:
    """The numbers that the codes stand for; without a scale, the codes themselves."""
    if scale is None:
        return codes.astype(dtype)
    return codes.astype(dtype) * scale.astype(dtype)[..., None]


CODECS: dict[str, Codec] = {
    "int8": Codec("int8", bits=7, most=127),
    "fp8": Codec("float8_e4m3fn", bits=8, most=448),
}
"""By the names that the command line uses."""
