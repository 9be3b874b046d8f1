"""An independent draft model: any target that shares the vocabulary, drafting a chain.

(Leviathan, Kalman, Matias, 2211.17192; Chen et al., 2302.01318.)
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.decoding.interfaces import ProposalLaw
from specjax.decoding.laws import Laws
from specjax.decoding.types import Context, Proposal, Verdict, Window
from specjax.drafters.drawing import Pick, Warping, pick
from specjax.drafters.length import LengthPolicy
from specjax.drafters.model_state import (
    CaughtUp,
    DraftModelState,
    OwnModel,
    catch_up,
    drafts_window,
    safe_logits,
)


class Chain(NamedTuple):
    """A draft as it grows."""

    tokens: Int[Array, "B K"]
    log_q: Float[Array, "B W V"] | None
    count: Int[Array, " B"]
    open: Bool[Array, " B"]  # rows whose draft may grow
    confidence: Float[Array, " B"]


class DraftModel(OwnModel):
    """At most ``k`` tokens picked one after the other from a smaller model.

    The first pass of a round takes in the tokens committed since the last one, at most
    ``k + 1``; each other one reads the drafts so far as a window. ``pick`` says how a
    token is chosen, ``warping`` under which settings (the request's, if ``None``), and
    ``length`` when to stop early (at ``k``, if ``None``).
    """

    name = "draft-model"
    k: int = struct.field(pytree_node=False)
    pick: Pick = struct.field(pytree_node=False, default=Pick.COUPLED)
    warping: Warping | None = struct.field(pytree_node=False, default=None)
    length: LengthPolicy | None = struct.field(pytree_node=False, default=None)

    def __post_init__(self) -> None:
        if isinstance(self.k, int) and self.k < 1:
            raise ValueError(f"k = {self.k}: a draft model needs k >= 1")

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

    def propose(
        self, state: DraftModelState, context: Context
    ) -> tuple[Proposal, DraftModelState]:
        """Catch up with the committed tokens, then draft; only the former is kept."""
        pass_ = catch_up(self.model, state, context, self.k + 1)
        chain = self._first(pass_, context)

        def growing(carry: tuple[jax.Array, Chain]) -> jax.Array:
            step, chain = carry
            return (step < self.k) & jnp.any(chain.open)

        def grow(carry: tuple[jax.Array, Chain]) -> tuple[jax.Array, Chain]:
            step, chain = carry
            return step + 1, self._next(pass_.state, step, chain, context)

        _, chain = jax.lax.while_loop(growing, grow, (jnp.int32(1), chain))
        parents = jnp.broadcast_to(
            jnp.arange(self.k, dtype=jnp.int32) - 1, chain.tokens.shape
        )
        useful = jnp.clip(context.room - 1, 0, chain.count)
        return Proposal(chain.tokens, parents, useful, chain.log_q), pass_.state

    def _first(self, pass_: CaughtUp, context: Context) -> Chain:
        """The draft behind the anchor."""
        batch, vocab = context.lengths.shape[0], self.vocab_size
        drawn = self.pick is Pick.DRAWN
        empty = Chain(
            tokens=jnp.zeros((batch, self.k), jnp.int32),
            log_q=jnp.zeros((batch, self.k + 1, vocab), jnp.float32) if drawn else None,
            count=jnp.zeros((batch,), jnp.int32),
            # the last token a row has room for needs no draft
            open=context.room > 1,
            confidence=jnp.ones((batch,), jnp.float32),
        )
        width = pass_.window.width
        laws = self._laws(pass_.verdict, pass_.window, context, counted=width)
        return self._grow(empty, jnp.int32(0), laws, pass_.last, context)

    def _next(
        self, state: DraftModelState, step: jax.Array, chain: Chain, context: Context
    ) -> Chain:
        """The draft behind ``step`` others."""
        rows = jnp.arange(self.k, dtype=jnp.int32)
        causal = jnp.tril(jnp.ones((self.k, self.k), bool))
        window = drafts_window(chain.tokens, causal, rows < step, state.lengths)
        verdict = self.model.verify(state.model, window)
        laws = self._laws(verdict, window, context, counted=0)
        last = jnp.broadcast_to(step - 1, chain.count.shape)
        return self._grow(chain, step, laws, last, context)

    def _laws(
        self, verdict: Verdict, window: Window, context: Context, *, counted: int
    ) -> Laws:
        """The model's laws under the settings it drafts with."""
        sampling = context.sampling
        if self.warping is not None:
            sampling = self.warping.apply(sampling, context.lengths.shape[0])
        logits = safe_logits(verdict)
        return Laws(logits, window, sampling, context.counts, counted)

    def _grow(
        self,
        chain: Chain,
        step: jax.Array,
        laws: Laws,
        rows: Int[Array, " B"],
        context: Context,
    ) -> Chain:
        """Decide whether the chain goes on; only then pick its next token."""
        goes_on, confidence, log_q = chain.open, chain.confidence, chain.log_q
        belief = None
        if self.length is not None:
            # before temperature: at 0 a law would always be sure of itself
            belief = jax.nn.log_softmax(laws.adjusted_at(rows), axis=-1)
            goes_on = goes_on & self.length.goes_on(belief, confidence)
        greedy = self.pick is Pick.BEST or context.sampling.temperature is None
        scores = laws.adjusted_at(rows) if greedy else laws.scores_at(rows)
        token = pick(self.pick, scores, context, context.lengths + step, step)
        if belief is not None:
            picked = jnp.take_along_axis(belief, token[:, None], axis=1, mode="clip")
            confidence = confidence * jnp.exp(picked[:, 0])
        if log_q is not None:
            law = laws.log_probs_at(rows)
            log_q = log_q.at[:, step].set(law)
        return Chain(
            tokens=chain.tokens.at[:, step].set(token),
            log_q=log_q,
            count=chain.count + goes_on.astype(jnp.int32),
            open=goes_on,
            confidence=confidence,
        )
