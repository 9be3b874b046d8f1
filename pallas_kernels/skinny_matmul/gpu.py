"""Skinny products on NVIDIA's Hopper: a weight streams through once, whatever the rows.

The weight's outputs are the rows of the matrix units' products, and the 16 rows of the
window their columns, as few as they get. A block of threads takes 128 outputs and a
share of the inputs, in steps that are copied ahead of their use; the shares are added
up in one order. How a weight is cut follows from its own shape, so a row's bits depend
on its own numbers and on the weight alone.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import compat, hopper
from pallas_kernels.skinny_matmul.reference import (
    ACTIVATIONS,
    ROWS,
    Activation,
    Weight,
)

OUTPUTS = 128
"""Of one block of threads."""

INPUTS = 128
"""Of one step."""

STAGES = 3
"""Steps that are on their way at once: two blocks of threads fit side by side."""

SHORTEST = 4
"""Steps of a share, at least."""

SWIZZLE = 128
"""Bytes of a row of shared memory that lie together for the matrix units."""

_KINDS = ("bfloat16", "int8")


@dataclasses.dataclass(frozen=True)
class Cut:
    """Of one weight; rows play no part in it."""

    tiles: int
    shares: int
    """Of the inputs."""
    each: int
    """Steps of a share; the last may have fewer."""
    steps: int
    """Of all shares."""


def cut(outputs: int, inputs: int) -> Cut:
    """As many shares as fill the device, and none with too little to do."""
    tiles, steps = outputs // OUTPUTS, inputs // INPUTS
    shares = max(min(2 * hopper.MULTIPROCESSORS // tiles, steps // SHORTEST), 1)
    each = -(-steps // shares)
    return Cut(tiles, -(-steps // each), each, steps)


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
        if (kind == "bfloat16") != (weight.scale is None):
            return f"{kind} weights with scales missing, or with scales too many"
        if weight.scale is not None and (
            weight.scale.ndim != 1 or weight.scale.dtype != jnp.float32
        ):
            return "scales that are not one float32 an output"
        if outputs % OUTPUTS or inputs % INPUTS:
            return (
                f"a weight of {weight.values.shape}: multiples of {OUTPUTS} outputs "
                f"and {INPUTS} inputs are read"
            )
    return None


def skinny_matmul(
    x: Float[Array, "M in"], weight: Weight, *, interpret: compat.Interpret = False
) -> Float[Array, "M out"]:
    """``reference.skinny_matmul``."""
    return _sixteen(x, weight, interpret=interpret)[: x.shape[0]]


def skinny_gated(
    x: Float[Array, "M in"],
    gate: Weight,
    up: Weight,
    *,
    activation: Activation,
    interpret: compat.Interpret = False,
) -> Float[Array, "M out"]:
    """``reference.skinny_gated``, in two products."""
    inner = ACTIVATIONS[activation](_sixteen(x, gate, interpret=interpret))
    return (inner * _sixteen(x, up, interpret=interpret))[: x.shape[0]]


@functools.partial(jax.jit, static_argnames="interpret")
def _sixteen(
    x: Float[Array, "M in"], weight: Weight, *, interpret: compat.Interpret
) -> Float[Array, "16 out"]:
    rows = jnp.pad(x, [(0, ROWS - x.shape[0]), (0, 0)]).astype(jnp.bfloat16)
    parts = _shares(rows, weight.values, interpret)
    # one after another: a sum over an axis is free to take them in another order
    total = functools.reduce(jnp.add, [parts[i] for i in range(parts.shape[0])]).T
    return total if weight.scale is None else total * weight.scale


def _shares(
    rows: Float[Array, "16 in"], values: jax.Array, interpret: compat.Interpret
) -> Float[Array, "shares out 16"]:
    outputs, inputs = values.shape
    how = cut(outputs, inputs)
    scratch = [
        _shared(jnp.bfloat16, STAGES, ROWS, INPUTS),
        _shared(values.dtype, STAGES, OUTPUTS, INPUTS),
        plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
    ]
    if values.dtype == jnp.int8:
        scratch.append(_shared(jnp.bfloat16, OUTPUTS, INPUTS))
    return compat.gpu_kernel(
        functools.partial(_kernel, how),
        out_type=jax.ShapeDtypeStruct((how.shares, outputs, ROWS), jnp.float32),
        scratch_types=scratch,
        grid=(how.shares, how.tiles),
        grid_names=("shares", "tiles"),
        kernel_name="skinny_matmul",
        interpret=interpret,
    )(rows, values)


def _shared(dtype: Any, *shape: int) -> Any:
    """Shared memory, as the matrix units take it or as plain rows."""
    if dtype == jnp.int8:
        return plgpu.SMEM(shape, dtype)
    tiling = plgpu.TilingTransform((8, SWIZZLE // 2))  # pyright: ignore
    swizzled = plgpu.SwizzleTransform(SWIZZLE)  # pyright: ignore
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzled))


def _kernel(
    how: Cut,
    x: Any,
    values: Any,
    out: Any,
    x_steps: Any,
    steps: Any,
    arrived: Any,
    wide: Any = None,
) -> None:
    """``values x^T`` of one block of threads: ``[128, 16]``."""
    share = jax.lax.axis_index("shares")
    outputs = pl.ds(jax.lax.axis_index("tiles") * OUTPUTS, OUTPUTS)
    first = share * how.each
    count = jnp.minimum(jnp.int32(how.each), how.steps - first)

    def fetch(i: Any) -> None:
        stage = jax.lax.rem(jnp.int32(i), jnp.int32(STAGES))
        at = pl.ds((first + i) * INPUTS, INPUTS)
        ready = arrived.at[stage]
        plgpu.copy_gmem_to_smem(x.at[:, at], x_steps.at[stage], ready)
        plgpu.copy_gmem_to_smem(values.at[outputs, at], steps.at[stage], ready)

    def multiply(acc: Any) -> jax.Array:
        def step(i: Any, _: None) -> None:
            stage = jax.lax.rem(i, jnp.int32(STAGES))
            plgpu.barrier_wait(arrived.at[stage])
            block = steps.at[stage]
            if wide is not None:
                _widen(block, wide)
                block = wide
            plgpu.wgmma(acc, block, x_steps.at[stage].transpose((1, 0)))
            plgpu.wgmma_wait(0)
            pl.when(i + STAGES < count)(lambda: fetch(i + STAGES))

        jax.lax.fori_loop(0, count, step, None)
        return acc[...]

    for i in range(STAGES):
        pl.when(i < count)(lambda i=i: fetch(i))
    shape = (OUTPUTS, ROWS)
    total = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
    compat.gpu_store(out.at[share, outputs], total)


def _widen(block: Any, wide: Any) -> None:
    """int8 to bfloat16, which holds them all; 64 outputs at a time."""
    for first in range(0, OUTPUTS, 64):
        part = block.at[pl.ds(first, 64)]
        found = compat.gpu_load(part, plgpu.Layout.WGMMA)
        wide.at[pl.ds(first, 64)][...] = found.astype(jnp.bfloat16)
    plgpu.commit_smem()
