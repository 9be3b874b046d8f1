"""Recurrences with a matrix state over a window, in closed form: the definition.

Serially, a head advances its state ``S [dk, dv]`` by one token as

    S <- e^g S;   u = beta (v - S^T k);   S <- S + k u^T;   o = S^T q

(the gated delta rule: Yang, Kautz, Hatamizadeh, 2412.06464), with ``g`` one number a
head, or one a key channel (Kimi Linear, 2510.26692). Without the delta, ``u = v``, it
is Mamba2 (Dao, Gu, 2405.21060), where ``q, k`` and ``v`` are ``C, B`` and ``dt x``.
Over a window in which row ``t`` continues from its ancestors, with ``G_t`` the sum of
``g`` along the path to ``t``, this is

    (I + A) U = beta (V - (K e^G) S0),  A[t, s] = beta_t (k_t e^(G_t - G_s)) . k_s
    O = (Q e^G) S0 + P U,               P[t, s] = (q_t e^(G_t - G_s)) . k_s

where ``A`` keeps strict ancestors and ``P`` ancestors and the row itself. The tree
enters only as that mask and through ``G``, so no state per node is ever made.

Queries and keys have ``G`` heads, each shared by ``H / G`` neighbouring heads of the
state. Rows come after their ancestors, and are finite, also where nobody may see them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.delta_window.decays import (
    along_paths,
    decays_after,
    path_sums,
    per_channel,
)
from pallas_kernels.delta_window.pairs import decayed_products, dot
from pallas_kernels.delta_window.solve import solve_unit_lower


class Records(NamedTuple):
    """What rows write: the state after a path follows from these and the one before."""

    k: jax.Array  # [B, W, G, dk]
    updates: jax.Array  # [B, W, H, dv]
    log_decay: jax.Array  # [B, W, H] or [B, W, H, dk], of each row alone


class Weights(NamedTuple):
    """What the rows of a window are to each other, and to the state before it."""

    reads: jax.Array  # [B, m, G, W, dk]: queries, and with the delta keys
    power: jax.Array  # [B, H, W, c]: what is left of the state; c is 1 or dk
    shown: jax.Array  # [B, H, W, W]: of updates, for outputs (P above)
    mix: jax.Array | None  # [B, H, W, W]: for updates (A above, and a diagonal)


def delta_window(
    q: Float[Array, "B W G dk"],
    k: Float[Array, "B W G dk"],
    v: Float[Array, "B W H dv"],
    log_decay: Float[Array, "B W H *dk"],
    beta: Float[Array, "B W H"] | None,
    state: Float[Array, "B H dk dv"],
    ancestors: Bool[Array, "B W W"],
    past: Records | None = None,
    num_past: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B W H dv"], Float[Array, "B W H dv"]]:
    """Outputs ``O`` and updates ``U`` of every row; ``beta`` is ``None``: no delta.

    The state is read once and not written. ``past`` are rows, one after another, that
    stand between the state and the window; in those beyond the first ``num_past``
    anything may stand. Its dtype may be narrower than the state's.
    """
    heads = v.shape[2]
    if past is not None:
        past = first_rows(past, num_past, state.dtype)
    rows = weigh(q, k, log_decay, beta, ancestors)
    reads = jnp.repeat(rows.reads, heads // k.shape[2], axis=2)
    old = _read(reads * rows.power[:, None], state, past)
    updates = v.swapaxes(1, 2)  # [B, H, W, dv]
    if beta is not None and rows.mix is not None:
        rate = beta.swapaxes(1, 2)[..., None]
        updates = solve_unit_lower(rows.mix, rate * (updates - old[:, 1]))
    out = old[:, 0] + dot("bhts,bhsv->bhtv", rows.shown, updates)
    return out.swapaxes(1, 2), updates.swapaxes(1, 2)


def weigh(
    q: Float[Array, "B W G dk"],
    k: Float[Array, "B W G dk"],
    log_decay: Float[Array, "B W H *dk"],
    beta: Float[Array, "B W H"] | None,
    ancestors: Bool[Array, "B W W"],
    *,
    fused: bool = False,
) -> Weights:
    """All of a window that needs no state; ``fused``: in few steps on a GPU."""
    decay = per_channel(log_decay)
    sums = path_sums(decay, ancestors, fused=fused)
    keys = k.swapaxes(1, 2)
    reads = jnp.stack([q.swapaxes(1, 2)] + [keys] * (beta is not None), axis=1)
    products = decayed_products(reads, keys, sums, ancestors, fused=fused)
    mix = None
    if beta is not None:
        mix = products[:, 1] * beta.swapaxes(1, 2)[..., None]
    # summed up by itself, a GPU's compiler makes it beside ``sums``, not of them
    total = along_paths(decay, ancestors, fused=True) if fused else sums.total
    return Weights(reads, jnp.exp(total), products[:, 0], mix)


def delta_fold(
    state: Float[Array, "B H dk dv"], rows: Records, num: Int[Array, " B"]
) -> Float[Array, "B H dk dv"]:
    """The state after the first ``num`` of rows that stand one after another.

    ``S = e^(G_n) S0 + sum_j (e^(G_n - G_j) k_j) u_j^T``. It is unchanged where ``num``
    is 0. What stands in the other rows is not looked at.
    """
    rows = first_rows(rows, num, state.dtype)
    total, keys = _weighted(rows, state.shape[1])
    folded = total * state + dot("bhsk,bshv->bhkv", keys, rows.updates)
    return jnp.where((num > 0)[:, None, None, None], folded, state)


def delta_commit(
    state: Float[Array, "B H dk dv"],
    rows: Records,
    path: Int[Array, "B P"],
    num: Int[Array, " B"],
) -> Float[Array, "B H dk dv"]:
    """The state after the first ``num`` rows of ``path``; unchanged where ``num`` is 0.

    What stands in rows off the path, or beyond ``num``, is not looked at. Those of the
    path that count are numbers of rows and go up, as ancestors do: of others nothing is
    promised, and kernels differ.
    """
    return delta_fold(state, take_rows(rows, path, num), num)


def delta_commit_window(
    state: Float[Array, "B H dk dv"],
    rows: Records,
    path: Int[Array, "B P"],
    num: Int[Array, " B"],
    q: Float[Array, "B W G dk"],
    k: Float[Array, "B W G dk"],
    v: Float[Array, "B W H dv"],
    log_decay: Float[Array, "B W H *dk"],
    beta: Float[Array, "B W H"] | None,
    ancestors: Bool[Array, "B W W"],
) -> tuple[
    Float[Array, "B W H dv"], Float[Array, "B W H dv"], Float[Array, "B H dk dv"]
]:
    """``delta_commit`` of the last round, then ``delta_window`` of this one.

    Outputs, updates and the committed state. A kernel passes over the state once.
    """
    state = delta_commit(state, rows, path, num)
    found = delta_window(q, k, v, log_decay, beta, state, ancestors)
    return (*found, state)


def first_rows(
    rows: Records, num: Int[Array, " B"] | None, dtype: jax.typing.DTypeLike
) -> Records:
    """The first ``num`` rows (all, for ``None``) in this dtype, and zeros behind."""
    held = jnp.arange(rows.k.shape[1], dtype=jnp.int32)

    def keep(x: jax.Array) -> jax.Array:
        if num is None:
            return x.astype(dtype)
        mask = (held < num[:, None]).reshape(*x.shape[:2], *[1] * (x.ndim - 2))
        return jnp.where(mask, x, jnp.zeros((), x.dtype)).astype(dtype)

    return jax.tree.map(keep, rows)


def take_rows(rows: Records, path: Int[Array, "B P"], num: Int[Array, " B"]) -> Records:
    """The first ``num`` rows of ``path``, and zeros behind them."""
    taken = jnp.arange(path.shape[1], dtype=jnp.int32) < num[:, None]

    def pick(x: jax.Array) -> jax.Array:
        lead = (..., *[None] * (x.ndim - 2))
        picked = jnp.take_along_axis(x, path[lead], axis=1, mode="clip")
        return jnp.where(taken[lead], picked, jnp.zeros((), x.dtype))

    return jax.tree.map(pick, rows)


def delta_step(
    q: Float[Array, "B G dk"],
    k: Float[Array, "B G dk"],
    v: Float[Array, "B H dv"],
    log_decay: Float[Array, "B H *dk"],
    beta: Float[Array, "B H"] | None,
    state: Float[Array, "B H dk dv"],
) -> tuple[Float[Array, "B H dv"], Float[Array, "B H dk dv"]]:
    """The recurrence itself, for one token: its output and the state after it."""
    share = state.shape[1] // k.shape[1]
    q, k = jnp.repeat(q, share, axis=1), jnp.repeat(k, share, axis=1)
    decay = per_channel(log_decay[:, None])[:, 0]
    state = _exp_by_channel(decay, k.shape[2])[..., None] * state
    update = v
    if beta is not None:
        update = beta[..., None] * (v - dot("bhk,bhkv->bhv", k, state))
    state = state + k[..., None] * update[:, :, None]
    return dot("bhk,bhkv->bhv", q, state), state


def _read(
    reads: Float[Array, "B m H W dk"],
    state: Float[Array, "B H dk dv"],
    past: Records | None,
) -> Float[Array, "B m H W dv"]:
    """``S^T`` times each of the rows, with ``S`` the state after ``past``."""
    batch, stacks, heads, width, dim = reads.shape
    # one product for all: the state is by far the largest operand
    rows = reads.swapaxes(1, 2).reshape(batch, heads, stacks * width, dim)
    if past is None:
        found = dot("bhtk,bhkv->bhtv", rows, state)
    else:
        total, keys = _weighted(past, heads)
        found = dot("bhtk,bhkv->bhtv", rows * total.swapaxes(2, 3), state)
        products = dot("bhtk,bhsk->bhts", rows, keys)
        found = found + dot("bhts,bshv->bhtv", products, past.updates)
    found = found.reshape(batch, heads, stacks, width, -1)
    return found.swapaxes(1, 2)


def _weighted(
    rows: Records, heads: int
) -> tuple[Float[Array, "B H dk 1"], Float[Array, "B H P dk"]]:
    """What rows leave of the state before them, and their keys as they are at the end.

    Reading and folding share this, so that what is read is what will be folded.
    """
    decay = per_channel(rows.log_decay)
    total = jnp.sum(decay, axis=1)
    total = _exp_by_channel(total, rows.k.shape[3])[..., None]
    keys = jnp.repeat(rows.k, heads // rows.k.shape[2], axis=2)
    return total, (keys * jnp.exp(decays_after(decay))).swapaxes(1, 2)


def _exp_by_channel(
    decay: Float[Array, "B H dk_or_1"], dim: int
) -> Float[Array, "B H dk"]:
    """``exp``, worked out by channel even where there is one decay a head.

    XLA's CPU backend takes what is left of an array behind its last whole vector by
    other code, which rounds otherwise: with a few heads, the last row of a batch then
    had bits of its own.
    """
    wide = jnp.broadcast_to(decay, (*decay.shape[:2], dim))
    return jnp.exp(jax.lax.optimization_barrier(wide))
