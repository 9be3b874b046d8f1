"""How often each continuation of a text's last tokens stood behind them before.

A suffix tree of a text holds, for every string in it, how often it stands there. For
drafting only the strings that begin with the text's last ``L`` tokens are asked for,
for ``L`` = 1, 2, ...; those are found without a tree. The places where the last tokens
stand are sorted by what follows them: then the places that share a continuation are
neighbours, and a count is a difference of two prefix sums. Shapes are fixed, nothing is
kept between rounds, and all ``L`` are counted at once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

NOTHING = -1
"""Stands in texts and continuations where there is no token."""

MOST = 2**31 - 2**24
"""What ``largest`` can order."""


class Places(struct.PyTreeNode):
    """Where the last tokens stand, sorted by what follows, place after place.

    ``C`` places; those that do not exist have ``match`` 0 and stand last. ``J`` is the
    longest continuation that is looked at.
    """

    ends: jax.Array  # [B, C] int32: index of the last matching token
    match: jax.Array  # [B, C] int32: how many last tokens stand there
    follows: jax.Array  # [B, J, C] int32: the tokens behind, or NOTHING
    starts: jax.Array  # [B, J, C] int32: first place that shares the first j + 1
    stops: jax.Array  # [B, J, C] int32: one behind the last such place


class Counts(struct.PyTreeNode):
    """How often, for match lengths ``L`` of 1 to ``M``."""

    within: jax.Array  # [B, C, M] bool: the last L tokens stand at the place
    total: jax.Array  # [B, M] int32: places where they stand
    behind: jax.Array  # [B, J, C, M] int32: of these, how many share j + 1 tokens
    first: jax.Array  # [B, J, C, M] bool: the first of those that share them


def match_lengths(
    text: Int[Array, "b T"], pattern: Int[Array, "B n"], may_end: Bool[Array, "B T"]
) -> Int[Array, "B T"]:
    """How many tokens ending at each place equal the pattern's last ones.

    ``pattern`` stands reversed: entry 0 is the last token. A missing entry (below
    ``NOTHING``) equals nothing. ``b`` is ``B``, or 1 for a text that all rows share.
    """
    size = text.shape[1]
    running, total = may_end, jnp.zeros(may_end.shape, jnp.int32)
    for back in range(min(pattern.shape[1], size)):
        # shifted so that entry i holds the token ``back`` places before i
        here = jnp.pad(text, [(0, 0), (back, 0)], constant_values=NOTHING)[:, :size]
        running = running & (here == pattern[:, back : back + 1])
        total = total + running.astype(jnp.int32)
    return total


def find_places(
    text: Int[Array, "b T"], match: Int[Array, "B T"], most: int, longest: int
) -> Places:
    """At most ``most`` places with a match: the longest, of equals the latest.

    Continuations end where ``text`` holds ``NOTHING``, and after ``longest`` tokens.
    """
    batch, size = match.shape
    order = match * size + jnp.arange(size, dtype=jnp.int32)
    kept = largest(order, min(most, size))
    ends, match = kept % size, kept // size
    steps = jnp.arange(1, longest + 1, dtype=jnp.int32)
    at = ends[:, None, :] + steps[:, None]  # [B, J, C]
    shared = jnp.broadcast_to(text, (batch, size))
    there = jnp.take_along_axis(shared[:, None], at, axis=2, mode="clip")
    there = jnp.where((at < size) & (match[:, None] > 0), there, NOTHING)
    ended = jnp.cumsum((there == NOTHING).astype(jnp.int32), axis=1, dtype=jnp.int32)
    there = jnp.where(ended > 0, NOTHING, there)
    missing = (match == 0).astype(jnp.int32)
    keys = [missing, *(there[:, j] for j in range(longest))]
    *keys, ends, match = jax.lax.sort(
        [*keys, ends, match], dimension=1, num_keys=len(keys)
    )
    follows = jnp.stack(keys[1:], axis=1)
    starts, stops = _runs(follows)
    return Places(ends, match, follows, starts, stops)


def largest(x: Int[Array, "*rows n"], k: int) -> Int[Array, "*rows k"]:
    """The ``k`` largest integers from -1 to ``MOST``, in order.

    As floats, of which XLA's CPU backend finds the largest in a tenth of the time:
    positive floats are ordered as their bits are. The first normal float stands for -1,
    as smaller ones may be taken for zero.
    """
    first = jnp.int32(2**23 + 1)
    floats = jax.lax.bitcast_convert_type(x + first, jnp.float32)
    found, _ = jax.lax.top_k(floats, k)
    return jax.lax.bitcast_convert_type(found, jnp.int32) - first


def _runs(
    follows: Int[Array, "B J C"],
) -> tuple[Int[Array, "B J C"], Int[Array, "B J C"]]:
    """The stretch of neighbours that agree with a place in its first tokens."""
    size = follows.shape[2]
    index = jnp.arange(size, dtype=jnp.int32)
    before = jnp.pad(follows, [(0, 0), (0, 0), (1, 0)], constant_values=NOTHING)
    differs = (follows != before[:, :, :size]) | (follows == NOTHING)
    differs = jnp.cumsum(differs.astype(jnp.int32), axis=1, dtype=jnp.int32) > 0
    begins = jnp.where(differs, index, 0)
    starts = jax.lax.cummax(begins, axis=2)
    after = jnp.pad(differs, [(0, 0), (0, 0), (0, 1)], constant_values=True)
    last = jnp.where(after[:, :, 1:], index + 1, size)
    return starts, jax.lax.cummin(last, axis=2, reverse=True)


def count(places: Places, lengths: int) -> Counts:
    """Counts for match lengths 1 to ``lengths``."""
    batch, longest, size = places.follows.shape
    wanted = jnp.arange(1, lengths + 1, dtype=jnp.int32)
    within = places.match[:, :, None] >= wanted
    sums = jnp.cumsum(within.astype(jnp.int32), axis=1, dtype=jnp.int32)
    sums = jnp.pad(sums, [(0, 0), (1, 0), (0, 0)])  # of the places before each
    shape = (batch, longest, size, lengths)

    def at(index: Int[Array, "B J C"]) -> Int[Array, "B J C M"]:
        flat = index.reshape(batch, longest * size)
        rows = jax.vmap(lambda s, i: s.at[i].get(mode="clip"))(sums, flat)
        return rows.reshape(shape)

    before = at(places.starts)
    first = within[:, None] & (before == sums[:, None, :size])
    there = (places.follows != NOTHING)[..., None]
    return Counts(
        within=within,
        total=sums[:, size],
        behind=jnp.where(there, at(places.stops) - before, 0),
        first=first & there,
    )
