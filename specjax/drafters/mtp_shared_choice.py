"""MTP heads that choose the keys of a round's drafts once: GLM-5.

``index_share_for_mtp_iteration``: the head's indexer chooses for the last true row, and
what is drafted on from there attends to these keys, and to no others: not to itself
either, for it stood beyond them. (So vLLM, SGLang and TensorRT-LLM serve GLM-5.2.)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from specjax.decoding.types import Acceptance, Window
from specjax.drafters.features import along
from specjax.drafters.mtp import MTPHead
from specjax.models.committed import CommittedState
from specjax.models.mixers.base import Aids, Chosen
from specjax.models.stack import Block, rope_of, rotary_tables


class SharedChoiceState(struct.PyTreeNode):
    """The module's state, and what its block read of the last pair."""

    committed: CommittedState
    joined: jax.Array  # [B, D]


class SharedChoiceHead(MTPHead):
    """A head that reads guesses through ``guessing``, and true pairs like any other."""

    chosen: Bool[Array, "B 1 T"] | None = None
    """While guessing: the committed keys that all rows attend to."""

    def init(self, batch: int, capacity: int) -> SharedChoiceState:
        """An empty state."""
        return SharedChoiceState(
            committed=super().init(batch, capacity),
            joined=jnp.zeros((batch, self.hidden_size), jnp.float32),
        )

    def guessing(self, state: SharedChoiceState) -> SharedChoiceHead:
        """The head for what is drafted on from this state."""
        (block,) = self.module.blocks
        assert block.mixer is not None
        mixer, lengths = block.mixer.body, state.committed.lengths
        last = state.joined[:, None]
        itself = (*lengths.shape, 1, 1)
        window = Window(
            tokens=jnp.zeros(itself[:2], jnp.int32),
            positions=jnp.maximum(lengths - 1, 0)[:, None],
            # among the committed keys it finds its own: it must not count twice
            ancestors=jnp.zeros(itself, bool),
            valid=jnp.ones(itself[:2], bool),
        )
        tables = rotary_tables([mixer], window.positions, last.dtype)
        aids = Aids(rotary=tables.get(rope_of(mixer)))
        (own,) = state.committed.blocks
        chosen = mixer.choose(block.mixer.norm(last), window, own, lengths, aids)
        return self.replace(chosen=chosen.committed)

    def run(
        self, hidden: Float[Array, "B W D"], window: Window, state: SharedChoiceState
    ) -> tuple[Float[Array, "B W D"], Any]:
        """One pass over pairs, true ones or guesses."""
        joined, committed = self.joined(hidden, window), state.committed
        if self.chosen is None:
            out, pending = self.module.run(joined, window, committed)
            return out, (pending, joined)
        blocks = tuple(map(without_indexer, self.module.blocks))
        batch, width = window.tokens.shape
        # a row without any key would be NaN
        nothing = (committed.lengths == 0)[:, None, None]
        chosen = Chosen(
            committed=jnp.broadcast_to(
                self.chosen, (batch, width, self.chosen.shape[2])
            ),
            window=jnp.eye(width, dtype=bool) & nothing,
        )
        module = self.module.replace(blocks=blocks)
        return module.run(joined, window, committed, chosen=chosen)

    def commit(
        self, state: SharedChoiceState, pending: Any, acceptance: Acceptance
    ) -> SharedChoiceState:
        """The state after the accepted pairs, which must be true ones."""
        added, joined = pending
        num = acceptance.num_tokens
        last = jnp.maximum(num - 1, 0)[:, None]
        rows = jnp.take_along_axis(acceptance.path, last, axis=1, mode="clip")
        said = along(joined, rows)[:, 0].astype(state.joined.dtype)
        return SharedChoiceState(
            committed=super().commit(state.committed, added, acceptance),
            joined=jnp.where((num > 0)[:, None], said, state.joined),
        )


def without_indexer(block: Block) -> Block:
    """The block, attending to what it is told."""
    assert block.mixer is not None
    mixer = block.mixer.body
    config = dataclasses.replace(mixer.config, indexer=None, chosen_before=True)
    body = mixer.replace(config=config, indexer=None)
    return block.replace(mixer=block.mixer.replace(body=body))
