"""A drafter whose proposals the test chooses, and proposals of every awkward kind.

Most faults of a speculative decoder are invisible behind a real drafter, which rarely
rejects twice in a row or accepts a path that is no prefix of its tree. Here the test
says, round by round and row by row, what is drafted; ``plant`` makes proposals of
which a chosen number is accepted, given the tokens that plain decoding emits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax.decoding.interfaces import ProposalLaw, Tap
from specjax.decoding.types import (
    ANCHOR,
    Acceptance,
    Context,
    Proposal,
    Verdict,
    Window,
)
from specjax.drafters.simulated import check_rows, wrong_token

NO_DRAFTS = -1
"""An entry of ``accepts`` for a round in which the row drafts nothing."""

RUBBISH_TOKENS = (-7, 2**31 - 1, -(2**31), 10**6)
RUBBISH_PARENTS = (99, -9, 2**31 - 1, -(2**31))


class Forced(struct.PyTreeNode):
    """Proposes what stands in its arrays; nothing once they are used up.

    A row's own counter says which round it is in, and stands still while the row is
    finished. Entries may be anything at all: ids out of range, parents that do not
    exist, garbage beyond ``num_nodes``.
    """

    name = "forced"
    law = ProposalLaw.DETERMINISTIC
    may_be_malformed = True
    tokens: jax.Array  # [R, B, N] int32
    parents: jax.Array  # [R, B, N] int32
    num_nodes: jax.Array  # [R, B] int32
    max_depth: int = struct.field(pytree_node=False)

    @property
    def taps(self) -> tuple[Tap, ...]:
        """No hidden states are needed."""
        return ()

    @property
    def max_nodes(self) -> int:
        """``N``."""
        return self.tokens.shape[2]

    def for_rows(self, rows: Sequence[int]) -> Forced:
        """The same script for other rows: entry ``i`` is what row ``rows[i]`` had."""
        picked = np.asarray(rows)
        return self.replace(
            tokens=self.tokens[:, picked],
            parents=self.parents[:, picked],
            num_nodes=self.num_nodes[:, picked],
        )

    def init(self, batch: int, capacity: int) -> jax.Array:
        """``[B]`` rounds so far."""
        check_rows(self.tokens.shape[1], batch, "Forced")
        return jnp.zeros((batch,), jnp.int32)

    def propose(self, state: jax.Array, context: Context) -> tuple[Proposal, jax.Array]:
        """This round's entry of the script."""
        rounds, batch, _ = self.tokens.shape
        at = jnp.minimum(state, rounds - 1), jnp.arange(batch, dtype=jnp.int32)
        num_nodes = jnp.where(state < rounds, self.num_nodes[at], 0)
        return Proposal(self.tokens[at], self.parents[at], num_nodes), state

    def observe(
        self,
        state: jax.Array,
        pending: jax.Array | None,
        window: Window,
        verdict: Verdict,
        acceptance: Acceptance,
    ) -> jax.Array:
        """Count the round, unless it is prefill or the row is finished."""
        if pending is None:
            return state
        return state + (acceptance.num_tokens > 0).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A tree, and where in it the right tokens go."""

    parents: tuple[int, ...]
    path: tuple[int, ...]
    """Nodes that can be right, from the anchor's child down."""
    twins: tuple[tuple[int, int], ...] = ()
    """``(a, b)``: node ``a`` gets the token of its earlier sibling ``b``."""
    rubbish: tuple[int, ...] = ()
    """Nodes off the path that get an impossible token or an impossible parent."""

    def depth(self, node: int) -> int:
        """Steps below the anchor: 1 for its children."""
        return 0 if node == ANCHOR else 1 + self.depth(self.parents[node])


def chain(k: int) -> Shape:
    """Node ``i``'s parent is node ``i - 1``."""
    return Shape(parents=tuple(range(-1, k - 1)), path=tuple(range(k)))


# The accepted paths 0-3-7, 2-5-7 and 1-4-6 are no prefixes of their trees.
SIBLINGS_AFTER = Shape((-1, -1, -1, 0, 0, 1, 3, 3), path=(0, 3, 7))
SIBLINGS_BEFORE = Shape((-1, -1, -1, 0, 1, 2, 5, 5), path=(2, 5, 7))
TWINS = Shape(
    (-1, -1, -1, 0, 1, 1, 4, 5), path=(1, 4, 6), twins=((2, 1), (5, 4), (7, 6))
)
"""Right children drafted twice, the second time with children of its own."""
WRONG_TWINS = Shape((-1, -1, -1, 0, 2, 2, 2, 6), path=(2, 6, 7), twins=((1, 0), (5, 4)))
RUBBISH = Shape((-1, -1, 0, 1, 1, 1, 4, 6), path=(1, 4, 6, 7), rubbish=(0, 3, 5))
"""Impossible tokens and parents inside the tree; what hangs below them falls away."""


def chains_of(k: int) -> tuple[Shape, ...]:
    """Chains of at most ``k`` drafts."""
    return chain(k), chain(1), chain((k + 1) // 2)


def trees_of(nodes: int) -> tuple[Shape, ...]:
    """Trees of at most ``nodes`` nodes with siblings; stars if it is below 4."""
    if nodes >= 8:
        return SIBLINGS_AFTER, SIBLINGS_BEFORE, TWINS, WRONG_TWINS, RUBBISH
    if nodes >= 4:
        return (
            Shape((-1, -1, 0, 1), path=(1, 3)),
            Shape((-1, 0, 0, -1), path=(0, 2)),
            Shape((-1, -1, 0, 1), path=(0, 2), twins=((1, 0), (3, 2))),
            Shape((-1, -1, 1, 1), path=(1, 3), rubbish=(0, 2)),
        )
    star = (-1,) * nodes
    last = nodes - 1
    return Shape(star, path=(last,)), Shape(star, path=(0,), twins=((last, 0),))


def accept_pattern(rounds: int, batch: int, k: int, seed: int = 0) -> np.ndarray:
    """``[rounds, batch]`` accept counts: every awkward run of them, then random ones.

    No drafts, a full accept, two rejects in a row, no drafts behind a full accept; each
    row is a step ahead of the one before.
    """
    awkward = [NO_DRAFTS, k, 0, 0, k, NO_DRAFTS, NO_DRAFTS, min(2, k), k, k, 0, 1]
    draw = np.random.default_rng(seed)
    pattern = draw.integers(NO_DRAFTS, k + 1, (rounds, batch))
    for row in range(batch):
        start = np.roll(awkward, -row)[:rounds]
        pattern[: len(start), row] = start
    return pattern


def plant(
    continuations: Sequence[Sequence[int]],
    accepts: Sequence[Sequence[int]] | np.ndarray,
    shapes: Sequence[Shape],
    vocab_size: int,
    *,
    nodes: int | None = None,
) -> Forced:
    """Proposals of which ``accepts[round][row]`` drafts are accepted.

    ``continuations`` are the tokens plain decoding emits for each row. An entry
    ``NO_DRAFTS`` drafts nothing, 0 drafts only what is wrong; more than the shape's
    path can hold, or than there are tokens left, is cut to that. Row ``b`` of round
    ``r`` has shape ``(r + b) mod len(shapes)``. Wrong nodes have a wrong sibling's
    token, or, below another wrong node, the token that would be right at their depth.
    """
    accepts = np.asarray(accepts)
    rounds, batch = accepts.shape
    nodes = nodes or max(len(shape.parents) for shape in shapes)
    tokens = _cycle(RUBBISH_TOKENS, (rounds, batch, nodes))
    parents = _cycle(RUBBISH_PARENTS, (rounds, batch, nodes))
    num_nodes = np.zeros((rounds, batch), np.int32)
    for row, continuation in enumerate(continuations):
        place = 0  # tokens of the continuation that are committed by now
        for r in range(rounds):
            shape = shapes[(r + row) % len(shapes)]
            ahead = continuation[place:]
            wanted = min(int(accepts[r, row]), len(shape.path), len(ahead) - 1)
            if accepts[r, row] != NO_DRAFTS and len(ahead) > 0:
                count = len(shape.parents)
                drafted = _node_tokens(shape, wanted, ahead, vocab_size)
                tokens[r, row, :count], parents[r, row, :count] = drafted
                num_nodes[r, row] = count
            place += max(wanted, 0) + 1
    return Forced(
        tokens=jnp.asarray(tokens),
        parents=jnp.asarray(parents),
        num_nodes=jnp.asarray(num_nodes),
        max_depth=nodes,
    )


def _node_tokens(
    shape: Shape, accepted: int, ahead: Sequence[int], vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and parents of one tree with ``accepted`` right nodes."""
    right = set(shape.path[:accepted])
    on_path = right | {ANCHOR}
    tokens = np.zeros(len(shape.parents), np.int64)
    for node, parent in enumerate(shape.parents):
        depth = shape.depth(node)
        true = ahead[depth - 1] if depth <= len(ahead) else 0
        wrong = wrong_token(true, node, vocab_size)
        tokens[node] = wrong if parent in on_path and node not in right else true
    for twin, first in shape.twins:
        tokens[twin] = tokens[first]
    parents = np.array(shape.parents, np.int64)
    for i, node in enumerate(shape.rubbish):
        if i % 2:
            parents[node] = RUBBISH_PARENTS[i % len(RUBBISH_PARENTS)]
        else:
            tokens[node] = RUBBISH_TOKENS[i % len(RUBBISH_TOKENS)]
    return tokens, parents


def _cycle(values: Sequence[int], shape: tuple[int, ...]) -> np.ndarray:
    return np.resize(np.array(values, np.int32), shape)
