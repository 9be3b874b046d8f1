"""Products of a few rows with a weight: the definition, and what runs on CPU.

A decoding step multiplies 1 to 16 rows by every weight of the model, and its time is
that of reading them. The arithmetic: rows are rounded to bfloat16; weights of bfloat16,
int8 or int4 are bfloat16 numbers too, so every product is exact; sums and scales are
float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.elementwise import whole

ROWS = 16
"""Rows of every product, the missing ones zeros: what the smallest vector of bfloat16
has on TPU. One shape for all, so a row's bits do not depend on how many there are."""

Activation = Literal["silu", "gelu_tanh"]

ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


class Weight(NamedTuple):
    """A weight, and what its numbers are to be multiplied by."""

    values: jax.Array  # [out, in] bfloat16, int8 or int4
    scale: jax.Array | None = None
    """float32: ``[out]`` for int8; ``[in / group, out]`` for int4, one for each group
    of neighbouring inputs (and outputs last, which is how a TPU reads them)."""

    @property
    def group(self) -> int:
        """Inputs that share a scale; all of them, unless the scales say otherwise."""
        inputs = self.values.shape[1]
        if self.scale is None or self.scale.ndim == 1:
            return inputs
        return inputs // self.scale.shape[0]


def check(x: jax.Array, *weights: Weight) -> None:
    """Raise ``ValueError`` for what no implementation can take."""
    if x.shape[0] > ROWS or 0 in x.shape:
        raise ValueError(f"x is {list(x.shape)}: 1 to {ROWS} rows are multiplied")
    if len({weight.values.shape[0] for weight in weights}) > 1:
        found = " and ".join(str(weight.values.shape[0]) for weight in weights)
        raise ValueError(f"{found} outputs of gate and up: as many are expected")
    for weight in weights:
        outputs, inputs = weight.values.shape
        if inputs != x.shape[1]:
            raise ValueError(f"{inputs} inputs of the weight, {x.shape[1]} of x")
        if weight.scale is None:
            continue
        *groups, scaled = weight.scale.shape
        bad = len(groups) > 1 or scaled != outputs
        if bad or (groups and (not groups[0] or inputs % groups[0])):
            raise ValueError(
                f"a scale of {list(weight.scale.shape)} for a weight of "
                f"{[outputs, inputs]}: [{outputs}], or [groups, {outputs}] whose "
                f"groups divide {inputs}"
            )


def skinny_matmul(x: Float[Array, "M in"], weight: Weight) -> Float[Array, "M out"]:
    """``x W^T`` for at most 16 rows, in float32."""
    return _product(_sixteen(x), weight)[: x.shape[0]]


def skinny_gated(
    x: Float[Array, "M in"], gate: Weight, up: Weight, activation: Activation
) -> Float[Array, "M out"]:
    """``activation(x Wg^T) * (x Wu^T)``: the first half of a gated feed-forward."""
    rows = _sixteen(x)
    inner = whole(ACTIVATIONS[activation], _product(rows, gate))
    return (inner * _product(rows, up))[: x.shape[0]]


def quantize_int4(weight: Float[Array, "out in"], group: int = 128) -> Weight:
    """Symmetric int4, -7 to 7, with one scale for each group of inputs of an output."""
    outputs, inputs = weight.shape
    if inputs % group:
        raise ValueError(f"{inputs} inputs are no multiple of groups of {group}")
    grouped = weight.astype(jnp.float32).reshape(outputs, inputs // group, group)
    largest = jnp.max(jnp.abs(grouped), axis=-1)
    scale = jnp.where(largest > 0, largest / 7.0, 1.0)
    codes = jnp.clip(jnp.round(grouped / scale[..., None]), -7, 7)
    return Weight(codes.reshape(outputs, inputs).astype(jnp.int4), scale.T)


def _sixteen(x: Float[Array, "M in"]) -> Float[Array, "16 in"]:
    return jnp.pad(x, [(0, ROWS - x.shape[0]), (0, 0)]).astype(jnp.bfloat16)


def _product(x: Float[Array, "16 in"], weight: Weight) -> Float[Array, "16 out"]:
    values, scale = weight.values.astype(jnp.bfloat16), weight.scale
    if scale is None or scale.ndim == 1:
        out = _dot("mi,oi->mo", x, values)
        return out if scale is None else out * scale
    groups = scale.shape[0]
    rows = x.reshape(ROWS, groups, -1)
    parts = _dot("mgi,ogi->mog", rows, values.reshape(len(values), groups, -1))
    return jnp.sum(parts * scale.T, axis=-1)


def _dot(expression: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(expression, x, y, preferred_element_type=jnp.float32)
