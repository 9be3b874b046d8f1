"""The choice of keys in DeepSeek's sparse attention, as GLM-5 makes it.

A narrow attention of its own scores every key for every token,
``s[t, p] = sum_h w[t, h] relu(q[t, h] . k[p] / sqrt(Di)) / sqrt(Hi)``, and the token
attends to the ``top_k`` keys of highest score alone. Up to ``top_k`` keys that is
attention to all.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.decoding.types import Window
from specjax.models.config import IndexerConfig
from specjax.models.linear import Linear
from specjax.models.mixers.base import Chosen, RotaryTables
from specjax.models.norms import LayerNorm
from specjax.models.rope import rotate


class Indexer(struct.PyTreeNode):
    """Projections to index queries, index keys and the weights of index heads."""

    config: IndexerConfig = struct.field(pytree_node=False)
    q: Linear  # from the query latent
    k: Linear
    k_norm: LayerNorm
    weights: Linear

    def keys(
        self, x: Float[Array, "B W D"], rotary: RotaryTables | None
    ) -> Float[Array, "B W 1 Di"]:
        """A window's index keys: one a token."""
        return _turned(self.k_norm(self.k(x))[:, :, None], rotary)

    def choose(
        self,
        x: Float[Array, "B W D"],
        query_latent: Float[Array, "B W rank"],
        keys: Float[Array, "B W 1 Di"],
        committed_keys: Float[Array, "B 1 T Di"],
        window: Window,
        lengths: Int[Array, " B"],
        rotary: RotaryTables | None,
    ) -> Chosen:
        """The keys that each row attends to, of those that it may see."""
        config = self.config
        queries = self.q(query_latent).reshape(*x.shape[:2], -1, config.head_dim)
        queries = _turned(queries, rotary)
        weights = self.weights(x) * (config.num_heads * config.head_dim) ** -0.5
        old = _scores(queries, weights, committed_keys[:, 0])
        new = _scores(queries, weights, keys[:, :, 0])
        capacity = old.shape[2]
        held = jnp.arange(capacity, dtype=jnp.int32) < lengths[:, None]
        visible = jnp.concatenate(
            [jnp.broadcast_to(held[:, None], old.shape), window.ancestors], axis=2
        )
        scores = jnp.concatenate([old, new], axis=2)
        chosen = _largest(scores, visible, config.top_k)
        return Chosen(committed=chosen[:, :, :capacity], window=chosen[:, :, capacity:])


def _scores(
    queries: Float[Array, "B W H Di"],
    weights: Float[Array, "B W H"],
    keys: Float[Array, "B n Di"],
) -> Float[Array, "B W n"]:
    acc = np.promote_types(queries.dtype, np.float32)
    dots = jnp.einsum("bwhd,bnd->bwhn", queries, keys.astype(acc))
    return jnp.einsum("bwh,bwhn->bwn", weights, jax.nn.relu(dots))


def _largest(
    scores: Float[Array, "B W n"], visible: Bool[Array, "B W n"], top_k: int
) -> Bool[Array, "B W n"]:
    """The ``top_k`` visible entries of every row; of equals, those that stand first."""
    if scores.shape[2] <= top_k:
        return visible
    # what nobody may see can be NaN, which would come out on top
    _, picked = jax.lax.top_k(jnp.where(visible, scores, -jnp.inf), top_k)
    batch, width, _ = scores.shape
    row = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    column = jnp.arange(width, dtype=jnp.int32)[:, None]
    chosen = jnp.zeros(scores.shape, bool).at[row, column, picked].set(True)
    return chosen & visible


def _turned(
    x: Float[Array, "B W H Di"], rotary: RotaryTables | None
) -> Float[Array, "B W H Di"]:
    return x if rotary is None else rotate(x, rotary.cos, rotary.sin)
