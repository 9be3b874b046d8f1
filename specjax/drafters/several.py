"""The part of a combinator of several drafters that does not depend on how they are
combined: each has its own state, and each observes every committed window."""

from __future__ import annotations

from typing import Any

from flax import struct

from specjax.decoding.interfaces import Drafter, ProposalLaw, Tap
from specjax.decoding.pairs import makes_trees
from specjax.decoding.types import Acceptance, Context, Proposal, Verdict, Window
from specjax.drafters.combining import (
    check_together,
    common_law,
    taps_of,
    vocab_of,
    widen_nodes,
)


class Several(struct.PyTreeNode):
    """Drafters side by side, all of one law."""

    drafters: tuple[Drafter, ...]

    def __post_init__(self) -> None:
        check_together(self.drafters, getattr(self, "name", "a combination"))

    @property
    def vocab_size(self) -> int | None:
        """That of the drafters that have one."""
        return vocab_of(self.drafters)

    @property
    def taps(self) -> tuple[Tap, ...]:
        """All that any of them needs."""
        return taps_of(self.drafters)

    @property
    def law(self) -> ProposalLaw:
        """The law that they share."""
        return common_law(self.drafters)

    @property
    def makes_trees(self) -> bool:
        """Whether any of them may branch."""
        return any(map(makes_trees, self.drafters))

    @property
    def max_depth(self) -> int:
        """The deepest one's."""
        return max(drafter.max_depth for drafter in self.drafters)

    def init(self, batch: int, capacity: int) -> tuple[Any, ...]:
        """A state each."""
        return tuple(drafter.init(batch, capacity) for drafter in self.drafters)

    def observe(
        self,
        state: tuple[Any, ...],
        pending: tuple[Any, ...] | None,
        window: Window,
        verdict: Verdict,
        acceptance: Acceptance,
    ) -> tuple[Any, ...]:
        """Every drafter learns what was committed, whoever drafted it."""
        held = pending or (None,) * len(self.drafters)
        return tuple(
            drafter.observe(own, mine, window, verdict, acceptance)
            for drafter, own, mine in zip(self.drafters, state, held, strict=True)
        )

    def _proposals(
        self, state: tuple[Any, ...], context: Context
    ) -> tuple[list[Proposal], tuple[Any, ...]]:
        """What each proposes, with as many nodes, and its pending."""
        made = [
            drafter.propose(own, context)
            for drafter, own in zip(self.drafters, state, strict=True)
        ]
        nodes = max(proposal.tokens.shape[1] for proposal, _ in made)
        return [widen_nodes(p, nodes) for p, _ in made], tuple(x for _, x in made)
