"""The body of the Hopper kernel: 64 value channels of one head.

They are the rows of ``[64, dk]`` in the registers of 128 threads, each of which has 32
of a row's numbers: a product with a key is a multiplication and a sum along the row,
all in float32 (the matrix units would round to fewer bits). In memory states are ``[dk,
dv]``, so that they are turned as they are loaded and stored.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import compat
from pallas_kernels.delta_window.gpu_plan import TILE, Plan

PAST = ("order", "past_power", "past_k", "past_u")
WINDOW = ("q", "k", "v", "weights", "power")
"""Names of what is copied to shared memory, by what it is for."""

_TILE = plgpu.Layout.WGMMA
_TURNED = plgpu.Layout.WGMMA_TRANSPOSED
_BY_VALUE = plgpu.Layout.WGMMA.reduce(1)
_BY_KEY = plgpu.Layout.WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """In the device's memory; ``None``: the call has no such part."""

    state: Any  # [B, H, dk, dv]
    q: Any = None  # [B, W, G, dk]
    k: Any = None  # [B, W, G, dk], with the delta
    v: Any = None  # [B, W, H, dv]
    weights: Any = None
    """``[B, H, *plan.weights]``. A row for each window row, of what every row takes of
    its update for the own one (with the delta), then the same for outputs, then a row
    of powers of the decays (one decay a head) and one of rates (the delta)."""
    power: Any = None  # [B, H, W, dk], with one decay a channel
    past_k: Any = None  # [B, P, G, dk]
    past_u: Any = None  # [B, P, H, dv]
    past_power: Any = None  # [B, H, slots], or [B, P, H, dk]
    order: Any = None  # [B, slots] int32: past rows that count
    num: Any = None  # [B] int32: how many do


@dataclasses.dataclass(frozen=True)
class Scratch:
    """In shared memory: what is read of the inputs of the same names."""

    q: Any = None  # [W, dk]
    k: Any = None
    v: Any = None  # [W, 64]
    weights: Any = None
    power: Any = None
    past_k: Any = None  # [P, dk]
    past_u: Any = None  # [P, 64]
    past_power: Any = None  # [slots], or [P, dk]
    order: Any = None  # [slots]
    window_here: Any = None
    past_here: Any = None


@dataclasses.dataclass(frozen=True)
class Place:
    """Which part of the work this is."""

    batch: Any
    head: Any
    key_head: Any
    values: Any
    """A slice of the value channels."""


def place(plan: Plan) -> Place:
    """From the grid. Neighbours have the same head: they read the same rows."""
    at = jax.lax.axis_index("blocks")
    tile = jax.lax.rem(at, jnp.int32(plan.tiles))
    at = jax.lax.div(at, jnp.int32(plan.tiles))
    head = jax.lax.rem(at, jnp.int32(plan.heads))
    return Place(
        batch=jax.lax.div(at, jnp.int32(plan.heads)),
        head=head,
        key_head=jax.lax.div(head, jnp.int32(plan.share)),
        values=pl.ds(tile * TILE, TILE),
    )


def run(x: Inputs, s: Scratch, out: Any, updates: Any, plan: Plan) -> None:
    """Advance, write, window: those of the three that the plan has."""
    at = place(plan)
    _fetch(x, s, at, plan)
    matrix = x.state.at[at.batch, at.head, :, at.values].transpose((1, 0))
    state = plgpu.layout_cast(compat.gpu_load(matrix, _TURNED), _TILE)
    if plan.past:
        num = x.num[at.batch]
        plgpu.barrier_wait(s.past_here)
        state = _advance(s, num, state, plan)
        if plan.writes:
            # where no row counts, what stands there is left alone
            turned = plgpu.layout_cast(state, _TURNED)
            pl.when(num > 0)(lambda: compat.gpu_store(matrix, turned))
    if plan.rows:
        plgpu.barrier_wait(s.window_here)
        _window(s, at, state, out, updates, plan)


def _fetch(x: Inputs, s: Scratch, at: Place, plan: Plan) -> None:
    """Ask for all rows, which arrive while the state is loaded."""
    every = slice(None)
    of_head, of_key = (at.batch, at.head), (at.batch, every, at.key_head)
    of_values = (at.batch, every, at.head, at.values)
    parts = {
        "order": (at.batch,),
        "past_power": (at.batch, every, at.head) if plan.channel_decay else of_head,
        "past_k": of_key,
        "past_u": of_values,
        "q": of_key,
        "k": of_key,
        "v": of_values,
        "weights": of_head,
        "power": of_head,
    }
    for name, index in parts.items():
        source = getattr(x, name)
        if source is not None:
            barrier = s.past_here if name in PAST else s.window_here
            plgpu.copy_gmem_to_smem(source.at[index], getattr(s, name), barrier)


def _advance(
    s: Scratch, num: Int[Array, ""], state: Float[Array, "64 dk"], plan: Plan
) -> Float[Array, "64 dk"]:
    """The state behind the first ``num`` rows of the order, one after another."""

    def step(i: Any, state: jax.Array) -> jax.Array:
        row = s.order[i]
        key = compat.gpu_load(s.past_k.at[row], _BY_KEY).astype(jnp.float32)
        update = compat.gpu_load(s.past_u.at[row], _BY_VALUE).astype(jnp.float32)
        if plan.channel_decay:
            power = _over_values(compat.gpu_load(s.past_power.at[row], _BY_KEY))
        else:
            power = s.past_power[row]
        new = _over_columns(update, plan.key_dim) * _over_values(key)
        return power * state + new

    return jax.lax.fori_loop(0, num, step, state)


def _window(
    s: Scratch,
    at: Place,
    state: Float[Array, "64 dk"],
    out: Any,
    updates: Any,
    plan: Plan,
) -> None:
    """Outputs and updates, row after row.

    As soon as a row's update is known, all rows take of it what is theirs: ``own`` and
    ``shown`` have a column for each of what it took so far, for update and output.
    """
    shape = (TILE, plan.columns)
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_TILE)
    nothing = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _TILE)

    def step(t: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        own, shown = sums
        here = column == t
        update = compat.gpu_load(s.v.at[t], _BY_VALUE)
        if plan.delta:
            foretold = _read(s, s.k, t, state, plan)
            rate = s.weights[plan.power_row + 1, t]
            update = rate * (update - foretold) - _column(own, here)
            own = own + _taken(s, t, update, plan)
        shown = shown + _taken(s, t + plan.columns * plan.delta, update, plan)
        seen = _read(s, s.q, t, state, plan) + _column(shown, here)
        compat.gpu_store(updates.at[at.batch, t, at.head, at.values], update)
        compat.gpu_store(out.at[at.batch, t, at.head, at.values], seen)
        return own, shown

    jax.lax.fori_loop(0, plan.rows, step, (nothing, nothing))


def _read(
    s: Scratch, rows: Any, t: Any, state: Float[Array, "64 dk"], plan: Plan
) -> Float[Array, " 64"]:
    """What the state holds for a row of queries or keys, after the decay up to it."""
    row = compat.gpu_load(rows.at[t], _BY_KEY)
    if plan.channel_decay:
        row = row * compat.gpu_load(s.power.at[t], _BY_KEY)
    found = jnp.sum(state * _over_values(row), axis=1)
    return found if plan.channel_decay else s.weights[plan.power_row, t] * found


def _taken(
    s: Scratch, row: Any, update: Float[Array, " 64"], plan: Plan
) -> Float[Array, "64 columns"]:
    """An update times what every row takes of it."""
    weights = compat.gpu_load(s.weights.at[row], _BY_KEY)
    return _over_columns(update, plan.columns) * _over_values(weights)


def _column(x: Float[Array, "64 n"], here: Array) -> Float[Array, " 64"]:
    """The one that is marked, which need not be the only one that is finite."""
    return jnp.sum(jnp.where(here, x, 0.0), axis=1)


def _over_columns(x: Float[Array, " 64"], count: int) -> Float[Array, "64 count"]:
    return jax.lax.broadcast_in_dim(x, (TILE, count), [0])


def _over_values(x: Float[Array, " n"]) -> Float[Array, "64 n"]:
    return jax.lax.broadcast_in_dim(x, (TILE, x.shape[0]), [1])
