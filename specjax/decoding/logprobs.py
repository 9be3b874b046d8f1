"""Log-probabilities of committed tokens under the target's own law.

They are taken from the logits before bias, penalties, temperature and cut-offs, which
is what evaluation harnesses expect of a model's log-probabilities.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from specjax.decoding.types import Acceptance


class Logprobs(struct.PyTreeNode):
    """For each entry of a path: the token's log-probability, and the best ones."""

    token: jax.Array  # [B, P] float32
    top_ids: jax.Array  # [B, P, n] int32, most probable first
    top: jax.Array  # [B, P, n] float32


def path_logprobs(
    logits: Float[Array, "B W V"], acceptance: Acceptance, top: int
) -> Logprobs:
    """Log-probabilities along an accepted path (meaningless beyond ``num_tokens``)."""
    rows = acceptance.path[:, :, None]
    picked = jnp.take_along_axis(logits, rows, axis=1, mode="clip")
    log_probs = jax.nn.log_softmax(picked.astype(jnp.float32), axis=-1)
    tokens = jnp.maximum(acceptance.tokens, 0)[:, :, None]
    token = jnp.take_along_axis(log_probs, tokens, axis=2, mode="clip")[:, :, 0]
    best, ids = jax.lax.top_k(log_probs, top)
    return Logprobs(token=token, top_ids=ids.astype(jnp.int32), top=best)
