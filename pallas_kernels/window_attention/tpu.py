"""Window attention for TPU, a Mosaic kernel.

One step of the grid reads a block of the cache for all rows of some KV heads, and goes
on with their softmax (Milakov and Gimelshein, 1805.02867): a running maximum, total and
sum. The window's own keys come first, so that maximum is finite from the start. Blocks
beyond a row's length, and those that a sliding window has left behind, are neither
copied nor looked at.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import compat
from pallas_kernels.window_attention.plan import LANES, Plan, make_plan, shapes_of
from pallas_kernels.window_attention.rows import (
    EARLIEST,
    FIRST_LANE,
    pack_keys,
    pack_queries,
    row_facts,
    unpack_outputs,
)

LOWEST = -1e30
"""A maximum before anything was seen. It is finite, and below every score."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What a call's program depends on besides its shapes."""

    scale: float
    reach: int | None = None
    softcap: float | None = None
    ring: bool = False
    """Slots say which position they hold."""
    shared: bool = False
    """Keys are the values too, as of latent attention."""
    with_lse: bool = False


@functools.partial(jax.jit, static_argnames=("options", "block", "interpret"))
def window_attention(
    q: Float[Array, "B W Hq D"],
    k: Float[Array, "B W H D"],
    v: Float[Array, "B W H Dv"] | None,
    k_cache: Float[Array, "B H T D"],
    v_cache: Float[Array, "B H T Dv"] | None,
    lengths: Int[Array, " B"],
    ancestors: Bool[Array, "B W W"],
    positions: Int[Array, "B W"] | None,
    slots: Int[Array, "B T"] | None,
    sinks: Float[Array, " Hq"] | None,
    *,
    options: Options,
    block: int | None = None,
    interpret: compat.Interpret = False,
) -> Float[Array, "B W Hq Dv"]:
    """As ``reference.window_attention``; ``None`` for values: they are the keys."""
    shapes = shapes_of(q, k_cache, k_cache if v_cache is None else v_cache)
    plan = make_plan(shapes, k_cache.dtype, block=block)
    dtype = k_cache.dtype
    inputs = [
        pack_queries(q, options.scale, shapes, plan, dtype),
        row_facts(ancestors, positions, options.reach, shapes, plan),
        pack_keys(k, plan, dtype),
        *([] if v is None else [pack_keys(v, plan, dtype)]),
        *([] if slots is None else [slots[:, None]]),
        *(
            cache.swapaxes(2, 3) if plan.turned else cache
            for cache in (k_cache, v_cache)
            if cache is not None
        ),
    ]
    if not options.ring:  # which holds the last of more positions than it has slots
        lengths = jnp.minimum(lengths, shapes.capacity)
    blocks = _blocks_in_sight(lengths, positions, options, plan)
    out = pl.pallas_call(
        functools.partial(_kernel, plan=plan, options=options),
        out_shape=_outputs(shapes, plan, options),
        grid_spec=_grid(shapes, plan, options),
        compiler_params=compat.tpu_params(
            ("parallel", "parallel", "parallel", "arbitrary")
        ),
        cost_estimate=_cost(shapes, k_cache.dtype, options),
        interpret=interpret,
        name="window_attention",
    )(lengths, *blocks, *inputs)
    read = out[0]
    if sinks is not None:
        # a key without a value only takes its share of the total
        sink = sinks.astype(jnp.float32).reshape(1, shapes.kv_heads, shapes.group, 1)
        sink = jnp.repeat(sink, shapes.width, axis=3).reshape(1, shapes.kv_heads, -1)
        missing = plan.rows - shapes.rows
        sink = jnp.pad(sink, [(0, 0), (0, 0), (0, missing)])
        read = read * jax.nn.sigmoid(out[1][..., 0] - sink)[..., None]
    return unpack_outputs(read, shapes)


def _blocks_in_sight(
    lengths: Int[Array, " B"],
    positions: Int[Array, "B W"] | None,
    options: Options,
    plan: Plan,
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """The first block of the cache that a batch row looks at, and the one behind the
    last.
    """
    behind = (lengths + (plan.block - 1)) // plan.block
    first = jnp.zeros_like(lengths)
    if options.ring:
        # a ring may hold any position in any slot
        behind = jnp.where(lengths > 0, jnp.int32(plan.blocks), 0)
    elif options.reach is not None:
        assert positions is not None
        first = jnp.min(positions, axis=1) - jnp.int32(options.reach - 1)
        first = jnp.clip(first // plan.block, 0, plan.blocks)
    return first, behind


def _outputs(shapes: Any, plan: Plan, options: Options) -> list[jax.ShapeDtypeStruct]:
    rows = (shapes.batch, shapes.kv_heads, plan.rows)
    out = jax.ShapeDtypeStruct((*rows, shapes.value_dim), jnp.float32)
    lse = jax.ShapeDtypeStruct((*rows, LANES), jnp.float32)
    return [out, lse] if options.with_lse else [out]


def _grid(shapes: Any, plan: Plan, options: Options) -> pltpu.PrefetchScalarGridSpec:
    heads, rows, block = plan.heads, plan.row_tile, plan.block
    dim, value_dim = shapes.dim, shapes.value_dim

    def cached(b: Any, j: Any, firsts: Any, behinds: Any) -> Any:
        # past the end the last block stays, and is not copied again
        last = jnp.maximum(behinds[b] - 1, 0)
        return jnp.minimum(firsts[b] + j, last)

    def turn(b: int, h: int, t: int, n: int) -> tuple[int, ...]:
        return (b, h, n, t) if plan.turned else (b, h, t, n)

    cached_dims = [dim] if options.shared else [dim, value_dim]

    def spec(shape: tuple[int, ...], index: Any) -> pl.BlockSpec:
        return pl.BlockSpec(shape, index)

    own = lambda b, h, r, j, *_: (b, h, 0, 0)  # noqa: E731
    of_rows = lambda b, h, r, j, *_: (b, h, r, 0)  # noqa: E731

    def of_cache(b: Any, h: Any, r: Any, j: Any, lengths: Any, *ends: Any) -> Any:
        at = cached(b, j, *ends)
        return (b, h, 0, at) if plan.turned else (b, h, at, 0)

    def of_slots(b: Any, h: Any, r: Any, j: Any, lengths: Any, *ends: Any) -> Any:
        return (b, 0, cached(b, j, *ends))

    in_specs = [
        spec((1, heads, rows, dim), of_rows),
        spec((1, rows, LANES), lambda b, h, r, j, *_: (b, r, 0)),
        spec((1, heads, plan.window, dim), own),
        *([] if options.shared else [spec((1, heads, plan.window, value_dim), own)]),
        *([spec((1, 1, block), of_slots)] if options.ring else []),
        *[spec(turn(1, heads, block, n), of_cache) for n in cached_dims],
    ]
    out_specs = [spec((1, heads, rows, value_dim), of_rows)]
    if options.with_lse:
        out_specs.append(spec((1, heads, rows, LANES), of_rows))
    return pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=(
            shapes.batch,
            shapes.kv_heads // heads,
            plan.row_tiles,
            plan.blocks,
        ),
        in_specs=in_specs,
        out_specs=out_specs,
        scratch_shapes=[
            pltpu.VMEM((heads, rows, 1), jnp.float32),
            pltpu.VMEM((heads, rows, 1), jnp.float32),
            pltpu.VMEM((heads, rows, value_dim), jnp.float32),
        ],
    )


def _cost(shapes: Any, dtype: Any, options: Options) -> pl.CostEstimate:
    """For the compiler's schedule, as if every cache were full."""
    pairs = shapes.batch * shapes.q_heads * shapes.width * shapes.capacity
    wide = shapes.dim + (0 if options.shared else shapes.value_dim)
    slots = shapes.batch * shapes.kv_heads * shapes.capacity
    return pl.CostEstimate(
        flops=2 * pairs * (shapes.dim + shapes.value_dim),
        transcendentals=pairs,
        bytes_accessed=slots * wide * jnp.dtype(dtype).itemsize,
    )


@dataclasses.dataclass(frozen=True)
class _Refs:
    """What one step of the grid may touch."""

    q: Any
    facts: Any
    k: Any
    v: Any
    slots: Any
    k_cache: Any
    v_cache: Any
    out: Any
    lse: Any
    top: Any
    total: Any
    sum: Any


def _named(refs: tuple[Any, ...], options: Options) -> _Refs:
    left = list(refs)
    q, facts, k = left.pop(0), left.pop(0), left.pop(0)
    v = k if options.shared else left.pop(0)
    slots = left.pop(0) if options.ring else None
    k_cache = left.pop(0)
    v_cache = k_cache if options.shared else left.pop(0)
    out = left.pop(0)
    lse = left.pop(0) if options.with_lse else None
    return _Refs(q, facts, k, v, slots, k_cache, v_cache, out, lse, *left)


def _kernel(
    lengths: Any, firsts: Any, behinds: Any, *refs: Any, plan: Plan, options: Options
) -> None:
    x = _named(refs, options)
    row, step = pl.program_id(0), pl.program_id(3)
    length = lengths[row]
    at = firsts[row] + step

    @pl.when(step == 0)
    def _() -> None:
        _start(x, plan, options)

    base, turned = at * plan.block, plan.turned
    here = at < behinds[row]
    always_masked = options.ring or options.reach is not None
    whole = jnp.logical_and(base + plan.block <= length, not always_masked)

    @pl.when(jnp.logical_and(here, whole))
    def _() -> None:
        scores = _scores(x.q[0], x.k_cache[0], options, turned)
        _go_on(x, scores, x.v_cache[0], turned)

    @pl.when(jnp.logical_and(here, jnp.logical_not(whole)))
    def _() -> None:
        seen, held = _visible(x, base, length, plan, options)
        scores = _scores(x.q[0], x.k_cache[0], options, turned)
        # 0 * NaN is NaN, and slots that hold nothing may hold anything
        values = jnp.where(held, x.v_cache[0], jnp.zeros((), x.v_cache.dtype))
        _go_on(x, jnp.where(seen, scores, -jnp.inf), values, turned)

    @pl.when(step == plan.blocks - 1)
    def _() -> None:
        total = x.total[...]
        seen = total > 0  # not in rows that make up a tile
        x.out[0] = x.sum[...] / jnp.where(seen, total, 1.0)
        if x.lse is not None:
            lse = x.top[...] + jnp.log(total)
            x.lse[0] = jnp.broadcast_to(lse, (*lse.shape[:2], LANES))


def _start(x: _Refs, plan: Plan, options: Options) -> None:
    """The window's own keys."""
    x.top[...] = jnp.full(x.top.shape, LOWEST, jnp.float32)
    x.total[...] = jnp.zeros(x.total.shape, jnp.float32)
    x.sum[...] = jnp.zeros(x.sum.shape, jnp.float32)
    seen = x.facts[0][None, :, : plan.window] != 0
    scores = _scores(x.q[0], x.k[0], options)
    _go_on(x, jnp.where(seen, scores, -jnp.inf), x.v[0])


def _go_on(
    x: _Refs,
    scores: Float[Array, "H R T"],
    values: Float[Array, "H x y"],
    turned: bool = False,
) -> None:
    """Take more keys into the softmax."""
    top = jnp.maximum(x.top[...], jnp.max(scores, axis=-1, keepdims=True))
    before = jnp.exp(x.top[...] - top)
    weights = jnp.exp(scores - top)
    x.top[...] = top
    x.total[...] = x.total[...] * before + jnp.sum(weights, axis=-1, keepdims=True)
    x.sum[...] = x.sum[...] * before + _product(
        weights.astype(values.dtype), values, contract=2 if turned else 1
    )


def _scores(
    q: Float[Array, "H R D"],
    keys: Float[Array, "H x y"],
    options: Options,
    turned: bool = False,
) -> Float[Array, "H R T"]:
    scores = _product(q, keys, contract=1 if turned else 2)
    if options.softcap is not None:
        scores = options.softcap * jnp.tanh(scores / options.softcap)
    return scores


def _product(
    a: Float[Array, "H R n"], b: Float[Array, "H x y"], contract: int
) -> Float[Array, "H R m"]:
    """Summed in float32, and not rounded before that."""
    full = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a,
        b,
        (((2,), (contract,)), ((0,), (0,))),
        precision=full,
        preferred_element_type=jnp.float32,
    )


def _visible(
    x: _Refs, base: jax.Array, length: jax.Array, plan: Plan, options: Options
) -> tuple[Bool[Array, "1 R_or_1 T"], Bool[Array, "1 x y"]]:
    """Which slots of this block each row sees, and which hold something."""
    block = plan.block
    slot = base + jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)
    if options.ring:
        # behind the last slot a block holds anything
        real = slot < plan.capacity
        position = jnp.where(real, x.slots[0], -1)
    else:
        position = slot
    held = (position >= 0) & (position < length)
    seen = held
    if options.reach is not None:
        lane = jax.lax.broadcasted_iota(jnp.int32, x.facts.shape[1:], 1)
        first = jnp.where(lane == FIRST_LANE, x.facts[0], EARLIEST)
        seen = held & (position > jnp.max(first, axis=1, keepdims=True))
    if plan.turned:
        return seen[None], held[None]
    if options.ring:
        column = jnp.broadcast_to(held.astype(jnp.int32), (8, block)).T[:, :1] != 0
    else:
        column = jax.lax.broadcasted_iota(jnp.int32, (block, 1), 0) + base < length
    return seen[None], column[None]
