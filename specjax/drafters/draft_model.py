"""An independent draft model: any target that shares the vocabulary, drafting a chain.

(Leviathan, Kalman, Matias, 2211.17192; Chen et al., 2302.01318.) Its state is a target
state of its own and holds only committed tokens: what it guesses is read through
windows on top of that state and never written, so there is nothing to trim after a
rejection and nothing to fill in after a full accept.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.decoding.argmax import first_argmax
from specjax.decoding.interfaces import ProposalLaw, Tap, Target
from specjax.decoding.laws import Laws
from specjax.decoding.noise import sample
from specjax.decoding.types import Acceptance, Context, Proposal, Verdict, Window
from specjax.decoding.windows import chunk_window


class DraftModelState(struct.PyTreeNode):
    """The model's own state, and how many committed tokens it has taken in."""

    model: Any
    lengths: jax.Array  # [B] int32


class DraftModel(struct.PyTreeNode):
    """``k`` tokens drawn one after the other from a smaller model.

    The first pass of a round takes in the tokens committed since the last one, at most
    ``k + 1``; the ``k - 1`` others read the drafts so far as a window. Rows that sample
    draw with the target's noise, which agrees with the target most often; so, given
    the seed, the drafts are deterministic.
    """

    name = "draft-model"
    law = ProposalLaw.DETERMINISTIC
    model: Target
    k: int = struct.field(pytree_node=False)

    def __post_init__(self) -> None:
        if isinstance(self.k, int) and self.k < 1:
            raise ValueError(f"k = {self.k}: a draft model needs k >= 1")

    @property
    def vocab_size(self) -> int:
        """The model's vocabulary, which must be the target's."""
        return self.model.vocab_size

    @property
    def taps(self) -> tuple[Tap, ...]:
        """No hidden states of the target are needed."""
        return ()

    @property
    def max_nodes(self) -> int:
        """``k``."""
        return self.k

    @property
    def max_depth(self) -> int:
        """``k``: the draft is a chain."""
        return self.k

    def init(self, batch: int, capacity: int) -> DraftModelState:
        """An empty state of the model."""
        return DraftModelState(
            model=self.model.init(batch, capacity),
            lengths=jnp.zeros((batch,), jnp.int32),
        )

    def propose(
        self, state: DraftModelState, context: Context
    ) -> tuple[Proposal, DraftModelState]:
        """Catch up with the committed tokens, then draft; only the former is kept."""
        stop = jnp.where(context.done, state.lengths, context.lengths)
        window = chunk_window(context.tokens, state.lengths, stop, self.k + 1)
        verdict = self.model.verify(state.model, window)
        caught_up = self._take_in(state, window, verdict)
        last = jnp.maximum(stop - state.lengths - 1, 0)
        first = self._draw(verdict, window, last, context)
        batch = first.shape[0]
        tokens = jnp.zeros((batch, self.k), jnp.int32).at[:, 0].set(first)

        def draft(step: jax.Array, tokens: jax.Array) -> jax.Array:
            drafts = _drafts_window(tokens, caught_up.lengths, step)
            verdict = self.model.verify(caught_up.model, drafts)
            row = jnp.broadcast_to(step - 1, (batch,))
            return tokens.at[:, step].set(self._draw(verdict, drafts, row, context))

        tokens = jax.lax.fori_loop(1, self.k, draft, tokens)
        chain = jnp.broadcast_to(jnp.arange(self.k, dtype=jnp.int32) - 1, tokens.shape)
        useful = jnp.clip(context.room - 1, 0, self.k)
        return Proposal(tokens, chain, useful), caught_up

    def observe(
        self,
        state: DraftModelState,
        pending: DraftModelState | None,
        window: Window,
        verdict: Verdict,
        acceptance: Acceptance,
    ) -> DraftModelState:
        """Keep what ``propose`` took in; in prefill, take in the chunk."""
        if pending is not None:
            return pending
        own = self.model.verify(state.model, window, logits="none")
        return DraftModelState(
            model=self.model.commit(state.model, own.pending, acceptance),
            lengths=state.lengths + acceptance.num_tokens,
        )

    def _take_in(
        self, state: DraftModelState, window: Window, verdict: Verdict
    ) -> DraftModelState:
        """Commit every valid row of a linear window."""
        num = window.valid.sum(axis=1, dtype=jnp.int32)
        # The same number, but one that waits for the pass: else XLA may write the
        # cache before the pass has read it, and for that copies it, every round.
        num = jnp.minimum(num, num + jnp.any(verdict.bad, axis=1).astype(jnp.int32))
        rows = jnp.arange(window.width, dtype=jnp.int32)
        path = jnp.where(window.valid, rows, 0)
        taken = Acceptance(path=path, tokens=window.tokens, num_tokens=num)
        return DraftModelState(
            model=self.model.commit(state.model, verdict.pending, taken),
            lengths=state.lengths + num,
        )

    def _draw(
        self,
        verdict: Verdict,
        window: Window,
        rows: Int[Array, " B"],
        context: Context,
    ) -> Int[Array, " B"]:
        """The model's token after these rows, under the row's own settings."""
        laws = Laws(_logits(verdict), window, context.sampling, context.counts)
        adjusted = laws.adjusted_at(rows)
        if context.sampling.temperature is None:
            return first_argmax(adjusted)
        position = jnp.take_along_axis(
            window.positions, rows[:, None], axis=1, mode="clip"
        )
        return sample(laws.scores_at(rows), context.seeds, position[:, 0] + 1)


def _logits(verdict: Verdict) -> Float[Array, "B W V"]:
    """The pass's logits, with what is not finite taken out: a draft may be anything."""
    assert verdict.logits is not None
    return jnp.where(verdict.bad[:, :, None], 0.0, verdict.logits)


def _drafts_window(
    tokens: Int[Array, "B K"], lengths: Int[Array, " B"], step: jax.Array
) -> Window:
    """The first ``step`` drafts as a chain on top of the committed tokens."""
    batch, k = tokens.shape
    rows = jnp.arange(k, dtype=jnp.int32)
    valid = jnp.broadcast_to(rows < step, (batch, k))
    causal = jnp.tril(jnp.ones((k, k), bool)) & valid[:, :, None] & valid[:, None, :]
    return Window(
        tokens=jnp.where(valid, tokens, 0),
        positions=lengths[:, None] + rows,
        ancestors=causal | jnp.eye(k, dtype=bool),
        valid=valid,
    )
