"""The body of the TPU kernel: all heads of one step.

Heads stand side by side in the lanes of ``[rows, heads * dim]``, as projections leave
them, so nothing is transposed. The matrices are taken one head after another, for they
fill the registers; everything else is done for all heads of the step at once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels import exact
from pallas_kernels.delta_window import heads as maths
from pallas_kernels.delta_window.decays import LOWEST
from pallas_kernels.delta_window.plan import SUBLANES, Plan


def run(plan: Plan, names: tuple[str, ...], taken: Any, *refs: Any) -> None:
    """Advance, write, window: those of the three that the plan has."""
    ref = dict(zip(names, refs, strict=True))
    past = _Past(plan, ref, taken) if plan.past else None
    window = _Window(plan, ref) if plan.rows else None
    heads = range(plan.heads_per_step)
    states = ref["state"]
    if past is not None:
        # a round trip through memory: registers do not hold a matrix for both parts
        states = ref["written" if plan.writes else "advanced"]
        for head in heads:
            states[0, head] = past.advance(head, ref["state"][0, head])
    if window is None:
        return
    for head in heads:
        window.read(head, states[0, head])
    for name, found in zip(("out", "updates"), window.finish(), strict=True):
        for head in heads:
            at = _lanes(head, plan.value_dim)
            ref[name][0, :, at] = found[head, : plan.rows]


class _Window:
    """The window's rows of one step: what its heads read, then all that follows."""

    def __init__(self, plan: Plan, ref: dict[str, Any]) -> None:
        self.plan = plan
        mask = _padded(ref["ancestors"][0], 0, 1)
        self.along = maths.Paths(mask)
        self.k = _heads(ref["k"], plan.key_dim)
        self.q = _heads(ref["q"], plan.key_dim)
        self.v = _heads(ref["v"], plan.value_dim)
        self.beta = None
        if plan.delta:
            self.beta = maths.as_column(_padded(ref["beta"][0, 0], 1))
        self.old: list[jax.Array] = []
        if plan.channel_decay:
            sums = maths.path_decays(
                _padded(ref["log_decay"][0], 0), lambda x: exact.masked_sums(mask, x)
            )
            self.decays = maths.Decays(*(_split(x, plan.key_dim) for x in sums))
        else:
            self.rows = maths.path_decays(
                _padded(ref["log_decay"][0, 0], 1),
                lambda x: exact.sums_masked(x, mask),
            )
            self.decays = maths.Decays(*map(maths.as_column, self.rows))
        self.power = jnp.exp(self.decays.total)

    def read(self, head: int, state: jax.Array) -> None:
        """What the state holds for each query, and with the delta for each key."""
        plan, at = self.plan, head // self.plan.share
        reads = [self.q[at], self.k[at]][: 1 + plan.delta]
        if plan.channel_decay:
            reads = [x * self.power[head] for x in reads]
        rows = jnp.concatenate(reads, axis=0)
        self.old.append(exact.dot(rows, state, transposed=plan.flipped))

    def finish(self) -> tuple[jax.Array, jax.Array]:
        """Outputs and updates ``[heads, W8, dv]``."""
        plan, size = self.plan, self.q.shape[1]
        old = jnp.stack(self.old)
        out, foretold = old[:, :size], old[:, size:]
        if plan.channel_decay:
            q, k = (_shared(x, plan.share) for x in (self.q, self.k))
            columns = maths.channel_columns(q, k, self.decays, self.beta, self.along)
        else:
            out = out * self.power
            foretold = foretold * self.power if plan.delta else foretold
            columns = maths.head_columns(
                _shared(self._products(), plan.share), self.rows, self.beta, self.along
            )
        updates = self.v
        if self.beta is not None:
            updates = self.beta * (self.v - foretold)
        return maths.substitute(out, updates, columns, plan.rows)

    def _products(self) -> jax.Array:
        """Of queries, and with the delta of keys, with keys: for each key head."""
        found = []
        for q, k in zip(self.q, self.k, strict=True):
            reads = jnp.concatenate([q, k][: 1 + self.plan.delta], axis=0)
            found.append(exact.dot(reads, k.T))
        return jnp.stack(found)


class _Past:
    """The past rows of one step."""

    def __init__(self, plan: Plan, ref: dict[str, Any], taken: Any) -> None:
        self.plan, self.ref = plan, ref
        size = -(-plan.past // SUBLANES) * SUBLANES
        later = maths.later_rows(size)
        self.column, self.any = _taken_rows(plan, taken, size, 0)
        if plan.channel_decay:
            self.decay = self._bounded(ref["past_decay"][0], self.column, 0)
            behind = exact.masked_sums(later, self.decay)
            self.weight = _split(jnp.exp(behind), plan.key_dim)
        else:
            row, _ = _taken_rows(plan, taken, size, 1)
            decay = ref["past_decay"][0, 0]
            self.decay = self._bounded(decay, row, 1)
            behind = exact.sums_masked(self.decay, later)
            self.weight = maths.as_column(jnp.exp(behind))
            self.total = jnp.exp(jnp.sum(self.decay, axis=1, keepdims=True))

    def advance(self, head: int, state: jax.Array) -> jax.Array:
        """The state behind the rows; untouched where none counts."""
        plan, at = self.plan, _lanes(head, self.plan.key_dim)
        if not plan.channel_decay:
            decay = self.total[head : head + 1]
        elif plan.flipped:
            decay = jnp.exp(jnp.sum(self.decay[:, at], axis=0, keepdims=True))
        else:
            decay = jnp.exp(exact.column_sums(self.decay[:, at], plan.value_dim))
        keys = self._rows("past_k", head // plan.share, plan.key_dim)
        keys = keys * self.weight[head]
        updates = self._rows("past_u", head, plan.value_dim)
        pair = (updates, keys) if plan.flipped else (keys, updates)
        after = maths.advanced(state, decay, *pair)
        return jnp.where(self.any, after, state)

    def _rows(self, name: str, head: int, dim: int) -> jax.Array:
        """With zeros for rows that do not count, whatever they hold."""
        x = self.ref[name][0, :, _lanes(head, dim)].astype(jnp.float32)
        return jnp.where(self.column > 0, _padded(x, 0), 0.0)

    def _bounded(self, x: jax.Array, mask: jax.Array, axis: int) -> jax.Array:
        kept = jnp.where(mask > 0, _padded(x.astype(jnp.float32), axis), 0.0)
        return jnp.maximum(kept, LOWEST)


def _taken_rows(
    plan: Plan, taken: Any, size: int, axis: int
) -> tuple[jax.Array, jax.Array]:
    """Which past rows count, along an axis of two, and whether any does."""
    shape = (size, 1) if axis == 0 else (1, size)
    rows = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    batch = pl.program_id(0)
    words = [taken[batch, i] for i in range(plan.words)]
    word, some = words[0], words[0]
    for i, other in enumerate(words[1:], start=1):
        word = jnp.where(rows < 32 * i, word, other)
        some = some | other
    return (word >> (rows & 31)) & 1, some != 0


def _padded(x: Float[Array, "n m"], *axes: int) -> jax.Array:
    """With zeros up to a multiple of 8 along these axes."""
    missing = [-size % SUBLANES if i in axes else 0 for i, size in enumerate(x.shape)]
    return jnp.pad(x, [(0, count) for count in missing])


def _heads(ref: Any, dim: int) -> Float[Array, "heads W8 dim"]:
    """The heads that stand side by side in the lanes."""
    return _split(_padded(ref[0], 0), dim)


def _split(x: Float[Array, "W8 lanes"], dim: int) -> Float[Array, "heads W8 dim"]:
    return jnp.stack([x[:, _lanes(i, dim)] for i in range(x.shape[1] // dim)])


def _shared(x: Float[Array, "G n m"], share: int) -> Float[Array, "H n m"]:
    """Each key head's for all the heads it serves."""
    if share == 1:
        return x
    return jnp.stack([x[i // share] for i in range(x.shape[0] * share)])


def _lanes(head: int, dim: int) -> slice:
    return slice(head * dim, (head + 1) * dim)
