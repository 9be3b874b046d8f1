"""What the methods of the block family have in common: slots that become laws."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.decoding.interfaces import Tap
from specjax.decoding.types import Acceptance, Context, Verdict, Window
from specjax.drafters.block.backbone import Backbone
from specjax.models.committed import CommittedState


class Slot(NamedTuple):
    """What a head says of one slot, given the tokens drafted before it."""

    logits: Float[Array, "B Vd"]
    right: Float[Array, " B"] | None = None
    """How probable the head holds it that the draft will be accepted, if those before
    it are: a judgement made before the draft is drawn."""


@runtime_checkable
class SlotHead(Protocol):
    """A backbone, and how its rows become laws, slot by slot."""

    backbone: Backbone

    def read(self, rows: Float[Array, "B K D"]) -> Any:
        """What all slots can be asked for at once."""
        ...

    def start(self, batch: int) -> Any:
        """The memory of a walk that has drafted nothing."""
        ...

    def slot(
        self,
        reading: Any,
        step: jax.Array | int,
        previous: Int[Array, " B"],
        memory: Any,
    ) -> tuple[Slot, Any]:
        """What slot ``step`` says behind ``previous``, the anchor or the draft before
        it (an id of the target)."""
        ...

    def marginals(
        self, rows: Float[Array, "B K D"], anchor: Int[Array, " B"]
    ) -> Float[Array, "B K Vd"]:
        """Logits of every slot that look at no draft."""
        ...


class OwnContext(struct.PyTreeNode):
    """The part of a drafter that is the same whatever it drafts of its slots."""

    head: SlotHead

    @property
    def vocab_size(self) -> int:
        """The target's vocabulary."""
        return self.head.backbone.vocab_size

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The hidden states that make the context."""
        return self.head.backbone.taps

    def init(self, batch: int, capacity: int) -> CommittedState:
        """No context yet."""
        return self.head.backbone.init(batch, capacity)

    def observe(
        self,
        state: CommittedState,
        pending: Any,
        window: Window,
        verdict: Verdict,
        acceptance: Acceptance,
    ) -> CommittedState:
        """Take in the accepted rows' features; the block is forgotten."""
        return self.head.backbone.take_in(state, verdict, acceptance)

    def rows(
        self, state: CommittedState, context: Context
    ) -> tuple[Float[Array, "B K D"], Bool[Array, " B"]]:
        """The slots of this round's block, and which batch rows may use theirs: one
        without any context (its prompt was one token) has nothing to go by."""
        backbone = self.head.backbone
        rows = backbone.slot_rows(backbone.block(context.anchor, state))
        return rows, state.lengths > 0
