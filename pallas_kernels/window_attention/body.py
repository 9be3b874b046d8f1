"""The body of the TPU's window attention: what happens in one step of the grid."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float

from pallas_kernels.window_attention.plan import Options, Plan
from pallas_kernels.window_attention.rows import EARLIEST, FIRST_LANE

LOWEST = -1e30
"""A maximum before anything was seen. It is finite, and below every score."""


@dataclasses.dataclass(frozen=True)
class Refs:
    """What one step of the grid may touch."""

    q: Any
    facts: Any
    k: Any
    v: Any
    slots: Any
    k_cache: tuple[Any, ...]
    """One stretch of slots, or pages that follow one another."""
    v_cache: tuple[Any, ...]
    k_scale: tuple[Any, ...]
    """As the caches, of all heads; empty: there are none."""
    v_scale: tuple[Any, ...]
    out: Any
    lse: Any
    top: Any
    total: Any
    sum: Any


def named(refs: tuple[Any, ...], plan: Plan, options: Options) -> Refs:
    """By their order in the call."""
    left = list(refs)

    def pieces(there: bool = True) -> tuple[Any, ...]:
        return tuple(left.pop(0) for _ in range(plan.pages or 1)) if there else ()

    q, facts, k = left.pop(0), left.pop(0), left.pop(0)
    v = k if options.shared else left.pop(0)
    slots = left.pop(0) if options.ring else None
    k_cache = pieces()
    v_cache = k_cache if options.shared else pieces()
    k_scale, v_scale = pieces(options.scaled), pieces(options.scaled)
    out = left.pop(0)
    lse = left.pop(0) if options.with_lse else None
    return Refs(
        q, facts, k, v, slots, k_cache, v_cache, k_scale, v_scale, out, lse, *left
    )


def kernel(
    lengths: Any, firsts: Any, behinds: Any, *refs: Any, plan: Plan, options: Options
) -> None:
    """One step: at first the window's own keys, which are the first share's, then a
    block of the cache.
    """
    # the table of a paged cache is for the index maps only
    x = named(refs[1:] if plan.pages else refs, plan, options)
    share, row, step = pl.program_id(0), pl.program_id(1), pl.program_id(4)
    length = lengths[row]
    at = firsts[share, row] + step

    @pl.when(step == 0)
    def _() -> None:
        x.top[...] = jnp.full(x.top.shape, LOWEST, jnp.float32)
        x.total[...] = jnp.zeros(x.total.shape, jnp.float32)
        x.sum[...] = jnp.zeros(x.sum.shape, jnp.float32)

    @pl.when(jnp.logical_and(step == 0, has_window(share)))
    def _() -> None:
        _read_window(x, plan, options)

    base, turned = at * plan.block, plan.turned
    here = at < behinds[share, row]
    always_masked = options.ring or options.reach is not None
    whole = jnp.logical_and(base + plan.block <= length, not always_masked)
    head = pl.program_id(2) * plan.heads

    @pl.when(jnp.logical_and(here, whole))
    def _() -> None:
        keys, values = _stretch(x.k_cache, x, turned), _stretch(x.v_cache, x, turned)
        scores = _scores(x.q[0], keys, options, turned, _scales(x.k_scale, head, plan))
        _go_on(x, scores, values, turned, _scales(x.v_scale, head, plan))

    @pl.when(jnp.logical_and(here, jnp.logical_not(whole)))
    def _() -> None:
        seen, held, held_values = _visible(x, base, length, plan, options)
        keys, values = _stretch(x.k_cache, x, turned), _stretch(x.v_cache, x, turned)
        scores = _scores(x.q[0], keys, options, turned, _scales(x.k_scale, head, plan))
        # 0 * NaN is NaN, and slots that hold nothing may hold anything
        values = jnp.where(held_values, values, jnp.zeros((), values.dtype))
        scales = _scales(x.v_scale, head, plan)
        scales = None if scales is None else jnp.where(held, scales, 0.0)
        _go_on(x, jnp.where(seen, scores, -jnp.inf), values, turned, scales)

    @pl.when(step == plan.steps - 1)
    def _() -> None:
        _finish(x)


def has_window(share: jax.Array) -> jax.Array:
    """One share alone counts the window's own keys."""
    return share == 0


def _read_window(x: Refs, plan: Plan, options: Options) -> None:
    """The window's own keys."""
    seen = x.facts[0][None, :, : plan.window] != 0
    scores = _scores(x.q[0], x.k[0], options)
    _go_on(x, jnp.where(seen, scores, -jnp.inf), x.v[0])


def _finish(x: Refs) -> None:
    """Rows that make up a tile, or whose share is empty, may have seen nothing: they
    read zeros, and have a log-sum-exp below all others.
    """
    total = jnp.where(x.total[...] > 0, x.total[...], 1.0)
    x.out[0] = x.sum[...] / total
    if x.lse is not None:
        lse = x.top[...] + jnp.log(total)
        x.lse[0] = jnp.broadcast_to(lse, x.sum.shape)


def _go_on(
    x: Refs,
    scores: Float[Array, "H R T"],
    values: Float[Array, "H x y"],
    turned: bool = False,
    scales: Float[Array, "H 1 T"] | None = None,
) -> None:
    """Take more keys into the softmax."""
    top = jnp.maximum(x.top[...], jnp.max(scores, axis=-1, keepdims=True))
    before = jnp.exp(x.top[...] - top)
    weights = jnp.exp(scores - top)
    x.top[...] = top
    x.total[...] = x.total[...] * before + jnp.sum(weights, axis=-1, keepdims=True)
    if scales is not None:
        weights = weights * scales
    x.sum[...] = x.sum[...] * before + _product(
        weights.astype(values.dtype), values, contract=2 if turned else 1
    )


def _stretch(pieces: tuple[Any, ...], x: Refs, turned: bool) -> Float[Array, "H x y"]:
    """The slots of a step, one behind the other, in the dtype of the queries."""
    wide = [ref[0].astype(x.q.dtype) for ref in pieces]
    return wide[0] if len(wide) == 1 else jnp.concatenate(wide, 2 if turned else 1)


def _scales(
    pieces: tuple[Any, ...], head: jax.Array, plan: Plan
) -> Float[Array, "H 1 T"] | None:
    """Of the heads of this step, from ``head`` on."""
    if not pieces:
        return None
    every = pieces[0].shape[1] == plan.heads
    at = slice(None) if every else pl.ds(head, plan.heads)
    rows = [ref[0, at] for ref in pieces]
    row = rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=1)
    return row[:, None]


def _scores(
    q: Float[Array, "H R D"],
    keys: Float[Array, "H x y"],
    options: Options,
    turned: bool = False,
    scales: Float[Array, "H 1 T"] | None = None,
) -> Float[Array, "H R T"]:
    scores = _product(q, keys, contract=1 if turned else 2)
    if scales is not None:
        scores = scores * scales
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
    x: Refs, base: jax.Array, length: jax.Array, plan: Plan, options: Options
) -> tuple[Bool[Array, "1 R_or_1 T"], Bool[Array, "1 1 T"], Bool[Array, "1 x y"]]:
    """Which slots of this block each row sees, and which hold something: the latter as
    they lie beside scores, and as beside values.
    """
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
        return seen[None], held[None], held[None]
    if options.ring:
        column = jnp.broadcast_to(held.astype(jnp.int32), (8, block)).T[:, :1] != 0
    else:
        column = jax.lax.broadcasted_iota(jnp.int32, (block, 1), 0) + base < length
    return seen[None], held[None], column[None]
