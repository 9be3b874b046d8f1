"""Skinny products, as they are called.

The kernel is worth its place for int4 weights in groups, for a gate and an up weight
at once, and where a row's bits must not depend on other rows: it treats 1 to 16 rows
alike. Of plain bfloat16 and int8 weights XLA's own product is one pass that keeps
nothing besides (compiled for v5e and v6e with 1, 8 and 16 rows, JAX 0.10.2), so
``skinny_matmul`` of these takes the kernel only where it is told ``invariant``. Of int4
weights in groups XLA makes a float32 copy at one row, of 15 times their size.

A Hopper GPU has a kernel for the same weights: int4 in groups of 128 inputs, or of a
multiple of 128.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.platforms import Implementation, Kernel, Platform, choose
from pallas_kernels.skinny_matmul import gpu, gpu_plan, plan, reference, tpu
from pallas_kernels.skinny_matmul.reference import (
    ROWS,
    Activation,
    Weight,
    quantize_int4,
)

__all__ = [
    "ROWS",
    "Activation",
    "Weight",
    "quantize_int4",
    "skinny_gated",
    "skinny_matmul",
]


def skinny_matmul(
    x: Float[Array, "M in"],
    weight: Weight,
    *,
    invariant: bool = False,
    implementation: Implementation = "auto",
) -> Float[Array, "M out"]:
    """``x W^T`` for at most 16 rows, in float32; see ``reference``.

    ``invariant``: a row's bits depend on that row and the weight alone.
    """
    reference.check(x, weight)
    rows = x.shape[0]
    by_xla = weight.values.dtype != jnp.int4 and not invariant
    kernels: dict[Platform, Kernel] = {}
    if not by_xla:
        kernels["tpu"] = Kernel(tpu.skinny_matmul, plan.refusal(rows, weight))
        kernels["cuda"] = Kernel(gpu.skinny_matmul, gpu_plan.refusal(rows, weight))
    return choose(
        "skinny_matmul",
        (x, weight),
        reference=reference.skinny_matmul,
        kernels=kernels,
        implementation=implementation,
    )


def skinny_gated(
    x: Float[Array, "M in"],
    gate: Weight,
    up: Weight,
    *,
    activation: Activation = "silu",
    implementation: Implementation = "auto",
) -> Float[Array, "M out"]:
    """``activation(x Wg^T) * (x Wu^T)`` for at most 16 rows, in float32."""
    reference.check(x, gate, up)
    if activation not in reference.ACTIVATIONS:
        known = ", ".join(reference.ACTIVATIONS)
        raise ValueError(f"activation={activation!r}: one of {known}")
    rows = x.shape[0]
    by_tpu = functools.partial(tpu.skinny_gated, activation=activation)
    by_gpu = functools.partial(gpu.skinny_gated, activation=activation)
    return choose(
        "skinny_gated",
        (x, gate, up),
        reference=functools.partial(reference.skinny_gated, activation=activation),
        kernels={
            "tpu": Kernel(by_tpu, plan.refusal(rows, gate, up)),
            "cuda": Kernel(by_gpu, gpu_plan.refusal(rows, gate, up)),
        },
        implementation=implementation,
    )
