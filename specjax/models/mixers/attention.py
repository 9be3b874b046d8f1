"""Grouped-query softmax attention over a key-value cache."""

from __future__ import annotations

from functools import partial

import jax
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
from specjax.models.norms import RMSNorm
from specjax.models.pages import Paged
from specjax.models.rope import rotate


class KVCache(struct.PyTreeNode):
    """Keys and values of the committed tokens: all of them, or the last ``reach``."""

    k: jax.Array  # [B, H, T, D], or of a pool [pages, H, page_size, D]
    v: jax.Array
    table: jax.Array | None = None  # [B, blocks]: lent to paged caches, see Decoder

    axes = (BATCH, KV_HEADS, TIME, HEAD_DIM)


class WindowKV(struct.PyTreeNode):
    """Keys and values of a window's rows: what attention would commit."""

    k: jax.Array  # [B, W, H, D]
    v: jax.Array  # [B, W, H, D]


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

    @property
    def pageable(self) -> bool:
        """A ring is short, and stays one stretch a row."""
        return self.config.reach is None

    def init_state(
        self, batch: int, capacity: int, paged: Paged | None = None
    ) -> KVCache:
        """An empty cache."""
        config = self.config

        def empty() -> jax.Array:
            return empty_cache(
                batch,
                ring_slots(capacity, config.reach),
                config.num_kv_heads,
                config.head_dim,
                cache_dtype(self.k.weight.dtype),
                paged,
            )

        return KVCache(k=empty(), v=empty())

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
        k, v = added.k, added.v
        slots = None
        if config.reach is not None:
            slots = held_positions(lengths, state.k.shape[2])
        scale = config.head_dim**-0.5 if config.scale is None else config.scale
        k_cache, v_cache = state.k, state.v
        attend = partial(window_attention, table=state.table, spread=self.spread)
        if self.tile is not None:
            k_cache, v_cache = (rows_of(y, state.table) for y in (k_cache, v_cache))
            attend = window_attention_by_row
        mixed = attend(
            q,
            k,
            v,
            k_cache,
            v_cache,
            lengths,
            window.ancestors,
            scale=scale,
            positions=window.positions,
            slots=slots,
            reach=config.reach,
            sinks=self.sinks,
            softcap=config.softcap,
        ).reshape(*x.shape[:2], -1)
        if self.gate is not None:
            mixed = mixed * sigmoid(self.gate(x))
        return self.out(mixed), added

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
        k, v = (y.astype(state.k.dtype) for y in sound_rows((k, v), window))
        return WindowKV(k=k, v=v)

    def commit(
        self,
        state: KVCache,
        pending: WindowKV,
        acceptance: Acceptance,
        lengths: Int[Array, " B"],
    ) -> KVCache:
        """Write the path's keys and values behind the committed ones."""
        ring = self.config.reach is not None

        def write(cache: jax.Array, rows: jax.Array) -> jax.Array:
            return write_path(
                cache,
                rows,
                acceptance,
                lengths,
                in_ring=ring,
                spread=self.spread is not None,
                table=state.table,
            )

        return state.replace(k=write(state.k, pending.k), v=write(state.v, pending.v))

    def canonical(self, state: KVCache, lengths: Int[Array, " B"]) -> KVCache:
        """One stretch a row, zeros in every slot that holds no committed token."""
        return KVCache(
            k=canonical(state.k, lengths, state.table),
            v=canonical(state.v, lengths, state.table),
        )

    def blank(
        self, state: KVCache, lengths: Int[Array, " B"], value: float | jax.Array
    ) -> KVCache:
        """The state with ``value`` in every slot that holds no committed token."""
        return state.replace(
            k=blank(state.k, lengths, state.table, value),
            v=blank(state.v, lengths, state.table, value),
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
