"""Skinny products on NVIDIA's Hopper: a weight streams through once, whatever the rows.

The weight's outputs are the rows of the matrix units' products, and the 16 rows of the
window their columns, as few as they get. A block of threads takes 128 outputs and a
share of the inputs, in steps that are copied ahead of their use; the shares are added
up in one order. Where scales come in groups, each step's product is summed up by itself
and then scaled. How a weight is cut follows from its own shape, so a row's bits depend
on its own numbers and on the weight alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import compat, gpu_products, hopper
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

_KINDS = ("bfloat16", "int8", "int4")


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
    arrays = [rows, weight.values]
    by_output = weight.scale
    if weight.scale is not None and weight.scale.ndim == 2:
        arrays.append(weight.scale)
        by_output = None
    parts = _shares(arrays, interpret)
    # one after another: a sum over an axis is free to take them in another order
    total = functools.reduce(jnp.add, [parts[i] for i in range(parts.shape[0])]).T
    return total if by_output is None else total * by_output


def _shares(
    arrays: Sequence[jax.Array], interpret: compat.Interpret
) -> Float[Array, "shares out 16"]:
    """Of rows, values and, where they come in groups, their scales."""
    values = arrays[1]
    outputs, inputs = values.shape
    how = cut(outputs, inputs)
    steps = [(ROWS, INPUTS), (OUTPUTS, INPUTS), (OUTPUTS,)][: len(arrays)]
    scratch: dict[str, Any] = {
        "kept": [
            _shared(array.dtype, STAGES, *step)
            for array, step in zip(arrays, steps, strict=True)
        ],
        "arrived": plgpu.Barrier(num_arrivals=len(arrays), num_barriers=STAGES),
    }
    if values.dtype != jnp.bfloat16:
        scratch["wide"] = _shared(jnp.bfloat16, OUTPUTS, INPUTS)

    def kernel(*refs: Any, **kept: Any) -> None:
        with gpu_products.traced_for(interpret):
            _kernel(how, *refs, **kept)

    return compat.gpu_kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((how.shares, outputs, ROWS), jnp.float32),
        scratch_types=scratch,
        grid=(how.shares, how.tiles),
        grid_names=("shares", "tiles"),
        kernel_name="skinny_matmul",
        interpret=interpret,
    )(*arrays)


def _shared(dtype: Any, *shape: int) -> Any:
    """Shared memory, in tiles as the matrix units take it, or plain.

    int4 must lie in tiles as wide as a step. Where a copy of plain rows begins, Pallas
    counts in numbers and the device in bytes; a tile begins at nought.
    """
    if dtype not in (jnp.bfloat16, jnp.int4):
        return plgpu.SMEM(shape, dtype)
    wide, bits = (INPUTS, 4) if dtype == jnp.int4 else (SWIZZLE // 2, 16)
    tiling = plgpu.TilingTransform((8, wide))  # pyright: ignore
    swizzled = plgpu.SwizzleTransform(wide * bits // 8)  # pyright: ignore
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzled))


@dataclasses.dataclass(frozen=True)
class _Steps:
    """Of one block of threads, copied ahead of their use."""

    arrays: Sequence[Any]
    """In the device's memory: rows, values and scales, if there are any of groups."""
    kept: Sequence[Any]
    """In shared memory, of as many stages."""
    arrived: Any
    outputs: Any
    first: Any
    """Of all shares' steps."""
    count: Any
    all: int
    """Of all shares."""

    def fetch(self, i: Any) -> None:
        """Begin to copy a step, if there is one."""
        pl.when(i < self.count)(lambda: self._fetch(i))

    def _fetch(self, i: Any) -> None:
        stage = _stage(i)
        x, values, *scales = self.arrays
        at = pl.ds((self.first + i) * INPUTS, INPUTS)
        parts = [x.at[:, at], values.at[self.outputs, at]]
        for scale in scales:
            each = self.all // scale.shape[0]
            group = jax.lax.div(self.first + i, jnp.int32(each))
            parts.append(scale.at[group, self.outputs])
        for part, kept in zip(parts, self.kept, strict=True):
            plgpu.copy_gmem_to_smem(part, kept.at[stage], self.arrived.at[stage])

    def wait(self, i: Any) -> list[Any]:
        """What has been copied for a step."""
        stage = _stage(i)
        plgpu.barrier_wait(self.arrived.at[stage])
        return [kept.at[stage] for kept in self.kept]


def _stage(i: Any) -> jax.Array:
    return jax.lax.rem(jnp.int32(i), jnp.int32(STAGES))


def _kernel(how: Cut, *refs: Any, kept: Any, arrived: Any, wide: Any = None) -> None:
    """``values x^T`` of one block of threads: ``[128, 16]``."""
    *arrays, out = refs
    share = jax.lax.axis_index("shares")
    outputs = pl.ds(jax.lax.axis_index("tiles") * OUTPUTS, OUTPUTS)
    first = share * how.each
    count = jnp.minimum(jnp.int32(how.each), how.steps - first)
    steps = _Steps(arrays, kept, arrived, outputs, first, count, how.steps)
    for i in range(STAGES):
        steps.fetch(i)
    multiply = _sum_of_groups if len(arrays) == 3 else _sum
    compat.gpu_store(out.at[share, outputs], multiply(steps, wide))


def _sum(steps: _Steps, wide: Any) -> Float[Array, "128 16"]:
    """Of products that all have the same scale."""

    def multiply(acc: Any) -> jax.Array:
        def step(i: Any, _: None) -> None:
            x, block = steps.wait(i)
            if wide is not None:
                _widen(block, wide)
                block = wide
            turned = x.transpose((1, 0))
            gpu_products.watch(block, turned)
            plgpu.wgmma(acc, block, turned)
            plgpu.wgmma_wait(0)
            steps.fetch(i + STAGES)

        jax.lax.fori_loop(0, steps.count, step, None)
        return acc[...]

    shape = (OUTPUTS, ROWS)
    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def _sum_of_groups(steps: _Steps, wide: Any) -> Float[Array, "128 16"]:
    """Of products that are scaled by their outputs' scales in this step."""
    shape = (OUTPUTS, ROWS)

    def step(i: Any, total: jax.Array) -> jax.Array:
        x, block, scale = steps.wait(i)
        by_output = compat.gpu_load(scale, plgpu.Layout.WGMMA.reduce(1))
        _widen(block, wide)
        part = gpu_products.product(wide, x.transpose((1, 0)))
        steps.fetch(i + STAGES)
        return total + part * jax.lax.broadcast_in_dim(by_output, shape, [0])

    nothing = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
    return jax.lax.fori_loop(0, steps.count, step, nothing)


def _widen(block: Any, wide: Any) -> None:
    """int8 or int4 to bfloat16, which holds them all; 64 outputs at a time."""
    few = block.dtype == jnp.int4  # eight of them fill a register
    layout = plgpu.Layout.WGMMA_UPCAST_4X if few else plgpu.Layout.WGMMA
    for first in range(0, OUTPUTS, 64):
        part = block.at[pl.ds(first, 64)]
        found = compat.gpu_load(part, layout)
        wide.at[pl.ds(first, 64)][...] = found.astype(jnp.bfloat16)
    plgpu.commit_smem()
