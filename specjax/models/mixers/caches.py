"""Where attention keeps what the committed tokens left.

One stretch a row ``[B, H, T, D]``; of a sliding window a ring, as long as the window;
or pages of a pool that all rows share (``specjax.models.pages``), where there is a
block table. With a codec (``codecs``) there are codes, and one scale a slot and head
in an array of its own, which is written and paged as the codes are.

Rejected rows are never in a cache. What lies in slots that hold no committed token is
never read.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from pallas_kernels.layouts import as_kernels_read
from pallas_kernels.window_attention.pages import gather_pages
from specjax.decoding.types import Acceptance, Window
from specjax.models.pages import Paged, held_in_pages, write_pages


def cache_dtype(weight: jnp.dtype) -> jnp.dtype:
    """The weights' dtype; float32 under int8 weights, and on CPU, where XLA updates
    a bfloat16 array by converting all of it.
    """
    narrow = weight == jnp.bfloat16 and jax.default_backend() == "cpu"
    return jnp.dtype(jnp.float32) if narrow or weight == jnp.int8 else weight


def ring_slots(capacity: int, reach: int | None) -> int:
    """How many slots a cache needs when a token sees ``reach`` positions."""
    return capacity if reach is None else min(capacity, reach)


def held_positions(lengths: Int[Array, " B"], size: int) -> Int[Array, "B size"]:
    """The position that each slot of a ring holds; negative: none yet.

    Position ``p`` stands in slot ``p % size``, and the last ``size`` ones are held.
    """
    slots = jnp.arange(size, dtype=jnp.int32)
    last = lengths[:, None] - 1
    return last - jnp.remainder(last - slots, size)


def empty_cache(
    batch: int,
    capacity: int,
    heads: int,
    dim: int | None,
    dtype: jnp.dtype,
    paged: Paged | None,
) -> jax.Array:
    """One stretch a row, or the pool's pages; without ``dim`` one number a slot."""
    ends = () if dim is None else (dim,)
    if paged is None:
        return jnp.zeros((batch, heads, capacity, *ends), dtype)
    return jnp.zeros((paged.pages, heads, paged.page_size, *ends), dtype)


def rows_of(cache: jax.Array, table: jax.Array | None) -> Num[Array, "B H T *D"]:
    """The cache as one stretch a row."""
    return cache if table is None else gather_pages(cache, table)


def blank(
    cache: jax.Array,
    lengths: Int[Array, " B"],
    table: jax.Array | None,
    value: float | jax.Array,
) -> jax.Array:
    """``value`` in every slot that holds no committed token; of integers, which have no
    NaN, the largest.
    """
    if table is None:
        held = held_positions(lengths, cache.shape[2]) >= 0
    else:
        held = held_in_pages(table, lengths, cache.shape[0], cache.shape[2])
    if jnp.issubdtype(cache.dtype, jnp.integer):
        value = jnp.iinfo(cache.dtype).max
    held = held.reshape(held.shape[0], 1, held.shape[1], *[1] * (cache.ndim - 3))
    return jnp.where(held, cache, jnp.asarray(value, cache.dtype))


def canonical(
    cache: jax.Array, lengths: Int[Array, " B"], table: jax.Array | None
) -> Float[Array, "B H T D"]:
    """One stretch a row, with zeros in every slot that holds no committed token."""
    return blank(rows_of(cache, table), lengths, None, 0.0)


def sound_rows(rows: tuple[jax.Array, ...], window: Window) -> tuple[jax.Array, ...]:
    """Zero the window rows (axis 1) that are padding or not finite in any array.

    A masked score gives weight 0, and ``0 * NaN`` is NaN, so what nobody may see must
    be finite. The row itself is flagged by its logits.
    """
    sound = window.valid
    for x in rows:
        sound = sound & jnp.all(jnp.isfinite(x), axis=tuple(range(2, x.ndim)))

    def keep(x: jax.Array) -> jax.Array:
        mask = sound.reshape(*sound.shape, *[1] * (x.ndim - 2))
        return jnp.where(mask, x, jnp.zeros((), x.dtype))

    return tuple(keep(x) for x in rows)


MOST_SLICED_ROWS = 8
"""Batches up to this size are written by slices: XLA's CPU backend turns a scatter into
a loop over rows. Beyond it one scatter keeps the program small."""


def write_path(
    cache: Num[Array, "B_or_pages H T_or_size *D"],
    rows: Num[Array, "B W H *D"],
    acceptance: Acceptance,
    lengths: Int[Array, " B"],
    *,
    in_ring: bool = False,
    spread: bool = False,
    table: Int[Array, "B blocks"] | None = None,
) -> Num[Array, "B_or_pages H T_or_size *D"]:
    """Write the path's rows into the slots from ``lengths`` on, and nothing else.

    A ring (``in_ring``) goes on at its beginning, and of a path that is longer keeps
    the end. With a block ``table`` the slots are those of the row's pages. ``spread``:
    batch rows lie on several devices, and none may look at another's.
    """
    path = acceptance.path.reshape(*acceptance.path.shape, *[1] * (rows.ndim - 2))
    picked = jnp.take_along_axis(rows, path, axis=1, mode="clip").astype(cache.dtype)
    if table is not None:
        return write_pages(cache, picked, acceptance.taken, lengths, table)
    if in_ring:
        return _write_ring(cache, picked, acceptance.num_tokens, lengths)
    if cache.shape[0] <= MOST_SLICED_ROWS and not spread:
        return _write_slices(cache, picked, acceptance.num_tokens, lengths)
    return _write_scattered(cache, picked, acceptance.taken, lengths)


def _write_slices(
    cache: Num[Array, "B H T *D"],
    picked: Num[Array, "B P H *D"],
    num: Int[Array, " B"],
    lengths: Int[Array, " B"],
) -> Num[Array, "B H T *D"]:
    """One slice a batch row is read, mixed with what is new, and written back."""
    batch, heads, capacity, *ends = cache.shape
    picked = picked.swapaxes(1, 2)
    steps = min(picked.shape[2], capacity)
    # a slice that would cross the end is moved back by XLA; here it is moved knowingly
    starts = jnp.minimum(lengths, capacity - steps)
    zero = jnp.int32(0)  # a plain 0 would be an int64 beside ``starts`` under x64
    for row in range(batch):
        entry = starts[row] + jnp.arange(steps, dtype=jnp.int32) - lengths[row]
        new = picked[row].at[:, entry].get(mode="clip")
        taken = ((entry >= 0) & (entry < num[row])).reshape(steps, *[1] * len(ends))
        at = (jnp.int32(row), zero, starts[row], *[zero] * len(ends))
        old = jax.lax.dynamic_slice(cache, at, (1, heads, steps, *ends))
        mixed = jnp.where(taken, new[None], old)
        cache = jax.lax.dynamic_update_slice(cache, as_kernels_read(mixed), at)
    return cache


def _write_scattered(
    cache: Num[Array, "B H T *D"],
    picked: Num[Array, "B P H *D"],
    taken: Bool[Array, "B P"],
    lengths: Int[Array, " B"],
) -> Num[Array, "B H T *D"]:
    """All batch rows in one scatter."""
    slots = lengths[:, None] + jnp.arange(taken.shape[1], dtype=jnp.int32)
    return _scatter(cache, picked, slots, taken)


def _write_ring(
    cache: Num[Array, "B H T *D"],
    picked: Num[Array, "B P H *D"],
    num: Int[Array, " B"],
    lengths: Int[Array, " B"],
) -> Num[Array, "B H T *D"]:
    """All batch rows in one scatter, around the end of the ring."""
    size = cache.shape[2]
    entry = jnp.arange(picked.shape[1], dtype=jnp.int32)
    # of two entries for one slot the later one counts, and only it may be written
    taken = (entry < num[:, None]) & (entry >= num[:, None] - size)
    return _scatter(cache, picked, jnp.remainder(lengths[:, None] + entry, size), taken)


def _scatter(
    cache: Num[Array, "B H T *D"],
    picked: Num[Array, "B P H *D"],
    slots: Int[Array, "B P"],
    taken: Bool[Array, "B P"],
) -> Num[Array, "B H T *D"]:
    # an index of T is dropped; a negative one would wrap and overwrite live slots
    slots = jnp.where(taken, slots, cache.shape[2])

    def write(row: jax.Array, values: jax.Array, at: jax.Array) -> jax.Array:
        return row.at[:, at].set(values.swapaxes(0, 1), mode="drop")

    # row by row, so that a partitioner sees that batch rows do not meet
    return jax.vmap(write)(cache, picked, slots)
