"""How a weight is cut into blocks, and what cannot be: by its own shape alone."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pallas_kernels.skinny_matmul.reference import ROWS, Weight

LANES, SUBLANES = 128, 8

BLOCK_BYTES = 2 << 20
"""Of the weights in one step, about."""

_MOST_INPUTS = 2048
"""In one block: rows of a weight are read in pieces of as many."""

_KINDS = ("bfloat16", "int8", "int4")


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Of one weight; rows play no part in it, so their number changes no bit."""

    outputs: int
    inputs: int
    group: int
    """Inputs that share a scale."""


def blocks(weight: Weight, count: int = 1) -> Blocks | None:
    """The largest that fit, ``count`` weights of this kind at a time; ``None``: none.

    Blocks are whole vectors, and a block has whole groups, eight or all of them.
    """
    outputs, inputs = weight.values.shape
    group = weight.group
    per_input = _bits(weight) * count / 8
    for wide in (*_divisors(inputs, _MOST_INPUTS), inputs):
        # the groups of one block are whole vectors too, unless it has all of them
        whole = wide % (group * SUBLANES) == 0 or wide == inputs
        if group < inputs and not whole:
            continue
        for tall in _divisors(outputs, int(BLOCK_BYTES / (wide * per_input))):
            return Blocks(tall, wide, group)
    return None


def refusal(rows: int, *weights: Weight) -> str | None:
    """Why there is no kernel for these, or ``None``."""
    first = weights[0]
    if rows > ROWS:
        return f"{rows} rows: more than {ROWS}"
    for weight in weights:
        kind = str(weight.values.dtype)
        if kind not in _KINDS:
            return f"weights of {kind}, not of {', '.join(_KINDS)}"
        alike = weight.values.shape == first.values.shape
        if not alike or kind != first.values.dtype or weight.group != first.group:
            return "a gate and an up weight of other shapes, types or groups"
        if (kind == "bfloat16") != (weight.scale is None):
            return (
                f"{kind} weights "
                + ("with" if weight.scale is not None else "without")
                + " scales"
            )
        if weight.scale is not None and weight.scale.dtype != jnp.float32:
            return f"scales of {weight.scale.dtype}, not float32"
    if blocks(first, len(weights)) is None:
        shape, group = first.values.shape, first.group
        return (
            f"a weight of {shape} in groups of {group} has no blocks of whole vectors"
        )
    return None


def _bits(weight: Weight) -> int:
    return {"bfloat16": 16, "int8": 8, "int4": 4}[str(weight.values.dtype)]


def _divisors(size: int, most: int) -> list[int]:
    """Multiples of 128 that divide it, largest first; at least one if there is any."""
    found = [n for n in range(LANES, size + 1, LANES) if size % n == 0]
    fitting = [n for n in found if n <= most]
    return (fitting or found[:1])[::-1]
