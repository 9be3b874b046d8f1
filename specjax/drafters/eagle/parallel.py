"""P-EAGLE (2602.01469): EAGLE-3's head drafts all its tokens in one pass.

Behind the last committed pair stand slots: each a mask token beside one learned vector
in the place of the target's features. Slot ``d`` sees the committed pairs and the slots
before it, and says the token ``d`` further. So no draft waits for another, and none
knows which token was drafted before it.

The slots are read in the pass that takes in the accepted pairs, and are not kept.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from specjax.decoding.interfaces import Tap
from specjax.decoding.types import Acceptance, Context, Proposal, Verdict, Window
from specjax.decoding.windows import keep_valid
from specjax.drafters.chain import ChainDrafter, Said
from specjax.drafters.eagle.eagle3 import Eagle3Head
from specjax.drafters.features import (
    along,
    anchor_window,
    pairs_window,
    rows_taken,
    safe_rows,
)
from specjax.drafters.model_state import drafts_window


class ParallelHead(struct.PyTreeNode):
    """A head, and what stands in its slots."""

    head: Eagle3Head
    mask_hidden: jax.Array  # [m * Dt]: passes through ``fc`` as features do
    mask_token: int = struct.field(pytree_node=False)

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The target's hidden states that it reads."""
        return self.head.taps


class SlotsState(struct.PyTreeNode):
    """What the head remembers of the committed pairs, and what it says behind them."""

    own: Any
    """The head's state."""
    lengths: jax.Array  # [B] int32: pairs taken in
    outs: jax.Array  # [B, K, D]: of the last pair's row, and of the slots behind it


class OwnParallelHead(struct.PyTreeNode):
    """The part of a drafter that holds the head."""

    part: ParallelHead


class ParallelChain(ChainDrafter, OwnParallelHead):
    """A chain of ``k`` tokens, each picked from a law that knows no other draft."""

    name = "p-eagle"

    @property
    def vocab_size(self) -> int:
        """The target's vocabulary."""
        return self.part.head.vocab_size

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The hidden states that the head reads."""
        return self.part.taps

    def init(self, batch: int, capacity: int) -> SlotsState:
        """An empty state: without a pair there is nothing to draft from."""
        head = self.part.head
        return SlotsState(
            own=head.init(batch, capacity),
            lengths=jnp.zeros((batch,), jnp.int32),
            outs=jnp.zeros((batch, self.k, head.hidden_size), jnp.float32),
        )

    def propose(self, state: SlotsState, context: Context) -> tuple[Proposal, None]:
        """Pick a token of every slot's law."""
        logits = safe_rows(self.part.head.logits(state.outs))
        window = anchor_window(context)
        first = self.laws(logits[:, :1], window, context, counted=1)
        zeros = jnp.zeros(state.lengths.shape, jnp.int32)

        def read(step: jax.Array, tokens: jax.Array, memory: Any) -> tuple[Said, Any]:
            rows = jnp.arange(self.k, dtype=jnp.int32)
            causal = jnp.tril(jnp.ones((self.k, self.k), bool))
            # penalties know the drafts, though the head does not
            window = drafts_window(tokens, causal, rows < step, state.lengths)
            seen = jax.lax.dynamic_index_in_dim(window.ancestors, step - 1, axis=1)
            laws = self.laws(
                jax.lax.dynamic_index_in_dim(logits, step, axis=1),
                window.replace(ancestors=seen),
                context,
                counted=0,
            )
            return Said(laws, zeros), memory

        ready = state.lengths > 0
        return self.draft(context, ready, Said(first, zeros), read, ()), None

    def observe(
        self,
        state: SlotsState,
        pending: Any,
        window: Window,
        verdict: Verdict,
        acceptance: Acceptance,
    ) -> SlotsState:
        """Take in the accepted pairs, and read the slots behind them."""
        head, num = self.part.head, acceptance.num_tokens
        features = {tap: verdict.features[tap] for tap in self.taps}
        hidden = head.fuse(jax.tree.map(lambda x: along(x, acceptance.path), features))
        batch, pairs, size = hidden.shape
        mask = head.project(self.part.mask_hidden[None, None])
        masks = jnp.broadcast_to(mask, (batch, self.k - 1, size))
        rows = with_slots(
            pairs_window(acceptance, state.lengths),
            num,
            self.k - 1,
            self.part.mask_token,
        )
        both = jnp.concatenate([hidden, masks.astype(hidden.dtype)], axis=1)
        out, added = head.run(both, rows, state.own)
        last = along(out, jnp.maximum(num - 1, 0)[:, None])
        outs = jnp.concatenate([last, out[:, pairs:]], axis=1)
        outs = outs.astype(state.outs.dtype)
        return SlotsState(
            own=head.commit(state.own, added, rows_taken(acceptance, out)),
            lengths=state.lengths + num,
            outs=jnp.where((num > 0)[:, None, None], outs, state.outs),
        )


def with_slots(
    window: Window, num: Int[Array, " B"], slots: int, mask_token: int
) -> Window:
    """A window of ``num`` pairs with a chain of slots behind the last of them."""
    batch, pairs = window.tokens.shape
    behind = jnp.arange(slots, dtype=jnp.int32)
    valid = jnp.concatenate(
        [window.valid, jnp.broadcast_to((num > 0)[:, None], (batch, slots))], axis=1
    )
    chain = jnp.concatenate(
        [jnp.ones((slots, pairs), bool), jnp.tril(jnp.ones((slots, slots), bool))],
        axis=1,
    )
    above = jnp.pad(window.ancestors, [(0, 0), (0, 0), (0, slots)])
    below = jnp.broadcast_to(chain, (batch, slots, pairs + slots))
    masks = jnp.full((batch, slots), mask_token, window.tokens.dtype)
    start = window.positions[:, :1] + num[:, None]
    return Window(
        tokens=jnp.concatenate([window.tokens, masks], axis=1),
        positions=jnp.concatenate([window.positions, start + behind], axis=1),
        ancestors=keep_valid(jnp.concatenate([above, below], axis=1), valid),
        valid=valid,
    )
