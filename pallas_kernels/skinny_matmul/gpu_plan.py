"""How a weight is cut for Hopper, by its shape alone, and which cannot be."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pallas_kernels import hopper
from pallas_kernels.skinny_matmul.reference import ROWS, Weight

OUTPUTS = 128
"""Of one block of threads, of all its weights together."""

INPUTS = 128
"""Of one step."""

STAGES = 3
"""Steps that are on their way at once: two blocks of threads fit side by side."""

SHORTEST = 4
"""Steps of a share, at least."""

_KINDS = ("bfloat16", "int8", "int4")


@dataclasses.dataclass(frozen=True)
class Cut:
    """Of one weight, or of several that are alike; rows play no part in it."""

    tall: int
    """Outputs of each weight in a block of threads."""
    tiles: int
    shares: int
    """Of the inputs."""
    each: int
    """Steps of a share; the last may have fewer."""
    steps: int
    """Of all shares."""


def cut(outputs: int, inputs: int, weights: int = 1) -> Cut:
    """As many shares as fill the device, and none with too little to do."""
    tall = OUTPUTS // weights
    tiles, steps = outputs // tall, inputs // INPUTS
    shares = max(min(2 * hopper.MULTIPROCESSORS // tiles, steps // SHORTEST), 1)
    each = -(-steps // shares)
    return Cut(tall, tiles, -(-steps // each), each, steps)


def alike(gate: Weight, up: Weight) -> bool:
    """Whether one kernel takes both, a step of each at a time."""
    kinds = gate.values.dtype == up.values.dtype
    return kinds and gate.values.shape == up.values.shape and gate.group == up.group


def refusal(rows: int, *weights: Weight) -> str | None:
    """Why the kernel for Hopper cannot take these; ``None``: it can."""
    elsewhere = hopper.absent()
    if elsewhere is not None:
        return elsewhere
    if rows > ROWS:
        return f"{rows} rows: more than {ROWS}"
    for weight in weights:
        kind, (outputs, inputs) = str(weight.values.dtype), weight.values.shape
        if kind not in _KINDS:
            return f"weights of {kind}, not of {', '.join(_KINDS)}"
        unfit = _unfit(weight)
        if unfit is not None:
            return unfit
        if outputs % OUTPUTS or inputs % INPUTS:
            return (
                f"a weight of {weight.values.shape}: multiples of {OUTPUTS} outputs "
                f"and {INPUTS} inputs are read"
            )
    return None


def _unfit(weight: Weight) -> str | None:
    """What is wrong with a weight's scales."""
    kind, scale = str(weight.values.dtype), weight.scale
    if (kind == "bfloat16") != (scale is None):
        return f"{kind} weights with scales missing, or with scales too many"
    if scale is None:
        return None
    axes, each = (2, "group and output") if kind == "int4" else (1, "output")
    if scale.ndim != axes or scale.dtype != jnp.float32:
        return f"scales that are not one float32 for each {each}"
    if axes == 2 and weight.group % INPUTS:
        return f"groups of {weight.group} inputs, not of multiples of {INPUTS}"
    return None
