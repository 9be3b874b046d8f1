"""A draft model that drafts a tree of a fixed shape, level by level."""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

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
from specjax.drafters.drawing import draft_noise
from specjax.drafters.model_state import (
    DraftModelState,
    OwnModel,
    catch_up,
    drafts_window,
    safe_logits,
)


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


class DraftTree(OwnModel):
    """The nodes of ``tree``, from a model that reads all levels above in one window.

    One pass a level. With a chain and ``BEST`` it is a greedy ``DraftModel``.
    """

    name = "draft-tree"
    tree: Tree = struct.field(pytree_node=False)
    siblings: Siblings = struct.field(pytree_node=False, default=Siblings.BEST)

    def __post_init__(self) -> None:
        if isinstance(self.tree, Tree) and self.tree.num_nodes == 0:
            raise ValueError("a draft tree needs at least one node")
        vocab = getattr(self.model, "vocab_size", None)
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

    def propose(
        self, state: DraftModelState, context: Context
    ) -> tuple[Proposal, DraftModelState]:
        """Catch up with the committed tokens, then grow the tree by levels."""
        batch, nodes = context.lengths.shape[0], self.max_nodes
        # a round may commit a path and one more token
        pass_ = catch_up(self.model, state, context, self.max_depth + 1)
        width = pass_.window.width
        laws = self._laws(pass_.verdict, pass_.window, context, counted=width)
        tokens = jnp.zeros((batch, nodes), jnp.int32)
        log_q = None
        if self.siblings is not Siblings.BEST:
            log_q = jnp.zeros((batch, nodes + 1, self.vocab_size), jnp.float32)
        tokens, log_q = self._children(ANCHOR, laws, pass_.last, tokens, log_q, context)
        for depth in range(1, self.max_depth):
            above = [node for level in self.tree.levels[:depth] for node in level]
            laws = self._pass(pass_.state, np.array(above), tokens, context)
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
        count = jnp.where(context.room > 1, nodes, 0).astype(jnp.int32)
        return Proposal(tokens, parents, count, log_q), pass_.state

    def _pass(
        self,
        state: DraftModelState,
        above: np.ndarray,
        tokens: Int[Array, "B N"],
        context: Context,
    ) -> Laws:
        """One pass over the nodes that are there."""
        mask = self.tree.ancestors[1:, 1:][np.ix_(above, above)]
        valid = jnp.ones((len(above),), bool)
        window = drafts_window(
            tokens[:, above], jnp.asarray(mask), valid, state.lengths
        )
        verdict = self.model.verify(state.model, window)
        return self._laws(verdict, window, context, counted=0)

    def _laws(
        self, verdict: Verdict, window: Window, context: Context, *, counted: int
    ) -> Laws:
        logits = safe_logits(verdict)
        return Laws(logits, window, context.sampling, context.counts, counted)

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
