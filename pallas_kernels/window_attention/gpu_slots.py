"""Which rows and slots a block of threads has on a Hopper GPU, and what they hold."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool

from pallas_kernels import compat
from pallas_kernels.window_attention.gpu_plan import TILE, Plan
from pallas_kernels.window_attention.gpu_tiles import (
    BY_ROW,
    BY_SLOT,
    WHOLE,
    count,
    forget,
    rows_over,
    slots_over,
)
from pallas_kernels.window_attention.plan import Options, Shapes


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
    v: Any  # None: the keys are the values too
    k_cache: Any  # [B, H, T, D] or [pages, H, size, D]
    v_cache: Any
    slots: Any  # [B, T], or None
    table: Any  # [B, blocks], or None


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

    @property
    def rows(self) -> Any:
        """Of the queries, as a slice."""
        return pl.ds(self.tile * TILE, TILE)


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


def begin_of(at: Place, i: Any, shapes: Shapes) -> Any:
    """The first slot of a step. The last step ends with the cache, and may look back on
    slots of the one before.
    """
    begin = (at.first + i) * TILE
    if shapes.page_size is not None:
        return begin
    return jnp.minimum(begin, shapes.capacity - TILE)


def source_of(
    cache: Any, x: Inputs, at: Place, i: Any, n: int, shapes: Shapes, plan: Plan
) -> Any:
    """The slots of piece ``n`` of a step, in the device's memory."""
    begin = begin_of(at, i, shapes)
    row, slot, size = at.batch, begin, shapes.page_size
    if size is not None:
        # behind the last page any will do: nothing of it is looked at
        last = jax.lax.div(at.length - 1, jnp.int32(size))
        slot = begin + n * plan.piece
        row = x.table[at.batch, jnp.minimum(jax.lax.div(slot, jnp.int32(size)), last)]
        slot = jax.lax.rem(slot, jnp.int32(size))
    return cache.at[row, at.head, pl.ds(slot, plan.piece)]


def target_of(steps: Any, stage: Any, n: int, plan: Plan) -> Any:
    """Where piece ``n`` of a step goes, in shared memory."""
    if plan.pieces == 1:
        return steps.at[stage]
    return steps.at[stage, pl.ds(n * plan.piece, plan.piece)]


def seen_in_window(x: Inputs, at: Place) -> Bool[Array, "64 window"]:
    """Which window rows each row sees."""
    return compat.gpu_load(x.seen.at[at.batch, at.rows], WHOLE) != 0


def seen_in_cache(
    x: Inputs, at: Place, i: Any, shapes: Shapes, options: Options
) -> Bool[Array, "64 64"]:
    """Which of a step's slots each row sees."""
    begin = begin_of(at, i, shapes)
    column = count(1)
    # what the step before had is not taken twice
    seen = column >= (at.first + i) * TILE - begin
    if options.ring:
        held = x.slots.at[at.batch, pl.ds(begin, TILE)]
        position = slots_over(compat.gpu_load(held, BY_SLOT))
        seen = seen & (position >= 0) & (position < at.length)
    else:
        position = begin + column
        seen = seen & (column < at.length - begin)
    if options.reach is not None:
        firsts = compat.gpu_load(x.firsts.at[at.batch, at.rows], BY_ROW)
        seen = seen & (position > rows_over(firsts, TILE))
    return seen


def forget_unused(
    values: Any, x: Inputs, at: Place, i: Any, shapes: Shapes, options: Options
) -> None:
    """0 * NaN is NaN, and a step's slots that hold nothing may hold anything."""
    begin = begin_of(at, i, shapes)
    if options.ring:
        position = compat.gpu_load(x.slots.at[at.batch, pl.ds(begin, TILE)], BY_ROW)
        forget(values, (position >= 0) & (position < at.length))
        return

    @pl.when(begin + TILE > at.length)
    def _() -> None:
        slot = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=BY_ROW)
        forget(values, slot < at.length - begin)
