"""A bounded store of past outputs, for drafters that look things up.

A value like any other: whoever makes a drafter with it decides whose text is in it, and
between runs makes the next drafter with the next store. Its shape never changes, so
nothing is compiled again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

BETWEEN = -1
"""Stands between outputs, and where there are none."""


class PastOutputs(struct.PyTreeNode):
    """Whole outputs, the latest last; the oldest make room for new ones.

    Text of one request reaches the drafts of every request that is given the store.
    """

    tokens: jax.Array  # [M] int32

    @classmethod
    def empty(cls, size: int) -> PastOutputs:
        """Room for ``size`` tokens, one more an output."""
        if size < 2:
            raise ValueError(f"size = {size}: a store has room for 2 tokens or more")
        return cls(jnp.full((size,), BETWEEN, jnp.int32))

    @property
    def outputs(self) -> tuple[tuple[int, ...], ...]:
        """What is in it, the oldest first."""
        kept: list[tuple[int, ...]] = []
        now: list[int] = []
        for token in [*np.asarray(self.tokens).tolist(), BETWEEN]:
            if token != BETWEEN:
                now.append(token)
            elif now:
                kept.append(tuple(now))
                now = []
        return tuple(kept)

    def add(self, outputs: Iterable[Sequence[int]]) -> PastOutputs:
        """The store with these behind the others; of one that is too long, its end."""
        size = self.tokens.shape[0]
        kept, room = [], size
        for output in reversed([*self.outputs, *map(tuple, outputs)]):
            if any(token < 0 for token in output):
                raise ValueError(
                    "an output holds a negative id: give it without padding"
                )
            if not output:
                continue
            if len(output) + 1 > room:
                if not kept:  # longer than the whole store
                    kept.append(output[-(size - 1) :])
                break
            kept.append(output)
            room -= len(output) + 1
        text = [BETWEEN] * size
        at = size
        for output in kept:
            text[at - len(output) : at] = output
            at -= len(output) + 1
        return PastOutputs(jnp.asarray(text, jnp.int32))
