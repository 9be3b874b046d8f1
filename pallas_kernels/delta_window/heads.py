"""The arithmetic inside a kernel: the reference for some heads of a step at once.

Values are float32, ``[heads, rows, dim]``, with rows along the sublanes: a multiple of
8 of them, and zeros in those behind the real ones. Heads are but a leading axis, so the
program is as long for eight of them as for one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import exact
from pallas_kernels.delta_window.decays import LOWEST, STEP

_NEVER = -1e30
"""An exponent whose power is 0."""


@dataclasses.dataclass(frozen=True)
class Paths:
    """The window's ancestor mask."""

    mask: jax.Array  # [W8, W8] of zeros and ones; rows with themselves

    @property
    def strict(self) -> Float[Array, "W8 W8"]:
        """Without the rows themselves."""
        return jnp.where(_diagonal(self.mask.shape[0]), 0.0, self.mask)


@dataclasses.dataclass(frozen=True)
class Decays:
    """Sums of log decays along the paths, in two parts (see ``decays.PathSums``)."""

    coarse: jax.Array  # [heads, W8, n]; n is dk, or 1 for one decay a head
    fine: jax.Array

    @property
    def total(self) -> jax.Array:
        """``[heads, W8, n]``."""
        return self.coarse + self.fine

    def since(self, earlier: Decays, seen: jax.Array) -> jax.Array:
        """``e`` to the decay since earlier rows, where they are seen, else 0."""
        gap = (self.coarse - earlier.coarse) + (self.fine - earlier.fine)
        return jnp.exp(jnp.where(seen > 0, gap, _NEVER))

    def row(self, s: int) -> Decays:
        """Of one row, ``[heads, 1, n]``."""
        return Decays(self.coarse[:, s : s + 1], self.fine[:, s : s + 1])


def path_decays(
    log_decay: jax.Array, sums: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Coarse and fine sums of decays, which are bounded from below."""
    decay = jnp.maximum(log_decay, LOWEST)
    coarse = jnp.round(decay / STEP) * STEP
    return sums(coarse), sums(decay - coarse)


def as_column(rows: Float[Array, "heads W8"]) -> Float[Array, "heads W8 1"]:
    """Numbers from the lanes to the sublanes."""
    spread = jnp.where(_diagonal(rows.shape[1]), rows[:, None], 0.0)
    return jnp.sum(spread, axis=2, keepdims=True)


def as_row(rows: Float[Array, "heads W8"]) -> Float[Array, "heads 1 W8"]:
    """Numbers in the lanes, for each head by itself."""
    return rows[:, None]


Columns = Callable[[int], tuple[jax.Array, jax.Array | None]]
"""Of a row ``s``: what each row takes of its update for its output, and (``None``
without the delta) for its own update; both ``[heads, W8, 1]``."""


def head_columns(
    products: Float[Array, "heads stacksxW8 W8"],
    rows: tuple[Float[Array, "heads W8"], Float[Array, "heads W8"]],
    beta: Float[Array, "heads W8 1"] | None,
    along: Paths,
) -> Columns:
    """With one decay a head: products of keys times powers of the gaps.

    ``rows`` are the coarse and fine sums, with window rows in the lanes.
    """
    size = along.mask.shape[0]
    later, earlier = (Decays(*map(turn, rows)) for turn in (as_column, as_row))
    power = later.since(earlier, along.mask)  # [heads, W8, W8]
    out = products[:, :size] * power
    update = None
    if beta is not None:
        update = products[:, size:] * power * beta * along.strict

    def column(s: int) -> tuple[jax.Array, jax.Array | None]:
        at = slice(s, s + 1)
        return out[:, :, at], None if update is None else update[:, :, at]

    return column


def channel_columns(
    q: Float[Array, "heads W8 dk"],
    k: Float[Array, "heads W8 dk"],
    decays: Decays,
    beta: Float[Array, "heads W8 1"] | None,
    along: Paths,
) -> Columns:
    """With one decay a channel: pair by pair, for a split power would overflow."""
    strict = along.strict

    def column(s: int) -> tuple[jax.Array, jax.Array | None]:
        at = slice(s, s + 1)
        key = decays.since(decays.row(s), along.mask[:, at]) * k[:, at]
        out = jnp.sum(q * key, axis=2, keepdims=True)
        if beta is None:
            return out, None
        mixed = jnp.sum(k * key, axis=2, keepdims=True)
        return out, mixed * beta * strict[:, at]

    return column


def substitute(
    out: Float[Array, "heads W8 dv"],
    updates: Float[Array, "heads W8 dv"],
    columns: Columns,
    rows: int,
) -> tuple[Float[Array, "heads W8 dv"], Float[Array, "heads W8 dv"]]:
    """Outputs and updates from what the old state gives, row after row.

    When a row's turn comes its update is final: all that it takes is from rows before.
    """
    for s in range(rows):
        own = updates[:, s : s + 1]
        shown, mixed = columns(s)
        out = out + shown * own
        if mixed is not None:
            updates = updates - mixed * own
    return out, updates


def advanced(
    state: Float[Array, "n m"],
    decay: Float[Array, "n_or_1 m_or_1"],
    left: Float[Array, "R8 n"],
    right: Float[Array, "R8 m"],
) -> Float[Array, "n m"]:
    """One head's state behind past rows: keys, as they are at the end, by updates."""
    return decay * state + exact.dot_columns(left, right)


def later_rows(size: int) -> Float[Array, "R8 R8"]:
    """For rows one after another: 1 for those behind each."""
    row, column = _row_and_column(size)
    return jnp.where(column > row, 1.0, 0.0)


def _diagonal(size: int) -> jax.Array:
    row, column = _row_and_column(size)
    return row == column


def _row_and_column(size: int) -> tuple[jax.Array, jax.Array]:
    shape = (size, size)
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return row, jax.lax.broadcasted_iota(jnp.int32, shape, 1)
