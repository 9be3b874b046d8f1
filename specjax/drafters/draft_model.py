"""An independent draft model: any target that shares the vocabulary, drafting a chain.

(Leviathan, Kalman, Matias, 2211.17192; Chen et al., 2302.01318.)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from specjax.decoding.types import Context, Proposal
from specjax.drafters.chain import ChainDrafter, Said
from specjax.drafters.model_state import (
    DraftModelState,
    OwnModel,
    catch_up,
    drafts_window,
    safe_logits,
)


class DraftModel(ChainDrafter, OwnModel):
    """At most ``k`` tokens picked one after the other from a smaller model.

    The first pass of a round takes in the tokens committed since the last one, at most
    ``k + 1``; each other one reads the drafts so far as a window.
    """

    name = "draft-model"

    def propose(
        self, state: DraftModelState, context: Context
    ) -> tuple[Proposal, DraftModelState]:
        """Catch up with the committed tokens, then draft; only the former is kept."""
        pass_ = catch_up(self.model, state, context, self.k + 1)
        logits, width = safe_logits(pass_.verdict), pass_.window.width
        first = self.laws(logits, pass_.window, context, counted=width)

        def read(step: jax.Array, tokens: jax.Array, memory: Any) -> tuple[Said, Any]:
            rows = jnp.arange(self.k, dtype=jnp.int32)
            causal = jnp.tril(jnp.ones((self.k, self.k), bool))
            window = drafts_window(tokens, causal, rows < step, pass_.state.lengths)
            verdict = self.model.verify(pass_.state.model, window)
            laws = self.laws(safe_logits(verdict), window, context, counted=0)
            return Said(laws, jnp.broadcast_to(step - 1, pass_.last.shape)), memory

        ready = jnp.ones(context.room.shape, bool)
        proposal = self.draft(context, ready, Said(first, pass_.last), read, ())
        return proposal, pass_.state
