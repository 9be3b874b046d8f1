"""Medusa: heads on the target's last hidden state, one for each draft (2401.10774).

Head ``i`` reads the hidden state of position ``s`` (behind the last norm) and says what
token ``s + 2 + i`` is, whatever stands between. The target itself says ``s + 1``; at
the start of a round that is the anchor, and so head 0 says the first draft. Nothing is
remembered but one hidden state, that of the last committed row.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.decoding.interfaces import FINAL, ProposalLaw, Tap
from specjax.decoding.laws import Laws
from specjax.decoding.trees import Tree
from specjax.decoding.types import Acceptance, Context, Proposal, Verdict, Window
from specjax.drafters.chain import ChainDrafter, Said
from specjax.drafters.features import along, anchor_window, check_depth, safe_rows
from specjax.models.linear import Linear


class MedusaHead(struct.PyTreeNode):
    """Residual blocks ``x + silu(W x + b)``, and an output head."""

    blocks: tuple[Linear, ...]
    out: Linear

    def __call__(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Logits of one token ahead."""
        for block in self.blocks:
            hidden = hidden + jax.nn.silu(block(hidden))
        return self.out(hidden)


class MedusaHeads(struct.PyTreeNode):
    """``K`` heads: what is loaded from a checkpoint."""

    heads: tuple[MedusaHead, ...]

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The hidden state that the target's own head reads."""
        return (FINAL,)

    @property
    def num_heads(self) -> int:
        """``K``."""
        return len(self.heads)

    @property
    def vocab_size(self) -> int:
        """``V``, of the target."""
        return self.heads[0].out.out_features

    @property
    def hidden_size(self) -> int:
        """``D``, of the target."""
        return self.heads[0].out.weight.shape[1]

    def logits(
        self, hidden: Float[Array, "B D"], count: int | None = None
    ) -> Float[Array, "B K V"]:
        """Of the first ``count`` heads (all, if ``None``)."""
        rows = [head(hidden) for head in self.heads[:count]]
        return safe_rows(jnp.stack(rows, axis=1))


class MedusaState(struct.PyTreeNode):
    """The last committed row."""

    hidden: jax.Array  # [B, D] float32
    ready: jax.Array  # [B] bool: there is one; not behind a prompt of one token


class OwnHeads(struct.PyTreeNode):
    """The part of a drafter that is the same whatever it makes of the heads."""

    heads: MedusaHeads

    @property
    def vocab_size(self) -> int:
        """The target's vocabulary."""
        return self.heads.vocab_size

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The last hidden state."""
        return self.heads.taps

    def init(self, batch: int, capacity: int) -> MedusaState:
        """No row yet."""
        hidden = jnp.zeros((batch, self.heads.hidden_size), jnp.float32)
        return MedusaState(hidden, jnp.zeros((batch,), bool))

    def observe(
        self,
        state: MedusaState,
        pending: Any,
        window: Window,
        verdict: Verdict,
        acceptance: Acceptance,
    ) -> MedusaState:
        """Keep the accepted path's last row."""
        some = acceptance.num_tokens > 0
        last = jnp.maximum(acceptance.num_tokens - 1, 0)[:, None]
        row = jnp.take_along_axis(acceptance.path, last, axis=1, mode="clip")
        hidden = along(verdict.features[FINAL], row)[:, 0].astype(state.hidden.dtype)
        return MedusaState(
            hidden=jnp.where(some[:, None], hidden, state.hidden),
            ready=state.ready | some,
        )


class MedusaChain(ChainDrafter, OwnHeads):
    """One token from each of the first ``k`` heads.

    The heads do not see each other's tokens, so a chain of draws is a draw from the
    product of their laws, and each carries its own.
    """

    name = "medusa"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_depth(self.heads, "k", self.k)

    def propose(self, state: MedusaState, context: Context) -> tuple[Proposal, None]:
        """Ask all heads at once, then pick a token of each."""
        logits = self.heads.logits(state.hidden, self.k)

        def said(
            step: jax.Array | int, tokens: Int[Array, "B K"], memory: None
        ) -> tuple[Said, None]:
            laws = self.laws(logits, _behind_each(tokens), context, counted=0)
            rows = jnp.full(tokens.shape[:1], step, jnp.int32)
            return Said(laws, rows), memory

        nothing = jnp.zeros((context.lengths.shape[0], self.k), jnp.int32)
        first, memory = said(0, nothing, None)
        return self.draft(context, state.ready, first, said, memory), None


class MedusaTree(OwnHeads):
    """The nodes of ``tree``: one of rank ``r`` at depth ``d`` has the token that head
    ``d - 1`` finds ``r``-th best, whatever its parent.

    Tokens are chosen by rank and not drawn, so the tree is a deterministic proposal.
    Ranks are those of the request's settings; penalties count the committed text, for
    the drafts above a node are not known to its head.
    """

    name = "medusa-tree"
    law = ProposalLaw.DETERMINISTIC
    tree: Tree = struct.field(pytree_node=False)

    def __post_init__(self) -> None:
        if not isinstance(self.tree, Tree):
            return  # rebuilt by JAX
        if self.tree.num_nodes == 0:
            raise ValueError("a draft tree needs at least one node")
        check_depth(self.heads, "tree of depth", self.tree.max_depth)
        vocab = getattr(self.heads, "vocab_size", None)
        widest = max(self.tree.ranks)
        if isinstance(vocab, int) and widest >= vocab:
            raise ValueError(
                f"a node of the tree has rank {widest}, and the vocabulary has "
                f"{vocab} tokens"
            )

    @property
    def max_nodes(self) -> int:
        """The tree's nodes."""
        return self.tree.num_nodes

    @property
    def max_depth(self) -> int:
        """The tree's depth."""
        return self.tree.max_depth

    def propose(self, state: MedusaState, context: Context) -> tuple[Proposal, None]:
        """Ask all heads at once, and place their best tokens."""
        batch, depth = context.lengths.shape[0], self.max_depth
        logits = self.heads.logits(state.hidden, depth)
        best = [self._best(logits[:, head], context) for head in range(depth)]
        levels, ranks = self.tree.depths - 1, np.array(self.tree.ranks, np.int32)
        tokens = jnp.stack(best, axis=1)[:, levels, ranks]
        parents = jnp.asarray(self.tree.parents, jnp.int32)
        # the last token a row has room for needs no draft
        useful = state.ready & (context.room > 1)
        return Proposal(
            tokens=tokens,
            parents=jnp.broadcast_to(parents, (batch, self.max_nodes)),
            num_nodes=jnp.where(useful, self.max_nodes, 0).astype(jnp.int32),
        ), None

    def _best(
        self, logits: Float[Array, "B V"], context: Context
    ) -> Int[Array, "B ranks"]:
        """One head's tokens by rank, lower ids first among equals."""
        laws = Laws(
            logits[:, None], anchor_window(context), context.sampling, context.counts
        )
        scores = laws.adjusted_at(jnp.zeros(logits.shape[:1], jnp.int32))
        return jax.lax.top_k(scores, max(self.tree.ranks) + 1)[1].astype(jnp.int32)


def _behind_each(tokens: Int[Array, "B K"]) -> Window:
    """The drafts, as what stands before each row of laws."""
    batch, k = tokens.shape
    before = jnp.tril(jnp.ones((k, k), bool), -1)
    return Window(
        tokens=tokens,
        positions=jnp.zeros((batch, k), jnp.int32),
        ancestors=jnp.broadcast_to(before, (batch, k, k)),
        valid=jnp.ones((batch, k), bool),
    )
