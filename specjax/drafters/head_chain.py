"""A chain of drafts from a head that reads the target's hidden states: EAGLE, MTP."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.decoding.types import Context, Proposal, Window
from specjax.drafters.chain import ChainDrafter, Said
from specjax.drafters.features import (
    FeatureHead,
    HeadState,
    OwnHead,
    anchor_window,
    check_depth,
    safe_rows,
)
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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_depth(self.head, "k", self.k)

    def propose(self, state: HeadState, context: Context) -> tuple[Proposal, None]:
        """Draft on from the last committed pair."""
        head = guessing(self.head, state.own)
        logits = safe_rows(head.logits(state.out[:, None]))
        first = self.laws(logits, anchor_window(context), context, counted=1)
        zeros = jnp.zeros(state.lengths.shape, jnp.int32)

        def read(
            step: jax.Array, tokens: jax.Array, hidden: jax.Array
        ) -> tuple[Said, jax.Array]:
            last, window, hidden = read_drafts(head, state, step, tokens, hidden)
            # the output head is much of the work, and of one row alone is asked
            logits = safe_rows(head.logits(last))
            return Said(self.laws(logits, window, context, counted=0), zeros), hidden

        ready, hidden = state.lengths > 0, first_hidden(state, self.k)
        return self.draft(context, ready, Said(first, zeros), read, hidden), None


def first_hidden(state: HeadState, k: int) -> Float[Array, "B K D"]:
    """What ``k`` rows of drafts read in the place of the target's hidden states, as far
    as it is known before the first of them is read."""
    hidden = jnp.zeros((state.out.shape[0], k, state.out.shape[1]), state.out.dtype)
    return hidden.at[:, 0].set(state.out)


def read_drafts(
    head: FeatureHead,
    state: HeadState,
    step: jax.Array,
    tokens: Int[Array, "B K"],
    hidden: Float[Array, "B K D"],
) -> tuple[Float[Array, "B 1 D"], Window, Float[Array, "B K D"]]:
    """Read the first ``step`` drafts: what the last of them hands on, the window with
    what that row alone has seen, and ``hidden`` with the row after it filled in."""
    k = tokens.shape[1]
    rows = jnp.arange(k, dtype=jnp.int32)
    causal = jnp.tril(jnp.ones((k, k), bool))
    window = drafts_window(tokens, causal, rows < step, state.lengths)
    out, _ = head.run(hidden, window, state.own)
    last = jax.lax.dynamic_index_in_dim(out, step - 1, axis=1)
    hidden = hidden.at[:, step].set(last[:, 0].astype(hidden.dtype), mode="drop")
    seen = jax.lax.dynamic_index_in_dim(window.ancestors, step - 1, axis=1)
    return last, window.replace(ancestors=seen), hidden
