"""Grouped-query softmax attention over a key-value cache."""

from __future__ import annotations

from typing import Any

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
from specjax.models.config import AttentionConfig
from specjax.models.feedforward.activations import sigmoid
from specjax.models.linear import Linear
from specjax.models.mixers.base import Aids
from specjax.models.mixers.caches import (
    blank,
    cache_dtype,
    canonical,
    empty_cache,
    held_positions,
    ring_slots,
    rows_of,
    sound_rows,
    write_path,
)
from specjax.models.mixers.codecs import Codec, decode
from specjax.models.norms import RMSNorm
from specjax.models.pages import Paged
from specjax.models.rope import rotate


class KVCache(struct.PyTreeNode):
    """Keys and values of the committed tokens: all of them, or the last ``reach``."""

    k: jax.Array  # [B, H, T, D], or of a pool [pages, H, page_size, D]
    v: jax.Array
    table: jax.Array | None = None  # [B, blocks]: lent to paged caches, see Decoder
    k_scale: jax.Array | None = None  # [B, H, T] float32, where a codec made k and v
    v_scale: jax.Array | None = None

    axes = (BATCH, KV_HEADS, TIME, HEAD_DIM)


class WindowKV(struct.PyTreeNode):
    """Keys and values of a window's rows: what attention would commit."""

    k: jax.Array  # [B, W, H, D]
    v: jax.Array  # [B, W, H, D]
    k_scale: jax.Array | None = None  # [B, W, H] float32, of codes
    v_scale: jax.Array | None = None


class Attention(struct.PyTreeNode):
    """Projections to queries, keys and values, rotary positions, softmax attention.

    A part that is ``None`` is not there: norms of queries and keys, the output gate,
    sinks, and rotary positions (``config.rope``).
    """

    config: AttentionConfig = struct.field(pytree_node=False)
    q: Linear
    k: Linear
    v: Linear
    out: Linear
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    gate: Linear | None = None
    sinks: jax.Array | None = None  # [Hq]
    spread: Spread | None = struct.field(pytree_node=False, default=None)
    """How batch rows and heads lie on several devices: see ``caches.write_path``."""
    tile: int | None = struct.field(pytree_node=False, default=None)
    """Of the invariant mode: rows are attended one by one, and products tiled."""
    codec: Codec | None = struct.field(pytree_node=False, default=None)
    """Keys and values are kept, and seen, as this rounds them: see ``memory``."""

    @property
    def pageable(self) -> bool:
        """A ring is short, and stays one stretch a row."""
        return self.config.reach is None

    def init_state(
        self, batch: int, capacity: int, paged: Paged | None = None
    ) -> KVCache:
        """An empty cache."""
        config, codec = self.config, self.codec

        def empty(dtype: Any, dim: int | None = config.head_dim) -> jax.Array:
            slots = ring_slots(capacity, config.reach)
            heads = config.num_kv_heads
            return empty_cache(batch, slots, heads, dim, jnp.dtype(dtype), paged)

        if codec is None:
            dtype = cache_dtype(self.k.weight.dtype)
            return KVCache(k=empty(dtype), v=empty(dtype))
        return KVCache(
            k=empty(codec.dtype),
            v=empty(codec.dtype),
            k_scale=empty(jnp.float32, None),
            v_scale=empty(jnp.float32, None),
        )

    def mix(
        self,
        x: Float[Array, "B W channels"],
        window: Window,
        state: KVCache,
        lengths: Int[Array, " B"],
        aids: Aids,
    ) -> tuple[Float[Array, "B W D"], WindowKV]:
        """Attend to the committed tokens and to ancestors in the window."""
        config = self.config
        q = self._turned(self.q(x), self.q_norm, aids)
        added = self.keys_values(x, window, state, aids)
        slots = None
        if config.reach is not None:
            slots = held_positions(lengths, state.k.shape[2])
        mixed = self._attend(
            q,
            state,
            added,
            lengths,
            window.ancestors,
            scale=config.head_dim**-0.5 if config.scale is None else config.scale,
            positions=window.positions,
            slots=slots,
            reach=config.reach,
            sinks=self.sinks,
            softcap=config.softcap,
        ).reshape(*x.shape[:2], -1)
        if self.gate is not None:
            mixed = mixed * sigmoid(self.gate(x))
        return self.out(mixed), added

    def _attend(
        self,
        q: Float[Array, "B W Hq D"],
        state: KVCache,
        added: WindowKV,
        *arguments: Any,
        **options: Any,
    ) -> Float[Array, "B W Hq D"]:
        """Over the cache, and over the window's rows as the cache would hold them."""
        dtype = self._dtype(state)
        k = decode(added.k, added.k_scale, dtype)
        v = decode(added.v, added.v_scale, dtype)
        if self.tile is not None:
            caches = self._decoded(state)
            caches = [rows_of(cache, state.table) for cache in caches]
            return window_attention_by_row(q, k, v, *caches, *arguments, **options)
        return window_attention(
            q,
            k,
            v,
            state.k,
            state.v,
            *arguments,
            **options,
            k_scale=state.k_scale,
            v_scale=state.v_scale,
            table=state.table,
            spread=self.spread,
        )

    def keys_values(
        self,
        x: Float[Array, "B W channels"],
        window: Window,
        state: KVCache,
        aids: Aids,
    ) -> WindowKV:
        """What the rows of a window would add to the state."""
        k = self._turned(self.k(x), self.k_norm, aids)
        v = self.v(x).reshape(k.shape)
        k, v = sound_rows((k, v), window)
        if self.codec is None:
            return WindowKV(k=k.astype(state.k.dtype), v=v.astype(state.v.dtype))
        k, v = self.codec.encode(k), self.codec.encode(v)
        return WindowKV(k=k.codes, v=v.codes, k_scale=k.scale, v_scale=v.scale)

    def commit(
        self,
        state: KVCache,
        pending: WindowKV,
        acceptance: Acceptance,
        lengths: Int[Array, " B"],
    ) -> KVCache:
        """Write the path's keys and values behind the committed ones."""
        ring = self.config.reach is not None

        def write(cache: jax.Array | None, rows: jax.Array | None) -> jax.Array | None:
            if cache is None or rows is None:
                return None
            return write_path(
                cache,
                rows,
                acceptance,
                lengths,
                in_ring=ring,
                spread=self.spread is not None,
                table=state.table,
            )

        return state.replace(
            k=write(state.k, pending.k),
            v=write(state.v, pending.v),
            k_scale=write(state.k_scale, pending.k_scale),
            v_scale=write(state.v_scale, pending.v_scale),
        )

    def canonical(self, state: KVCache, lengths: Int[Array, " B"]) -> KVCache:
        """One stretch a row, zeros in every slot that holds no committed token; codes
        as the numbers that they stand for.
        """
        k, v = self._decoded(state)
        return KVCache(
            k=canonical(k, lengths, state.table), v=canonical(v, lengths, state.table)
        )

    def blank(
        self, state: KVCache, lengths: Int[Array, " B"], value: float | jax.Array
    ) -> KVCache:
        """The state with ``value`` in every slot that holds no committed token."""
        filled = jax.tree.map(
            lambda cache: blank(cache, lengths, state.table, value),
            state.replace(table=None),
        )
        return filled.replace(table=state.table)

    def _dtype(self, state: KVCache) -> jnp.dtype:
        """Of keys and values that are no codes."""
        if self.codec is None:
            return state.k.dtype
        return cache_dtype(self.k.weight.dtype)

    def _decoded(self, state: KVCache) -> tuple[jax.Array, jax.Array]:
        """The caches as numbers."""
        dtype = self._dtype(state)
        return (
            decode(state.k, state.k_scale, dtype),
            decode(state.v, state.v_scale, dtype),
        )

    def _turned(
        self, y: Float[Array, "B W channels"], norm: RMSNorm | None, aids: Aids
    ) -> Float[Array, "B W heads D"]:
        """Split into heads, normed and turned by their positions."""
        heads = y.reshape(*y.shape[:2], -1, self.config.head_dim)
        if norm is not None:
            heads = norm(heads)
        if self.config.rope is None:
            return heads
        assert aids.rotary is not None, "attention needs the window's rotary tables"
        return rotate(heads, aids.rotary.cos, aids.rotary.sin)
