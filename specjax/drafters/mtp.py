"""MTP heads: the layers of a checkpoint that predict one token further, as drafters.

They were trained with the model that they are shipped with (DeepSeek-V3, 2412.19437;
Qwen3-Next and Qwen3.5, GLM-4.5 to GLM-5, Nemotron 3), on its hidden states behind the
last norm, and share its embedding and its output head. To draft more than one token, a
head reads its own output, behind its own norm, in the place of the hidden state.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from specjax.decoding.interfaces import FINAL, Tap
from specjax.decoding.types import Acceptance, Window
from specjax.models.committed import CommittedState, empty_state
from specjax.models.ends import Ends
from specjax.models.mtp import MTPModule
from specjax.models.stack import commit_mixers, mixers_of


class MTPHead(struct.PyTreeNode):
    """A ``FeatureHead`` of one module between its target's two ends."""

    ends: Ends
    module: MTPModule
    mask_first: bool = struct.field(pytree_node=False, default=False)
    """The pair of position 0 has no embedding: as vLLM serves DeepSeek and GLM. They
    were not trained so."""

    @property
    def taps(self) -> tuple[Tap, ...]:
        """What is behind the target's last norm."""
        return (FINAL,)

    @property
    def vocab_size(self) -> int:
        """``V``."""
        return self.ends.vocab_size

    @property
    def hidden_size(self) -> int:
        """``D``."""
        return self.ends.hidden_size

    @property
    def mixers(self) -> tuple[Any, ...]:
        """One a block; ``None`` where it has none."""
        return mixers_of(self.module.blocks)

    def init(self, batch: int, capacity: int) -> CommittedState:
        """An empty state of the module's own."""
        return empty_state(self.mixers, batch, capacity, None)

    def fuse(self, features: dict[Tap, Array]) -> Float[Array, "B W D"]:
        """The hidden states behind the target's last norm, as they are."""
        return features[FINAL]

    def joined(
        self, hidden: Float[Array, "B W D"], window: Window
    ) -> Float[Array, "B W D"]:
        """What the module's blocks read of pairs."""
        embedded = self.ends.embed(window.tokens)
        if self.mask_first:
            first = (window.positions == 0)[:, :, None]
            embedded = jnp.where(first, jnp.zeros((), embedded.dtype), embedded)
        return self.module.joined(embedded, hidden.astype(embedded.dtype))

    def run(
        self, hidden: Float[Array, "B W D"], window: Window, state: CommittedState
    ) -> tuple[Float[Array, "B W D"], tuple[Any, ...]]:
        """One pass over pairs of a hidden state and the token that follows it."""
        return self.module.run(self.joined(hidden, window), window, state)

    def logits(self, out: Float[Array, "B W D"]) -> Float[Array, "B W V"]:
        """By the target's head: ``out`` is normed already."""
        return self.ends.logits(out)

    def commit(
        self, state: CommittedState, pending: Any, acceptance: Acceptance
    ) -> CommittedState:
        """The state after the accepted pairs."""
        return commit_mixers(self.mixers, state, pending, acceptance)


class MTPModules(struct.PyTreeNode):
    """Several heads of one checkpoint, in their order: see ``mtp_modules``."""

    heads: tuple[MTPHead, ...]
