"""A target that says what is written: a known output, replayed without the model.

Greedy decoding has one output, whatever drafts. Once plain decoding has written it, how
a drafter would have fared follows from the text alone, as long as the drafter looks at
tokens only. So a short run of the model serves every such drafter and every k.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax.decoding.interfaces import Drafter, Tap
from specjax.decoding.types import NO_TOKEN, Acceptance, Verdict, Window

SURE = 1e4
"""The logit of the next token; the others have 0."""


class Scripted(struct.PyTreeNode):
    """A ``Target`` whose most probable next token is the text's own."""

    truth: jax.Array  # [B, T] int32: prompt and output, NO_TOKEN beyond
    vocab_size: int = struct.field(pytree_node=False)

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], vocab_size: int) -> Scripted:
        """From prompt and output of each row."""
        truth = np.full((len(texts), max(map(len, texts))), NO_TOKEN, np.int32)
        for row, text in enumerate(texts):
            truth[row, : len(text)] = text
        return cls(jnp.asarray(truth), vocab_size)

    def init(self, batch: int, capacity: int) -> None:
        """Nothing to remember."""
        if batch != self.truth.shape[0]:
            raise ValueError(f"{self.truth.shape[0]} texts for {batch} rows")

    def verify(
        self,
        state: None,
        window: Window,
        *,
        taps: Sequence[Tap] = (),
        logits: Literal["all", "none"] = "all",
    ) -> Verdict:
        """Certain of the text; beyond its end token 0 is as good as any."""
        if taps:
            raise ValueError("a script has no hidden states to tap")
        following = jnp.take_along_axis(
            self.truth, window.positions + 1, axis=1, mode="fill", fill_value=NO_TOKEN
        )
        rows = SURE * jax.nn.one_hot(following, self.vocab_size, dtype=jnp.float32)
        return Verdict(
            logits=rows if logits == "all" else None,
            features={},
            pending=None,
            bad=jnp.zeros(window.tokens.shape, bool),
        )

    def commit(self, state: None, pending: Any, acceptance: Acceptance) -> None:
        """Nothing to learn."""
        return None


def needs_target(drafter: Drafter) -> bool:
    """Whether a drafter reads more than tokens, so that no script will do."""
    return bool(drafter.taps)
