"""The body of the Hopper kernel of latent attention: keys that are the values too.

A row of DeepSeek's latent cache has 576 channels. 64 rows of sums over as many do not
fit the registers of one warpgroup, so there are two, for one tile and one share of a
cache. The first makes the weights; it leaves them, and by how much older sums fade, in
shared memory, and both multiply the values of channels of their own. The first has the
smaller half: its registers hold the scores as well. The second has the time to ask for
slots, for it waits while the next weights are made.

If each made its own weights there would be less to hand over, and half as many products
again: 576 channels for the scores of each, and 576 for the values of both. 128 heads
keep the matrix units about as busy as the memory, and so it would show.

A step is 64 slots, read once, as keys and then as values. The window's own keys are the
first step of the first share. Steps lie in the same buffers in turn; one is free for
the next when both warpgroups are through with it, and so are the weights.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import compat
from pallas_kernels.window_attention.gpu_plan import TILE, Plan, swizzle_of
from pallas_kernels.window_attention.gpu_slots import (
    Inputs,
    Task,
    ask,
    forget_unused,
    place,
    seen_in_cache,
    seen_in_window,
    target_of,
)
from pallas_kernels.window_attention.gpu_tiles import (
    BY_ROW,
    Sums,
    add_values,
    channels_of,
    no_rows,
    no_sums,
    scores_of,
    shared_rows,
    store_means,
    weigh,
)
from pallas_kernels.window_attention.plan import Options, Shapes

WARPGROUPS = 2
AXIS = "warpgroups"

LAUNCH: dict[str, Any] = {
    "num_threads": WARPGROUPS,
    "thread_name": AXIS,
    "reduction_bytes": 0,
}
"""As ``compat.gpu_kernel`` has them: to sum up rows takes no shared memory."""

Softmax = tuple[Sums, Float[Array, " 64"], Float[Array, " 64"]]
"""Sums of the first's channels, maximum (times log2 e) and total of each row so far."""


@dataclasses.dataclass(frozen=True)
class Scratch:
    """In shared memory."""

    q: Any
    steps: Any  # [stages, 64, D]
    weights: Any  # [64, 64]: of the step at hand
    fades: Any  # [64]: what older sums are multiplied by, and at the end the totals
    q_arrived: Any
    arrived: Any
    """A step's slots."""
    weighed: Any
    """The step's weights and fades are there."""
    used: Any
    """Both are through with the step, and with its weights."""


@dataclasses.dataclass(frozen=True)
class Pair(Task):
    """What both warpgroups work on."""

    @property
    def own(self) -> Any:
        """Steps of the window: the first share of a cache has the only one."""
        return (self.at.split == 0).astype(jnp.int32)

    @property
    def steps(self) -> Any:
        """Of the window and of the cache."""
        return self.own + self.at.steps


def scratch_of(shapes: Shapes, plan: Plan) -> list[Any]:
    """As ``Scratch`` has them. Both sides of a product must be swizzled alike."""
    wide = swizzle_of(shapes.dim)
    return [
        shared_rows(wide, TILE, shapes.dim),
        shared_rows(wide, plan.stages, TILE, shapes.dim),
        shared_rows(wide, TILE, TILE),
        plgpu.SMEM((TILE,), jnp.float32),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=plan.pieces, num_barriers=plan.stages),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=WARPGROUPS),
    ]


def shares_of(dim: int) -> tuple[list[Any], list[Any]]:
    """The channels of either warpgroup: half of them each, in whole tiles.

    An odd tile is the second's, which has no scores in its registers.
    """
    half = -(-dim // TILE) // WARPGROUPS * TILE
    return channels_of(half), channels_of(dim, half)


def attend(
    x: Inputs,
    out: Any,
    lse: Any,
    *scratch: Any,
    shapes: Shapes,
    plan: Plan,
    options: Options,
) -> None:
    """All of one block of threads; for ``scratch`` see ``scratch_of``."""
    s = Scratch(*scratch)
    at = place(x, shapes, plan)
    task = Pair(x, s, at, shapes, plan, options)
    here = (at.split, at.batch, at.head, at.rows)
    mine, yours = shares_of(shapes.dim)
    first = jax.lax.axis_index(AXIS) == 0
    plgpu.barrier_arrive(s.used)  # there is nothing yet

    @pl.when(first)
    def _() -> None:
        read, top, total = _lead(task, mine)
        # a row that makes up a tile, or a share without a slot, may have seen nothing
        some = jnp.where(total > 0, total, 1.0)
        _hand_over(s, some)
        store_means(out, here, read, some, mine)
        compat.gpu_store(lse.at[here], top + jnp.log2(total))

    @pl.when(jnp.logical_not(first))
    def _() -> None:
        read = _follow(task, yours)
        plgpu.barrier_wait(s.weighed)
        some = compat.gpu_load(s.fades, BY_ROW)
        store_means(out, here, read, some, yours)


def _lead(t: Pair, channels: list[Any]) -> Softmax:
    """The first warpgroup's steps: weights for both, and the values of its channels."""
    s, at = t.s, t.at
    plgpu.copy_gmem_to_smem(t.x.q.at[at.batch, at.head, at.rows], s.q, s.q_arrived)
    plgpu.barrier_wait(s.q_arrived)

    def step(i: Any, state: Softmax) -> Softmax:
        read, top, total = state
        rows = s.steps.at[t.stage(i)]
        plgpu.barrier_wait(s.arrived.at[t.stage(i)])
        weights, fade, top, total = weigh(_seen_scores(t, i, rows), top, total)
        pl.when(i >= t.own)(lambda: forget_unused(rows, t, i - t.own))
        _hand_over(s, fade, weights)
        read = add_values(read, fade, s.weights, rows, channels)
        plgpu.barrier_arrive(s.used)
        return read, top, total

    start = (no_sums(channels), *no_rows())
    return jax.lax.fori_loop(0, t.steps, step, start)


def _seen_scores(t: Pair, i: Any, keys: Any) -> Float[Array, "64 64"]:
    """A step's scores, less those of keys that a row may not see."""
    scores = scores_of(t.s.q, keys, t.options)
    seen = jax.lax.cond(
        i < t.own,
        lambda: seen_in_window(t),
        lambda: seen_in_cache(t, i - t.own),
    )
    return jnp.where(seen, scores, -jnp.inf)


def _hand_over(
    s: Scratch,
    fades: Float[Array, " 64"],
    weights: Float[Array, "64 64"] | None = None,
) -> None:
    """To the second warpgroup, which must be through with what it had before."""
    plgpu.barrier_wait(s.used)
    s.fades[...] = fades
    if weights is not None:
        s.weights[...] = weights.astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.barrier_arrive(s.weighed)


def _follow(t: Pair, channels: list[Any]) -> Sums:
    """The second warpgroup's steps: it asks for slots, and multiplies its channels."""
    s, ahead = t.s, t.plan.stages - 1
    for i in range(ahead):
        pl.when(i < t.steps)(lambda i=i: _fetch(t, i))

    def step(i: Any, read: Sums) -> Sums:
        _refill(t, i + ahead)
        plgpu.barrier_wait(s.arrived.at[t.stage(i)])
        plgpu.barrier_wait(s.weighed)
        fade = compat.gpu_load(s.fades, BY_ROW)
        read = add_values(read, fade, s.weights, s.steps.at[t.stage(i)], channels)
        plgpu.barrier_arrive(s.used)
        return read

    return jax.lax.fori_loop(0, t.steps, step, no_sums(channels))


def _refill(t: Pair, i: Any) -> None:
    """Ask for a step as soon as that before in its buffer has been used."""
    plgpu.barrier_wait(t.s.used)
    pl.when(i < t.steps)(lambda: _fetch(t, i))


def _fetch(t: Pair, i: Any) -> None:
    """Ask for the rows of a step: of the window, or of the cache."""
    x, s, at, stage = t.x, t.s, t.at, t.stage(i)

    @pl.when(i < t.own)
    def _() -> None:
        for n in range(t.plan.pieces):
            rows = x.k.at[at.batch, at.head, pl.ds(n * t.plan.piece, t.plan.piece)]
            target = target_of(s.steps, stage, n, t)
            plgpu.copy_gmem_to_smem(rows, target, s.arrived.at[stage])

    pl.when(i >= t.own)(lambda: ask(t, i - t.own, stage, (x.k_cache, s.steps)))
