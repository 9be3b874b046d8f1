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
from pallas_kernels.window_attention.gpu_plan import TILE, Plan, swizzle_of
from pallas_kernels.window_attention.gpu_slots import (
    Inputs,
    Place,
    forget_unused,
    place,
    seen_in_cache,
    seen_in_window,
    source_of,
    target_of,
)
from pallas_kernels.window_attention.gpu_tiles import (
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
    k_steps: Any  # [stages, 64, D]
    v_steps: Any
    step_weights: Any  # [64, 64]
    own_arrived: Any
    arrived: Any


def scratch_of(shapes: Shapes, plan: Plan) -> list[Any]:
    """As ``Scratch`` has them. Both sides of a product must be swizzled alike."""
    dim, step = shapes.dim, (plan.stages, TILE, shapes.dim)
    wide = swizzle_of(dim)
    own = min(wide, swizzle_of(plan.window))
    return [
        shared_rows(wide, TILE, dim),
        shared_rows(wide, plan.window, dim),
        shared_rows(own, plan.window, dim),
        shared_rows(own, TILE, plan.window),
        shared_rows(wide, *step),
        shared_rows(wide, *step),
        shared_rows(wide, TILE, TILE),
        plgpu.Barrier(num_arrivals=3),
        plgpu.Barrier(num_arrivals=2 * plan.pieces, num_barriers=plan.stages),
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
    for source, target in (
        (x.q.at[at.batch, at.head, at.rows], s.q),
        (x.k.at[at.batch, at.head], s.k),
        (x.v.at[at.batch, at.head], s.v),
    ):
        plgpu.copy_gmem_to_smem(source, target, s.own_arrived)
    for i in range(plan.stages):
        pl.when(i < at.steps)(lambda i=i: _fetch(x, s, at, i, shapes, plan))
    plgpu.barrier_wait(s.own_arrived)
    state = _own(x, s, at, options)

    def step(i: Any, state: Softmax) -> Softmax:
        stage = jax.lax.rem(i, jnp.int32(plan.stages))
        plgpu.barrier_wait(s.arrived.at[stage])
        state = _cached(x, s, at, i, stage, state, shapes, options)
        pl.when(i + plan.stages < at.steps)(
            lambda: _fetch(x, s, at, i + plan.stages, shapes, plan)
        )
        return state

    read, top, total = jax.lax.fori_loop(0, at.steps, step, state)
    # a row that makes up a tile, or a share without a slot, may have seen nothing
    some = jnp.where(total > 0, total, 1.0)
    here = (at.split, at.batch, at.head, at.rows)
    store_means(out, here, read, some, channels_of(shapes.dim))
    compat.gpu_store(lse.at[here], top + jnp.log2(total))


def _fetch(
    x: Inputs, s: Scratch, at: Place, i: Any, shapes: Shapes, plan: Plan
) -> None:
    """Ask for the slots of a step."""
    stage = jax.lax.rem(jnp.int32(i), jnp.int32(plan.stages))
    for n in range(plan.pieces):
        for cache, steps in ((x.k_cache, s.k_steps), (x.v_cache, s.v_steps)):
            plgpu.copy_gmem_to_smem(
                source_of(cache, x, at, i, n, shapes, plan),
                target_of(steps, stage, n, plan),
                s.arrived.at[stage],
            )


def _own(x: Inputs, s: Scratch, at: Place, options: Options) -> Softmax:
    """The window's own keys, which the first share of the cache takes."""
    nothing = (no_sums(channels_of(s.v.shape[-1])), *no_rows())
    seen = seen_in_window(x, at) & (at.split == 0)
    scores = jnp.where(seen, scores_of(s.q, s.k, options), -jnp.inf)
    return _go_on(nothing, scores, s.weights, s.v)


def _cached(
    x: Inputs,
    s: Scratch,
    at: Place,
    i: Any,
    stage: Any,
    state: Softmax,
    shapes: Shapes,
    options: Options,
) -> Softmax:
    """A step's slots of the cache."""
    keys, values = s.k_steps.at[stage], s.v_steps.at[stage]
    seen = seen_in_cache(x, at, i, shapes, options)
    scores = jnp.where(seen, scores_of(s.q, keys, options), -jnp.inf)
    forget_unused(values, x, at, i, shapes, options)
    return _go_on(state, scores, s.step_weights, values)


def _go_on(
    state: Softmax, scores: Float[Array, "64 n"], weights_ref: Any, values: Any
) -> Softmax:
    """Take more keys into the softmax; scores are times log2 e."""
    read, before, total = state
    weights, fade, top, total = weigh(scores, before, total)
    weights_ref[...] = weights.astype(jnp.bfloat16)
    plgpu.commit_smem()
    read = add_values(read, fade, weights_ref, values, channels_of(values.shape[1]))
    return read, top, total
