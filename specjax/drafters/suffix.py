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
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array

from specjax.decoding.interfaces import ProposalLaw, Tap
from specjax.decoding.pairs import PairError
from specjax.decoding.types import Acceptance, Context, Proposal, Verdict, Window
from specjax.drafters.past_outputs import PastOutputs
from specjax.drafters.suffix_counts import (
    MOST,
    NOTHING,
    count,
    find_places,
    match_lengths,
)
from specjax.drafters.suffix_drafts import Draft, Limits, path, tree

MISSING = -2
"""A token of a pattern that the row does not have: it equals no token of a text."""


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
        limits = Limits(
            nodes=self.k,
            depth=self.max_depth,
            budgets=self.budgets,
            tree_depth=self.max_tree_depth,
            least=self.min_token_prob,
            places=self.places,
        )
        make = tree if self.tree else path
        return make(limits, text, places, counts, out_of)


def _check_size(size: int, places: int, nodes: int) -> None:
    """Counts and places are ordered as one integer."""
    if (places + 2) * max(nodes, 1) * size >= MOST:
        raise PairError(
            f"suffix drafts of k = {nodes} nodes, from {places} places (places) of a "
            f"text of up to {size} tokens, are too many to order: lower k, places or "
            "the capacity"
        )
