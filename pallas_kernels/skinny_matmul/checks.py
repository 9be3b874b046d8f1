"""Skinny products to check and to time: weights of models, kinds and rows."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import jax

from pallas_kernels.aot.case import nbytes
from pallas_kernels.check import Check, Planned
from pallas_kernels.platforms import Implementation
from pallas_kernels.skinny_matmul import api
from pallas_kernels.skinny_matmul.problems import KINDS, rows_of, weight_of
from pallas_kernels.skinny_matmul.reference import Weight
from pallas_kernels.skinny_matmul.specs import MODELS

TOLERANCE = 1e-4
"""Products are exact, so only the order of float32 sums differs."""
SMALL = (640, 4096)
"""Two steps along the inputs."""


def make_checks(*, quick: bool, seed: int) -> Iterator[Planned]:
    """Quick: every kind once, small."""
    sizes = {"small-up": SMALL} if quick else MODELS
    for name, kind in itertools.product(sizes, KINDS):
        # a gate and an up weight at once, where a model has them
        for count in (1, 2) if name.endswith("up") else (1,):
            family = f"{name}-{kind}" + ("-gated" if count == 2 else "")
            for rows in (3,) if quick else (1, 2, 4, 8, 16):
                make = functools.partial(
                    _check, family, kind, sizes[name], rows, count, seed
                )
                later = rows not in (1, 8) or not name.endswith("up")
                yield Planned(f"{family}-M{rows}", make, later)


def _check(
    family: str, kind: str, size: tuple[int, int], rows: int, count: int, seed: int
) -> Check:
    weights = [_weight(kind, *size, seed + i) for i in range(count)]
    packed = 2 if kind == "int4" else 1
    return Check(
        operation="skinny_matmul",
        name=f"{family}-M{rows}",
        run=_plain if count == 1 else _gated,
        arguments=(rows_of(rows, size[1], seed), *weights),
        tolerance=TOLERANCE,
        bytes=sum(nbytes(w.values) // packed + nbytes(w.scale) for w in weights),
        family=family,
        width=rows,
    )


@functools.lru_cache(maxsize=2)
def _weight(kind: str, outputs: int, inputs: int, seed: int) -> Weight:
    """Kept for the other numbers of rows: drawing one takes seconds."""
    return weight_of(kind, outputs, inputs, seed=seed)


def _plain(implementation: Implementation, x: jax.Array, weight: Weight) -> jax.Array:
    # without ``invariant`` there is no kernel for bfloat16 and int8
    return api.skinny_matmul(x, weight, invariant=True, implementation=implementation)


def _gated(
    implementation: Implementation, x: jax.Array, gate: Weight, up: Weight
) -> jax.Array:
    return api.skinny_gated(x, gate, up, implementation=implementation)
