"""A target that keeps what it says: logits and hidden states by committed position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from specjax.decoding.interfaces import Tap
from specjax.decoding.types import Acceptance, Verdict, Window
from specjax.models.decoder import Decoder


class Recorded(struct.PyTreeNode):
    """The decoder's own state, and by position what was said there."""

    inner: Any
    lengths: jax.Array  # [B] int32
    logits: jax.Array  # [B, T, V] float32
    features: dict[Tap, jax.Array]  # tap -> [B, T, D] float32


class Recorder(struct.PyTreeNode):
    """A decoder of which every committed row's logits and taps are kept.

    It is a ``Target`` like any other, so whatever runs on the decoder runs on it
    unchanged; what rejected rows say goes the way of everything rejected.
    """

    decoder: Decoder
    taps: tuple[Tap, ...] = struct.field(pytree_node=False, default=())

    @property
    def vocab_size(self) -> int:
        """``V``."""
        return self.decoder.vocab_size

    def init(self, batch: int, capacity: int) -> Recorded:
        """An empty state, and room for what will be said."""
        size = self.decoder.config.hidden_size
        return Recorded(
            inner=self.decoder.init(batch, capacity),
            lengths=jnp.zeros((batch,), jnp.int32),
            logits=jnp.zeros((batch, capacity, self.vocab_size), jnp.float32),
            features={
                tap: jnp.zeros((batch, capacity, size), jnp.float32)
                for tap in self.taps
            },
        )

    def verify(
        self,
        state: Recorded,
        window: Window,
        *,
        taps: Sequence[Tap] = (),
        logits: Literal["all", "none"] = "all",
    ) -> Verdict:
        """The decoder's verdict; what is to be kept goes along as pending."""
        every = tuple(dict.fromkeys((*taps, *self.taps)))
        verdict = self.decoder.verify(state.inner, window, taps=every)
        kept = {tap: verdict.features[tap] for tap in self.taps}
        return verdict.replace(
            logits=verdict.logits if logits == "all" else None,
            features={tap: verdict.features[tap] for tap in taps},
            pending=(verdict.pending, verdict.logits, kept),
        )

    def commit(self, state: Recorded, pending: Any, acceptance: Acceptance) -> Recorded:
        """Keep what was said along the accepted path."""
        inner, logits, features = pending
        path = acceptance.path
        capacity = state.logits.shape[1]
        steps = jnp.arange(path.shape[1], dtype=jnp.int32)
        slots = state.lengths[:, None] + steps
        slots = jnp.where(acceptance.taken, slots, capacity)  # out of range: dropped
        batch = jnp.arange(path.shape[0], dtype=jnp.int32)[:, None]

        def keep(all: jax.Array, said: jax.Array) -> jax.Array:
            rows = jnp.take_along_axis(said, path[:, :, None], axis=1, mode="clip")
            return all.at[batch, slots].set(rows.astype(all.dtype), mode="drop")

        return Recorded(
            inner=self.decoder.commit(state.inner, inner, acceptance),
            lengths=state.lengths + acceptance.num_tokens,
            logits=keep(state.logits, logits),
            features=jax.tree.map(keep, state.features, features),
        )
