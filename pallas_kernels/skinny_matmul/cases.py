"""Skinny products that must compile, at the sizes of real models."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.aot.case import Case, array
from pallas_kernels.skinny_matmul import api
from pallas_kernels.skinny_matmul.reference import Weight
from pallas_kernels.skinny_matmul.specs import MODELS

KINDS = ("bfloat16", "int8", "int4")
GROUP = 128


def _weight(kind: str, outputs: int, inputs: int) -> Weight:
    scale = {
        "bfloat16": None,
        "int8": array(outputs, dtype=jnp.float32),
        "int4": array(inputs // GROUP, outputs, dtype=jnp.float32),
    }[kind]
    return Weight(array(outputs, inputs, dtype=jnp.dtype(kind)), scale)


def _plain(x: jax.Array, weight: Weight) -> jax.Array:
    return api.skinny_matmul(x, weight, invariant=True, implementation="require")


def _gated(x: jax.Array, gate: Weight, up: Weight) -> jax.Array:
    return api.skinny_gated(x, gate, up, implementation="require")


def _of(name: str, kind: str, rows: int) -> list[Case]:
    outputs, inputs = MODELS[name]
    weight = _weight(kind, outputs, inputs)

    def case(part: str, function: Any, *weights: Weight) -> Case:
        return Case(
            operation="skinny_matmul",
            name=f"{name}-{kind}-{part}{rows}",
            function=function,
            arguments=(array(rows, inputs), *weights),
            kept=((outputs, inputs),),
            platforms=("tpu", "cuda"),
        )

    found = [case("", _plain, weight)]
    if name.endswith("up"):
        found.append(case("gated-", _gated, weight, weight))
    return found


CASES = tuple(
    case
    for name in MODELS
    for kind in KINDS
    for rows in ((1, 8, 16) if name == "llama-3-8b-up" else (8,))
    for case in _of(name, kind, rows)
)
