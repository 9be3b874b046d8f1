"""A target whose law is a table: the next token depends on the last one alone.

Its logits are exact, whatever the window, so a whole run's law is known in closed form;
thousands of rows decode in a second. It serves as a draft model as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax.decoding.interfaces import Tap
from specjax.decoding.types import Acceptance, Verdict, Window


class Markov(struct.PyTreeNode):
    """Logits ``table[token]``. The state counts what was taken in."""

    table: jax.Array  # [V, V] float32 logits

    @property
    def vocab_size(self) -> int:
        """``V``."""
        return self.table.shape[1]

    def init(self, batch: int, capacity: int) -> jax.Array:
        """``[B]``: nothing taken in."""
        return jnp.zeros((batch,), jnp.int32)

    def verify(
        self,
        state: jax.Array,
        window: Window,
        *,
        taps: Sequence[Tap] = (),
        logits: Literal["all", "none"] = "all",
    ) -> Verdict:
        """Look the window's tokens up."""
        assert not taps, "a table has no hidden states"
        return Verdict(
            logits=self.table[window.tokens] if logits == "all" else None,
            features={},
            pending=None,
            bad=jnp.zeros(window.tokens.shape, bool),
        )

    def commit(self, state: jax.Array, pending: Any, acceptance: Acceptance):
        """Count the path."""
        return state + acceptance.num_tokens


def markov(seed: int, vocab_size: int, concentration: float = 1.0) -> Markov:
    """Rows from a Dirichlet."""
    draw = np.random.default_rng(seed)
    rows = draw.dirichlet(np.full(vocab_size, concentration), vocab_size)
    return Markov(jnp.asarray(np.log(rows), jnp.float32))
