"""Products of a warpgroup's matrix units on Hopper, and what emulation makes of them.

Emulation (JAX 0.12) knows no accumulator that starts with anything, so there a product
is added to what it should have started with. It looks for races where arrays are
loaded, stored or copied, and not where they are multiplied: see ``watched``.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import compat

_emulated = contextvars.ContextVar("_emulated", default=False)
_watched = contextvars.ContextVar("_watched", default=False)


@contextlib.contextmanager
def traced_for(interpret: compat.Interpret) -> Iterator[None]:
    """The body of a kernel that will be compiled, or emulated."""
    token = _emulated.set(interpret is not False)
    try:
        yield
    finally:
        _emulated.reset(token)


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Look for races at products too, in kernels that are emulated inside.

    What a product reads may be overwritten, and emulation by itself will not say so.
    Inside, each product loads first what it multiplies. A fence goes with it, which may
    stand in for one that is missing: kernels are to be emulated without this as well.
    """
    jax.clear_caches()  # what was traced before would be run again
    token = _watched.set(True)
    try:
        yield
    finally:
        _watched.reset(token)
        jax.clear_caches()


def watch(a: Any, b: Any) -> None:
    """Load what is to be multiplied, inside ``watched``; ``product`` does so itself."""
    if _emulated.get() and _watched.get():
        _ = a[...], b[...]
        plgpu.commit_smem()  # for threads that load, unlike matrix units


def product(a: Any, b: Any) -> Float[Array, "m n"]:
    """Of two arrays in shared memory, in float32."""

    def multiply(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, a, b)
        return acc[...]

    watch(a, b)
    shape = (a.shape[0], b.shape[1])
    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def add_products(
    starts: Sequence[Float[Array, "64 _"]], a: Any, parts: Sequence[Any]
) -> tuple[Float[Array, "64 _"], ...]:
    """Arrays in registers, and to each the product of ``a`` and its own part.

    A sum that grows where it lies takes half the registers of one that a product is
    added to.
    """
    if _emulated.get():
        return tuple(
            start + product(a, part) for start, part in zip(starts, parts, strict=True)
        )
    if not starts:
        return ()

    def multiply(accs: Any) -> None:
        for acc, part in zip(accs, parts, strict=True):
            plgpu.wgmma(acc, a, part)

    accs: Any = tuple(plgpu.WGMMAAccumulatorRef.init(start) for start in starts)
    return tuple(pl.run_state(multiply)(accs))
