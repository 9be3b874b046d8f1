"""A chain of drafts from a head that reads the target's hidden states: EAGLE, MTP."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.decoding.types import Context, Proposal
from specjax.drafters.chain import ChainDrafter, Said
from specjax.drafters.features import HeadState, OwnHead, anchor_window, safe_rows
from specjax.drafters.guessing import guessing
from specjax.drafters.model_state import drafts_window


class HeadChain(ChainDrafter, OwnHead):
    """At most ``k`` tokens picked one after the other from a ``FeatureHead``.

    The last committed pair says the first draft, at the price of an output head. Each
    further one reads the drafts so far in a window on top of the committed pairs: row
    ``j`` takes the output of the row before it in the place of the target's hidden
    state. Nothing of that is kept. A row without a pair (its prompt was one token)
    drafts nothing.
    """

    name = "head-chain"

    def propose(self, state: HeadState, context: Context) -> tuple[Proposal, None]:
        """Draft on from the last committed pair."""
        head = guessing(self.head, state.own)
        logits = safe_rows(head.logits(state.out[:, None]))
        first = self.laws(logits, anchor_window(context), context, counted=1)
        zeros = jnp.zeros(state.lengths.shape, jnp.int32)
        # row j's hidden state, as far as the rows before it have been read
        hidden = jnp.zeros((len(zeros), self.k, state.out.shape[1]), state.out.dtype)
        hidden = hidden.at[:, 0].set(state.out)

        def read(
            step: jax.Array, tokens: jax.Array, hidden: jax.Array
        ) -> tuple[Said, jax.Array]:
            rows = jnp.arange(self.k, dtype=jnp.int32)
            causal = jnp.tril(jnp.ones((self.k, self.k), bool))
            window = drafts_window(tokens, causal, rows < step, state.lengths)
            out, _ = head.run(hidden, window, state.own)
            last = jax.lax.dynamic_index_in_dim(out, step - 1, axis=1)
            hidden = hidden.at[:, step].set(last[:, 0].astype(hidden.dtype))
            seen = jax.lax.dynamic_index_in_dim(window.ancestors, step - 1, axis=1)
            # the output head is much of the work, and of one row alone is asked
            laws = self.laws(
                safe_rows(head.logits(last)),
                window.replace(ancestors=seen),
                context,
                counted=0,
            )
            return Said(laws, zeros), hidden

        ready = state.lengths > 0
        return self.draft(context, ready, Said(first, zeros), read, hidden), None
