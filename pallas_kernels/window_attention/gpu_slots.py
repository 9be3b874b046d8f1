"""Which rows and slots a block of threads has on a Hopper GPU, and what they hold."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Int

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
    k_scale: Any  # as the cache without D, or None
    v_scale: Any
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


@dataclasses.dataclass(frozen=True)
class Task:
    """All that a block of threads works on."""

    x: Inputs
    s: Any
    """Its shared memory."""
    at: Place
    shapes: Shapes
    plan: Plan
    options: Options

    def stage(self, i: Any) -> Any:
        """The buffer of a step."""
        if self.plan.stages == 1:
            return self.only(i)
        return jax.lax.rem(jnp.int32(i), jnp.int32(self.plan.stages))

    @staticmethod
    def only(i: Any) -> Any:
        """0, the only buffer, and the compiler must not know: it would keep addresses
        in registers that the sums of the widest heads need.
        """
        return jax.lax.div(jnp.int32(i), jnp.int32(1 << 30))

    def begin(self, i: Any) -> Any:
        """The first slot of a step. The last step ends with the cache, and may look
        back on slots of the one before.
        """
        begin = (self.at.first + i) * TILE
        if self.shapes.page_size is not None:
            return begin
        return jnp.minimum(begin, self.shapes.capacity - TILE)


def ask(t: Task, i: Any, stage: Any, *arrays: tuple[Any, Any]) -> None:
    """Begin to copy the slots of a step, from caches to their buffers."""
    for n in range(t.plan.pieces):
        for cache, steps in arrays:
            source, target = source_of(cache, t, i, n), target_of(steps, stage, n, t)
            plgpu.copy_gmem_to_smem(source, target, t.s.arrived.at[stage])


def source_of(cache: Any, t: Task, i: Any, n: int) -> Any:
    """The slots of piece ``n`` of a step, in the device's memory."""
    begin, at = t.begin(i), t.at
    row, slot, size = at.batch, begin, t.shapes.page_size
    if size is not None:
        # behind the last page any will do: nothing of it is looked at
        last = jax.lax.div(at.length - 1, jnp.int32(size))
        slot = begin + n * t.plan.piece
        page = jnp.minimum(jax.lax.div(slot, jnp.int32(size)), last)
        row, slot = t.x.table[at.batch, page], jax.lax.rem(slot, jnp.int32(size))
    return cache.at[row, at.head, pl.ds(slot, t.plan.piece)]


def target_of(steps: Any, stage: Any, n: int, t: Task) -> Any:
    """Where piece ``n`` of a step goes, in shared memory."""
    if t.plan.pieces == 1:
        return steps.at[stage]
    return steps.at[stage, pl.ds(n * t.plan.piece, t.plan.piece)]


def seen_in_window(t: Task) -> Bool[Array, "64 window"]:
    """Which window rows each row sees."""
    return compat.gpu_load(t.x.seen.at[t.at.batch, t.at.rows], WHOLE) != 0


def seen_in_cache(t: Task, i: Any) -> Bool[Array, "64 64"]:
    """Which of a step's slots each row sees."""
    begin, at = t.begin(i), t.at
    column = count(1)
    # what the step before had is not taken twice
    seen = column >= (at.first + i) * TILE - begin
    if t.options.ring:
        position = slots_over(_positions(t, i, BY_SLOT))
        seen = seen & (position >= 0) & (position < at.length)
    else:
        position = begin + column
        seen = seen & (column < at.length - begin)
    if t.options.reach is not None:
        firsts = compat.gpu_load(t.x.firsts.at[at.batch, at.rows], BY_ROW)
        seen = seen & (position > rows_over(firsts, TILE))
    return seen


def held(t: Task, i: Any, layout: Any) -> Bool[Array, " 64"]:
    """Which of a step's slots hold anything, laid out by row or by slot."""
    if t.options.ring:
        position = _positions(t, i, layout)
        return (position >= 0) & (position < t.at.length)
    slot = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=layout)
    return slot < t.at.length - t.begin(i)


def _positions(t: Task, i: Any, layout: Any) -> Int[Array, " 64"]:
    """Of a ring's slots."""
    slots = t.x.slots.at[t.at.batch, pl.ds(t.begin(i), TILE)]
    return compat.gpu_load(slots, layout)


def forget_unused(values: Any, t: Task, i: Any) -> None:
    """0 * NaN is NaN, and a step's slots that hold nothing may hold anything."""
    if t.options.ring:
        forget(values, held(t, i, BY_ROW))
        return

    @pl.when(t.begin(i) + TILE > t.at.length)
    def _() -> None:
        forget(values, held(t, i, BY_ROW))
