"""Skinny products on NVIDIA's Hopper: a weight streams through once, whatever the rows.

The weight's outputs are the rows of the matrix units' products, and the 16 rows of the
window their columns, as few as they get. A block of threads takes 128 outputs (64 of a
gate and the same 64 of an up weight) and a share of the inputs, in steps that are
copied ahead of their use; the shares are added up in one order. Where scales come in
groups, each step's product is summed up by itself and then scaled. How a weight is cut
follows from its own shape, so a row's bits depend on its own numbers and on the weight
alone.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import compat, gpu_products
from pallas_kernels.skinny_matmul import gpu_body
from pallas_kernels.skinny_matmul.gpu_body import Operands
from pallas_kernels.skinny_matmul.gpu_plan import alike, cut
from pallas_kernels.skinny_matmul.reference import (
    ACTIVATIONS,
    ROWS,
    Activation,
    Weight,
)


def skinny_matmul(
    x: Float[Array, "M in"], weight: Weight, *, interpret: compat.Interpret = False
) -> Float[Array, "M out"]:
    """``reference.skinny_matmul``."""
    return _product(x, weight, interpret=interpret)


def skinny_gated(
    x: Float[Array, "M in"],
    gate: Weight,
    up: Weight,
    *,
    activation: Activation,
    interpret: compat.Interpret = False,
) -> Float[Array, "M out"]:
    """``reference.skinny_gated``; the rows are read once for both.

    Weights of other kinds, shapes or groups than each other's are two products. An
    output's inputs may be cut into fewer shares here than in a product of its own;
    where they are not, its sums have the same bits.
    """
    if alike(gate, up):
        return _gated(x, gate, up, activation=activation, interpret=interpret)
    inner = ACTIVATIONS[activation](_product(x, gate, interpret=interpret))
    return inner * _product(x, up, interpret=interpret)


@functools.partial(jax.jit, static_argnames="interpret")
def _product(
    x: Float[Array, "M in"], weight: Weight, *, interpret: compat.Interpret
) -> Float[Array, "M out"]:
    (total,) = _sums(x, (weight,), interpret)
    return total


@functools.partial(jax.jit, static_argnames=("activation", "interpret"))
def _gated(
    x: Float[Array, "M in"],
    gate: Weight,
    up: Weight,
    *,
    activation: Activation,
    interpret: compat.Interpret,
) -> Float[Array, "M out"]:
    weights = gate, up
    outputs, inputs = gate.values.shape
    if cut(outputs, inputs, 2).shares == 1:
        out = _call(_operands(x, weights, scaled=True), activation, interpret)
        return out.reshape(-1, ROWS)[:, : x.shape[0]].T
    inner, outer = _sums(x, weights, interpret)
    return ACTIVATIONS[activation](inner) * outer


def _sums(
    x: Float[Array, "M in"], weights: tuple[Weight, ...], interpret: compat.Interpret
) -> list[Float[Array, "M out"]]:
    """The product with each of the weights, scaled."""
    parts = _call(_operands(x, weights, scaled=False), None, interpret)
    parts = parts[..., : x.shape[0]]  # cut before it is turned: one pass by XLA
    # one after another: a sum over an axis is free to take them in another order
    totals = functools.reduce(jnp.add, [parts[i] for i in range(parts.shape[0])])
    scales = [
        None if w.scale is None or w.scale.ndim == 2 else w.scale for w in weights
    ]
    return [
        total.T if scale is None else total.T * scale
        for total, scale in zip(totals, scales, strict=True)
    ]


def _operands(
    x: Float[Array, "M in"], weights: tuple[Weight, ...], *, scaled: bool
) -> Operands:
    """``scaled``: sums are to be multiplied by their outputs' scales."""
    rows = jnp.pad(x, [(0, ROWS - x.shape[0]), (0, 0)]).astype(jnp.bfloat16)
    scales = [w.scale for w in weights if w.scale is not None]
    by_group = [scale for scale in scales if scale.ndim == 2]
    by_output = [scale for scale in scales if scale.ndim == 1] if scaled else []
    return Operands(rows, [w.values for w in weights], by_group, by_output)


def _call(
    operands: Operands, activation: Activation | None, interpret: compat.Interpret
) -> Float[Array, "shares _ out 16"]:
    """Sums with each of the weights, or what an ``activation`` leaves of them."""
    outputs, inputs = operands.values[0].shape
    weights = len(operands.values)
    how = cut(outputs, inputs, weights)
    found = weights if activation is None else 1

    def kernel(*refs: Any, **scratch: Any) -> None:
        *arrays, out = refs
        with gpu_products.traced_for(interpret):
            inside = operands.of(arrays)
            gpu_body.kernel(how, inside, activation, out, **scratch)

    shape = (how.shares, found, outputs, ROWS)
    return compat.gpu_kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        scratch_types=gpu_body.scratch(operands),
        grid=(how.shares, how.tiles),
        grid_names=("shares", "tiles"),
        kernel_name="skinny_matmul" if weights == 1 else "skinny_gated",
        interpret=interpret,
    )(*operands.arrays())
