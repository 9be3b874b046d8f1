"""Window attention for TPU, a Mosaic kernel.

One step of the grid reads a block of the cache for all rows of some KV heads, and goes
on with their softmax (Milakov and Gimelshein, 1805.02867): a running maximum, total and
sum. The window's own keys come first, so that maximum is finite from the start. Blocks
beyond a row's length, and those that a sliding window has left behind, are neither
copied nor looked at. Of a paged cache a block is several pages, each copied by itself.
Where nothing else could run at once, a large cache is read in two shares, for devices
of two cores, and these are merged by their log-sum-exp. One of them has the window.
A cache of one byte a number is copied as it is and widened here, and its scales with
it, of all heads at once: their slots lie in lanes, as those of scores do.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int, Real

from pallas_kernels import compat
from pallas_kernels.window_attention.body import kernel
from pallas_kernels.window_attention.narrow import computed_in
from pallas_kernels.window_attention.plan import (
    LANES,
    Options,
    Plan,
    Shapes,
    make_plan,
    shapes_of,
)
from pallas_kernels.window_attention.rows import (
    apply_sinks,
    merge,
    pack_keys,
    pack_queries,
    row_facts,
    shares_of,
    steps_in_sight,
    unpack_outputs,
)


@functools.partial(jax.jit, static_argnames=("options", "block", "splits", "interpret"))
def window_attention(
    q: Float[Array, "B W Hq D"],
    k: Float[Array, "B W H D"],
    v: Float[Array, "B W H Dv"] | None,
    k_cache: Real[Array, "B_or_pages H T_or_size D"],
    v_cache: Real[Array, "B_or_pages H T_or_size Dv"] | None,
    lengths: Int[Array, " B"],
    ancestors: Bool[Array, "B W W"],
    positions: Int[Array, "B W"] | None,
    slots: Int[Array, "B T"] | None,
    sinks: Float[Array, " Hq"] | None,
    table: Int[Array, "B blocks"] | None = None,
    k_scale: Float[Array, "B_or_pages H T_or_size"] | None = None,
    v_scale: Float[Array, "B_or_pages H T_or_size"] | None = None,
    *,
    options: Options,
    block: int | None = None,
    splits: int | None = None,
    interpret: compat.Interpret = False,
) -> Float[Array, "B W Hq Dv"]:
    """As ``reference.window_attention``; ``None`` for values: they are the keys.

    ``block`` overrides how many slots are read in a step, and ``splits`` in how many
    shares a cache is read.
    """
    caches = [k_cache] if v_cache is None else [k_cache, v_cache]
    scales = [scale for scale in (k_scale, v_scale) if scale is not None]
    shapes = shapes_of(q, caches[0], caches[-1], table)
    plan = make_plan(shapes, k_cache.dtype, window=k.dtype, block=block, splits=splits)
    if plan.splits > 1:
        options = dataclasses.replace(options, with_lse=True)
    dtype = computed_in(k_cache.dtype, k.dtype)
    if not options.ring:  # which holds the last of more positions than it has slots
        lengths = jnp.minimum(lengths, shapes.capacity)
    if plan.turned:
        caches = [cache.swapaxes(2, 3) for cache in caches]
    if interpret is False:
        caches = [compat.left_in_hbm(cache) for cache in caches]
        scales = [compat.left_in_hbm(scale) for scale in scales]
    sight = steps_in_sight(lengths, positions, options, plan.block, plan.blocks)
    known = [lengths, *shares_of(*sight, plan.splits)]
    if table is not None:
        # where there is no page any will do: nothing of it is looked at
        known.append(jnp.clip(table, 0, k_cache.shape[0] - 1))
    out = pl.pallas_call(
        functools.partial(kernel, plan=plan, options=options),
        out_shape=_outputs(shapes, plan, options),
        grid_spec=_grid(shapes, plan, options),
        compiler_params=compat.tpu_params(
            ("parallel", "parallel", "parallel", "parallel", "arbitrary")
        ),
        cost_estimate=_cost(shapes, k_cache.dtype, options),
        interpret=interpret,
        name="window_attention",
    )(
        *known,
        pack_queries(q, options.scale, shapes, plan.rows, dtype),
        row_facts(ancestors, positions, options.reach, shapes, plan),
        *[pack_keys(rows, plan.window, dtype) for rows in (k, v) if rows is not None],
        *([] if slots is None else [slots[:, None]]),
        *[array for array in (*caches, *scales) for _ in range(plan.pages or 1)],
    )
    read, lse = merge(*out) if plan.splits > 1 else (out[0][0], out[-1][0])
    if sinks is not None:
        read = apply_sinks(read, lse[..., 0], sinks, shapes)
    return unpack_outputs(read, shapes)


def _outputs(
    shapes: Shapes, plan: Plan, options: Options
) -> list[jax.ShapeDtypeStruct]:
    rows = (plan.splits, shapes.batch, shapes.kv_heads, plan.rows)
    out = jax.ShapeDtypeStruct((*rows, shapes.value_dim), jnp.float32)
    return [out, out] if options.with_lse else [out]


def _grid(shapes: Shapes, plan: Plan, options: Options) -> pltpu.PrefetchScalarGridSpec:
    """Shares, batch rows, heads, row tiles and, one after another, a share's blocks."""
    heads, rows = plan.heads, plan.row_tile
    of_rows = lambda s, b, h, r, j, *_: (b, h, r, 0)  # noqa: E731
    of_share = lambda s, b, h, r, j, *_: (s, b, h, r, 0)  # noqa: E731
    window = lambda s, b, h, r, j, *_: (b, h, 0, 0)  # noqa: E731
    dims = [shapes.dim] if options.shared else [shapes.dim, shapes.value_dim]
    out = pl.BlockSpec((None, 1, heads, rows, shapes.value_dim), of_share)
    return pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=4 if plan.pages else 3,
        grid=(
            plan.splits,
            shapes.batch,
            shapes.kv_heads // heads,
            plan.row_tiles,
            plan.steps,
        ),
        in_specs=[
            pl.BlockSpec((1, heads, rows, shapes.dim), of_rows),
            pl.BlockSpec((1, rows, LANES), lambda s, b, h, r, j, *_: (b, r, 0)),
            *[pl.BlockSpec((1, heads, plan.window, n), window) for n in dims],
            *([_slots_spec(plan)] if options.ring else []),
            *[spec for n in dims for spec in _cache_specs(n, shapes, plan)],
            *(2 * _scale_specs(shapes, plan) if options.scaled else []),
        ],
        out_specs=[out, out] if options.with_lse else [out],
        scratch_shapes=[
            pltpu.VMEM((heads, rows, 1), jnp.float32),
            pltpu.VMEM((heads, rows, 1), jnp.float32),
            pltpu.VMEM((heads, rows, shapes.value_dim), jnp.float32),
        ],
    )


def _block_at(
    s: Any, b: Any, h: Any, r: Any, j: Any, lengths: Any, *ends: Any
) -> jax.Array:
    """Past the end the last block stays, and is not copied again."""
    firsts, behinds, *_ = ends
    return jnp.minimum(firsts[s, b] + j, jnp.maximum(behinds[s, b] - 1, 0))


def _slots_spec(plan: Plan) -> pl.BlockSpec:
    return pl.BlockSpec((1, 1, plan.block), lambda *at: (at[1], 0, _block_at(*at)))


def _cache_specs(dim: int, shapes: Shapes, plan: Plan) -> list[pl.BlockSpec]:
    """Of one cache: a block of its slots, or the pages that make one up."""
    size = shapes.page_size or plan.block

    def spec(piece: Any) -> pl.BlockSpec:
        def index(*at: Any) -> Any:
            row, t = piece(*at)
            return (row, at[2], 0, t) if plan.turned else (row, at[2], t, 0)

        ends = (dim, size) if plan.turned else (size, dim)
        return pl.BlockSpec((1, plan.heads, *ends), index)

    return [spec(piece) for piece in _pieces(shapes, plan)]


def _scale_specs(shapes: Shapes, plan: Plan) -> list[pl.BlockSpec]:
    """Of one cache's scales: all heads of the same slots."""
    size = shapes.page_size or plan.block

    def spec(piece: Any) -> pl.BlockSpec:
        def index(*at: Any) -> Any:
            row, t = piece(*at)
            return row, 0, t

        return pl.BlockSpec((1, shapes.kv_heads, size), index)

    return [spec(piece) for piece in _pieces(shapes, plan)]


def _pieces(shapes: Shapes, plan: Plan) -> list[Any]:
    """Where the pieces of a step lie: in which batch row or page, and where there."""
    size = shapes.page_size
    if size is None:
        return [lambda *at: (at[1], _block_at(*at))]

    def page(i: int) -> Any:
        def where(*at: Any) -> Any:
            row, lengths, table = at[1], at[5], at[8]
            last = jnp.maximum((lengths[row] + (size - 1)) // size - 1, 0)
            entry = _block_at(*at) * plan.pages + i
            return table[row, jnp.minimum(entry, last)], 0

        return where

    return [page(i) for i in range(plan.pages)]


def _cost(shapes: Shapes, dtype: Any, options: Options) -> pl.CostEstimate:
    """For the compiler's schedule, as if every cache were full."""
    pairs = shapes.batch * shapes.q_heads * shapes.width * shapes.capacity
    wide = shapes.dim + (0 if options.shared else shapes.value_dim)
    slots = shapes.batch * shapes.kv_heads * shapes.capacity
    return pl.CostEstimate(
        flops=2 * pairs * (shapes.dim + shapes.value_dim),
        transcendentals=pairs,
        bytes_accessed=slots * wide * jnp.dtype(dtype).itemsize,
    )
