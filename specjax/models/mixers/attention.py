"""Grouped-query softmax attention with a contiguous key-value cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.window_attention.api import window_attention
from specjax.decoding.types import Acceptance, Window
from specjax.models.axes import BATCH, HEAD_DIM, KV_HEADS, TIME
from specjax.models.config import AttentionConfig
from specjax.models.linear import Linear
from specjax.models.mixers.base import Aids
from specjax.models.rope import rotate


class KVCache(struct.PyTreeNode):
    """Keys and values of the committed tokens. Rejected ones are never in it.

    What lies in slots from the row's length on is never read.
    """

    k: jax.Array  # [B, H, T, D]
    v: jax.Array  # [B, H, T, D]

    axes = (BATCH, KV_HEADS, TIME, HEAD_DIM)


class WindowKV(struct.PyTreeNode):
    """Keys and values of a window's rows: what attention would commit."""

    k: jax.Array  # [B, W, H, D]
    v: jax.Array  # [B, W, H, D]


class Attention(struct.PyTreeNode):
    """Projections to queries, keys and values, rotary positions, softmax attention."""

    config: AttentionConfig = struct.field(pytree_node=False)
    q: Linear
    k: Linear
    v: Linear
    out: Linear

    @property
    def cache_dtype(self) -> jnp.dtype:
        """The weights' dtype; float32 under int8 weights, and on CPU, where XLA updates
        a bfloat16 array by converting all of it.
        """
        dtype = self.k.weight.dtype
        narrow = dtype == jnp.bfloat16 and jax.default_backend() == "cpu"
        return jnp.dtype(jnp.float32) if narrow or dtype == jnp.int8 else dtype

    def init_state(self, batch: int, capacity: int) -> KVCache:
        """An empty cache."""
        config = self.config
        shape = (batch, config.num_kv_heads, capacity, config.head_dim)
        return KVCache(
            k=jnp.zeros(shape, self.cache_dtype), v=jnp.zeros(shape, self.cache_dtype)
        )

    def mix(
        self,
        x: Float[Array, "B W D"],
        window: Window,
        state: KVCache,
        lengths: Int[Array, " B"],
        aids: Aids,
    ) -> tuple[Float[Array, "B W D"], WindowKV]:
        """Attend to the committed tokens and to ancestors in the window."""
        config = self.config
        batch, width, _ = x.shape
        rotary = aids.rotary
        assert rotary is not None, "attention needs the window's rotary tables"

        def heads(y: jax.Array, count: int) -> jax.Array:
            return y.reshape(batch, width, count, config.head_dim)

        q = rotate(heads(self.q(x), config.num_heads), rotary.cos, rotary.sin)
        k = rotate(heads(self.k(x), config.num_kv_heads), rotary.cos, rotary.sin)
        pending = sound_rows(
            WindowKV(k=k, v=heads(self.v(x), config.num_kv_heads)), window
        )
        pending = jax.tree.map(lambda y: y.astype(self.cache_dtype), pending)
        mixed = window_attention(
            q,
            pending.k,
            pending.v,
            state.k,
            state.v,
            lengths,
            window.ancestors,
            scale=config.head_dim**-0.5,
        )
        return self.out(mixed.reshape(batch, width, -1)), pending

    def commit(
        self,
        state: KVCache,
        pending: WindowKV,
        acceptance: Acceptance,
        lengths: Int[Array, " B"],
    ) -> KVCache:
        """Write the path's keys and values behind the committed ones."""
        return KVCache(
            k=write_path(state.k, pending.k, acceptance, lengths),
            v=write_path(state.v, pending.v, acceptance, lengths),
        )

    def canonical(self, state: KVCache, lengths: Int[Array, " B"]) -> KVCache:
        """The cache with zeros in every slot that holds no committed token."""
        slots = jnp.arange(state.k.shape[2], dtype=jnp.int32)
        held = (slots < lengths[:, None])[:, None, :, None]
        return jax.tree.map(lambda x: jnp.where(held, x, jnp.zeros((), x.dtype)), state)


def sound_rows(pending: WindowKV, window: Window) -> WindowKV:
    """Zero the rows that are padding or not finite.

    A masked score gives weight 0, and ``0 * NaN`` is NaN, so what nobody may see must
    be finite. The row itself is flagged by its logits.
    """
    finite = jnp.all(jnp.isfinite(pending.k) & jnp.isfinite(pending.v), axis=(2, 3))
    sound = (finite & window.valid)[:, :, None, None]
    return jax.tree.map(lambda y: jnp.where(sound, y, 0.0), pending)


MOST_SLICED_ROWS = 8
"""Batches up to this size are written by slices: XLA's CPU backend turns a scatter into
a loop over rows. Beyond it one scatter keeps the program small."""


def write_path(
    cache: Float[Array, "B H T D"],
    rows: Float[Array, "B W H D"],
    acceptance: Acceptance,
    lengths: Int[Array, " B"],
) -> Float[Array, "B H T D"]:
    """Write the path's rows into the slots from ``lengths`` on, and nothing else."""
    picked = jnp.take_along_axis(
        rows, acceptance.path[:, :, None, None], axis=1, mode="clip"
    )
    if cache.shape[0] <= MOST_SLICED_ROWS:
        return _write_slices(cache, picked, acceptance.num_tokens, lengths)
    return _write_scattered(cache, picked, acceptance.taken, lengths)


def _write_slices(
    cache: Float[Array, "B H T D"],
    picked: Float[Array, "B P H D"],
    num: Int[Array, " B"],
    lengths: Int[Array, " B"],
) -> Float[Array, "B H T D"]:
    """One slice a batch row is read, mixed with what is new, and written back."""
    batch, heads, capacity, dim = cache.shape
    picked = picked.transpose(0, 2, 1, 3)
    steps = min(picked.shape[2], capacity)
    # a slice that would cross the end is moved back by XLA; here it is moved knowingly
    starts = jnp.minimum(lengths, capacity - steps)
    zero = jnp.int32(0)  # a plain 0 would be an int64 beside ``starts`` under x64
    for row in range(batch):
        entry = starts[row] + jnp.arange(steps, dtype=jnp.int32) - lengths[row]
        new = picked[row].at[:, entry].get(mode="clip")
        taken = (entry >= 0) & (entry < num[row])
        at = (jnp.int32(row), zero, starts[row], zero)
        old = jax.lax.dynamic_slice(cache, at, (1, heads, steps, dim))
        mixed = jnp.where(taken[None, None, :, None], new[None], old)
        cache = jax.lax.dynamic_update_slice(cache, mixed, at)
    return cache


def _write_scattered(
    cache: Float[Array, "B H T D"],
    picked: Float[Array, "B P H D"],
    taken: Bool[Array, "B P"],
    lengths: Int[Array, " B"],
) -> Float[Array, "B H T D"]:
    """All batch rows in one scatter."""
    batch, _, capacity, _ = cache.shape
    slots = lengths[:, None] + jnp.arange(taken.shape[1], dtype=jnp.int32)
    # an index of T is dropped; a negative one would wrap and overwrite live slots
    slots = jnp.where(taken, slots, capacity)
    at = jnp.arange(batch, dtype=jnp.int32)[:, None]
    return cache.at[at, :, slots].set(picked, mode="drop")
