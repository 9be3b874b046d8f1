"""Trees of a fixed shape, level by level, from a draft model or from a head."""

from __future__ import annotations

import enum
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.decoding.argmax import first_argmax
from specjax.decoding.interfaces import ProposalLaw
from specjax.decoding.laws import Laws
from specjax.decoding.trees import Tree
from specjax.decoding.types import (
    ANCHOR,
    Context,
    Proposal,
    Verdict,
    Window,
)
from specjax.drafters.chain import Said
from specjax.drafters.drawing import draft_noise
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

Read = Callable[[list[int], jax.Array], Laws]
"""The nodes of all levels so far, and the tokens ``[B, N]`` -> the laws behind them."""


class Siblings(enum.Enum):
    """How the children of a node are picked from one law."""

    BEST = "best"
    """The most probable tokens, by rank: chosen, not drawn."""
    INDEPENDENT = "independent"
    """Each is a draw of its own; two may be equal."""
    WITHOUT_REPLACEMENT = "without-replacement"
    """Drawn in turn, none twice: the largest of log-law plus Gumbel noise, in order."""

    @property
    def law(self) -> ProposalLaw:
        """What a rule may assume."""
        return {
            Siblings.BEST: ProposalLaw.DETERMINISTIC,
            Siblings.INDEPENDENT: ProposalLaw.IID_CHILDREN,
            Siblings.WITHOUT_REPLACEMENT: ProposalLaw.WITHOUT_REPLACEMENT,
        }[self]


class StaticTree(struct.PyTreeNode):
    """The part of a drafter that is the same whatever network says the laws."""

    tree: Tree = struct.field(pytree_node=False)
    siblings: Siblings = struct.field(pytree_node=False, default=Siblings.BEST)

    def __post_init__(self) -> None:
        if isinstance(self.tree, Tree) and self.tree.num_nodes == 0:
            raise ValueError("a draft tree needs at least one node")
        network = getattr(self, "model", None) or getattr(self, "head", None)
        vocab = getattr(network, "vocab_size", None)
        if isinstance(self.tree, Tree) and isinstance(vocab, int):
            self._check_siblings(vocab)

    @property
    def law(self) -> ProposalLaw:
        """How the drafts come about."""
        chain = self.max_depth == self.max_nodes
        if chain and self.siblings is not Siblings.BEST:
            return ProposalLaw.INDEPENDENT  # no siblings
        return self.siblings.law

    @property
    def max_nodes(self) -> int:
        """The tree's nodes."""
        return self.tree.num_nodes

    @property
    def max_depth(self) -> int:
        """The tree's depth."""
        return self.tree.max_depth

    def draft(
        self, context: Context, ready: Bool[Array, " B"], first: Said, read: Read
    ) -> Proposal:
        """Grow the tree by levels in every row that is ``ready``."""
        batch, nodes = context.lengths.shape[0], self.max_nodes
        tokens = jnp.zeros((batch, nodes), jnp.int32)
        log_q = None
        if self.siblings is not Siblings.BEST:
            vocab = first.laws.logits.shape[-1]
            log_q = jnp.zeros((batch, nodes + 1, vocab), jnp.float32)
        tokens, log_q = self._children(
            ANCHOR, first.laws, first.rows, tokens, log_q, context
        )
        for depth in range(1, self.max_depth):
            above = [node for level in self.tree.levels[:depth] for node in level]
            laws = read(above, tokens)
            for node in self.tree.levels[depth - 1]:
                if self.tree.children(node):
                    row = jnp.full((batch,), above.index(node), jnp.int32)
                    tokens, log_q = self._children(
                        node, laws, row, tokens, log_q, context
                    )
        parents = jnp.broadcast_to(
            jnp.array(self.tree.parents, jnp.int32), tokens.shape
        )
        # the last token a row has room for needs no draft
        count = jnp.where(ready & (context.room > 1), nodes, 0).astype(jnp.int32)
        return Proposal(tokens, parents, count, log_q)

    def window_of(
        self,
        above: list[int],
        tokens: Int[Array, "B N"],
        lengths: Int[Array, " B"],
    ) -> Window:
        """Nodes that are there, behind ``lengths`` rows of the network's."""
        index = np.array(above)
        mask = self.tree.ancestors[1:, 1:][np.ix_(index, index)]
        valid = jnp.ones((len(above),), bool)
        return drafts_window(tokens[:, index], jnp.asarray(mask), valid, lengths)

    def _children(
        self,
        node: int,
        laws: Laws,
        rows: Int[Array, " B"],
        tokens: Int[Array, "B N"],
        log_q: Float[Array, "B W V"] | None,
        context: Context,
    ) -> tuple[Int[Array, "B N"], Float[Array, "B W V"] | None]:
        """Pick the children of one node."""
        children = self.tree.children(node)
        if log_q is None:
            # by logits: a row at temperature 0 has a law of one token only
            picked = _best(laws.adjusted_at(rows), self._ranks(children))
            return tokens.at[:, children].set(picked), None
        scores = laws.scores_at(rows)
        log_q = log_q.at[:, node + 1].set(laws.log_probs_at(rows))
        if self.siblings is Siblings.INDEPENDENT:
            picked = jnp.stack(
                [
                    first_argmax(scores + draft_noise(context, child, scores.shape[1]))
                    for child in children
                ],
                axis=1,
            )
        else:
            noise = draft_noise(context, children[0], scores.shape[1])
            picked = _best(scores + noise, tuple(range(len(children))))
        return tokens.at[:, children].set(picked), log_q

    def _check_siblings(self, vocab: int) -> None:
        """No more children than tokens, where none may come twice."""
        most = max(self.tree.ranks) + 1
        if self.siblings is not Siblings.INDEPENDENT and most > vocab:
            raise ValueError(
                f"a node of the draft tree has a child of rank {most - 1}, and the "
                f"vocabulary has {vocab} tokens"
            )

    def _ranks(self, children: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.tree.ranks[child] for child in children)


def _best(scores: Float[Array, "B V"], ranks: tuple[int, ...]) -> Int[Array, "B C"]:
    """The tokens of these ranks, lower ids first among equals."""
    if ranks == (0,):
        return first_argmax(scores)[:, None]
    _, ids = jax.lax.top_k(scores, max(ranks) + 1)
    return ids[:, np.array(ranks)].astype(jnp.int32)


class DraftTree(StaticTree, OwnModel):
    """The nodes of ``tree``, from a model that reads all levels above in one window.

    One pass a level. With a chain and ``BEST`` it is a greedy ``DraftModel``.
    """

    name = "draft-tree"

    def propose(
        self, state: DraftModelState, context: Context
    ) -> tuple[Proposal, DraftModelState]:
        """Catch up with the committed tokens, then grow the tree."""
        # a round may commit a path and one more token
        pass_ = catch_up(self.model, state, context, self.max_depth + 1)

        def laws_of(verdict: Verdict, window: Window, counted: int) -> Laws:
            logits = safe_logits(verdict)
            return Laws(logits, window, context.sampling, context.counts, counted)

        def read(above: list[int], tokens: jax.Array) -> Laws:
            window = self.window_of(above, tokens, pass_.state.lengths)
            return laws_of(self.model.verify(pass_.state.model, window), window, 0)

        first = laws_of(pass_.verdict, pass_.window, pass_.window.width)
        ready = jnp.ones(context.room.shape, bool)
        proposal = self.draft(context, ready, Said(first, pass_.last), read)
        return proposal, pass_.state


class HeadTree(StaticTree, OwnHead):
    """The nodes of ``tree``, from a ``FeatureHead``: a row reads its parent's output in
    the place of the target's hidden state. A row without a pair drafts nothing.

    With a chain and ``BEST`` it is a greedy ``HeadChain``.
    """

    name = "head-tree"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.tree, Tree):
            check_depth(self.head, "a tree of depth", self.tree.max_depth)

    def propose(self, state: HeadState, context: Context) -> tuple[Proposal, None]:
        """Grow the tree from the last committed pair."""
        head, handed = guessing(self.head, state.own), {ANCHOR: state.out}

        def laws_of(logits: jax.Array, window: Window, counted: int) -> Laws:
            rows = safe_rows(logits)
            return Laws(rows, window, context.sampling, context.counts, counted)

        def read(above: list[int], tokens: jax.Array) -> Laws:
            window = self.window_of(above, tokens, state.lengths)
            hidden = [handed[self.tree.parents[node]] for node in above]
            out, _ = head.run(jnp.stack(hidden, axis=1), window, state.own)
            for row, node in enumerate(above):
                handed[node] = out[:, row].astype(state.out.dtype)
            return laws_of(head.logits(out), window, 0)

        logits = head.logits(state.out[:, None])
        first = laws_of(logits, anchor_window(context), 1)
        zeros = jnp.zeros(state.lengths.shape, jnp.int32)
        return self.draft(context, state.lengths > 0, Said(first, zeros), read), None
