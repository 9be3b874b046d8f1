"""The proposals of several drafters as one tree: what they agree on stands once."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from specjax.decoding.interfaces import ProposalLaw
from specjax.decoding.trees import depths_of
from specjax.decoding.types import ANCHOR, Context, Proposal
from specjax.decoding.windows import ancestor_mask
from specjax.drafters.combining import keep_nodes, name_of, sound_parents
from specjax.drafters.several import Several


class MergedTree(Several):
    """The union of all proposals: nodes with the same tokens on their paths are one.

    Earlier drafters' nodes come first, also where there are more than ``nodes`` (all
    fit, if ``None``). Only for chosen drafts: two drawn ones would no more be draws of
    one law, and a rule that takes them for that is biased.
    """

    name = "merged"
    nodes: int | None = struct.field(pytree_node=False, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nodes is not None and self.nodes < 1:
            raise ValueError(f"nodes = {self.nodes}: a tree needs at least one node")
        drafters = self.drafters if isinstance(self.drafters, tuple) else ()
        for drafter in drafters:
            law = getattr(drafter, "law", ProposalLaw.DETERMINISTIC)
            if law is not ProposalLaw.DETERMINISTIC:
                raise ValueError(
                    f"drafter {name_of(drafter)} makes {law.value} proposals: only "
                    "chosen drafts (deterministic) can be merged into a tree"
                )

    @property
    def makes_trees(self) -> bool:
        """It does."""
        return True

    @property
    def max_nodes(self) -> int:
        """``nodes``, or what all of them may propose together."""
        together = sum(drafter.max_nodes for drafter in self.drafters)
        return together if self.nodes is None else min(self.nodes, together)

    def propose(
        self, state: tuple[Any, ...], context: Context
    ) -> tuple[Proposal, tuple[Any, ...]]:
        """Ask all, and lay their trees over each other."""
        proposals, pending = self._proposals(state, context)
        size = proposals[0].tokens.shape[1]
        index = jnp.arange(size, dtype=jnp.int32)
        there = [index < p.num_nodes[:, None] for p in proposals]
        parents = [
            jnp.where(p < 0, ANCHOR, p + i * size)
            for i, p in enumerate(map(sound_parents, proposals))
        ]
        both = Proposal(
            tokens=jnp.concatenate([p.tokens for p in proposals], axis=1),
            parents=jnp.concatenate(parents, axis=1),
            num_nodes=jnp.full_like(context.lengths, size * len(proposals)),
        )
        valid = jnp.concatenate(there, axis=1)
        first = _first_alike(both, valid, self.max_depth)
        above = jnp.take_along_axis(
            first, jnp.maximum(both.parents, 0), axis=1, mode="clip"
        )
        both = both.replace(parents=jnp.where(both.parents < 0, ANCHOR, above))
        new = first == jnp.arange(first.shape[1], dtype=jnp.int32)
        return keep_nodes(both, valid & new, self.max_nodes), pending


def _first_alike(
    proposal: Proposal, valid: Bool[Array, "B N"], depth: int
) -> Int[Array, "B N"]:
    """For each node the first that has the same tokens on its path."""
    above = ancestor_mask(proposal.parents + 1)[:, 1:, 1:]
    levels = jnp.arange(1, depth + 1, dtype=jnp.int32)
    at = above[:, :, None, :] & (
        depths_of(proposal.parents)[:, None, None, :] == levels[:, None]
    )
    # one token a level, or 0: tokens are told from nothing by adding 1
    tokens = jnp.where(at, proposal.tokens[:, None, None, :] + 1, 0)
    paths = tokens.sum(axis=3, dtype=jnp.int32)
    alike = jnp.all(paths[:, :, None] == paths[:, None], axis=3) & valid[:, None, :]
    return jnp.argmax(alike, axis=2).astype(jnp.int32)
