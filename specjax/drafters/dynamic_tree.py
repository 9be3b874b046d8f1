"""EAGLE-2's dynamic tree (Li et al., 2406.16858), from a head or from a draft model.

Level by level the ``top_k`` most probable children of every node in the beam become
candidates, and the best ``top_k`` of them, by the probability of their whole path, the
next beam. Of all candidates the best ``nodes`` are verified. The draft's own confidence
says where the tree is wide and where it is deep; its tokens are chosen, not drawn.

Every level is read together with all above it, for a window leaves nothing behind. That
costs products of more rows, and reads no weight more often than a level at a time does.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.decoding.interfaces import ProposalLaw
from specjax.decoding.laws import Laws
from specjax.decoding.trees import grow, rerank, start
from specjax.decoding.types import Context, Proposal, Window
from specjax.drafters.features import (
    HeadState,
    OwnHead,
    anchor_window,
    check_depth,
    safe_rows,
)
from specjax.drafters.guessing import guessing
from specjax.drafters.model_state import (
    DraftModelState,
    OwnModel,
    catch_up,
    drafts_window,
    safe_logits,
)

Rows = Float[Array, "B k V"]
Given = Float[Array, "B R D"] | None
"""What the rows of a pass take from those above them: nothing where a model reads
tokens alone."""
Handed = Float[Array, "B k D"] | None
"""What the last level's rows hand on."""
Read = Callable[[Window, Given], tuple[Rows, Handed]]
"""All levels so far -> logits of the last one's rows, and what those hand on."""


class DynamicTree(struct.PyTreeNode):
    """The part of a drafter that is the same whatever network says the laws.

    ``depth`` is the longest path. EAGLE's own code counts its expansions, which are one
    less, and counts the anchor among the nodes.
    """

    makes_trees = True
    top_k: int = struct.field(pytree_node=False, default=10)
    depth: int = struct.field(pytree_node=False, default=8)
    nodes: int = struct.field(pytree_node=False, default=59)
    """The most nodes that are verified; there may be fewer candidates."""

    def __post_init__(self) -> None:
        for name in ("top_k", "depth", "nodes"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name} = {value}: a dynamic tree needs 1 or more")

    @property
    def law(self) -> ProposalLaw:
        """The drafts are chosen."""
        return ProposalLaw.DETERMINISTIC

    @property
    def max_nodes(self) -> int:
        """``nodes``, or all candidates."""
        return min(self.nodes, self.top_k + (self.depth - 1) * self.top_k**2)

    @property
    def max_depth(self) -> int:
        """``depth``."""
        return min(self.depth, self.max_nodes)

    def draft(
        self,
        context: Context,
        ready: Bool[Array, " B"],
        first: Float[Array, "B V"],
        read: Read,
        handed: Given,
        lengths: Int[Array, " B"],
    ) -> Proposal:
        """Grow the tree below the anchor, whose logits are ``first`` and whose row
        hands ``handed`` on. Drafts stand behind ``lengths`` rows of the network's."""
        k = self.top_k
        tree = start(jax.nn.log_softmax(first, axis=-1), k)
        tokens, seen = tree.beam_tokens, _below(None, tree.beam_rows)
        rows = handed = _children(handed, tree.beam_rows)
        for _ in range(1, self.depth):
            window = drafts_window(tokens, seen, jnp.bool_(True), lengths)
            logits, said = read(window, rows)
            tree = grow(tree, jax.nn.log_softmax(logits, axis=-1))
            tokens = jnp.concatenate([tokens, tree.beam_tokens], axis=1)
            seen = _below(seen, tree.beam_rows)
            handed = _children(said, tree.beam_rows)
            if rows is not None and handed is not None:
                rows = jnp.concatenate([rows, handed.astype(rows.dtype)], axis=1)
        best = rerank(tree, self.max_nodes).proposal
        # the last token a row has room for needs no draft
        wanted = ready & (context.room > 1)
        return best.replace(num_nodes=jnp.where(wanted, best.num_nodes, 0))


class HeadDynamicTree(DynamicTree, OwnHead):
    """From a ``FeatureHead``: a row reads its parent's output in the place of the
    target's hidden state. A row without a pair drafts nothing."""

    name = "head-dynamic-tree"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_depth(self.head, "a tree of depth", self.depth)

    def propose(self, state: HeadState, context: Context) -> tuple[Proposal, None]:
        """Grow a tree from the last committed pair."""
        head = guessing(self.head, state.own)
        logits = safe_rows(head.logits(state.out[:, None]))
        first = adjusted(logits, anchor_window(context), context, counted=1)[:, 0]

        def read(window: Window, rows: Given) -> tuple[Rows, Handed]:
            assert rows is not None
            out, _ = head.run(rows, window, state.own)
            last = out[:, -self.top_k :]
            logits = safe_rows(head.logits(last))
            return adjusted(logits, window, context, counted=0), last

        handed, ready = state.out[:, None], state.lengths > 0
        return self.draft(context, ready, first, read, handed, state.lengths), None


class ModelDynamicTree(DynamicTree, OwnModel):
    """From a draft model."""

    name = "model-dynamic-tree"

    def propose(
        self, state: DraftModelState, context: Context
    ) -> tuple[Proposal, DraftModelState]:
        """Catch up with the committed tokens, then grow a tree; only the former is
        kept."""
        pass_ = catch_up(self.model, state, context, self.max_depth + 1)
        laws = Laws(
            safe_logits(pass_.verdict),
            pass_.window,
            context.sampling,
            context.counts,
            pass_.window.width,
        )
        first = laws.adjusted_at(pass_.last)

        def read(window: Window, rows: Given) -> tuple[Rows, Handed]:
            verdict = self.model.verify(pass_.state.model, window)
            logits = safe_logits(verdict)[:, -self.top_k :]
            return adjusted(logits, window, context, counted=0), None

        ready = jnp.ones(context.room.shape, bool)
        lengths = pass_.state.lengths
        return self.draft(context, ready, first, read, None, lengths), pass_.state


def adjusted(logits: Rows, window: Window, context: Context, *, counted: int) -> Rows:
    """Logits of the last rows of a window, with the request's bias and penalties."""
    sampling = context.sampling
    if sampling.bias is None and not sampling.has_penalties:
        return logits
    count = logits.shape[1]
    last = window.replace(ancestors=window.ancestors[:, -count:])
    laws = Laws(logits, last, sampling, context.counts, counted)
    zeros = jnp.zeros(context.lengths.shape, jnp.int32)
    return jnp.stack([laws.adjusted_at(zeros + row) for row in range(count)], axis=1)


def _children(handed: Given, beam_rows: Int[Array, "B k"]) -> Handed:
    """What the rows above hand to the beam."""
    if handed is None:
        return None
    return jnp.take_along_axis(handed, beam_rows[:, :, None], axis=1, mode="clip")


def _below(
    seen: Bool[Array, "B R R"] | None, beam_rows: Int[Array, "B k"]
) -> Bool[Array, "B S S"]:
    """The mask with one more level, whose rows see what their parents see."""
    batch, k = beam_rows.shape
    itself = jnp.broadcast_to(jnp.eye(k, dtype=bool), (batch, k, k))
    if seen is None:
        return itself
    rows = seen.shape[1]
    parents = jnp.take_along_axis(
        seen[:, -k:], beam_rows[:, :, None], axis=1, mode="clip"
    )
    above = jnp.concatenate([seen, jnp.zeros((batch, rows, k), bool)], axis=2)
    level = jnp.concatenate([parents, itself], axis=2)
    return jnp.concatenate([above, level], axis=1)
