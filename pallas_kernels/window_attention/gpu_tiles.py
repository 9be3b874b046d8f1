"""Tiles of 64 rows in the registers of a warpgroup (128 threads) of a Hopper GPU.

A product takes two arrays of shared memory and leaves its tile in registers. The
softmax goes on with one tile of scores after another (Milakov and Gimelshein,
1805.02867).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import compat
from pallas_kernels.gpu_products import add_products, product
from pallas_kernels.window_attention.gpu_plan import TILE
from pallas_kernels.window_attention.plan import Options

LOWEST = -1e30
"""A maximum before anything was seen. It is finite, and below every score."""

LOG2_E = math.log2(math.e)

WHOLE = plgpu.Layout.WGMMA
BY_ROW = plgpu.Layout.WGMMA.reduce(1)
BY_SLOT = plgpu.Layout.WGMMA.reduce(0)

WIDEST = 256
"""Channels of one product."""

Sums = tuple[Float[Array, "64 _"], ...]
"""Of values by their weights, for slices of the channels."""


def shared_rows(swizzle: int, *shape: int, dtype: Any = jnp.bfloat16) -> Any:
    """Scratch: rows of shared memory as the matrix units take them."""
    tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))  # pyright: ignore
    swizzled = plgpu.SwizzleTransform(swizzle)  # pyright: ignore
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzled))


def channels_of(dim: int, begin: int = 0, widest: int = WIDEST) -> list[Any]:
    """Slices of a head's channels from ``begin`` on."""
    return [pl.ds(at, min(widest, dim - at)) for at in range(begin, dim, widest)]


def no_sums(channels: Sequence[Any]) -> Sums:
    """Before anything was read."""
    return tuple(
        plgpu.layout_cast(jnp.zeros((TILE, part.size), jnp.float32), WHOLE)
        for part in channels
    )


def no_rows() -> tuple[Float[Array, " 64"], Float[Array, " 64"]]:
    """Maximum and total of rows that have seen nothing."""
    lowest = plgpu.layout_cast(jnp.full((TILE,), LOWEST, jnp.float32), BY_ROW)
    return lowest, plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), BY_ROW)


def scores_of(
    q: Any, keys: Any, options: Options, scale: Float[Array, " 64"] | None = None
) -> Float[Array, "64 n"]:
    """Times log2 e; a ``scale`` is that of each key."""
    scores = product(q, keys.transpose((1, 0)))
    if scale is not None:
        scores = scores * slots_over(scale)
    if options.softcap is not None:
        scores = options.softcap * jnp.tanh(scores / options.softcap)
    return scores * LOG2_E


def weigh(
    scores: Float[Array, "64 n"],
    before: Float[Array, " 64"],
    total: Float[Array, " 64"],
) -> tuple[
    Float[Array, "64 n"],
    Float[Array, " 64"],
    Float[Array, " 64"],
    Float[Array, " 64"],
]:
    """Weights of more keys, what older sums fade by, and maximum and total with them.

    Scores and maximum are times log2 e.
    """
    top = jnp.maximum(before, jnp.max(scores, axis=1))
    fade = jnp.exp2(before - top)
    weights = jnp.exp2(scores - rows_over(top, scores.shape[1]))
    return weights, fade, top, total * fade + jnp.sum(weights, axis=1)


def add_values(
    sums: Sums,
    fade: Float[Array, " 64"],
    weights: Any,
    values: Any,
    channels: Sequence[Any],
) -> Sums:
    """The sums of some channels, with more values; both are in shared memory."""
    faded = [
        old * rows_over(fade, part.size)
        for part, old in zip(channels, sums, strict=True)
    ]
    parts = [values.at[:, part] for part in channels]
    return add_products(faded, weights, parts)


def store_means(
    out: Any,
    place: tuple[Any, ...],
    sums: Sums,
    total: Float[Array, " 64"],
    channels: Sequence[Any],
) -> None:
    """What was read, to the device's memory; ``place`` is that of the rows."""
    for part, read in zip(channels, sums, strict=True):
        mean = read / rows_over(total, part.size)
        compat.gpu_store(out.at[(*place, part)], mean)


def forget(values: Any, keep: Bool[Array, " 64"]) -> None:
    """Zero the values of slots that hold nothing."""
    for part in channels_of(values.shape[1], widest=TILE):  # more may not fit
        there = values.at[:, part]
        found = compat.gpu_load(there, WHOLE)
        held = rows_over(keep, part.size)
        there[...] = jnp.where(held, found, jnp.zeros_like(found))
    plgpu.commit_smem()


def count(axis: int) -> Int[Array, "64 64"]:
    """Rows or columns, numbered."""
    return plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), axis, layout=WHOLE)


def rows_over(x: Array, width: int) -> Array:
    """A number a row, over the row's columns."""
    return jax.lax.broadcast_in_dim(x, (TILE, width), [0])


def slots_over(x: Array) -> Array:
    """A number a slot, over all rows."""
    return jax.lax.broadcast_in_dim(x, (TILE, TILE), [1])
