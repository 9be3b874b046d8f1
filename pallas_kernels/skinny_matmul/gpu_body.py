"""What one block of threads does with its outputs and its share of the inputs.

Two weights lie under each other in shared memory, as if they were one, and are
multiplied at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import compat, gpu_products
from pallas_kernels.skinny_matmul.gpu_plan import INPUTS, OUTPUTS, STAGES, Cut
from pallas_kernels.skinny_matmul.reference import ACTIVATIONS, ROWS, Activation

SWIZZLE = 128
"""Bytes of a row of shared memory that lie together for the matrix units."""


@dataclasses.dataclass(frozen=True)
class Operands:
    """In the device's memory; of each but the rows as many as there are weights."""

    rows: Any
    values: Sequence[Any]
    by_group: Sequence[Any] = ()
    """Scales ``[groups, out]``, if each step's product has its own."""
    by_output: Sequence[Any] = ()
    """Scales ``[out]``, if the kernel is to multiply sums by them."""

    def arrays(self) -> list[Any]:
        """All of them, in the order of the fields."""
        return [self.rows, *self.values, *self.by_group, *self.by_output]

    def of(self, refs: Sequence[Any]) -> Operands:
        """The same, in the references that a kernel has for ``arrays``."""
        rows, *rest = refs
        parts = []
        for group in (self.values, self.by_group, self.by_output):
            parts.append(rest[: len(group)])
            rest = rest[len(group) :]
        return Operands(rows, *parts)


def scratch(operands: Operands) -> dict[str, Any]:
    """Shared memory and barriers of a block of threads."""
    kind = operands.values[0].dtype
    kept = {
        "rows": _shared(jnp.bfloat16, STAGES, ROWS, INPUTS),
        "values": _shared(kind, STAGES, OUTPUTS, INPUTS),
    }
    if operands.by_group:
        kept["by_group"] = _shared(jnp.float32, STAGES, OUTPUTS)
    if kind != jnp.bfloat16:
        kept["wide"] = _shared(jnp.bfloat16, OUTPUTS, INPUTS)
    copies = 1 + len(operands.values) + len(operands.by_group)
    arrived = plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES)
    return {"kept": kept, "arrived": arrived}


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
class Steps:
    """Of one block of threads, copied ahead of their use."""

    operands: Operands
    kept: Mapping[str, Any]
    """In shared memory, of as many stages."""
    arrived: Any
    how: Cut
    outputs: Any
    first: Any
    """Of all shares' steps."""
    count: Any

    def fetch(self, i: Any) -> None:
        """Begin to copy a step, if there is one."""
        pl.when(i < self.count)(lambda: self._fetch(i))

    def _fetch(self, i: Any) -> None:
        stage, tall = _stage(i), self.how.tall
        at = pl.ds((self.first + i) * INPUTS, INPUTS)
        copies = [(self.operands.rows.at[:, at], self.kept["rows"].at[stage])]
        for n, values in enumerate(self.operands.values):
            to = self.kept["values"].at[stage, pl.ds(n * tall, tall)]
            copies.append((values.at[self.outputs, at], to))
        for n, scale in enumerate(self.operands.by_group):
            steps = self.how.steps // scale.shape[0]
            group = jax.lax.div(self.first + i, jnp.int32(steps))
            to = self.kept["by_group"].at[stage, pl.ds(n * tall, tall)]
            copies.append((scale.at[group, self.outputs], to))
        for origin, to in copies:
            plgpu.copy_gmem_to_smem(origin, to, self.arrived.at[stage])

    def wait(self, i: Any) -> tuple[Any, Any, Any]:
        """What has been copied for a step: rows, values and scales, if there are."""
        stage = _stage(i)
        plgpu.barrier_wait(self.arrived.at[stage])
        kept = [self.kept.get(name) for name in ("rows", "values", "by_group")]
        rows, values, scales = (None if x is None else x.at[stage] for x in kept)
        return rows, values, scales


def _stage(i: Any) -> jax.Array:
    return jax.lax.rem(jnp.int32(i), jnp.int32(STAGES))


def kernel(
    how: Cut,
    operands: Operands,
    activation: Activation | None,
    out: Any,
    *,
    kept: Mapping[str, Any],
    arrived: Any,
) -> None:
    """``values x^T`` of one block of threads: its share of each weight's sums.

    With an ``activation`` there is one share, and what is left of gate and up is one.
    """
    share, tile = jax.lax.axis_index("shares"), jax.lax.axis_index("tiles")
    outputs = pl.ds(tile * how.tall, how.tall)
    first = share * how.each
    count = jnp.minimum(jnp.int32(how.each), how.steps - first)
    steps = Steps(operands, kept, arrived, how, outputs, first, count)
    for i in range(STAGES):
        steps.fetch(i)
    multiply = _sum_of_groups if operands.by_group else _sum
    sums = multiply(steps, kept.get("wide"))
    found = [
        jax.lax.slice(sums, (n * how.tall, 0), ((n + 1) * how.tall, ROWS))
        for n in range(len(operands.values))
    ]
    if activation is not None:
        gate, up = _scaled(found, steps)
        found = [ACTIVATIONS[activation](gate) * up]
    for n, x in enumerate(found):
        compat.gpu_store(out.at[share, n, outputs], x)


def _sum(steps: Steps, wide: Any) -> Float[Array, "128 16"]:
    """Of products that all have the same scale."""

    def multiply(acc: Any) -> jax.Array:
        def step(i: Any, _: None) -> None:
            rows, block, _scales = steps.wait(i)
            if wide is not None:
                _widen(block, wide)
                block = wide
            turned = rows.transpose((1, 0))
            gpu_products.watch(block, turned)
            plgpu.wgmma(acc, block, turned)
            plgpu.wgmma_wait(0)
            steps.fetch(i + STAGES)

        jax.lax.fori_loop(0, steps.count, step, None)
        return acc[...]

    shape = (OUTPUTS, ROWS)
    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def _sum_of_groups(steps: Steps, wide: Any) -> Float[Array, "128 16"]:
    """Of products that are scaled by their outputs' scales in this step."""

    def step(i: Any, total: jax.Array) -> jax.Array:
        rows, block, scales = steps.wait(i)
        by_output = compat.gpu_load(scales, plgpu.Layout.WGMMA.reduce(1))
        _widen(block, wide)
        part = gpu_products.product(wide, rows.transpose((1, 0)))
        steps.fetch(i + STAGES)
        return total + part * _of_rows(by_output)

    shape = (OUTPUTS, ROWS)
    nothing = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
    return jax.lax.fori_loop(0, steps.count, step, nothing)


def _scaled(sums: Sequence[jax.Array], steps: Steps) -> list[jax.Array]:
    """By their outputs' scales, if the kernel has them."""
    scales = [
        compat.gpu_load(scale.at[steps.outputs], plgpu.Layout.WGMMA.reduce(1))
        for scale in steps.operands.by_output
    ]
    if not scales:
        return list(sums)
    return [x * _of_rows(scale) for x, scale in zip(sums, scales, strict=True)]


def _of_rows(by_output: Float[Array, "n"]) -> Float[Array, "n 16"]:
    return jax.lax.broadcast_in_dim(by_output, (by_output.shape[0], ROWS), [0])


def _widen(block: Any, wide: Any) -> None:
    """int8 or int4 to bfloat16, which holds them all; 64 outputs at a time."""
    few = block.dtype == jnp.int4  # eight of them fill a register
    layout = plgpu.Layout.WGMMA_UPCAST_4X if few else plgpu.Layout.WGMMA
    for first in range(0, OUTPUTS, 64):
        part = block.at[pl.ds(first, 64)]
        found = compat.gpu_load(part, layout)
        wide.at[pl.ds(first, 64)][...] = found.astype(jnp.bfloat16)
    plgpu.commit_smem()
