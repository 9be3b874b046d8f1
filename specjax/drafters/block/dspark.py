"""DSpark: a block whose slots are corrected by the token before them, and judged
(2607.05147, DeepSpec).

The anchor's row is the first slot; a slot at position ``t`` says the token at
``t + 1``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.decoding.interfaces import Tap
from specjax.drafters.block.backbone import Backbone
from specjax.drafters.block.dflash import at_slot
from specjax.drafters.block.slots import Slot
from specjax.models.linear import Linear, accumulator


class Markov(struct.PyTreeNode):
    """``W2 W1[previous]``, added to a slot's logits: a bigram table of low rank."""

    kind = "vanilla"
    w1: jax.Array  # [V, r]: of the target's ids
    w2: Linear  # [Vd, r]: to the head's

    @property
    def rank(self) -> int:
        """``r``."""
        return self.w1.shape[1]

    def embed(self, previous: Int[Array, " B"]) -> Float[Array, "B r"]:
        """The token before a slot."""
        rows = self.w1.at[previous].get(mode="clip")
        return rows.astype(accumulator(self.w1.dtype))

    def start(self, batch: int) -> Any:
        """What is remembered before the first slot."""
        return ()

    def bias(
        self, hidden: Float[Array, "B D"], before: Float[Array, "B r"], memory: Any
    ) -> tuple[Float[Array, "B Vd"], Any]:
        """What is added to a slot's logits, and what the next slot remembers."""
        return self.w2(before), memory


class GatedMarkov(Markov):
    """The embedding passes a gate that sees the slot's hidden state."""

    kind = "gated"
    gate: Linear  # [r, D + r]

    def bias(
        self, hidden: Float[Array, "B D"], before: Float[Array, "B r"], memory: Any
    ) -> tuple[Float[Array, "B Vd"], Any]:
        """See ``Markov``."""
        seen = jnp.concatenate([hidden.astype(before.dtype), before], axis=-1)
        return self.w2(jax.nn.sigmoid(self.gate(seen)) * before), memory


class RecurrentMarkov(Markov):
    """A gated state runs over the block: more than one token back is remembered."""

    kind = "rnn"
    joint: Linear  # [3r, 2r + D]: gate, candidate and output, of state, token, hidden

    def start(self, batch: int) -> Float[Array, "B r"]:
        """An empty state."""
        return jnp.zeros((batch, self.rank), accumulator(self.w1.dtype))

    def bias(
        self, hidden: Float[Array, "B D"], before: Float[Array, "B r"], memory: Any
    ) -> tuple[Float[Array, "B Vd"], Any]:
        """See ``Markov``."""
        seen = jnp.concatenate([memory, before, hidden.astype(before.dtype)], axis=-1)
        gate, candidate, out = jnp.split(self.joint(seen), 3, axis=-1)
        gate = jax.nn.sigmoid(gate)
        memory = gate * memory + (1.0 - gate) * jnp.tanh(candidate)
        return self.w2(jnp.tanh(out)), memory


class ConfidenceHead(struct.PyTreeNode):
    """How probably a slot's draft is accepted, told from what is known *before* it is
    drawn: the slot's hidden state and the token before it.

    A judgement that saw the draft itself must not decide whether it is verified (see
    ``specjax.drafters.length``); this one may.
    """

    proj: Linear  # [1, D + r] or [1, D]
    with_markov: bool = struct.field(pytree_node=False, default=True)

    def __call__(
        self, hidden: Float[Array, "B D"], before: Float[Array, "B r"] | None
    ) -> Float[Array, " B"]:
        """The logit of the probability."""
        if self.with_markov:
            assert before is not None, "the confidence head reads the Markov embedding"
            hidden = jnp.concatenate([hidden, before.astype(hidden.dtype)], axis=-1)
        return self.proj(hidden)[:, 0]


class Reading(NamedTuple):
    """The rows of a block's slots, and their logits before any correction."""

    rows: Float[Array, "B K D"]
    logits: Float[Array, "B K Vd"]


class DSpark(struct.PyTreeNode):
    """Slots with a Markov head and a confidence head; either may be absent."""

    backbone: Backbone
    markov: Markov | None
    confidence: ConfidenceHead | None

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The target's hidden states that the context is made of."""
        return self.backbone.taps

    def read(self, rows: Float[Array, "B K D"]) -> Reading:
        """The base logits of all slots, in one product."""
        return Reading(rows, self.backbone.logits(rows))

    def start(self, batch: int) -> Any:
        """The Markov head's memory."""
        return () if self.markov is None else self.markov.start(batch)

    def slot(
        self,
        reading: Reading,
        step: jax.Array | int,
        previous: Int[Array, " B"],
        memory: Any,
    ) -> tuple[Slot, Any]:
        """See ``SlotHead``."""
        hidden, logits = at_slot(reading.rows, step), at_slot(reading.logits, step)
        before = None if self.markov is None else self.markov.embed(previous)
        if self.markov is not None:
            assert before is not None
            bias, memory = self.markov.bias(hidden, before, memory)
            logits = logits + bias
        if self.confidence is None:
            return Slot(logits), memory
        return Slot(logits, jax.nn.sigmoid(self.confidence(hidden, before))), memory

    def marginals(
        self, rows: Float[Array, "B K D"], anchor: Int[Array, " B"]
    ) -> Float[Array, "B K Vd"]:
        """The base logits; of the first slot, those behind the anchor."""
        reading = self.read(rows)
        first, _ = self.slot(reading, 0, anchor, self.start(rows.shape[0]))
        return reading.logits.at[:, 0].set(first.logits)
