"""A layer that predicts one token further, as checkpoints ship it (MTP).

(DeepSeek-V3, 2412.19437, section 2.2; Gloeckle et al., 2404.19737.)
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from specjax.decoding.types import Window
from specjax.models.committed import CommittedState
from specjax.models.linear import Linear
from specjax.models.mixers.base import Chosen
from specjax.models.norms import RMSNorm
from specjax.models.stack import Block, run_blocks


class MTPModule(struct.PyTreeNode):
    """``norm(blocks(join [embed_norm(e); hidden_norm(h)]))``.

    ``h`` is the hidden state of a position behind the decoder's last norm, or what
    another module said there, and ``e`` the embedding of the token that follows. The
    output stands for the hidden state of that token.
    """

    embed_norm: RMSNorm
    hidden_norm: RMSNorm
    join: Linear  # [D, 2D], the embedding's half first
    blocks: tuple[Block, ...]
    norm: RMSNorm

    def joined(
        self, embedded: Float[Array, "B W D"], hidden: Float[Array, "B W D"]
    ) -> Float[Array, "B W D"]:
        """What the blocks read."""
        halves = [self.embed_norm(embedded), self.hidden_norm(hidden)]
        return self.join(jnp.concatenate(halves, axis=-1))

    def run(
        self,
        joined: Float[Array, "B W D"],
        window: Window,
        state: CommittedState,
        *,
        chosen: Chosen | None = None,
    ) -> tuple[Float[Array, "B W D"], tuple[Any, ...]]:
        """The output, and what the blocks would commit; ``chosen``: see there."""
        streams, pending = run_blocks(self.blocks, joined, window, state, chosen=chosen)
        return self.norm(streams[-1]), pending
