"""DFlash: a block filled in at once, every slot by itself (2602.06036)."""

from __future__ import annotations

from typing import Any

import jax
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.decoding.interfaces import Tap
from specjax.drafters.block.backbone import Backbone
from specjax.drafters.block.slots import Slot


class DFlash(struct.PyTreeNode):
    """Slots that do not look at each other's tokens.

    The anchor's row of the block drafts nothing; a mask at position ``t`` says the
    token at ``t``.
    """

    backbone: Backbone

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The target's hidden states that the context is made of."""
        return self.backbone.taps

    def read(self, rows: Float[Array, "B K D"]) -> Float[Array, "B K Vd"]:
        """The logits of all slots, in one product."""
        return self.backbone.logits(rows)

    def start(self, batch: int) -> tuple[()]:
        """Nothing is remembered."""
        return ()

    def slot(
        self,
        reading: Float[Array, "B K Vd"],
        step: jax.Array | int,
        previous: Int[Array, " B"],
        memory: Any,
    ) -> tuple[Slot, Any]:
        """See ``SlotHead``."""
        return Slot(at_slot(reading, step)), memory

    def marginals(
        self, rows: Float[Array, "B K D"], anchor: Int[Array, " B"]
    ) -> Float[Array, "B K Vd"]:
        """The logits themselves."""
        return self.backbone.logits(rows)


def at_slot(x: Float[Array, "B K n"], step: jax.Array | int) -> Float[Array, "B n"]:
    """One slot of what all slots say."""
    return jax.lax.dynamic_index_in_dim(x, step, axis=1, keepdims=False)
