"""The best suffix draft of one text, of all match lengths: a path, or a tree."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from specjax.decoding.types import ANCHOR
from specjax.drafters.suffix_counts import NOTHING, Counts, Places, largest


class Limits(NamedTuple):
    """What a draft may be; see ``Suffix``, whose settings they are."""

    nodes: int
    depth: int
    budgets: tuple[int, ...]
    tree_depth: int
    least: float
    places: int


class Draft(NamedTuple):
    """The best draft of one text, and its score ``won / out_of``: the number of its
    tokens that will be accepted, if counts are to be believed."""

    tokens: Int[Array, "B N"]
    parents: Int[Array, "B N"]
    num_nodes: Int[Array, " B"]
    won: Int[Array, " B"]
    out_of: Int[Array, " B"]


def path(
    limits: Limits,
    text: Int[Array, "b T"],
    places: Places,
    counts: Counts,
    out_of: Int[Array, "B M"],
) -> Draft:
    """The most frequent next token, step by step, for all match lengths."""
    size, steps = text.shape[1], limits.depth
    budgets, least = jnp.asarray(limits.budgets, jnp.int32), _least(limits, out_of)
    lengths = jnp.arange(1, limits.tree_depth, dtype=jnp.int32)
    budgets = jnp.minimum(budgets, limits.tree_depth - lengths)
    inside, going = counts.within, jnp.ones(out_of.shape, bool)
    tokens, won, num = [], jnp.zeros_like(out_of), jnp.zeros_like(out_of)
    for step in range(steps):
        follows = places.follows[:, step, :, None]
        inside = inside & (follows != NOTHING)
        # of equal counts the latest place wins
        order = counts.behind[:, step] * size + places.ends[:, :, None]
        best = jnp.where(inside, order, -1).max(axis=1)
        going = going & (best // size >= least) & (step < budgets)
        token = _text_at(text, best % size + step + 1)
        inside = inside & (follows == token[:, None])
        won = won + jnp.where(going, best // size, 0)
        num = num + going.astype(jnp.int32)
        tokens.append(token)
    chosen = _best_length(won, out_of)
    batch = won.shape[0]
    parents = jnp.arange(steps, dtype=jnp.int32) - 1
    return Draft(
        tokens=_at(jnp.stack(tokens, axis=1), chosen),
        parents=jnp.broadcast_to(parents, (batch, steps)),
        num_nodes=_at(num, chosen),
        won=_at(won, chosen),
        out_of=_at(out_of, chosen),
    )


def tree(
    limits: Limits,
    text: Int[Array, "b T"],
    places: Places,
    counts: Counts,
    out_of: Int[Array, "B M"],
) -> Draft:
    """The most frequent continuations, as many as the match may draft."""
    batch, depths, size, lengths = counts.behind.shape
    depth = jnp.arange(1, depths + 1, dtype=jnp.int32)[:, None, None]
    length = jnp.arange(1, lengths + 1, dtype=jnp.int32)
    node = counts.first & (counts.behind >= _least(limits, out_of)[:, None, None])
    node = node & (depth + length <= limits.tree_depth)
    nodes = jnp.where(node, counts.behind, 0)
    budgets = jnp.asarray(limits.budgets, jnp.int32)
    flat = nodes.reshape(batch, depths * size, lengths)
    chosen = _best_length(_sum_of_largest(flat, budgets, limits.nodes), out_of)
    nodes = _at(nodes, chosen)
    latest = _latest(places, _at(counts.within, chosen))
    order = nodes * depths + (depths - 1 - jnp.arange(depths, dtype=jnp.int32))[:, None]
    order = jnp.where(nodes > 0, order * text.shape[1] + latest, -1)
    order = order.reshape(batch, depths * size)
    best = largest(order, min(limits.nodes, depths * size))
    best = jnp.pad(
        best, [(0, 0), (0, limits.nodes - best.shape[1])], constant_values=-1
    )
    there, index = best >= 0, jnp.arange(limits.nodes, dtype=jnp.int32)
    there = there & (index < budgets.at[chosen].get(mode="clip")[:, None])
    rest = jnp.maximum(best, 0) // text.shape[1]
    level = depths - 1 - rest % depths
    tokens, parents = _nodes(text, best % text.shape[1], level, depths)
    return Draft(
        tokens=tokens,
        parents=parents,
        num_nodes=there.sum(axis=1, dtype=jnp.int32),
        won=jnp.where(there, rest // depths, 0).sum(axis=1, dtype=jnp.int32),
        out_of=_at(out_of, chosen),
    )


def _least(limits: Limits, out_of: Int[Array, "B M"]) -> Int[Array, "B M"]:
    """The count from which on a continuation is probable enough; at least 1."""
    most = limits.places + 1
    table = [math.ceil(limits.least * n - 1e-6) for n in range(most + 1)]
    return jnp.asarray(np.maximum(table, 1), jnp.int32).at[out_of].get(mode="clip")


def _best_length(won: Int[Array, "B M"], out_of: Int[Array, "B M"]) -> Int[Array, " B"]:
    """Where ``won / out_of`` is largest, the last of equals; exact, in integers."""
    cross = won[:, :, None] * out_of[:, None, :]  # [i, j]: score i against score j
    no_less = jnp.all(cross >= cross.swapaxes(1, 2), axis=2)
    index = jnp.arange(won.shape[1], dtype=jnp.int32)
    return jnp.where(no_less, index, 0).max(axis=1)


def _sum_of_largest(
    values: Int[Array, "B X M"], how_many: Int[Array, " M"], most: int
) -> Int[Array, "B M"]:
    """The sum of the ``how_many`` (at most ``most``) largest values of each column."""
    top = largest(values.swapaxes(1, 2), min(most, values.shape[1]))
    index = jnp.arange(top.shape[2], dtype=jnp.int32)
    counted = index < how_many[:, None]
    return jnp.where(counted, top, 0).sum(axis=2, dtype=jnp.int32)


def _latest(places: Places, within: Array) -> Int[Array, "B J C"]:
    """The latest of the places within that share a continuation, at the first."""
    ends = jnp.where(within, places.ends, 0)

    def one(starts: Int[Array, " C"], ends: Int[Array, " C"]) -> Int[Array, " C"]:
        return jnp.zeros_like(ends).at[starts].max(ends, mode="drop")

    each = jax.vmap(jax.vmap(one, in_axes=(0, None)))
    latest = each(places.starts, ends)
    return jnp.take_along_axis(latest, places.starts, axis=2, mode="clip")


def _nodes(
    text: Int[Array, "b T"],
    ends: Int[Array, "B N"],
    level: Int[Array, "B N"],
    depths: int,
) -> tuple[Int[Array, "B N"], Int[Array, "B N"]]:
    """Tokens and parents of the nodes ``level + 1`` tokens behind the places."""
    steps = jnp.arange(1, depths + 1, dtype=jnp.int32)
    strings = _text_at(text, ends[:, :, None] + steps)
    tokens = jnp.take_along_axis(strings, level[:, :, None], axis=2, mode="clip")
    same = jnp.all(
        (strings[:, :, None] == strings[:, None])
        | (steps > level[:, None, :, None] + 1),
        axis=3,
    )
    above = same & (level[:, None, :] == level[:, :, None] - 1)
    index = jnp.arange(ends.shape[1], dtype=jnp.int32)
    return tokens[:, :, 0], jnp.where(above, index, ANCHOR).max(axis=2)


def _text_at(text: Int[Array, "b T"], at: Int[Array, "B ..."]) -> Int[Array, "B ..."]:
    """The tokens at these places of each row's text."""
    batch = at.shape[0]
    text = jnp.broadcast_to(text, (batch, text.shape[1]))
    flat = jnp.take_along_axis(text, at.reshape(batch, -1), axis=1, mode="clip")
    return flat.reshape(at.shape)


def _at(x: Shaped[Array, "B ... M"], chosen: Int[Array, " B"]) -> Array:
    """Each row's entry for its chosen match length."""
    index = chosen.reshape(-1, *[1] * (x.ndim - 1))
    return jnp.take_along_axis(x, index, axis=-1, mode="clip")[..., 0]
