"""How fast this device reads memory and multiplies matrices, as JAX reaches it."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from specjax.analysis.costs.timing import Part, once

SIDE = 1024
"""Of the square matrices that are multiplied."""


def read_parts(size: int) -> list[Part]:
    """Ways to read ``size`` bytes once; the fastest says what the memory gives.

    A count of 1 a call: divide ``size`` by the least seconds.
    """
    count = max(SIDE, size // 4 // SIDE * SIDE)
    array = jnp.ones((count // SIDE, SIDE), jnp.float32)
    row = jnp.ones((1, count // SIDE), jnp.float32)
    ways = {"read max": (_largest, (array,)), "read vector": (_vector, (row, array))}
    return [once(name, partial(way, *given)) for name, (way, given) in ways.items()]


def read_bytes(size: int) -> int:
    """The bytes that ``read_parts`` really reads."""
    return max(SIDE, size // 4 // SIDE * SIDE) * 4


def matrix_parts(dtypes: tuple[str, ...]) -> list[Part]:
    """One square product in each of these types: ``2 SIDE^3`` operations."""
    found = []
    for name in dtypes:
        square = jnp.ones((SIDE, SIDE), name)
        found.append(once(f"matrix {name}", partial(_product, square, square)))
    return found


MATRIX_FLOPS = 2 * SIDE**3


@jax.jit
def _largest(array: jax.Array) -> jax.Array:
    return array.max(axis=0)


@jax.jit
def _vector(row: jax.Array, array: jax.Array) -> jax.Array:
    return row @ array


@jax.jit
def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    return left @ right
