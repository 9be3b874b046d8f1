"""Window attention, as the decoder calls it.

On a TPU it is a kernel where ``plan.refusal`` finds nothing against it, on a Hopper GPU
one where ``gpu_plan.refusal`` does not, and elsewhere the reference;
``platforms.choices()`` says which.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Real

from pallas_kernels import compat, platforms
from pallas_kernels.mesh import Spread
from pallas_kernels.window_attention import gpu, gpu_plan, reference, tpu
from pallas_kernels.window_attention.by_row import window_attention_by_row
from pallas_kernels.window_attention.narrow import check_scales
from pallas_kernels.window_attention.pages import gather_pages
from pallas_kernels.window_attention.plan import Options, refusal

__all__ = ["window_attention", "window_attention_by_row"]

OPERATION = "window_attention"


def window_attention(
    q: Float[Array, "B W Hq D"],
    k: Float[Array, "B W H D"],
    v: Float[Array, "B W H Dv"],
    k_cache: Real[Array, "B_or_pages H T_or_size D"],
    v_cache: Real[Array, "B_or_pages H T_or_size Dv"],
    lengths: Int[Array, " B"],
    ancestors: Bool[Array, "B W W"],
    *,
    scale: float,
    positions: Int[Array, "B W"] | None = None,
    slots: Int[Array, "B T"] | None = None,
    reach: int | None = None,
    chosen: tuple[Bool[Array, "B W T"], Bool[Array, "B W W"]] | None = None,
    sinks: Float[Array, " Hq"] | None = None,
    softcap: float | None = None,
    k_scale: Float[Array, "B_or_pages H T_or_size"] | None = None,
    v_scale: Float[Array, "B_or_pages H T_or_size"] | None = None,
    table: Int[Array, "B blocks"] | None = None,
    spread: Spread | None = None,
    implementation: platforms.Implementation = "auto",
) -> Float[Array, "B W Hq Dv"]:
    """As ``reference.window_attention``, by the platform's kernel if it has one.

    Pass one array for keys and values if they are the same: it is then read once.
    With a ``table`` the caches are pools of pages, and so are their scales: entry ``i``
    of a row is the page of its positions ``i * size ..``, and one that is no page's id
    (-1, or as many as there are pages) stands for none. ``spread`` says how batch rows
    and KV heads lie on several devices; for ``implementation`` see
    ``platforms.choose``.
    """
    check_scales(k_cache, v_cache, k_scale, v_scale)
    reference.check_heads(q, k_cache, v_cache, reach, positions)
    if slots is not None and table is not None:
        raise ValueError("slots and table: a ring does not lie in pages, give one")
    shared = v is k and v_cache is k_cache
    options = Options(
        scale=scale,
        reach=reach,
        softcap=softcap,
        ring=slots is not None,
        shared=shared,
        with_lse=sinks is not None,
        scaled=k_scale is not None,
    )
    call, narrowed = (q, k_cache, v_cache, table), chosen is not None
    return platforms.choose(
        OPERATION,
        (
            q,
            k,
            None if shared else v,
            k_cache,
            None if shared else v_cache,
            *_as_int32(lengths),
            ancestors,
            *_as_int32(positions, slots),
            sinks,
            *_as_int32(table),
            *(() if k_scale is None else (k_scale, v_scale)),
        ),
        reference=functools.partial(_reference, chosen=chosen, options=options),
        kernels=_kernels(call, options, spread, window=k.dtype, narrowed=narrowed),
        implementation=implementation,
    )


def _as_int32(*numbers: jax.Array | None) -> list[jax.Array | None]:
    """Narrower integers would overflow where a kernel reckons with them."""
    return [None if x is None else x.astype(jnp.int32) for x in numbers]


def _kernels(
    call: tuple[jax.Array, jax.Array, jax.Array, jax.Array | None],
    options: Options,
    spread: Spread | None,
    *,
    window: Any,
    narrowed: bool,
) -> dict[platforms.Platform, platforms.Kernel]:
    """By platform, with what each has against queries, caches and table."""
    q, k_cache, _, table = call

    def kernel(run: Callable[..., jax.Array], against: str | None) -> platforms.Kernel:
        run = functools.partial(run, options=options)
        if spread is not None:
            run = _on_each_device(run, spread, q, k_cache, table is not None, options)
        return platforms.Kernel(run, against)

    against_tpu = refusal(
        *call,
        narrowed=narrowed,
        window=window,
        shared=options.shared,
        scaled=options.scaled,
    )
    against_gpu = gpu_plan.refusal(*call, options, narrowed=narrowed, window=window)
    return {
        "tpu": kernel(tpu.window_attention, against_tpu),
        "cuda": kernel(gpu.window_attention, against_gpu),
    }


def _reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    k_cache: jax.Array,
    v_cache: jax.Array | None,
    lengths: jax.Array,
    ancestors: jax.Array,
    positions: jax.Array | None,
    slots: jax.Array | None,
    sinks: jax.Array | None,
    table: jax.Array | None,
    *scales: jax.Array,
    chosen: tuple[jax.Array, jax.Array] | None,
    options: Options,
) -> jax.Array:
    """``reference.window_attention`` of a kernel's arguments, pages gathered."""
    if table is not None:
        k_cache = gather_pages(k_cache, table)
        v_cache = None if v_cache is None else gather_pages(v_cache, table)
        scales = tuple(gather_pages(scale, table) for scale in scales)
    return reference.window_attention(
        q,
        k,
        k if v is None else v,
        k_cache,
        k_cache if v_cache is None else v_cache,
        lengths,
        ancestors,
        scale=options.scale,
        positions=positions,
        slots=slots,
        reach=options.reach,
        chosen=chosen,
        sinks=sinks,
        softcap=options.softcap,
        **dict(zip(("k_scale", "v_scale"), scales, strict=False)),
    )


def _on_each_device(
    kernel: Callable[..., jax.Array],
    spread: Spread,
    q: jax.Array,
    k_cache: jax.Array,
    paged: bool,
    options: Options,
) -> Callable[..., jax.Array]:
    """The kernel on the batch rows and heads of each device.

    Query heads of a single KV head can be shared out as well: it is whole everywhere.
    """
    kv_heads = k_cache.shape[1]
    single = kv_heads == 1
    spread = spread.narrowed(q.shape[0], q.shape[2] if single else kv_heads)
    batch, heads = spread.batch, spread.heads
    kv = None if single else heads
    rows = PartitionSpec(batch, None, kv)
    cache = PartitionSpec(None if paged else batch, kv)
    by_row = PartitionSpec(batch)
    queries = PartitionSpec(batch, None, heads)
    inputs = (
        *(queries, rows, rows, cache, cache),
        *(by_row, by_row, by_row, by_row),  # lengths, ancestors, positions, slots
        *(PartitionSpec(heads), by_row),  # sinks, table
        *((cache, cache) if options.scaled else ()),
    )

    def run(*arguments: Any, interpret: compat.Interpret = False) -> jax.Array:
        local = functools.partial(kernel, interpret=interpret)
        return spread.run(local, inputs, queries)(*arguments)

    return run
