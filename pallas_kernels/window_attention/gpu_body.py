"""The body of the Hopper kernel of window attention: one tile and one share of a cache.

128 threads do it all: they ask for the slots of steps to come, and multiply those that
have arrived. The running maximum, total and sum of the softmax are in registers.
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
from pallas_kernels.window_attention import gpu_narrow
from pallas_kernels.window_attention.gpu_plan import TILE, Plan, swizzle_of
from pallas_kernels.window_attention.gpu_slots import (
    Inputs,
    Task,
    ask,
    forget_unused,
    place,
    seen_in_cache,
    seen_in_window,
)
from pallas_kernels.window_attention.gpu_tiles import (
    Sums,
    add_values,
    channels_of,
    no_rows,
    no_sums,
    scores_of,
    shared_rows,
    slots_over,
    store_means,
    weigh,
)
from pallas_kernels.window_attention.plan import Options, Shapes

LAUNCH: dict[str, Any] = {}
"""As ``compat.gpu_kernel`` has them."""

Softmax = tuple[Sums, Float[Array, " 64"], Float[Array, " 64"]]
"""Sums, maximum (times log2 e) and total of each row so far."""


@dataclasses.dataclass(frozen=True)
class Scratch:
    """In shared memory."""

    q: Any
    k: Any
    v: Any
    weights: Any  # [64, window]
    k_steps: Any  # [stages, 64, D]: as the cache has them
    v_steps: Any
    step_weights: Any  # [64, 64]
    own_arrived: Any
    arrived: Any
    k_wide: Any = None  # [1, 64, D]: a step of a narrow cache, as it is multiplied
    v_wide: Any = None
    k_scales: Any = None  # [stages, 64]
    v_scales: Any = None


def scratch_of(shapes: Shapes, plan: Plan) -> list[Any]:
    """As ``Scratch`` has them. Both sides of a product must be swizzled alike."""
    dim = shapes.dim
    wide = swizzle_of(dim)
    own = min(wide, swizzle_of(plan.window))
    steps = shared_rows(wide, plan.stages, TILE, dim)
    more = []
    if plan.codes is not None:
        steps = gpu_narrow.shared_codes(plan.codes, plan.stages, TILE, dim)
        more = 2 * [shared_rows(wide, 1, TILE, dim)]
    if plan.scaled:
        more += 2 * [plgpu.SMEM((plan.stages, TILE), jnp.float32)]
    copies = (4 if plan.scaled else 2) * plan.pieces
    return [
        shared_rows(wide, TILE, dim),
        shared_rows(wide, plan.window, dim),
        shared_rows(own, plan.window, dim),
        shared_rows(own, TILE, plan.window),
        steps,
        steps,
        shared_rows(wide, TILE, TILE),
        plgpu.Barrier(num_arrivals=3),
        plgpu.Barrier(num_arrivals=copies, num_barriers=plan.stages),
        *more,
    ]


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
    t = Task(x, s, at, shapes, plan, options)
    for source, target in (
        (x.q.at[at.batch, at.head, at.rows], s.q),
        (x.k.at[at.batch, at.head], s.k),
        (x.v.at[at.batch, at.head], s.v),
    ):
        plgpu.copy_gmem_to_smem(source, target, s.own_arrived)
    for i in range(plan.stages):
        _fetch(t, i)
    plgpu.barrier_wait(s.own_arrived)

    def step(i: Any, state: Softmax) -> Softmax:
        plgpu.barrier_wait(s.arrived.at[t.stage(i)])
        state = _cached(t, i, state)
        _fetch(t, i + plan.stages)
        return state

    read, top, total = jax.lax.fori_loop(0, at.steps, step, _own(t))
    # a row that makes up a tile, or a share without a slot, may have seen nothing
    some = jnp.where(total > 0, total, 1.0)
    here = (at.split, at.batch, at.head, at.rows)
    store_means(out, here, read, some, channels_of(shapes.dim))
    compat.gpu_store(lse.at[here], top + jnp.log2(total))


def _fetch(t: Task, i: Any) -> None:
    """Ask for the slots of a step, if there is one."""
    x, s = t.x, t.s
    arrays = [(x.k_cache, s.k_steps), (x.v_cache, s.v_steps)]
    if t.plan.scaled:
        arrays += [(x.k_scale, s.k_scales), (x.v_scale, s.v_scales)]
    pl.when(i < t.at.steps)(lambda: ask(t, i, t.stage(i), *arrays))


def _own(t: Task) -> Softmax:
    """The window's own keys, which the first share of the cache takes."""
    s = t.s
    seen = seen_in_window(t) & (t.at.split == 0)
    scores = jnp.where(seen, scores_of(s.q, s.k, t.options), -jnp.inf)
    weights, fade, top, total = weigh(scores, *no_rows())
    nothing = no_sums(channels_of(t.shapes.dim))
    return _add(nothing, fade, weights, s.weights, s.v), top, total


def _cached(t: Task, i: Any, state: Softmax) -> Softmax:
    """A step's slots of the cache."""
    s, stage = t.s, t.stage(i)
    keys, values = s.k_steps.at[stage], s.v_steps.at[stage]
    k_scale = None
    if t.plan.codes is not None:
        keys, values = gpu_narrow.widened(
            (keys, s.k_wide.at[t.only(i)]), (values, s.v_wide.at[t.only(i)])
        )
    if t.plan.scaled:
        k_scale = gpu_narrow.scale_of_keys(t, i)
    scores = scores_of(s.q, keys, t.options, k_scale)
    scores = jnp.where(seen_in_cache(t, i), scores, -jnp.inf)
    if gpu_narrow.may_be_nan(t.plan.codes):
        forget_unused(values, t, i)
    read, before, total = state
    weights, fade, top, total = weigh(scores, before, total)
    if t.plan.scaled:  # not before, for the registers are full
        weights = weights * slots_over(gpu_narrow.scale_of_values(t, i))
    return _add(read, fade, weights, s.step_weights, values), top, total


def _add(
    read: Sums,
    fade: Float[Array, " 64"],
    weights: Float[Array, "64 n"],
    weights_ref: Any,
    values: Any,
) -> Sums:
    """Values by their weights, which are put into shared memory for it."""
    weights_ref[...] = weights.astype(jnp.bfloat16)
    plgpu.commit_smem()
    return add_values(read, fade, weights_ref, values, channels_of(values.shape[1]))
