"""Window attention for NVIDIA's Hopper, a Mosaic GPU kernel.

A block of threads reads a share of one KV head's cache for 64 rows: the query heads of
that KV head by the window's rows. Steps of 64 slots are copied ahead of their use, and
each goes on with the rows' softmax (Milakov and Gimelshein, 1805.02867). Shares of the
cache, of which a small batch has several, are merged by their log-sum-exp (Dao et al.,
Flash-Decoding). The first takes the window's own keys as well. Steps beyond a row's
length, and those that a sliding window has left behind, are never asked for.

Latent attention, whose keys are its values, has a body of its own: ``gpu_latent``.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Real

from pallas_kernels import compat, gpu_products
from pallas_kernels.window_attention import gpu_body, gpu_latent
from pallas_kernels.window_attention.gpu_plan import TILE, Plan, make_plan
from pallas_kernels.window_attention.gpu_slots import Inputs
from pallas_kernels.window_attention.narrow import computed_in
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
    v: Float[Array, "B W H D"] | None,
    k_cache: Real[Array, "B_or_pages H T_or_size D"],
    v_cache: Real[Array, "B_or_pages H T_or_size D"] | None,
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
    splits: int | None = None,
    interpret: compat.Interpret = False,
) -> Float[Array, "B W Hq D"]:
    """As ``reference.window_attention``; no values if the keys are these as well.

    ``splits`` overrides how many blocks of threads share a row's cache.
    """
    assert (v is None) == (v_cache is None) == options.shared
    shapes = shapes_of(q, k_cache, k_cache if v_cache is None else v_cache, table)
    plan = make_plan(
        shapes,
        latent=options.shared,
        cache=k_cache.dtype,
        scaled=options.scaled,
        splits=splits,
    )
    wide = computed_in(k_cache.dtype, k.dtype)
    if not options.ring:  # which holds the last of more positions than it has slots
        lengths = jnp.minimum(lengths, shapes.capacity)
    spans = steps_in_sight(lengths, positions, options, TILE, plan.blocks)
    firsts = first_positions(positions, options.reach)
    seen = window_seen(ancestors, positions, firsts, plan.window)
    read, lse = _call(
        {
            "lengths": lengths,
            "spans": jnp.stack(spans, axis=1),
            "q": pack_queries(q, options.scale, shapes, plan.rows, wide),
            "seen": rows_of_heads(seen, shapes, plan.rows),
            "firsts": None
            if firsts is None
            else rows_of_heads(firsts, shapes, plan.rows),
            "k": pack_keys(k, plan.window, wide),
            "v": None if v is None else pack_keys(v, plan.window, wide),
            "k_cache": k_cache,
            "v_cache": v_cache,
            "k_scale": k_scale,
            "v_scale": v_scale,
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
    program = gpu_latent if plan.latent else gpu_body

    def window_attention(*refs: Any) -> None:
        inputs = Inputs(**dict(zip(names, refs, strict=False)), **absent)
        rest = refs[len(names) :]
        with gpu_products.traced_for(interpret):
            program.attend(inputs, *rest, shapes=shapes, plan=plan, options=options)

    heads = (plan.splits, shapes.batch, shapes.kv_heads, plan.rows)
    call = compat.gpu_kernel(
        window_attention,
        out_type=[
            jax.ShapeDtypeStruct((*heads, shapes.dim), jnp.float32),
            jax.ShapeDtypeStruct(heads, jnp.float32),
        ],
        scratch_types=program.scratch_of(shapes, plan),
        grid=(plan.splits, plan.row_tiles, shapes.batch * shapes.kv_heads),
        grid_names=("splits", "tiles", "heads"),
        interpret=interpret,
        **program.LAUNCH,
    )
    return call(*(arrays[name] for name in names))
