"""Shorter drafts: a fixed length, and none beyond what a drafter was made for."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct

from specjax.decoding.interfaces import Drafter, ProposalLaw, Tap
from specjax.decoding.pairs import makes_trees
from specjax.decoding.trees import depths_of
from specjax.decoding.types import Acceptance, Context, Proposal, Verdict, Window
from specjax.drafters.combining import keep_nodes, sound_parents


class Capped(struct.PyTreeNode):
    """A drafter whose drafts are at most ``k`` deep, and end at ``max_context``.

    ``max_context`` is the longest text, drafts included, that the drafter was made for;
    a row that has reached it gets no drafts, and goes on by plain rounds. What is cut
    depends on depth and text length and on no drafted token, so that drawn drafts stay
    what they say they are.
    """

    drafter: Drafter
    k: int | None = struct.field(pytree_node=False, default=None)
    max_context: int | None = struct.field(pytree_node=False, default=None)

    def __post_init__(self) -> None:
        for field in ("k", "max_context"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field} = {value}: it must be at least 1")

    @property
    def name(self) -> str:
        """The drafter's."""
        return getattr(self.drafter, "name", type(self.drafter).__name__)

    @property
    def vocab_size(self) -> int | None:
        """The drafter's, if it has one."""
        return getattr(self.drafter, "vocab_size", None)

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The drafter's."""
        return self.drafter.taps

    @property
    def law(self) -> ProposalLaw:
        """The drafter's."""
        return self.drafter.law

    @property
    def max_depth(self) -> int:
        """``k``, if the drafter's is not less."""
        depth = self.drafter.max_depth
        return depth if self.k is None else min(depth, self.k)

    @property
    def makes_trees(self) -> bool:
        """The drafter's."""
        return makes_trees(self.drafter)

    @property
    def max_nodes(self) -> int:
        """The drafter's; of a chain, ``max_depth``."""
        return self.drafter.max_nodes if self.makes_trees else self.max_depth

    def init(self, batch: int, capacity: int) -> Any:
        """The drafter's."""
        return self.drafter.init(batch, capacity)

    def propose(self, state: Any, context: Context) -> tuple[Proposal, Any]:
        """The drafter's proposal, cut."""
        most = jnp.full_like(context.lengths, self.max_depth)
        if self.max_context is not None:
            most = jnp.minimum(most, self.max_context - context.lengths)
        most = jnp.maximum(most, 0)
        # no more is asked for than will be kept
        room = jnp.minimum(context.room, most + 1)
        proposal, pending = self.drafter.propose(state, context.replace(room=room))
        depths = depths_of(sound_parents(proposal))
        kept = depths <= most[:, None]
        return keep_nodes(proposal, kept, self.max_nodes), pending

    def observe(
        self,
        state: Any,
        pending: Any,
        window: Window,
        verdict: Verdict,
        acceptance: Acceptance,
    ) -> Any:
        """The drafter's."""
        return self.drafter.observe(state, pending, window, verdict, acceptance)
