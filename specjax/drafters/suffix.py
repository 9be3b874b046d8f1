"""Suffix decoding: what stood behind the same last tokens most often (2411.04975).

The text's last ``L`` tokens are looked for, for every ``L``; a continuation is as
probable as it was frequent behind them. The draft is the one, of all ``L``, that
promises the most accepted tokens: a longer match may promise more of them.

Counts are those of a suffix tree that holds strings of at most ``max_tree_depth``
tokens, match and draft together, and counts the text's own end among the places where
the match stands. Where the reference leaves an order open it is fixed here: of equally
frequent continuations the one that stood last comes first, a shallower node before a
deeper one; of equal scores the longer match is taken, and the row's own text before
past outputs.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int, Shaped

from specjax.decoding.interfaces import ProposalLaw, Tap
from specjax.decoding.types import (
    ANCHOR,
    Acceptance,
    Context,
    Proposal,
    Verdict,
    Window,
)
from specjax.drafters.past_outputs import PastOutputs
from specjax.drafters.suffix_counts import (
    MOST,
    NOTHING,
    Counts,
    Places,
    count,
    find_places,
    largest,
    match_lengths,
)

MISSING = -2
"""A token of a pattern that the row does not have: it equals no token of a text."""


class Draft(NamedTuple):
    """The best draft of one text, and its score ``won / out_of``: the number of its
    tokens that will be accepted, if counts are to be believed."""

    tokens: Int[Array, "B N"]
    parents: Int[Array, "B N"]
    num_nodes: Int[Array, " B"]
    won: Int[Array, " B"]
    out_of: Int[Array, " B"]


class Suffix(struct.PyTreeNode):
    """At most ``k`` tokens that followed the row's last ones before.

    A match of ``L`` tokens may draft ``max_spec_factor * L + max_spec_offset`` of them;
    no drafted token is less probable than ``min_token_prob``. As a path the draft takes
    the most frequent token at each step; as a ``tree`` it is the most probable nodes.

    A row drafts from its own text, and from ``past`` as well if that is given. Of each
    text at most ``places`` places are looked at, those of the longest matches (of equal
    ones the latest): the cost is bounded, and counts are exact up to there.
    """

    name = "suffix"
    law = ProposalLaw.DETERMINISTIC
    past: PastOutputs | None = None
    k: int = struct.field(pytree_node=False, default=8)
    tree: bool = struct.field(pytree_node=False, default=False)
    max_spec_factor: float = struct.field(pytree_node=False, default=1.0)
    max_spec_offset: float = struct.field(pytree_node=False, default=0.0)
    min_token_prob: float = struct.field(pytree_node=False, default=0.1)
    max_tree_depth: int = struct.field(pytree_node=False, default=24)
    places: int = struct.field(pytree_node=False, default=256)

    def __post_init__(self) -> None:
        for field, least in (("k", 1), ("max_tree_depth", 2), ("places", 1)):
            if getattr(self, field) < least:
                value = getattr(self, field)
                raise ValueError(f"{field} = {value}: it must be at least {least}")
        if not 0 <= self.min_token_prob <= 1:
            raise ValueError(
                f"min_token_prob = {self.min_token_prob}: it must lie in [0, 1]"
            )
        if self.max_spec_factor < 0 or not math.isfinite(self.max_spec_factor):
            raise ValueError(
                f"max_spec_factor = {self.max_spec_factor}: it must be 0 or more"
            )
        if not math.isfinite(self.max_spec_offset):
            raise ValueError(f"max_spec_offset = {self.max_spec_offset}: not finite")

    @property
    def taps(self) -> tuple[Tap, ...]:
        """No hidden states are needed."""
        return ()

    @property
    def max_nodes(self) -> int:
        """``k``; a path is no deeper than the suffix tree allows."""
        return self.k if self.tree else self.max_depth

    @property
    def makes_trees(self) -> bool:
        """Whether a draft may branch; its longest path may have ``k`` nodes too."""
        return self.tree

    @property
    def max_depth(self) -> int:
        """``k``, or what the suffix tree leaves behind a match of one token."""
        return min(self.k, self.max_tree_depth - 1)

    @property
    def budgets(self) -> tuple[int, ...]:
        """The most nodes of a draft, for matches of 1, 2, ... tokens."""
        factor, offset = self.max_spec_factor, self.max_spec_offset
        # as in the reference, 0.1 * 30 is 3, whatever its last bit says
        allowed = [
            math.floor(factor * length + offset + 1e-6)
            for length in range(1, self.max_tree_depth)
        ]
        return tuple(min(max(nodes, 0), self.max_nodes) for nodes in allowed)

    def init(self, batch: int, capacity: int) -> None:
        """Nothing to remember: the text is in the context."""
        return None

    def propose(self, state: None, context: Context) -> tuple[Proposal, None]:
        """The better of the drafts from the row's own text and from past outputs."""
        tokens, lengths = context.tokens, context.lengths
        last = (lengths - 1)[:, None]
        index = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        text = jnp.where(index <= last, tokens, NOTHING)
        back = last - jnp.arange(self.max_tree_depth - 1, dtype=jnp.int32)
        pattern = jnp.take_along_axis(text, jnp.maximum(back, 0), axis=1, mode="clip")
        pattern = jnp.where(back >= 0, pattern, MISSING)
        # the end itself is a place too, behind which nothing stands
        draft = self._best(text, pattern, index < last, ends=1)
        if self.past is not None:
            shared = self.past.tokens[None]
            anywhere = jnp.ones((tokens.shape[0], shared.shape[1]), bool)
            other = self._best(shared, pattern, anywhere, ends=0)
            own = draft.won * other.out_of >= other.won * draft.out_of
            draft = jax.tree.map(
                lambda a, b: jnp.where(own.reshape(-1, *[1] * (a.ndim - 1)), a, b),
                draft,
                other,
            )
        # the last token a row has room for needs no draft
        room = jnp.maximum(context.room - 1, 0)
        most = jnp.where(room > 0, draft.num_nodes, 0) if self.tree else room
        count = jnp.minimum(draft.num_nodes, most)
        return Proposal(draft.tokens, draft.parents, count), None

    def observe(
        self,
        state: None,
        pending: Any,
        window: Window,
        verdict: Verdict,
        acceptance: Acceptance,
    ) -> None:
        """Nothing to learn: committed tokens reach the next context by themselves."""
        return None

    def _best(self, text: Array, pattern: Array, may_end: Array, *, ends: int) -> Draft:
        """The best draft from one text, in which the pattern stands ``ends`` times
        where it is not looked for."""
        match = match_lengths(text, pattern, may_end)
        _check_size(match.shape[1], self.places, self.max_nodes)
        places = find_places(text, match, self.places, self.max_depth)
        counts = count(places, self.max_tree_depth - 1)
        out_of = jnp.maximum(counts.total + ends, 1)
        make = self._tree if self.tree else self._path
        return make(text, places, counts, out_of)

    def _least(self, out_of: Int[Array, "B M"]) -> Int[Array, "B M"]:
        """The count from which on a continuation is probable enough; at least 1."""
        most = self.places + 1
        table = [math.ceil(self.min_token_prob * n - 1e-6) for n in range(most + 1)]
        return jnp.asarray(np.maximum(table, 1), jnp.int32).at[out_of].get(mode="clip")

    def _path(
        self,
        text: Int[Array, "b T"],
        places: Places,
        counts: Counts,
        out_of: Int[Array, "B M"],
    ) -> Draft:
        """The most frequent next token, step by step, for all match lengths."""
        size, steps = text.shape[1], self.max_depth
        budgets, least = jnp.asarray(self.budgets, jnp.int32), self._least(out_of)
        lengths = jnp.arange(1, self.max_tree_depth, dtype=jnp.int32)
        budgets = jnp.minimum(budgets, self.max_tree_depth - lengths)
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

    def _tree(
        self,
        text: Int[Array, "b T"],
        places: Places,
        counts: Counts,
        out_of: Int[Array, "B M"],
    ) -> Draft:
        """The most frequent continuations, as many as the match may draft."""
        batch, depths, size, lengths = counts.behind.shape
        depth = jnp.arange(1, depths + 1, dtype=jnp.int32)[:, None, None]
        length = jnp.arange(1, lengths + 1, dtype=jnp.int32)
        node = counts.first & (counts.behind >= self._least(out_of)[:, None, None])
        node = node & (depth + length <= self.max_tree_depth)
        nodes = jnp.where(node, counts.behind, 0)
        budgets = jnp.asarray(self.budgets, jnp.int32)
        flat = nodes.reshape(batch, depths * size, lengths)
        chosen = _best_length(_sum_of_largest(flat, budgets, self.k), out_of)
        nodes = _at(nodes, chosen)
        latest = _latest(places, _at(counts.within, chosen))
        order = (
            nodes * depths + (depths - 1 - jnp.arange(depths, dtype=jnp.int32))[:, None]
        )
        order = jnp.where(nodes > 0, order * text.shape[1] + latest, -1)
        order = order.reshape(batch, depths * size)
        best = largest(order, min(self.k, depths * size))
        best = jnp.pad(best, [(0, 0), (0, self.k - best.shape[1])], constant_values=-1)
        there, index = best >= 0, jnp.arange(self.k, dtype=jnp.int32)
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


def _check_size(size: int, places: int, nodes: int) -> None:
    """Counts and places are ordered as one integer."""
    if (places + 2) * max(nodes, 1) * size >= MOST:
        raise ValueError(
            f"places = {places} of a text of {size} tokens, with {nodes} nodes, are "
            "too many to order: lower places"
        )
