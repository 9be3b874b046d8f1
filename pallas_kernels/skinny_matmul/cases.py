"""Skinny products that must compile, at the sizes of real models."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.aot.case import Case, array
from pallas_kernels.skinny_matmul import api
from pallas_kernels.skinny_matmul.reference import Activation, Weight
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


def _gated(activation: Activation, x: jax.Array, gate: Weight, up: Weight) -> jax.Array:
    return api.skinny_gated(
        x, gate, up, activation=activation, implementation="require"
    )


def _case(
    name: str, function: Any, rows: int, *weights: Weight, platforms: tuple[str, ...]
) -> Case:
    outputs, inputs = weights[0].values.shape
    return Case(
        operation="skinny_matmul",
        name=f"{name}{rows}",
        function=function,
        arguments=(array(rows, inputs), *weights),
        kept=((outputs, inputs),),
        platforms=platforms,
    )


def _of(name: str, kind: str, rows: int) -> list[Case]:
    case = functools.partial(_case, platforms=("tpu", "cuda"))
    weight = _weight(kind, *MODELS[name])
    found = [case(f"{name}-{kind}-", _plain, rows, weight)]
    if name.endswith("up"):
        gated = functools.partial(_gated, "silu")
        found.append(case(f"{name}-{kind}-gated-", gated, rows, weight, weight))
    return found


_ON_HOPPER: tuple[tuple[str, Activation, int, int], ...] = (
    ("llama-3.2-1b-up", "silu", 8192, 2048),
    ("gemma-2-9b-up", "gelu_tanh", 14336, 3584),
)
"""Gate and up: a weight that is read in shares, and the other activation."""


def _on_hopper(kind: str) -> list[Case]:
    return [
        _case(
            f"{name}-{kind}-gated-",
            functools.partial(_gated, activation),
            8,
            weight,
            weight,
            platforms=("cuda",),
        )
        for name, activation, *size in _ON_HOPPER
        for weight in [_weight(kind, *size)]
    ]


CASES = (
    *(
        case
        for name in MODELS
        for kind in KINDS
        for rows in ((1, 8, 16) if name == "llama-3-8b-up" else (8,))
        for case in _of(name, kind, rows)
    ),
    *(case for kind in KINDS for case in _on_hopper(kind)),
)
