"""The random draws of one round, as an acceptance rule asks for them.

A rule never sees a key. It names what it draws, and the stream follows from that: a
rule cannot take its accept test's number for its residual draw, or the drafter's. Tests
put an object in this place that goes through all outcomes and weighs them.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.decoding.argmax import first_argmax
from specjax.decoding.noise import (
    Stream,
    gumbel_of,
    round_keys,
    sample,
    uniform_of,
)


@runtime_checkable
class Draws(Protocol):
    """What a rule may draw."""

    def coupled(
        self,
        scores: Float[Array, "B V"],
        depths: Int[Array, " B"],
        where: Bool[Array, " B"],
    ) -> Int[Array, " B"]:
        """The target's own token after a row ``depths`` below the anchor.

        ``scores`` are its unnormalised log-law. One draw for each position of the
        text: it is the same in every round that gets there. Only the answers of the
        batch rows ``where`` are used; the same below.
        """
        ...

    def accepts(
        self,
        p: Float[Array, " B"],
        q: Float[Array, " B"],
        node: Int[Array, " B"],
        where: Bool[Array, " B"],
    ) -> Bool[Array, " B"]:
        """True with probability ``min(1, p / q)``, and never where ``p`` is 0.

        One independent draw for each ``node`` of a round.
        """
        ...

    def token(self, weights: Float[Array, "B V"]) -> Int[Array, " B"]:
        """A token with probability proportional to its weight: one draw a round."""
        ...


class RoundDraws(struct.PyTreeNode):
    """Draws keyed by the row's seed and the position of the round's anchor."""

    seeds: jax.Array  # [B] uint32
    anchors: jax.Array  # [B] int32

    def coupled(
        self,
        scores: Float[Array, "B V"],
        depths: Int[Array, " B"],
        where: Bool[Array, " B"],
    ) -> Int[Array, " B"]:
        """See ``Draws``."""
        # the token after a row at position t stands at t + 1
        return sample(scores, self.seeds, self.anchors + 1 + depths)

    def accepts(
        self,
        p: Float[Array, " B"],
        q: Float[Array, " B"],
        node: Int[Array, " B"],
        where: Bool[Array, " B"],
    ) -> Bool[Array, " B"]:
        """See ``Draws``."""
        keys = round_keys(self.seeds, self.anchors, Stream.ACCEPT, node)
        # no division: q may be tiny, and 0 < 0 is false
        return uniform_of(keys) * q < p

    def token(self, weights: Float[Array, "B V"]) -> Int[Array, " B"]:
        """See ``Draws``."""
        nodes = jnp.zeros_like(self.anchors)
        keys = round_keys(self.seeds, self.anchors, Stream.RESIDUAL, nodes)
        noise = gumbel_of(keys, weights.shape[-1])
        return first_argmax(jnp.log(weights) + noise)
