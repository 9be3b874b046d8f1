"""Window attention for NVIDIA's Hopper, a Mosaic GPU kernel.

A block of threads reads a share of one KV head's cache for 64 rows: the query heads of
that KV head by the window's rows. Steps of 64 slots are copied ahead of their use, and
each goes on with the rows' softmax (Milakov and Gimelshein, 1805.02867). Shares of the
cache, of which a small batch has several, are merged by their log-sum-exp (Dao et al.,
Flash-Decoding). The first takes the window's own keys as well. Steps beyond a row's
length, and those that a sliding window has left behind, are never asked for.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import compat
from pallas_kernels.window_attention.gpu_body import Inputs, Scratch, attend
from pallas_kernels.window_attention.gpu_plan import TILE, Plan, make_plan, swizzle_of
from pallas_kernels.window_attention.plan import Options, Shapes, shapes_of
from pallas_kernels.window_attention.rows import (
    apply_sinks,
    first_positions,
    pack_keys,
    pack_queries,
    rows_of_heads,
    steps_in_sight,
    unpack_outputs,
    window_seen,
)


@functools.partial(jax.jit, static_argnames=("options", "splits", "interpret"))
def window_attention(
    q: Float[Array, "B W Hq D"],
    k: Float[Array, "B W H D"],
    v: Float[Array, "B W H D"],
    k_cache: Float[Array, "B_or_pages H T_or_size D"],
    v_cache: Float[Array, "B_or_pages H T_or_size D"],
    lengths: Int[Array, " B"],
    ancestors: Bool[Array, "B W W"],
    positions: Int[Array, "B W"] | None,
    slots: Int[Array, "B T"] | None,
    sinks: Float[Array, " Hq"] | None,
    table: Int[Array, "B blocks"] | None = None,
    *,
    options: Options,
    splits: int | None = None,
    interpret: compat.Interpret = False,
) -> Float[Array, "B W Hq D"]:
    """As ``reference.window_attention``.

    ``splits`` overrides how many blocks of threads share a row's cache.
    """
    shapes = shapes_of(q, k_cache, v_cache, table)
    plan = make_plan(shapes, splits=splits)
    if not options.ring:  # which holds the last of more positions than it has slots
        lengths = jnp.minimum(lengths, shapes.capacity)
    spans = steps_in_sight(lengths, positions, options, TILE, plan.blocks)
    firsts = first_positions(positions, options.reach)
    seen = window_seen(ancestors, positions, firsts, plan.window)
    read, lse = _call(
        {
            "lengths": lengths,
            "spans": jnp.stack(spans, axis=1),
            "q": pack_queries(q, options.scale, shapes, plan.rows, k_cache.dtype),
            "seen": rows_of_heads(seen, shapes, plan.rows),
            "firsts": None
            if firsts is None
            else rows_of_heads(firsts, shapes, plan.rows),
            "k": pack_keys(k, plan.window, k_cache.dtype),
            "v": pack_keys(v, plan.window, v_cache.dtype),
            "k_cache": k_cache,
            "v_cache": v_cache,
            "slots": slots,
            "table": table,
        },
        shapes,
        plan,
        options,
        interpret,
    )
    read, lse = merge(read, lse)
    if sinks is not None:
        read = apply_sinks(read, lse, sinks, shapes)
    return unpack_outputs(read, shapes)


def merge(
    read: Float[Array, "splits B H R D"], lse: Float[Array, "splits B H R"]
) -> tuple[Float[Array, "B H R D"], Float[Array, "B H R"]]:
    """What the shares of a cache read, as one; ``lse`` to base 2, and then to base e.

    The first share is never empty, for it has the window.
    """
    top = jnp.max(lse, axis=0)
    weights = jnp.exp2(lse - top)
    total = jnp.sum(weights, axis=0)
    merged = jnp.sum(read * weights[..., None], axis=0) / total[..., None]
    return merged, (top + jnp.log2(total)) * jnp.log(2.0)


def _call(
    arrays: dict[str, Any],
    shapes: Shapes,
    plan: Plan,
    options: Options,
    interpret: compat.Interpret,
) -> Any:
    names = [name for name, x in arrays.items() if x is not None]
    absent = {name: None for name, x in arrays.items() if x is None}

    def window_attention(*refs: Any) -> None:
        inputs = Inputs(**dict(zip(names, refs, strict=False)), **absent)
        out, lse, *scratch = refs[len(names) :]
        attend(inputs, Scratch(*scratch), out, lse, shapes, plan, options)

    heads = (plan.splits, shapes.batch, shapes.kv_heads, plan.rows)
    call = compat.gpu_kernel(
        window_attention,
        out_type=[
            jax.ShapeDtypeStruct((*heads, shapes.dim), jnp.float32),
            jax.ShapeDtypeStruct(heads, jnp.float32),
        ],
        scratch_types=_scratch(shapes, plan),
        grid=(plan.splits, plan.row_tiles, shapes.batch * shapes.kv_heads),
        grid_names=("splits", "tiles", "heads"),
        interpret=interpret,
    )
    return call(*(arrays[name] for name in names))


def _scratch(shapes: Shapes, plan: Plan) -> list[Any]:
    """As ``Scratch`` has them. Both sides of a product must be swizzled alike."""

    def shared(swizzle: int, *shape: int) -> Any:
        """Rows of shared memory as the matrix units take them."""
        tiling = plgpu.TilingTransform((8, swizzle // 2))  # pyright: ignore
        swizzled = plgpu.SwizzleTransform(swizzle)  # pyright: ignore
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=(tiling, swizzled))

    dim, step = shapes.dim, (plan.stages, TILE, shapes.dim)
    wide = swizzle_of(dim)
    own = min(wide, swizzle_of(plan.window))
    return [
        shared(wide, TILE, dim),
        shared(wide, plan.window, dim),
        shared(own, plan.window, dim),
        shared(own, TILE, plan.window),
        shared(wide, *step),
        shared(wide, *step),
        shared(wide, TILE, TILE),
        plgpu.Barrier(num_arrivals=3),
        plgpu.Barrier(num_arrivals=2 * plan.pieces, num_barriers=plan.stages),
    ]
