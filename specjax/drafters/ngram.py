"""Prompt-lookup n-gram drafts, on the device (Saxena 2023; Yang et al., 2304.04487).

The last ``n`` tokens are looked for earlier in the row's own text, longest ``n`` first;
the tokens that followed the earliest such place are the draft.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from specjax.decoding.interfaces import ProposalLaw, Tap
from specjax.decoding.types import Acceptance, Context, Proposal, Verdict, Window

LONGEST_MATCH = 64
"""Each token of a match is an operation of the compiled program."""


class NGram(struct.PyTreeNode):
    """Up to ``k`` tokens after the earliest longest match of ``min_n..max_n`` tokens.

    The text is prompt and output up to and including the anchor. No match, no drafts:
    the row's round is then a plain step.
    """

    name = "ngram"
    k: int = struct.field(pytree_node=False)
    min_n: int = struct.field(pytree_node=False, default=2)
    max_n: int = struct.field(pytree_node=False, default=3)
    law = ProposalLaw.DETERMINISTIC

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k = {self.k}: an n-gram drafter needs k >= 1")
        if not 1 <= self.min_n <= self.max_n:
            raise ValueError(
                f"min_n = {self.min_n}, max_n = {self.max_n}: "
                "they must satisfy 1 <= min_n <= max_n"
            )
        if self.max_n > LONGEST_MATCH:
            raise ValueError(
                f"max_n = {self.max_n}: at most {LONGEST_MATCH} is looked for"
            )

    @property
    def taps(self) -> tuple[Tap, ...]:
        """No hidden states are needed."""
        return ()

    @property
    def max_nodes(self) -> int:
        """``k``."""
        return self.k

    @property
    def max_depth(self) -> int:
        """``k``: the draft is a chain."""
        return self.k

    def init(self, batch: int, capacity: int) -> None:
        """Nothing to remember: the text is in the context."""
        return None

    def propose(self, state: None, context: Context) -> tuple[Proposal, None]:
        """A chain behind the best match."""
        batch, _ = context.tokens.shape
        lengths = match_lengths(context.tokens, context.lengths, self.max_n)
        longest = lengths.max(axis=1)
        # argmax takes the first of equals: the earliest place
        end = jnp.argmax(lengths, axis=1).astype(jnp.int32)
        found = longest >= self.min_n
        steps = jnp.arange(1, self.k + 1, dtype=jnp.int32)
        tokens = jnp.take_along_axis(
            context.tokens, end[:, None] + steps, axis=1, mode="clip"
        )
        available = jnp.minimum(context.lengths - 1 - end, self.k)
        parents = jnp.broadcast_to(steps - 2, (batch, self.k))
        return Proposal(tokens, parents, jnp.where(found, available, 0)), None

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


def match_lengths(
    tokens: Int[Array, "B T"], lengths: Int[Array, " B"], max_n: int
) -> Int[Array, "B T"]:
    """How many tokens ending at each place equal the row's last ones, to ``max_n``.

    The row's own end does not count (nothing follows it), nor does what lies beyond.
    """
    capacity = tokens.shape[1]
    places = jnp.arange(capacity, dtype=jnp.int32)
    last = lengths - 1
    running = places < last[:, None]
    total = jnp.zeros_like(tokens)
    for back in range(max_n):
        mine = jnp.maximum(last - back, 0)[:, None]
        wanted = jnp.take_along_axis(tokens, mine, axis=1, mode="clip")
        # shifted so that entry i holds the token ``back`` places before i
        here = jnp.pad(tokens, [(0, 0), (back, 0)], constant_values=-1)[:, :capacity]
        inside = (places >= back) & (last[:, None] >= back)
        running = running & inside & (here == wanted)
        total = total + running.astype(jnp.int32)
    return total
