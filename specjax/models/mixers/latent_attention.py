"""Multi-head latent attention (DeepSeek-V2, 2405.04434), with the latent as the cache.

Every head's key and value are projections of one latent vector a token. Absorbed, the
projection to keys is applied to the query instead, and the one to values to what was
read, so attention runs over latents alone: all heads share one "key" ``[latent | turned
key]``, and its first part is the value too.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from pallas_kernels.mesh import Spread
from pallas_kernels.window_attention.api import (
    window_attention,
    window_attention_by_row,
)
from specjax.decoding.types import Acceptance, Window
from specjax.models.axes import BATCH, HEAD_DIM, KV_HEADS, TIME
from specjax.models.config import LatentAttentionConfig
from specjax.models.linear import Linear, accumulator
from specjax.models.mixers.base import Aids, Chosen
from specjax.models.mixers.caches import (
    blank,
    cache_dtype,
    canonical,
    empty_cache,
    rows_of,
    sound_rows,
    write_path,
)
from specjax.models.mixers.indexer import Indexer
from specjax.models.norms import RMSNorm
from specjax.models.pages import Paged
from specjax.models.rope import rotate
from specjax.models.tiles import in_tiles


class LatentCache(struct.PyTreeNode):
    """What the committed tokens left: one row each for all heads."""

    rows: jax.Array  # [B, 1, T, latent + rotary]
    index_keys: jax.Array | None  # [B, 1, T, Di]; None without an indexer
    table: jax.Array | None = None  # [B, blocks]: lent to paged caches, see Decoder

    axes = (BATCH, KV_HEADS, TIME, HEAD_DIM)


class WindowLatents(struct.PyTreeNode):
    """What a window would add."""

    rows: jax.Array  # [B, W, 1, latent + rotary]
    index_keys: jax.Array | None  # [B, W, 1, Di]


class QueryLatent(struct.PyTreeNode):
    """The narrow first step of the query projection."""

    down: Linear
    norm: RMSNorm

    def __call__(self, x: Float[Array, "B W D"]) -> Float[Array, "B W rank"]:
        """The normed latent."""
        return self.norm(self.down(x))


class LatentAttention(struct.PyTreeNode):
    """Latent attention; ``query_latent`` and ``indexer`` are ``None`` without them."""

    config: LatentAttentionConfig = struct.field(pytree_node=False)
    query_latent: QueryLatent | None
    q: Linear  # from the latent, or from the input; a head: content, then rotary
    latent: Linear  # to the latent and the rotary key of all heads
    latent_norm: RMSNorm
    key_weight: jax.Array  # [heads, latent, content]
    value_weight: jax.Array  # [heads, value, latent]
    out: Linear
    indexer: Indexer | None = None
    spread: Spread | None = struct.field(pytree_node=False, default=None)
    """How batch rows and heads lie on several devices: see ``caches.write_path``."""
    tile: int | None = struct.field(pytree_node=False, default=None)
    """Of the invariant mode: rows are attended one by one, and products tiled."""

    pageable = True

    def init_state(
        self, batch: int, capacity: int, paged: Paged | None = None
    ) -> LatentCache:
        """An empty cache."""
        config = self.config
        dtype = cache_dtype(self.latent.weight.dtype)

        def empty(dim: int) -> jax.Array:
            return empty_cache(batch, capacity, 1, dim, dtype, paged)

        return LatentCache(
            rows=empty(config.latent_dim + config.rotary_dim),
            index_keys=None if config.indexer is None else empty(self._index_dim),
        )

    def choose(
        self,
        x: Float[Array, "B W D"],
        window: Window,
        state: LatentCache,
        lengths: Int[Array, " B"],
        aids: Aids,
    ) -> Chosen:
        """Which keys this block, and those that share its choice, attend to."""
        assert self.indexer is not None
        assert state.index_keys is not None
        return self.indexer.choose(
            x,
            self._query_input(x),
            self._index_keys(x, window, aids).astype(state.index_keys.dtype),
            rows_of(state.index_keys, state.table),
            window,
            lengths,
            aids.rotary,
        )

    def mix(
        self,
        x: Float[Array, "B W D"],
        window: Window,
        state: LatentCache,
        lengths: Int[Array, " B"],
        aids: Aids,
    ) -> tuple[Float[Array, "B W D"], WindowLatents]:
        """Attend to the committed latents and to those of ancestors in the window."""
        config = self.config
        down = self.latent(x)
        latent, key = jnp.split(down, [config.latent_dim], axis=-1)
        key = self._turned(key[:, :, None], aids)
        row = jnp.concatenate([self.latent_norm(latent)[:, :, None], key], axis=-1)
        (row,) = sound_rows((row,), window)
        row = row.astype(state.rows.dtype)
        chosen = None
        if self.indexer is not None or config.chosen_before:
            assert aids.chosen is not None, "no indexer above this block"
            chosen = (aids.chosen.committed, aids.chosen.window)
        # the last dimensions of the "value" are the rotary key, and are dropped: to cut
        # them off the cache would copy it
        cache = state.rows
        attend = partial(window_attention, table=state.table, spread=self.spread)
        if self.tile is not None:
            cache = rows_of(cache, state.table)
            attend = window_attention_by_row
        read = attend(
            self._queries(x, aids),
            row,
            row,
            cache,
            cache,
            lengths,
            window.ancestors,
            scale=config.scale,
            positions=window.positions,
            chosen=chosen,
        )[..., : config.latent_dim]
        mixed = self._product("rhl,hvl->rhv", read, self.value_weight)
        keys = None
        if self.indexer is not None:
            keys = self._index_keys(x, window, aids).astype(state.rows.dtype)
        pending = WindowLatents(rows=row, index_keys=keys)
        return self.out(mixed.reshape(*x.shape[:2], -1)), pending

    def commit(
        self,
        state: LatentCache,
        pending: WindowLatents,
        acceptance: Acceptance,
        lengths: Int[Array, " B"],
    ) -> LatentCache:
        """Write the path's rows behind the committed ones."""

        def write(cache: jax.Array | None, rows: jax.Array | None):
            if cache is None or rows is None:
                return None
            return write_path(
                cache,
                rows,
                acceptance,
                lengths,
                spread=self.spread is not None,
                table=state.table,
            )

        return state.replace(
            rows=write(state.rows, pending.rows),
            index_keys=write(state.index_keys, pending.index_keys),
        )

    def canonical(self, state: LatentCache, lengths: Int[Array, " B"]) -> LatentCache:
        """One stretch a row, zeros in every slot that holds no committed token."""
        return jax.tree.map(
            lambda cache: canonical(cache, lengths, state.table),
            state.replace(table=None),
        )

    def blank(
        self, state: LatentCache, lengths: Int[Array, " B"], value: float | jax.Array
    ) -> LatentCache:
        """The state with ``value`` in every slot that holds no committed token."""
        filled = jax.tree.map(
            lambda cache: blank(cache, lengths, state.table, value),
            state.replace(table=None),
        )
        return filled.replace(table=state.table)

    @property
    def _index_dim(self) -> int:
        assert self.config.indexer is not None
        return self.config.indexer.head_dim

    def _query_input(self, x: Float[Array, "B W D"]) -> Float[Array, "B W n"]:
        return x if self.query_latent is None else self.query_latent(x)

    def _queries(
        self, x: Float[Array, "B W D"], aids: Aids
    ) -> Float[Array, "B W heads row"]:
        """Every head's query against ``[latent | turned key]``."""
        config = self.config
        q = self.q(self._query_input(x))
        q = q.reshape(*x.shape[:2], config.num_heads, -1)
        content, turning = jnp.split(q, [config.content_dim], axis=-1)
        absorbed = self._product("rhn,hln->rhl", content, self.key_weight)
        return jnp.concatenate([absorbed, self._turned(turning, aids)], axis=-1)

    def _product(
        self, spec: str, x: Float[Array, "B W heads n"], part: jax.Array
    ) -> Float[Array, "B W heads m"]:
        """A product a head, with the weights' precision, summed in float32 or wider.

        What is summed over stands last in both: XLA's CPU backend has no bfloat16
        product of another layout, and says so only when it runs (0.10.2 to 0.12).
        """

        def product(rows: jax.Array) -> jax.Array:
            return jnp.einsum(
                spec,
                rows.astype(part.dtype),
                part,
                preferred_element_type=accumulator(part.dtype),
            )

        y = in_tiles(product, x.reshape(-1, *x.shape[2:]), self.tile)
        return y.reshape(*x.shape[:2], *y.shape[1:])

    def _index_keys(
        self, x: Float[Array, "B W D"], window: Window, aids: Aids
    ) -> Float[Array, "B W 1 Di"]:
        assert self.indexer is not None
        (keys,) = sound_rows((self.indexer.keys(x, aids.rotary),), window)
        return keys

    def _turned(
        self, x: Float[Array, "B W H rotary"], aids: Aids
    ) -> Float[Array, "B W H rotary"]:
        if self.config.rope is None:
            return x
        assert aids.rotary is not None, "attention needs the window's rotary tables"
        return rotate(x, aids.rotary.cos, aids.rotary.sin)
