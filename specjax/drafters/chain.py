"""Chains of drafts: token after token, whatever network says the laws.

A drafter brings the law of the first draft and a way to read the drafts so far; when to
stop, how to pick and what law is reported are the same for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.decoding.interfaces import ProposalLaw
from specjax.decoding.laws import Laws
from specjax.decoding.types import Context, Proposal, Window
from specjax.drafters.drawing import Pick, Warping, pick
from specjax.drafters.length import LengthPolicy


class Said(NamedTuple):
    """A law for every batch row: that of one row of a pass."""

    laws: Laws
    rows: Int[Array, " B"]
    right: Float[Array, " B"] | None = None
    """How probable a drafter that judges its own drafts holds it that the next one is
    accepted; ``None``: its law is the judge."""


Read = Callable[[jax.Array, jax.Array, Any], tuple[Said, Any]]
"""``(step, tokens [B, K], memory) -> (what is said behind the first ``step`` drafts,
memory)``. ``memory`` is what one reading leaves to the next."""


class Chain(NamedTuple):
    """A draft as it grows."""

    tokens: Int[Array, "B K"]
    log_q: Float[Array, "B W V"] | None
    count: Int[Array, " B"]
    open: Bool[Array, " B"]  # rows whose draft may grow
    confidence: Float[Array, " B"]


class ChainDrafter(struct.PyTreeNode):
    """At most ``k`` tokens picked one after the other.

    ``pick`` says how a token is chosen, ``warping`` under which settings (the
    request's, if ``None``), and ``length`` when to stop early (at ``k``, if ``None``).
    """

    k: int = struct.field(pytree_node=False)
    pick: Pick = struct.field(pytree_node=False, default=Pick.COUPLED)
    warping: Warping | None = struct.field(pytree_node=False, default=None)
    length: LengthPolicy | None = struct.field(pytree_node=False, default=None)

    def __post_init__(self) -> None:
        if isinstance(self.k, int) and self.k < 1:
            raise ValueError(f"k = {self.k}: a chain of drafts needs k >= 1")

    @property
    def law(self) -> ProposalLaw:
        """How the drafts come about."""
        return self.pick.law

    @property
    def max_nodes(self) -> int:
        """``k``."""
        return self.k

    @property
    def max_depth(self) -> int:
        """``k``: the draft is a chain."""
        return self.k

    def laws(
        self,
        logits: Float[Array, "B R V"],
        window: Window,
        context: Context,
        *,
        counted: int,
    ) -> Laws:
        """The laws of a pass under the settings it drafts with."""
        sampling = context.sampling
        if self.warping is not None:
            sampling = self.warping.apply(sampling, context.lengths.shape[0])
        return Laws(logits, window, sampling, context.counts, counted)

    def draft(
        self,
        context: Context,
        ready: Bool[Array, " B"],
        first: Said,
        read: Read,
        memory: Any,
    ) -> Proposal:
        """Grow a chain in every row that is ``ready`` and has room for one."""
        chain = self._grow(self._empty(context, ready, first), 0, first, context)

        def growing(carry: tuple[jax.Array, Chain, Any]) -> jax.Array:
            step, chain, _ = carry
            return (step < self.k) & jnp.any(chain.open)

        def grow(carry: tuple[jax.Array, Chain, Any]) -> tuple[jax.Array, Chain, Any]:
            step, chain, memory = carry
            said, memory = read(step, chain.tokens, memory)
            return step + 1, self._grow(chain, step, said, context), memory

        start = (jnp.int32(1), chain, memory)
        _, chain, _ = jax.lax.while_loop(growing, grow, start)
        parents = jnp.broadcast_to(
            jnp.arange(self.k, dtype=jnp.int32) - 1, chain.tokens.shape
        )
        useful = jnp.clip(context.room - 1, 0, chain.count)
        return Proposal(chain.tokens, parents, useful, chain.log_q)

    def _empty(self, context: Context, ready: Bool[Array, " B"], first: Said) -> Chain:
        batch, vocab = context.lengths.shape[0], first.laws.logits.shape[-1]
        drawn = self.pick is Pick.DRAWN
        return Chain(
            tokens=jnp.zeros((batch, self.k), jnp.int32),
            log_q=jnp.zeros((batch, self.k + 1, vocab), jnp.float32) if drawn else None,
            count=jnp.zeros((batch,), jnp.int32),
            # the last token a row has room for needs no draft
            open=ready & (context.room > 1),
            confidence=jnp.ones((batch,), jnp.float32),
        )

    def _grow(
        self, chain: Chain, step: jax.Array | int, said: Said, context: Context
    ) -> Chain:
        """Decide whether the chain goes on; only then pick its next token."""
        laws, rows, right = said
        goes_on, confidence, log_q = chain.open, chain.confidence, chain.log_q
        belief = None
        if self.length is not None:
            if right is None:
                # before temperature: at 0 a law would always be sure of itself
                belief = jax.nn.log_softmax(laws.adjusted_at(rows), axis=-1)
            else:
                belief = jnp.log(right)[:, None]  # as a law of which the best counts
            goes_on = goes_on & self.length.goes_on(belief, confidence)
        greedy = self.pick is Pick.BEST or context.sampling.temperature is None
        scores = laws.adjusted_at(rows) if greedy else laws.scores_at(rows)
        token = pick(self.pick, scores, context, context.lengths + step, step)
        if belief is not None:
            chosen = token if right is None else jnp.zeros_like(token)
            picked = jnp.take_along_axis(belief, chosen[:, None], axis=1, mode="clip")
            confidence = confidence * jnp.exp(picked[:, 0])
        if log_q is not None:
            log_q = log_q.at[:, step].set(laws.log_probs_at(rows))
        return Chain(
            tokens=chain.tokens.at[:, step].set(token),
            log_q=log_q,
            count=chain.count + goes_on.astype(jnp.int32),
            open=goes_on,
            confidence=confidence,
        )
