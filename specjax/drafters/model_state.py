"""The state of a drafter that is a model of its own: committed tokens, and no others.

What such a model guesses is read through windows on top of this state and never
written, so there is nothing to trim after a rejection and nothing to fill in after a
full accept.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.decoding.interfaces import Tap, Target
from specjax.decoding.types import Acceptance, Context, Verdict, Window
from specjax.decoding.windows import chunk_window


class DraftModelState(struct.PyTreeNode):
    """The model's own state, and how many committed tokens it has taken in."""

    model: Any
    lengths: jax.Array  # [B] int32


class OwnModel(struct.PyTreeNode):
    """The part of a drafter that is the same whatever it makes of its model."""

    model: Target

    @property
    def vocab_size(self) -> int:
        """The model's vocabulary, which must be the target's."""
        return self.model.vocab_size

    @property
    def taps(self) -> tuple[Tap, ...]:
        """No hidden states of the target are needed."""
        return ()

    def init(self, batch: int, capacity: int) -> DraftModelState:
        """An empty state of the model."""
        lengths = jnp.zeros((batch,), jnp.int32)
        return DraftModelState(self.model.init(batch, capacity), lengths)

    def observe(
        self,
        state: DraftModelState,
        pending: DraftModelState | None,
        window: Window,
        verdict: Verdict,
        acceptance: Acceptance,
    ) -> DraftModelState:
        """Keep what the proposal took in; in prefill, take in the chunk."""
        if pending is not None:
            return pending
        own = self.model.verify(state.model, window, logits="none")
        return DraftModelState(
            model=self.model.commit(state.model, own.pending, acceptance),
            lengths=state.lengths + acceptance.num_tokens,
        )


class CaughtUp(struct.PyTreeNode):
    """The pass over the tokens committed since the last round."""

    state: DraftModelState
    window: Window
    verdict: Verdict
    last: jax.Array  # [B] int32: the window row of the anchor


def catch_up(
    model: Target, state: DraftModelState, context: Context, width: int
) -> CaughtUp:
    """Take in the tokens committed since the last round, at most ``width``."""
    stop = jnp.where(context.done, state.lengths, context.lengths)
    window = chunk_window(context.tokens, state.lengths, stop, width)
    verdict = model.verify(state.model, window)
    num = window.valid.sum(axis=1, dtype=jnp.int32)
    # The same number, but one that waits for the pass: else XLA may write the
    # cache before the pass has read it, and for that copies it, every round.
    num = jnp.minimum(num, num + jnp.any(verdict.bad, axis=1).astype(jnp.int32))
    rows = jnp.arange(window.width, dtype=jnp.int32)
    path = jnp.where(window.valid, rows, 0)
    taken = Acceptance(path=path, tokens=window.tokens, num_tokens=num)
    caught_up = DraftModelState(
        model=model.commit(state.model, verdict.pending, taken),
        lengths=state.lengths + num,
    )
    last = jnp.maximum(stop - state.lengths - 1, 0)
    return CaughtUp(caught_up, window, verdict, last)


def safe_logits(verdict: Verdict) -> Float[Array, "B W V"]:
    """The pass's logits, with what is not finite taken out: a draft may be anything."""
    assert verdict.logits is not None
    return jnp.where(verdict.bad[:, :, None], 0.0, verdict.logits)


def drafts_window(
    tokens: Int[Array, "B N"],
    ancestors: Array,
    valid: Array,
    lengths: Int[Array, " B"],
) -> Window:
    """Draft nodes on top of the committed tokens; ``ancestors`` is ``[N, N]`` bool."""
    batch, nodes = tokens.shape
    valid = jnp.broadcast_to(valid, (batch, nodes))
    mask = ancestors & valid[:, :, None] & valid[:, None, :]
    depths = jnp.asarray(ancestors).sum(axis=-1, dtype=jnp.int32) - 1
    return Window(
        tokens=jnp.where(valid, tokens, 0),
        positions=lengths[:, None] + depths,
        ancestors=mask | jnp.eye(nodes, dtype=bool),
        valid=valid,
    )
