"""Keys and values that a drafter makes of the target's hidden states, and keeps.

A block drafter does not read the text, it reads what the target made of it: the
target's features at the committed positions, fused to one vector each, are the context
that every layer of the drafter attends to. A layer's keys and values of a position
depend on that position's features alone, so they are made once, when the position is
committed, and stand in a cache like any other. What the block itself adds is never
committed: it is gone when the round is.

The context ends before the anchor, whose features do not exist yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.decoding.types import Acceptance, Window
from specjax.models.committed import CommittedState
from specjax.models.config import AttentionConfig
from specjax.models.mixers.attention import Attention, KVCache, WindowKV
from specjax.models.mixers.base import Aids
from specjax.models.stack import commit_mixers, rope_of, rotary_tables


class OverAttention(struct.PyTreeNode):
    """What a mixer around another one hands on to it: all that it remembers."""

    body: Any

    @property
    def config(self) -> AttentionConfig:
        """The attention's."""
        return self.body.config

    def init_state(self, batch: int, capacity: int) -> KVCache:
        """No context yet."""
        return self.body.init_state(batch, capacity)

    def commit(
        self,
        state: KVCache,
        pending: WindowKV,
        acceptance: Acceptance,
        lengths: Int[Array, " B"],
    ) -> KVCache:
        """See ``Attention.commit``."""
        return self.body.commit(state, pending, acceptance, lengths)

    def canonical(self, state: KVCache, lengths: Int[Array, " B"]) -> KVCache:
        """See ``Attention.canonical``."""
        return self.body.canonical(state, lengths)

    def blank(
        self, state: KVCache, lengths: Int[Array, " B"], value: float | jax.Array
    ) -> KVCache:
        """See ``Attention.blank``."""
        return self.body.blank(state, lengths, value)


class BlockAttention(OverAttention):
    """A block's rows attend to the context, and to each other.

    A mixer whose committed state is the context. ``causal``: a row sees the rows of the
    block that stand before it, and not those behind.
    """

    body: Attention
    causal: bool = struct.field(pytree_node=False, default=False)

    def mix(
        self,
        x: Float[Array, "B W D"],
        window: Window,
        state: KVCache,
        lengths: Int[Array, " B"],
        aids: Aids,
    ) -> tuple[Float[Array, "B W D"], WindowKV]:
        """See ``Attention.mix``."""
        if self.causal:
            width = window.width
            before = jnp.tril(jnp.ones((width, width), bool))
            window = window.replace(ancestors=window.ancestors & before)
        return self.body.mix(x, window, state, lengths, aids)

    def remember(
        self, context: Float[Array, "B W D"], window: Window, state: KVCache, aids: Aids
    ) -> WindowKV:
        """Keys and values of context rows. They are not normed for the layer."""
        return self.body.keys_values(context, window, state, aids)


def remember(
    mixers: Sequence[Any],
    context: Float[Array, "B P D"],
    window: Window,
    state: CommittedState,
    acceptance: Acceptance,
) -> CommittedState:
    """The state with more context behind what it has.

    ``window`` places the rows of ``context``; those that are not valid stand last, and
    ``acceptance.num_tokens`` says how many are.
    """
    tables = rotary_tables(mixers, window.positions, context.dtype)
    pending = tuple(
        mixer.remember(context, window, own, Aids(rotary=tables.get(rope_of(mixer))))
        for mixer, own in zip(mixers, state.blocks, strict=True)
    )
    rows = jnp.arange(window.width, dtype=jnp.int32)
    path = jnp.where(window.valid, rows, 0)
    return commit_mixers(mixers, state, pending, acceptance.replace(path=path))
