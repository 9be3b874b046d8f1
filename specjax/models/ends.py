"""The two ends of a decoder: from tokens to vectors, and from vectors to logits.

A draft head that shares its target's ends is given them when it is made.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.models.linear import Linear, accumulator


class Ends(struct.PyTreeNode):
    """An embedding and an output head."""

    embedding: jax.Array  # [V, D]
    head: Linear
    scale: float = struct.field(pytree_node=False, default=1.0)
    """Embeddings are multiplied by this."""
    softcap: float | None = struct.field(pytree_node=False, default=None)
    """Logits are squashed to less than this."""

    @property
    def vocab_size(self) -> int:
        """``V``."""
        return self.embedding.shape[0]

    @property
    def hidden_size(self) -> int:
        """``D``."""
        return self.embedding.shape[1]

    def embed(self, tokens: Int[Array, "B W"]) -> Float[Array, "B W D"]:
        """Rows of the embedding; an id outside it is clipped."""
        dtype = accumulator(self.embedding.dtype)
        # Bound to the tokens: XLA's CPU backend gathers bfloat16 by way of float32,
        # and would turn the whole matrix before a loop of rounds, at every call.
        matrix, tokens = jax.lax.optimization_barrier((self.embedding, tokens))
        rows = matrix.at[tokens].get(mode="clip").astype(dtype)
        if self.scale == 1.0:
            return rows
        # of the weights' precision, as in the model's own code
        return rows * jnp.asarray(self.scale, self.embedding.dtype).astype(dtype)

    def logits(self, final: Float[Array, "B W D"]) -> Float[Array, "B W V"]:
        """Of rows behind the last norm."""
        rows, cap = self.head(final), self.softcap
        return rows if cap is None else cap * jnp.tanh(rows / cap)
