"""The body of the Hopper kernel of window attention: one tile and one share of a cache.

128 threads do it all: they ask for the slots of steps to come, and multiply those that
have arrived. The running maximum, total and sum of the softmax are in registers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import compat
from pallas_kernels.window_attention.gpu_plan import TILE, Plan
from pallas_kernels.window_attention.plan import Options, Shapes

LOWEST = -1e30
"""A maximum before anything was seen. It is finite, and below every score."""

LOG2_E = math.log2(math.e)

_TILE = plgpu.Layout.WGMMA
_BY_ROW = plgpu.Layout.WGMMA.reduce(1)
_BY_SLOT = plgpu.Layout.WGMMA.reduce(0)

Softmax = tuple[
    tuple[Float[Array, "64 _"], ...], Float[Array, " 64"], Float[Array, " 64"]
]
"""Sum (64 channels at a time), maximum (times log2 e) and total of each row so far."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """In the device's memory."""

    lengths: Any  # [B]
    spans: (
        Any  # [B, 2]: the first step of the cache to look at, and that behind the last
    )
    q: Any  # [B, H, rows, D]
    seen: Any  # [B, rows, window]: which window rows a row sees
    firsts: Any  # [B, rows]: after which position a row sees the cache, or None
    k: Any  # [B, H, window, D]
    v: Any
    k_cache: Any  # [B, H, T, D] or [pages, H, size, D]
    v_cache: Any
    slots: Any  # [B, T], or None
    table: Any  # [B, blocks], or None


@dataclasses.dataclass(frozen=True)
class Scratch:
    """In shared memory."""

    q: Any
    k: Any
    v: Any
    weights: Any  # [64, window]
    k_steps: Any  # [stages, 64, D]
    v_steps: Any
    step_weights: Any  # [64, 64]
    own_arrived: Any
    arrived: Any


@dataclasses.dataclass(frozen=True)
class Place:
    """Which part of the work this is."""

    batch: Any
    head: Any
    tile: Any
    split: Any
    length: Any
    first: Any
    """Step of the cache."""
    steps: Any
    """How many."""


def place(x: Inputs, shapes: Shapes, plan: Plan) -> Place:
    """From the grid: a row's steps are shared out evenly, whatever its length."""
    at = jax.lax.axis_index("heads")
    split = jax.lax.axis_index("splits")
    batch = jax.lax.div(at, jnp.int32(shapes.kv_heads))
    begin, behind = x.spans[batch, 0], x.spans[batch, 1]
    shares = jnp.int32(plan.splits)
    each = jax.lax.div(behind - begin + (shares - 1), shares)
    first = begin + split * each
    return Place(
        batch=batch,
        head=jax.lax.rem(at, jnp.int32(shapes.kv_heads)),
        tile=jax.lax.axis_index("tiles"),
        split=split,
        length=x.lengths[batch],
        first=first,
        steps=jnp.minimum(each, jnp.maximum(behind - first, 0)),
    )


def attend(
    x: Inputs,
    s: Scratch,
    out: Any,
    lse: Any,
    shapes: Shapes,
    plan: Plan,
    options: Options,
) -> None:
    """All of one block of threads."""
    at = place(x, shapes, plan)
    rows = pl.ds(at.tile * TILE, TILE)
    for source, target in (
        (x.q.at[at.batch, at.head, rows], s.q),
        (x.k.at[at.batch, at.head], s.k),
        (x.v.at[at.batch, at.head], s.v),
    ):
        plgpu.copy_gmem_to_smem(source, target, s.own_arrived)
    for i in range(plan.stages):
        pl.when(i < at.steps)(lambda i=i: _fetch(x, s, at, i, shapes, plan))
    plgpu.barrier_wait(s.own_arrived)
    state = _own(x, s, at, rows, options)

    def step(i: Any, state: Softmax) -> Softmax:
        stage = jax.lax.rem(i, jnp.int32(plan.stages))
        plgpu.barrier_wait(s.arrived.at[stage])
        state = _cached(x, s, at, i, stage, rows, state, shapes, options)
        pl.when(i + plan.stages < at.steps)(
            lambda: _fetch(x, s, at, i + plan.stages, shapes, plan)
        )
        return state

    read, top, total = jax.lax.fori_loop(0, at.steps, step, state)
    # a row that makes up a tile, or a share without a slot, may have seen nothing
    some = jnp.where(total > 0, total, 1.0)
    here = (at.split, at.batch, at.head, rows)
    for channels, part in zip(_channels(shapes.dim), read, strict=True):
        mean = part / _rows_over(some, channels.size)
        compat.gpu_store(out.at[(*here, channels)], mean)
    compat.gpu_store(lse.at[here], top + jnp.log2(total))


def _begin(at: Place, i: Any, shapes: Shapes) -> Any:
    """The first slot of a step. The last step ends with the cache, and may look back on
    slots of the one before.
    """
    begin = (at.first + i) * TILE
    if shapes.page_size is not None:
        return begin
    return jnp.minimum(begin, shapes.capacity - TILE)


def _fetch(
    x: Inputs, s: Scratch, at: Place, i: Any, shapes: Shapes, plan: Plan
) -> None:
    """Ask for the slots of a step."""
    stage = jax.lax.rem(jnp.int32(i), jnp.int32(plan.stages))
    begin = _begin(at, i, shapes)
    size = shapes.page_size
    for n in range(plan.pieces):
        to = pl.ds(n * plan.piece, plan.piece)
        row, slot = at.batch, begin
        if size is not None:
            # behind the last page any will do: nothing of it is looked at
            last = jax.lax.div(at.length - 1, jnp.int32(size))
            slot = begin + n * plan.piece
            row = x.table[
                at.batch, jnp.minimum(jax.lax.div(slot, jnp.int32(size)), last)
            ]
            slot = jax.lax.rem(slot, jnp.int32(size))
        for cache, steps in ((x.k_cache, s.k_steps), (x.v_cache, s.v_steps)):
            plgpu.copy_gmem_to_smem(
                cache.at[row, at.head, pl.ds(slot, plan.piece)],
                steps.at[stage, to] if plan.pieces > 1 else steps.at[stage],
                s.arrived.at[stage],
            )


def _own(x: Inputs, s: Scratch, at: Place, rows: Any, options: Options) -> Softmax:
    """The window's own keys, which the first share of the cache takes."""
    nothing = tuple(
        plgpu.layout_cast(jnp.zeros((TILE, channels.size), jnp.float32), _TILE)
        for channels in _channels(s.v.shape[-1])
    )
    lowest = plgpu.layout_cast(jnp.full((TILE,), LOWEST, jnp.float32), _BY_ROW)
    zero = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), _BY_ROW)
    seen = compat.gpu_load(x.seen.at[at.batch, rows], _TILE)
    scores = _scores(s.q, s.k, options)
    scores = jnp.where((seen != 0) & (at.split == 0), scores, -jnp.inf)
    return _go_on((nothing, lowest, zero), scores, s.weights, s.v)


def _cached(
    x: Inputs,
    s: Scratch,
    at: Place,
    i: Any,
    stage: Any,
    rows: Any,
    state: Softmax,
    shapes: Shapes,
    options: Options,
) -> Softmax:
    """A step's slots of the cache."""
    keys, values = s.k_steps.at[stage], s.v_steps.at[stage]
    begin = _begin(at, i, shapes)
    column = _count(1)
    # what the step before had is not taken twice
    seen = column >= (at.first + i) * TILE - begin
    if options.ring:
        held = x.slots.at[at.batch, pl.ds(begin, TILE)]
        position = _slots_over(compat.gpu_load(held, _BY_SLOT))
        seen = seen & (position >= 0) & (position < at.length)
    else:
        position = begin + column
        seen = seen & (column < at.length - begin)
    if options.reach is not None:
        firsts = compat.gpu_load(x.firsts.at[at.batch, rows], _BY_ROW)
        seen = seen & (position > _rows_over(firsts, TILE))
    scores = jnp.where(seen, _scores(s.q, keys, options), -jnp.inf)

    # 0 * NaN is NaN, and slots that hold nothing may hold anything
    if options.ring:
        position = compat.gpu_load(x.slots.at[at.batch, pl.ds(begin, TILE)], _BY_ROW)
        _forget(values, (position >= 0) & (position < at.length))
    else:

        @pl.when(begin + TILE > at.length)
        def _() -> None:
            count = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=_BY_ROW)
            _forget(values, count < at.length - begin)

    return _go_on(state, scores, s.step_weights, values)


def _forget(values: Any, keep: Bool[Array, " 64"]) -> None:
    """Zero the values of slots that hold nothing."""
    for channels in _channels(values.shape[1]):
        part = values.at[:, channels]
        found = compat.gpu_load(part, _TILE)
        held = _rows_over(keep, channels.size)
        part[...] = jnp.where(held, found, jnp.zeros_like(found))
    plgpu.commit_smem()


def _go_on(
    state: Softmax, scores: Float[Array, "64 n"], weights_ref: Any, values: Any
) -> Softmax:
    """Take more keys into the softmax; scores are times log2 e."""
    read, before, total = state
    top = jnp.maximum(before, jnp.max(scores, axis=1))
    fade = jnp.exp2(before - top)
    weights = jnp.exp2(scores - _rows_over(top, scores.shape[1]))
    total = total * fade + jnp.sum(weights, axis=1)
    weights_ref[...] = weights.astype(jnp.bfloat16)
    plgpu.commit_smem()
    grown = []
    for channels, part in zip(_channels(values.shape[1]), read, strict=True):
        more = _product(weights_ref, values.at[:, channels], channels.size)
        part = part * _rows_over(fade, channels.size) + more
        # one after another: more of them at once do not fit the registers
        grown.append(jax.lax.optimization_barrier(part))
    return tuple(grown), top, total


def _product(a: Any, b: Any, width: int) -> Float[Array, "64 width"]:
    """Of two arrays in shared memory, in float32."""

    def multiply(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(
        multiply, plgpu.WGMMAAccumulatorRef((TILE, width), jnp.float32)
    )


def _scores(q: Any, keys: Any, options: Options) -> Float[Array, "64 n"]:
    """Times log2 e."""
    scores = _product(q, keys.transpose((1, 0)), keys.shape[0])
    if options.softcap is not None:
        scores = options.softcap * jnp.tanh(scores / options.softcap)
    return scores * LOG2_E


def _channels(dim: int) -> list[Any]:
    """Slices of a head, as wide as one accumulator."""
    return [pl.ds(at, min(TILE, dim - at)) for at in range(0, dim, TILE)]


def _count(axis: int) -> Int[Array, "64 64"]:
    return plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), axis, layout=_TILE)


def _rows_over(x: Array, width: int) -> Array:
    """A number a row, over the row's columns."""
    return jax.lax.broadcast_in_dim(x, (TILE, width), [0])


def _slots_over(x: Array) -> Array:
    """A number a slot, over all rows."""
    return jax.lax.broadcast_in_dim(x, (TILE, TILE), [1])
