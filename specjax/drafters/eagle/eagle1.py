"""EAGLE's first head (Li et al., 2401.15077): it predicts the target's next feature.

Row ``i`` takes the embedding of token ``i + 1`` and the target's hidden state ``i``
behind the last norm, fused to one vector by ``fc``, and passes them through a block
without a norm before its attention. Its output stands for hidden state ``i + 1``: the
target's own head says the next token from it, and the next row takes it as it is.
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
from specjax.models.linear import Linear
from specjax.models.stack import Block, commit_mixers, mixers_of, run_blocks


class AsItIs(struct.PyTreeNode):
    """What stands in the place of a norm that is not there."""

    def __call__(self, x: Float[Array, "*rows n"]) -> Float[Array, "*rows n"]:
        """``x``."""
        return x


class Eagle1Head(struct.PyTreeNode):
    """A ``FeatureHead`` between its target's two ends, with no norm of its own last."""

    ends: Ends
    """Embeddings as they are stored, unscaled, and the target's head, uncapped: as in
    the published code."""
    fc: Linear  # [D, 2D], the embedding's half first
    blocks: tuple[Block, ...]
    max_positions: int = struct.field(pytree_node=False)
    """The longest text it was made for; nothing here depends on it."""
    own_embedding: bool = struct.field(pytree_node=False, default=False)
    """Whether the embedding is not the target's."""

    @property
    def vocab_size(self) -> int:
        """``V``."""
        return self.ends.vocab_size

    @property
    def hidden_size(self) -> int:
        """``D``."""
        return self.ends.hidden_size

    @property
    def taps(self) -> tuple[Tap, ...]:
        """What the target's head reads."""
        return (FINAL,)

    @property
    def mixers(self) -> tuple[Any, ...]:
        """One a block."""
        return mixers_of(self.blocks)

    def init(self, batch: int, capacity: int) -> CommittedState:
        """Empty caches."""
        return empty_state(self.mixers, batch, capacity, None)

    def fuse(self, features: dict[Tap, Array]) -> Float[Array, "B W D"]:
        """The hidden states as they are: ``fc`` wants each beside an embedding."""
        return features[FINAL]

    def run(
        self, hidden: Float[Array, "B W D"], window: Window, state: CommittedState
    ) -> tuple[Float[Array, "B W D"], tuple[Any, ...]]:
        """The predicted features."""
        embedded = self.ends.embed(window.tokens)
        pair = jnp.concatenate([embedded, hidden.astype(embedded.dtype)], axis=-1)
        streams, pending = run_blocks(self.blocks, self.fc(pair), window, state)
        return streams[-1], pending

    def logits(self, out: Float[Array, "B W D"]) -> Float[Array, "B W V"]:
        """By the target's head."""
        return self.ends.logits(out)

    def commit(
        self, state: CommittedState, pending: Any, acceptance: Acceptance
    ) -> CommittedState:
        """The state after the accepted rows."""
        return commit_mixers(self.mixers, state, pending, acceptance)
