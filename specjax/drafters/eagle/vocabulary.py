"""A draft vocabulary: the tokens of the target's that a head can say.

Most of the text is made of few tokens, and the output head is most of a small network's
work (FR-Spec, 2502.14856; EAGLE-3, 2503.01840). What the head cannot say has no
probability under its law: a rule then takes the target's token in its place, and the
output's law does not change.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float


class DraftVocabulary(struct.PyTreeNode):
    """The target's id of every row of an output head."""

    ids: jax.Array  # [Vd] int32, ascending
    vocab_size: int = struct.field(pytree_node=False)
    """``V``, of the target."""

    def spread(self, logits: Float[Array, "B W Vd"]) -> Float[Array, "B W V"]:
        """Logits over the target's vocabulary, ``-inf`` outside the draft's."""
        shape = (*logits.shape[:2], self.vocab_size)
        nothing = jnp.full(shape, -jnp.inf, logits.dtype)
        return nothing.at[:, :, self.ids].set(
            logits, mode="drop", unique_indices=True, indices_are_sorted=True
        )

    def narrow(self, logits: Float[Array, "B W V"]) -> Float[Array, "B W Vd"]:
        """The logits that ``spread`` was given."""
        return logits.at[:, :, self.ids].get(mode="clip")


def draft_vocabulary(offsets: np.ndarray, vocab_size: int) -> DraftVocabulary:
    """From ``d2t``, which holds how far each target id lies behind the draft id.

    Raises ``ValueError`` unless the ids ascend within the target's vocabulary.
    """
    ids = np.arange(len(offsets), dtype=np.int64) + offsets.astype(np.int64)
    if np.any(np.diff(ids) <= 0) or ids[0] < 0 or ids[-1] >= vocab_size:
        raise ValueError(
            f"tensor 'd2t': row + d2t must ascend within {vocab_size} target ids"
        )
    return DraftVocabulary(jnp.asarray(ids, jnp.int32), vocab_size)
