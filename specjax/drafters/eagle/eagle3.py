"""EAGLE-3's head (Li et al., 2503.01840) and its later variants.

Row ``i`` takes the embedding of token ``i + 1`` and hidden states ``i`` of several of
the target's layers, fused to one vector by ``fc``. The first block attends with both
side by side, each behind a norm of its own; its residual stream is that of the fused
features. A drafted row takes the output of the row before it in their place, and that
does not pass through ``fc``.

Variants: norms before ``fc``, of each layer's features or of all together, and
``norm_output`` (EAGLE-3.1, 2605.09992), a residual stream that begins behind the norm,
and further blocks of the ordinary kind.
"""

from __future__ import annotations

import enum
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.decoding.interfaces import Tap
from specjax.decoding.types import Acceptance, Window
from specjax.drafters.eagle.vocabulary import DraftVocabulary
from specjax.models.committed import CommittedState, empty_state
from specjax.models.ends import Ends
from specjax.models.linear import Linear
from specjax.models.mixers.attention import Attention, KVCache, WindowKV
from specjax.models.mixers.base import Aids
from specjax.models.norms import RMSNorm
from specjax.models.stack import (
    Block,
    Sublayer,
    commit_mixers,
    mixers_of,
    rope_of,
    rotary_tables,
    run_blocks,
)


class Recycled(enum.Enum):
    """What a drafted row hands on. The output head reads behind the last norm in either
    case, once normed.

    With ``norm_output``, serving code and speculators recycle behind the norm, and for
    long SpecForge trained checkpoints with that flag that recycle before it. Weights do
    not tell, and the wrong one costs acceptance from the second draft on.
    """

    BEFORE_NORM = "pre-norm"
    BEHIND_NORM = "post-norm"


class PairBlock(struct.PyTreeNode):
    """A block whose attention reads embeddings and features side by side."""

    token_norm: RMSNorm
    hidden_norm: RMSNorm
    mixer: Attention  # from 2D channels, the embedding's first
    feedforward: Sublayer
    residual_normed: bool = struct.field(pytree_node=False, default=False)
    """The residual stream begins behind ``hidden_norm`` (``norm_before_residual``)."""

    def run(
        self,
        embedded: Float[Array, "B W D"],
        hidden: Float[Array, "B W D"],
        window: Window,
        state: KVCache,
        lengths: Int[Array, " B"],
    ) -> tuple[Float[Array, "B W D"], WindowKV]:
        """The residual stream behind the block, and what to commit."""
        tables = rotary_tables((self.mixer,), window.positions, embedded.dtype)
        normed = self.hidden_norm(hidden)
        pair = jnp.concatenate([self.token_norm(embedded), normed], axis=-1)
        aids = Aids(rotary=tables.get(rope_of(self.mixer)))
        mixed, added = self.mixer.mix(pair, window, state, lengths, aids)
        x = (normed if self.residual_normed else hidden) + mixed
        body = self.feedforward.body
        y = body(self.feedforward.norm(x), window.valid)
        return self.feedforward.add(x, y), added


class Eagle3Head(struct.PyTreeNode):
    """A ``FeatureHead`` with an output head of its own, and perhaps a vocabulary."""

    ends: Ends
    """The embedding, of the target or its own, and the output head ``[Vd, D]``."""
    fc: Linear  # [D, m * Dt]
    first: PairBlock
    others: tuple[Block, ...]
    norm: RMSNorm
    vocabulary: DraftVocabulary | None
    """``None``: the target's."""
    tap_norms: tuple[RMSNorm, ...] | None = None
    """One a tap, before ``fc`` (``fc_norm``)."""
    fused_norm: RMSNorm | None = None
    """Of all taps together, before ``fc`` (``norm_before_fc``)."""
    taps: tuple[Tap, ...] = struct.field(pytree_node=False, kw_only=True)
    """In the order in which ``fc`` takes them."""
    recycled: Recycled = struct.field(pytree_node=False, default=Recycled.BEFORE_NORM)
    max_positions: int = struct.field(pytree_node=False, kw_only=True)
    """The longest text it was made for; nothing here depends on it."""
    own_embedding: bool = struct.field(pytree_node=False, default=False)
    """Whether the embedding is not the target's."""

    @property
    def vocab_size(self) -> int:
        """``V``, of the target."""
        return self.ends.vocab_size

    @property
    def hidden_size(self) -> int:
        """``D``."""
        return self.ends.hidden_size

    @property
    def mixers(self) -> tuple[Any, ...]:
        """One a block."""
        return (self.first.mixer, *mixers_of(self.others))

    def init(self, batch: int, capacity: int) -> CommittedState:
        """Empty caches."""
        return empty_state(self.mixers, batch, capacity, None)

    def fuse(self, features: dict[Tap, Array]) -> Float[Array, "B W D"]:
        """The taps side by side, through ``fc``."""
        return self.project(
            jnp.concatenate([features[tap] for tap in self.taps], axis=-1)
        )

    def project(self, features: Float[Array, "B W F"]) -> Float[Array, "B W D"]:
        """Features of all taps, in order, to the head's size."""
        if self.tap_norms is not None:
            parts = jnp.split(features, len(self.taps), axis=-1)
            normed = [n(x) for n, x in zip(self.tap_norms, parts, strict=True)]
            features = jnp.concatenate(normed, axis=-1)
        if self.fused_norm is not None:
            features = self.fused_norm(features)
        return self.fc(features)

    def run(
        self, hidden: Float[Array, "B W D"], window: Window, state: CommittedState
    ) -> tuple[Float[Array, "B W D"], tuple[Any, ...]]:
        """What each row hands on."""
        embedded = self.ends.embed(window.tokens)
        hidden = hidden.astype(embedded.dtype)
        first, *others = state.blocks
        x, added = self.first.run(embedded, hidden, window, first, state.lengths)
        rest = state.replace(blocks=tuple(others))
        streams, pending = run_blocks(self.others, x, window, rest)
        out = streams[-1]
        if self.recycled is Recycled.BEHIND_NORM:
            out = self.norm(out)
        return out, (added, *pending)

    def logits(self, out: Float[Array, "B W D"]) -> Float[Array, "B W V"]:
        """Behind the norm, over the target's vocabulary."""
        if self.recycled is Recycled.BEFORE_NORM:
            out = self.norm(out)
        logits = self.ends.logits(out)
        return logits if self.vocabulary is None else self.vocabulary.spread(logits)

    def commit(
        self, state: CommittedState, pending: Any, acceptance: Acceptance
    ) -> CommittedState:
        """The state after the accepted rows."""
        return commit_mixers(self.mixers, state, pending, acceptance)
