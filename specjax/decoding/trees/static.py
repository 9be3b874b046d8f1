"""Trees that are the same in every round, as static configuration of a drafter."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools

import numpy as np
from jaxtyping import Bool, Int

from specjax.decoding.types import ANCHOR


@dataclasses.dataclass(frozen=True)
class Tree:
    """``N`` draft nodes below an anchor, parents before children.

    Hashable and equal by value, so a jitted function may take it as a static argument.
    The arrays are worked out once, on the host, and cannot be written to.
    """

    parents: tuple[int, ...]
    """For each node the earlier node it hangs below, or ``ANCHOR``."""
    ranks: tuple[int, ...] = ()
    """For each node which of its parent's candidates it is, 0 the most probable.

    Siblings have increasing ranks, perhaps with gaps: a Medusa tree may take the first
    and the third candidate and leave out the second. Left empty, there are no gaps.
    """

    def __post_init__(self):
        _check_parents(self.parents)
        if self.ranks:
            _check_ranks(self.ranks, self.parents)
        else:
            object.__setattr__(self, "ranks", _ranks_without_gaps(self.parents))

    @property
    def num_nodes(self) -> int:
        """``N``, the anchor not counted."""
        return len(self.parents)

    @functools.cached_property
    def depths(self) -> Int[np.ndarray, " N"]:
        """Steps below the anchor, 1 for its children."""
        depths = np.zeros(self.num_nodes, np.int32)
        for node, parent in enumerate(self.parents):
            depths[node] = 1 if parent == ANCHOR else depths[parent] + 1
        return _frozen(depths)

    @property
    def max_depth(self) -> int:
        """Nodes on the longest path, 0 without any."""
        return int(self.depths.max(initial=0))

    def children(self, node: int) -> tuple[int, ...]:
        """The nodes right below this one, or below ``ANCHOR``, by rank."""
        if not ANCHOR <= node < self.num_nodes:
            raise IndexError(f"no node {node} in a tree of {self.num_nodes} nodes")
        return self._children[node + 1]

    @functools.cached_property
    def _children(self) -> tuple[tuple[int, ...], ...]:
        """By window row: the anchor's children first."""
        below: list[list[int]] = [[] for _ in range(self.num_nodes + 1)]
        for node, parent in enumerate(self.parents):
            below[parent + 1].append(node)
        return tuple(map(tuple, below))

    @functools.cached_property
    def ancestors(self) -> Bool[np.ndarray, "W W"]:
        """``[i, j]``: window row ``j`` is row ``i`` or above it, the anchor row 0."""
        mask = np.eye(self.num_nodes + 1, dtype=bool)
        for row, parent in enumerate(self.parents, start=1):
            mask[row] |= mask[parent + 1]
        return _frozen(mask)

    @functools.cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The nodes from the anchor's child down to each leaf; leaves in node order."""
        to: list[tuple[int, ...]] = []
        for node, parent in enumerate(self.parents):
            to.append((node,) if parent == ANCHOR else (*to[parent], node))
        return tuple(path for path in to if not self.children(path[-1]))

    @functools.cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """The nodes of each depth, depth 1 first."""
        levels: list[list[int]] = [[] for _ in range(self.max_depth)]
        for node, depth in enumerate(self.depths):
            levels[depth - 1].append(node)
        return tuple(map(tuple, levels))

    def limited(
        self, *, max_nodes: int | None = None, max_depth: int | None = None
    ) -> Tree:
        """The first ``max_nodes`` of the nodes not deeper than ``max_depth``.

        Parents stand before children and are less deep, so no node loses its parent.
        """
        for name, limit in (("max_nodes", max_nodes), ("max_depth", max_depth)):
            if limit is not None and limit < 0:
                raise ValueError(f"{name} = {limit}: a limit is 0 or more")
        deepest = self.max_depth if max_depth is None else max_depth
        kept = [n for n in range(self.num_nodes) if self.depths[n] <= deepest]
        kept = kept[:max_nodes]
        place = {ANCHOR: ANCHOR} | {node: i for i, node in enumerate(kept)}
        return Tree(
            parents=tuple(place[self.parents[node]] for node in kept),
            ranks=tuple(self.ranks[node] for node in kept),
        )


def _check_parents(parents: tuple[int, ...]) -> None:
    for node, parent in enumerate(parents):
        if not ANCHOR <= parent < node:
            earlier = f"a node before it (0 to {node - 1}) or " if node else ""
            raise ValueError(
                f"node {node} has parent {parent}: a parent is {earlier}"
                f"the anchor ({ANCHOR})"
            )


def _check_ranks(ranks: tuple[int, ...], parents: tuple[int, ...]) -> None:
    if len(ranks) != len(parents):
        raise ValueError(f"{len(ranks)} ranks for {len(parents)} nodes")
    lowest = dict.fromkeys(parents, 0)  # that the next sibling may have
    for node, (rank, parent) in enumerate(zip(ranks, parents, strict=True)):
        if rank < lowest[parent]:
            raise ValueError(
                f"node {node} has rank {rank}, and {lowest[parent]} is the lowest it "
                "may have: ranks start at 0 and increase from sibling to sibling"
            )
        lowest[parent] = rank + 1


def _ranks_without_gaps(parents: tuple[int, ...]) -> tuple[int, ...]:
    next_rank = collections.defaultdict(itertools.count)
    return tuple(next(next_rank[parent]) for parent in parents)


def _frozen(array: np.ndarray) -> np.ndarray:
    """Cached arrays are shared by all who ask."""
    array.setflags(write=False)
    return array
