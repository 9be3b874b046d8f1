"""Hydra: Medusa's heads, told what was drafted before them (Ankner et al., 2402.05109).

Head ``i`` reads the target's hidden state of position ``s`` and the embeddings of the
tokens ``s + 1`` to ``s + 1 + i``, side by side, and says token ``s + 2 + i``. Hydra++
puts a block of the target's kind in between, which reads the hidden states alone and
has a cache of its own.

As a ``FeatureHead`` it hands on all of its input: the hidden state, a slot for each
token that a head may read, and how many slots are filled. So chains and trees need
nothing new, and a row's depth says which head is its own.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.decoding.interfaces import FINAL, Tap
from specjax.decoding.types import Acceptance, Window
from specjax.drafters.medusa import MedusaHead
from specjax.models.committed import CommittedState, empty_state
from specjax.models.ends import Ends
from specjax.models.linear import Linear
from specjax.models.norms import RMSNorm
from specjax.models.stack import Block, commit_mixers, run_blocks


class HydraHead(struct.PyTreeNode):
    """``skip x + silu(W x + b)`` of the vectors side by side, then Medusa's head."""

    first: Linear  # [D, (i + 2) D]
    skip: Linear  # [D, (i + 2) D]
    rest: MedusaHead

    def __call__(self, joined: Float[Array, "*rows n"]) -> Float[Array, "*rows V"]:
        """Logits of the token after those that were read."""
        return self.rest(self.skip(joined) + jax.nn.silu(self.first(joined)))


class HydraPrefix(struct.PyTreeNode):
    """Hydra++'s block over the hidden states, and the norm behind it."""

    block: Block
    norm: RMSNorm


class HydraHeads(struct.PyTreeNode):
    """``K`` heads as one ``FeatureHead``: what is loaded from a checkpoint."""

    ends: Ends
    """The target's embedding, as it is stored; its output head is not used."""
    heads: tuple[HydraHead, ...]
    prefix: HydraPrefix | None = None
    tap: Tap = struct.field(pytree_node=False, default=FINAL)
    offset: int = struct.field(pytree_node=False, default=0)
    """How many blocks before the target's end ``tap`` is; 0: behind the last norm."""
    own_embedding: bool = struct.field(pytree_node=False, default=False)
    """Whether the embedding is not the target's."""

    @property
    def num_heads(self) -> int:
        """``K``: the most tokens that are drafted."""
        return len(self.heads)

    @property
    def vocab_size(self) -> int:
        """``V``, of the target."""
        return self.ends.vocab_size

    @property
    def feature_size(self) -> int:
        """``F``, of the target's hidden states."""
        return self.ends.hidden_size

    @property
    def hidden_size(self) -> int:
        """``D = (1 + K) F + 1``: a hidden state, ``K`` embeddings, and their number."""
        return (1 + self.num_heads) * self.feature_size + 1

    @property
    def taps(self) -> tuple[Tap, ...]:
        """One hidden state."""
        return (self.tap,)

    @property
    def mixers(self) -> tuple[Any, ...]:
        """The prefix's, if there is one."""
        if self.prefix is None or self.prefix.block.mixer is None:
            return ()
        return (self.prefix.block.mixer.body,)

    def init(self, batch: int, capacity: int) -> CommittedState:
        """An empty cache of the prefix's."""
        return empty_state(self.mixers, batch, capacity, None)

    def fuse(self, features: dict[Tap, Array]) -> Float[Array, "B W D"]:
        """The hidden states, with no token read yet."""
        rows = features[self.tap]
        room = self.hidden_size - self.feature_size
        return jnp.pad(rows, [(0, 0), (0, 0), (0, room)])

    def guessing(self, state: CommittedState) -> HydraHeads:
        """Drafts come with a hidden state that the prefix has read already."""
        return self.replace(prefix=None)

    def run(
        self, hidden: Float[Array, "B W D"], window: Window, state: CommittedState
    ) -> tuple[Float[Array, "B W D"], tuple[Any, ...]]:
        """Each row with its token in the next slot."""
        size = self.feature_size
        rows, slots, filled = jnp.split(hidden, [size, hidden.shape[2] - 1], axis=2)
        pending: tuple[Any, ...] = ()
        if self.prefix is not None:
            streams, pending = run_blocks((self.prefix.block,), rows, window, state)
            rows = self.prefix.norm(streams[-1]).astype(hidden.dtype)
        embedded = self.ends.embed(window.tokens)[:, :, None].astype(hidden.dtype)
        parts = slots.reshape(*slots.shape[:2], self.num_heads, size)
        own = jnp.arange(self.num_heads) == filled.astype(jnp.int32)
        parts = jnp.where(own[..., None], embedded, parts)
        return jnp.concatenate(
            [rows, parts.reshape(slots.shape), filled + 1], axis=2
        ), pending

    def logits(self, out: Float[Array, "B W D"]) -> Float[Array, "B W V"]:
        """Of each row's own head. No other head is run than those that rows have."""
        head_of: Int[Array, "B W 1"] = out[..., -1:].astype(jnp.int32) - 1
        said = jnp.zeros((*out.shape[:2], self.vocab_size), jnp.float32)
        for i, head in enumerate(self.heads):
            here = head_of == i
            joined = out[..., : (i + 2) * self.feature_size]
            said = jax.lax.cond(
                jnp.any(here),
                lambda head, joined, here, said: jnp.where(
                    here, head(joined).astype(said.dtype), said
                ),
                lambda head, joined, here, said: said,
                head,
                joined,
                here,
                said,
            )
        return said

    def commit(
        self, state: CommittedState, pending: Any, acceptance: Acceptance
    ) -> CommittedState:
        """The state after the accepted rows."""
        return commit_mixers(self.mixers, state, pending, acceptance)
