"""Skinny products on TPU: a weight streams through once, whatever the rows.

Each step multiplies the 16 rows by one block of the weight. Blocks are as the weight's
shape has them and are summed in one order, so a row's bits depend on its own numbers
and on the weight alone.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels import compat
from pallas_kernels.skinny_matmul.plan import Blocks, blocks
from pallas_kernels.skinny_matmul.reference import (
    ACTIVATIONS,
    ROWS,
    Activation,
    Weight,
)


def skinny_matmul(
    x: jax.Array, weight: Weight, *, interpret: compat.Interpret = False
) -> jax.Array:
    """``reference.skinny_matmul``."""
    return _call(x, (weight,), None, interpret=interpret)


def skinny_gated(
    x: jax.Array,
    gate: Weight,
    up: Weight,
    *,
    activation: Activation,
    interpret: compat.Interpret = False,
) -> jax.Array:
    """``reference.skinny_gated``; the rows are read once for both."""
    return _call(x, (gate, up), activation, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("activation", "interpret"))
def _call(
    x: Float[Array, "M in"],
    weights: tuple[Weight, ...],
    activation: Activation | None,
    *,
    interpret: compat.Interpret,
) -> Float[Array, "M out"]:
    outputs, inputs = weights[0].values.shape
    cut = blocks(weights[0], len(weights))
    assert cut is not None, "refused before"
    rows = jnp.pad(x, [(0, ROWS - x.shape[0]), (0, 0)]).astype(jnp.bfloat16)
    operands = [(rows, pl.BlockSpec((ROWS, cut.inputs), lambda o, i: (0, i)))]
    for weight in weights:
        block = (cut.outputs, cut.inputs)
        operands.append((weight.values, pl.BlockSpec(block, lambda o, i: (o, i))))
        if weight.scale is not None:
            operands.append(_scales(weight.scale, cut))
    size = sum(x.size * x.dtype.itemsize for x, _ in operands)
    if weights[0].values.dtype == jnp.int4:
        size -= len(weights) * outputs * inputs // 2
    found = pl.pallas_call(
        functools.partial(_kernel, cut, len(weights), activation),
        grid=(outputs // cut.outputs, inputs // cut.inputs),
        in_specs=[spec for _, spec in operands],
        out_specs=pl.BlockSpec((ROWS, cut.outputs), lambda o, i: (0, o)),
        out_shape=jax.ShapeDtypeStruct((ROWS, outputs), jnp.float32),
        scratch_shapes=[pltpu.VMEM((ROWS, cut.outputs), jnp.float32)] * len(weights),
        compiler_params=compat.tpu_params(("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * ROWS * inputs * outputs * len(weights),
            bytes_accessed=size + 4 * ROWS * outputs,
            transcendentals=0 if activation is None else ROWS * outputs,
        ),
        interpret=interpret,
        name="skinny_matmul",
    )(*(x for x, _ in operands))
    return found[: x.shape[0]]


def _scales(scale: jax.Array, cut: Blocks) -> tuple[jax.Array, pl.BlockSpec]:
    """``[groups, out]``, and those of one block: one row, or several."""
    if scale.ndim == 1:
        scale = scale[None]
    groups = max(cut.inputs // cut.group, 1)
    if scale.shape[0] == 1:
        return scale, pl.BlockSpec((1, cut.outputs), lambda o, i: (0, o))
    return scale, pl.BlockSpec((groups, cut.outputs), lambda o, i: (i, o))


def _kernel(
    cut: Blocks, count: int, activation: Activation | None, rows: Any, *refs: Any
) -> None:
    """One block of each weight, added to what the blocks before gave."""
    sums, out, operands = refs[-count:], refs[-count - 1], refs[: -count - 1]
    each = len(operands) // count
    step, last = pl.program_id(1), pl.num_programs(1) - 1
    grouped = cut.group <= cut.inputs and each == 2 and operands[1].shape[0] > 1

    @pl.when(step == 0)
    def _() -> None:
        for total in sums:
            total[...] = jnp.zeros_like(total)

    for i, total in enumerate(sums):
        values, *scale = operands[i * each : (i + 1) * each]
        if grouped:
            total[...] += _by_group(rows, values, scale[0], cut.group)
        else:
            total[...] += _multiply(rows[...], values[...])

    @pl.when(step == last)
    def _() -> None:
        found = [total[...] for total in sums]
        if each == 2 and not grouped:
            found = [x * operands[2 * i + 1][...] for i, x in enumerate(found)]
        if activation is None:
            out[...] = found[0]
        else:
            out[...] = ACTIVATIONS[activation](found[0]) * found[1]


def _by_group(rows: Any, values: Any, scale: Any, group: int) -> jax.Array:
    total = jnp.zeros((ROWS, values.shape[0]), jnp.float32)
    for i in range(values.shape[1] // group):
        at = slice(i * group, (i + 1) * group)
        total += _multiply(rows[:, at], values[:, at]) * scale[i : i + 1]
    return total


def _multiply(rows: jax.Array, values: jax.Array) -> jax.Array:
    """``rows values^T`` in float32, of numbers that bfloat16 holds."""
    return jax.lax.dot_general(
        rows,
        values.astype(jnp.bfloat16),
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
        precision=jax.lax.Precision.DEFAULT,
    )
