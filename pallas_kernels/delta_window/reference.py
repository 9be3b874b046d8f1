"""The gated delta rule over a window, in closed form and plain jnp: the definition.

Serially, a head advances its state ``S [dk, dv]`` by one token as

    S <- e^g S;   u = beta (v - S^T k);   S <- S + k u^T;   o = S^T q

(Yang, Kautz, Hatamizadeh, 2412.06464). Over a window in which row ``t`` continues from
its ancestors, with ``G_t`` the sum of ``g`` along the path to ``t``, this is

    (I + A) U = beta (V - (K e^G) S0),  A[t, s] = beta_t (k_t . k_s) e^(G_t - G_s)
    O = (Q e^G) S0 + P U,               P[t, s] = (q_t . k_s) e^(G_t - G_s)

where ``A`` keeps strict ancestors and ``P`` ancestors and the row itself. The tree
enters only as that mask and through ``G``, so no state per node is ever made.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def delta_window(
    q: Float[Array, "B W H dk"],
    k: Float[Array, "B W H dk"],
    v: Float[Array, "B W H dv"],
    log_decay: Float[Array, "B W H"],
    beta: Float[Array, "B W H"],
    state: Float[Array, "B H dk dv"],
    ancestors: Bool[Array, "B W W"],
) -> tuple[Float[Array, "B W H dv"], Float[Array, "B W H dv"], Float[Array, "B W H"]]:
    """Outputs ``O``, updates ``U`` and path decays ``G`` of every row.

    The state is read once and not written. Rows must come after their ancestors, and
    rows that nobody may see must be finite.
    """
    width = q.shape[1]
    strict = ancestors & ~jnp.eye(width, dtype=bool)
    path_decay = jnp.einsum("bts,bsh->bth", ancestors.astype(q.dtype), log_decay)
    # the exponent is masked, not the power: off a path the difference may overflow
    gap = path_decay[:, :, None] - path_decay[:, None]
    decay = jnp.exp(jnp.where(ancestors[..., None], gap, -jnp.inf))
    read = jnp.exp(path_decay)[..., None]

    mix = jnp.einsum("bthk,bshk->btsh", k, k) * decay * beta[:, :, None]
    mix = jnp.where(strict[..., None], mix, 0.0)
    old = jnp.einsum("bthk,bhkv->bthv", k * read, state)
    updates = _solve(mix, beta[..., None] * (v - old))
    seen = jnp.einsum("bthk,bshk->btsh", q, k) * decay
    out = jnp.einsum("bthk,bhkv->bthv", q * read, state)
    out = out + jnp.einsum("btsh,bshv->bthv", seen, updates)
    return out, updates, path_decay


def delta_commit(
    state: Float[Array, "B H dk dv"],
    k: Float[Array, "B W H dk"],
    updates: Float[Array, "B W H dv"],
    path_decay: Float[Array, "B W H"],
    path: Int[Array, "B P"],
    num: Int[Array, " B"],
) -> Float[Array, "B H dk dv"]:
    """The state after the first ``num`` rows of ``path``; unchanged where ``num`` is 0.

    ``S = e^(G_n) S0 + sum_j e^(G_n - G_j) k_j u_j^T`` over the path, whose last
    row is ``n``.
    """
    on_path = path[:, :, None]
    last = jnp.maximum(num - 1, 0)[:, None, None]
    decays = jnp.take_along_axis(path_decay, on_path, axis=1, mode="clip")
    final = jnp.take_along_axis(decays, last, axis=1, mode="clip")
    taken = (jnp.arange(path.shape[1], dtype=jnp.int32) < num[:, None])[..., None]
    weight = jnp.exp(jnp.where(taken, final - decays, -jnp.inf))
    keys = jnp.take_along_axis(k, on_path[..., None], axis=1, mode="clip")
    rows = jnp.take_along_axis(updates, on_path[..., None], axis=1, mode="clip")
    added = jnp.einsum("bphk,bphv->bhkv", keys * weight[..., None], rows)
    kept = jnp.exp(final[:, 0])[..., None, None] * state
    return jnp.where((num > 0)[:, None, None, None], kept + added, state)


def _solve(
    mix: Float[Array, "B W W H"], rhs: Float[Array, "B W H dv"]
) -> Float[Array, "B W H dv"]:
    """``(I + mix)^-1 rhs`` for strictly lower triangular ``mix``, row after row.

    Forward substitution is as stable as the serial recurrence. (Powers of ``mix`` are
    not: for repeated keys they grow like binomials. A library solver was seen to hang
    on CPU when two of its calls ran at once.)
    """

    def eliminate(row: jax.Array, solved: jax.Array) -> jax.Array:
        weights = jax.lax.dynamic_index_in_dim(mix, row, axis=1, keepdims=False)
        above = jnp.einsum("bsh,bshv->bhv", weights, solved)
        return solved.at[:, row].add(-above)

    return jax.lax.fori_loop(0, mix.shape[1], eliminate, rhs)
