"""DFlash2: DFlash with local convolutions, and a selector that walks over candidates
(inco.ai's blog on DFlash2, and the loaders and the code of z-lab, vLLM and SGLang).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.decoding.interfaces import Tap
from specjax.decoding.types import Window
from specjax.drafters.block.backbone import Backbone
from specjax.drafters.block.context import BlockAttention, OverAttention
from specjax.drafters.block.dflash import at_slot
from specjax.drafters.block.slots import Slot
from specjax.models.linear import Linear, accumulator
from specjax.models.mixers.attention import KVCache, WindowKV
from specjax.models.mixers.base import Aids


class DynamicConvolution(struct.PyTreeNode):
    """A causal convolution before a sublayer and one behind it, over a block's rows.

    Kernels are a base, and what one projection of the row adds to it: the same for all
    channels of a group. *Both* halves' additions are made of the rows as they come in,
    before the first convolution. Nothing is read from before the block.
    """

    base: jax.Array  # [2, taps, D]
    projection: Linear  # [2 * taps * groups, D]

    @property
    def taps(self) -> int:
        """How many rows a kernel spans, its own included."""
        return self.base.shape[1]

    def kernels(self, x: Float[Array, "B W D"]) -> Float[Array, "B W 2 taps G"]:
        """What is added to the base kernels, before and behind."""
        return self.projection(x).reshape(*x.shape[:2], 2, self.taps, -1)

    def convolve(
        self, x: Float[Array, "B W D"], kernels: Float[Array, "B W 2 taps G"], half: int
    ) -> Float[Array, "B W D"]:
        """One of the two convolutions: 0 before the sublayer, 1 behind it."""
        width, groups = x.shape[1], kernels.shape[-1]
        grouped = x.reshape(*x.shape[:2], groups, -1)
        out = jnp.zeros_like(grouped)
        for tap in range(self.taps):
            edges = [(0, 0), (tap, 0), (0, 0), (0, 0)]
            earlier = jnp.pad(grouped[:, : width - tap], edges)
            base = self.base[half, tap].astype(x.dtype).reshape(groups, -1)
            kernel = base + kernels[:, :, half, tap, :, None].astype(x.dtype)
            out = out + kernel * earlier
        return out.reshape(x.shape)


class ConvolvedAttention(OverAttention):
    """A block's attention between its two convolutions; the context has none."""

    body: BlockAttention
    conv: DynamicConvolution

    def mix(
        self,
        x: Float[Array, "B W D"],
        window: Window,
        state: KVCache,
        lengths: Int[Array, " B"],
        aids: Aids,
    ) -> tuple[Float[Array, "B W D"], WindowKV]:
        """See ``BlockAttention.mix``."""
        kernels = self.conv.kernels(x)
        x = self.conv.convolve(x, kernels, 0)
        y, pending = self.body.mix(x, window, state, lengths, aids)
        return self.conv.convolve(y, kernels, 1), pending

    def remember(
        self, context: Float[Array, "B W D"], window: Window, state: KVCache, aids: Aids
    ) -> WindowKV:
        """See ``BlockAttention.remember``."""
        return self.body.remember(context, window, state, aids)


class ConvolvedFeedForward(struct.PyTreeNode):
    """A feed-forward between its two convolutions."""

    body: Any
    conv: DynamicConvolution

    def __call__(
        self, x: Float[Array, "B W D"], valid: Bool[Array, "B W"]
    ) -> Float[Array, "B W D"]:
        """Of normed rows of a block."""
        kernels = self.conv.kernels(x)
        y = self.body(self.conv.convolve(x, kernels, 0), valid)
        return self.conv.convolve(y, kernels, 1)


class Selector(struct.PyTreeNode):
    """Scores a slot's best candidates behind the token that was walked before it."""

    predecessors: jax.Array  # [V, r]
    successors: jax.Array  # [V, r]
    projection: Linear  # [r, D]
    top_k: int = struct.field(pytree_node=False)

    def scores(
        self,
        unary: Float[Array, "B M"],
        candidates: Int[Array, "B M"],
        projected: Float[Array, "B r"],
        previous: Int[Array, " B"],
    ) -> Float[Array, "B M"]:
        """Unary logits, and how well each candidate follows ``previous`` here."""
        dtype = accumulator(self.predecessors.dtype)
        before = self.predecessors.at[previous].get(mode="clip").astype(dtype)
        behind = self.successors.at[candidates].get(mode="clip").astype(dtype)
        link = before * projected.astype(dtype)
        return unary + jnp.einsum("br,bmr->bm", link, behind).astype(unary.dtype)


class Candidates(NamedTuple):
    """The best tokens of every slot by its own logits, best first."""

    unary: Float[Array, "B K M"]
    tokens: Int[Array, "B K M"]
    projected: Float[Array, "B K r"]


class DFlash2(struct.PyTreeNode):
    """Slots whose candidates are scored behind the token before them.

    A slot's law is the softmax over its candidates' scores, and nothing elsewhere.
    """

    backbone: Backbone
    selector: Selector

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The target's hidden states that the context is made of."""
        return self.backbone.taps

    def read(self, rows: Float[Array, "B K D"]) -> Candidates:
        """The candidates of all slots."""
        logits = self.backbone.logits(rows)
        unary, tokens = jax.lax.top_k(logits, self.selector.top_k)
        return Candidates(unary, tokens, self.selector.projection(rows))

    def start(self, batch: int) -> tuple[()]:
        """Nothing is remembered but the token before."""
        return ()

    def slot(
        self,
        reading: Candidates,
        step: jax.Array | int,
        previous: Int[Array, " B"],
        memory: Any,
    ) -> tuple[Slot, Any]:
        """See ``SlotHead``: ``-inf`` for all that is no candidate."""
        scores, tokens = self.scored(reading, step, previous)
        batch = jnp.arange(scores.shape[0], dtype=jnp.int32)[:, None]
        nothing = jnp.full(
            (scores.shape[0], self.backbone.vocab_size), -jnp.inf, scores.dtype
        )
        return Slot(nothing.at[batch, tokens].set(scores, mode="drop")), memory

    def scored(
        self, reading: Candidates, step: jax.Array | int, previous: Int[Array, " B"]
    ) -> tuple[Float[Array, "B M"], Int[Array, "B M"]]:
        """The scores of one slot's candidates, and the candidates."""
        unary, projected = (
            at_slot(reading.unary, step),
            at_slot(reading.projected, step),
        )
        tokens = jax.lax.dynamic_index_in_dim(
            reading.tokens, step, axis=1, keepdims=False
        )
        return self.selector.scores(unary, tokens, projected, previous), tokens

    def marginals(
        self, rows: Float[Array, "B K D"], anchor: Int[Array, " B"]
    ) -> Float[Array, "B K V"]:
        """The unary logits."""
        return self.backbone.logits(rows)
