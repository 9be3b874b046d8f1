"""How a call of window attention is cut into tiles, and which calls a kernel takes.

All of it follows from shapes, dtypes and options, before anything is lowered.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.window_attention.narrow import NARROW, computed_in, is_narrow

Shaped = jax.Array | jax.ShapeDtypeStruct

LANES = 128
MOST_ROWS = 64
"""Window rows. Wider windows are prefill, where other kernels are as good."""

MOST_DIM = 640
"""Of a head: 576 are DeepSeek's latent and rotary key."""

ROW_TILE = 256
"""Rows of a tile, all its KV heads together."""

BLOCK_BYTES = 1 << 20
"""Of keys read in a step, all its KV heads together."""

BLOCK = 512
"""Slots of a step. For 8 KV heads of 32 rows the compiler's schedule for a v5e counts
1139 cycles; to copy 2 MB of keys and values takes some 3800 (819 GB/s, 1.5 GHz)."""

MOST_PAGES = 8
"""Of a step: each is a copy of its own, with instructions of its own."""

CORES = 2
"""TensorCores that may make up one device, as on v4 and v5p. The compiler deals out to
them what may run at once: batch rows, groups of heads, and tiles of rows."""

WORTH_SHARING = 16 << 20
"""Bytes of keys in a cache that is read in a share a core, at least, where nothing else
could run at once: 8192 slots of Llama-3-8B. Most devices have one core, which is not
known here and gains nothing by it. There the kernel has 3 to 4 % more bundles, and the
merge is 2500 to 5100 cycles by the compiler's estimate (v5e), of 61 000 that the 32 MB
of such keys and values take (819 GB/s, 1.5 GHz)."""

MOST_TABLE = 1 << 16
"""Entries of a block table, which lies in scalar memory."""

CACHE_DTYPES = ("bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Extents of a call."""

    batch: int
    width: int
    q_heads: int
    kv_heads: int
    dim: int
    value_dim: int
    capacity: int
    page_size: int | None = None
    """Of a paged cache, ``[pages, H, page_size, D]``."""

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.q_heads // self.kv_heads

    @property
    def rows(self) -> int:
        """What one KV head is read for: its query heads by the window's rows."""
        return self.group * self.width


def shapes_of(
    q: Shaped, k_cache: Shaped, v_cache: Shaped, table: Shaped | None = None
) -> Shapes:
    """Of queries ``[B, W, Hq, D]`` and a cache ``[B, H, T, D]``, or pages of a pool
    and a table of them ``[B, blocks]``.
    """
    batch, width, q_heads, dim = q.shape
    slots = k_cache.shape[2]
    return Shapes(
        batch=batch,
        width=width,
        q_heads=q_heads,
        kv_heads=k_cache.shape[1],
        dim=dim,
        value_dim=v_cache.shape[3],
        capacity=slots if table is None else table.shape[1] * slots,
        page_size=None if table is None else slots,
    )


@dataclasses.dataclass(frozen=True)
class Options:
    """What a call's program depends on besides its shapes."""

    scale: float
    reach: int | None = None
    softcap: float | None = None
    ring: bool = False
    """Slots say which position they hold."""
    shared: bool = False
    """Keys are the values too, as of latent attention."""
    with_lse: bool = False
    scaled: bool = False
    """A narrow cache with a scale a slot and head."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Tiles of one call: the grid is shares of the cache, batch, heads, rows, and
    steps over a share.
    """

    heads: int
    """KV heads of a step."""
    row_tile: int
    row_tiles: int
    block: int
    """Cache slots of a step."""
    blocks: int
    """Steps over the whole cache."""
    splits: int
    """Shares of the cache, merged behind the kernel."""
    pages: int
    """Pages of a step; 0: the cache is one stretch a batch row."""
    capacity: int
    turned: bool
    """The cache is read as ``[B, H, D, T]``. Channels that do not fill lanes would be
    padded, so the compiler keeps such a cache that way round, and would copy all of it
    for a kernel that takes it the other way."""
    window: int
    """Window rows as keys, made up to whole tiles."""

    @property
    def rows(self) -> int:
        """Of one KV head, made up to whole tiles."""
        return self.row_tile * self.row_tiles

    @property
    def steps(self) -> int:
        """Over one share, at most."""
        return -(-self.blocks // self.splits)


def make_plan(
    shapes: Shapes,
    dtype: jnp.dtype,
    *,
    window: jnp.dtype | None = None,
    block: int | None = None,
    splits: int | None = None,
) -> Plan:
    """Tiles for a cache of this dtype; ``block`` overrides the slots of a step, and
    ``splits`` the shares of the cache.

    ``window`` is the dtype of the window's keys, in which narrow caches are computed.
    """
    wide = computed_in(dtype, dtype if window is None else window)
    whole = 8 * 4 // wide.itemsize  # rows of one packed tile
    row_tiles = -(-shapes.rows // ROW_TILE)
    row_tile = _up(-(-shapes.rows // row_tiles), whole)
    wanted, size = block or BLOCK, shapes.page_size
    if wanted % LANES:
        raise ValueError(f"blocks of {wanted} slots: a multiple of {LANES} is copied")
    pages = 0 if size is None else min(max(wanted // size, 1), MOST_PAGES)
    block = min(wanted, shapes.capacity) if size is None else pages * size
    key_bytes = block * _up(shapes.dim, LANES) * jnp.dtype(dtype).itemsize
    heads = max(
        n
        for n in range(1, shapes.kv_heads + 1)
        if shapes.kv_heads % n == 0
        and (n == 1 or (n * row_tile <= ROW_TILE and n * key_bytes <= BLOCK_BYTES))
    )
    blocks = -(-shapes.capacity // block)
    if splits is None:
        at_once = shapes.batch * (shapes.kv_heads // heads) * row_tiles
        shared = at_once == 1 and blocks > 1 and _worth_sharing(shapes, dtype)
        splits = CORES if shared else 1
    if splits not in (1, CORES):
        raise ValueError(f"splits = {splits}: 1 or {CORES} shares are merged")
    return Plan(
        heads=heads,
        row_tile=row_tile,
        row_tiles=row_tiles,
        block=block,
        blocks=blocks,
        splits=splits,
        pages=pages,
        capacity=shapes.capacity,
        turned=_turned(shapes),
        window=_up(shapes.width, whole),
    )


def _worth_sharing(shapes: Shapes, dtype: jnp.dtype) -> bool:
    key = shapes.dim * jnp.dtype(dtype).itemsize
    return shapes.kv_heads * shapes.capacity * key >= WORTH_SHARING


def _paged_badly(shapes: Shapes) -> bool:
    """Neither channels nor a page's slots fill lanes, so the compiler puts pages there,
    and would copy the pool for a kernel.
    """
    size = shapes.page_size
    return size is not None and shapes.dim % LANES != 0 and size % LANES != 0


def _turned(shapes: Shapes) -> bool:
    return shapes.dim % LANES != 0 and not _paged_badly(shapes)


def refusal(
    q: Shaped,
    k_cache: Shaped,
    v_cache: Shaped,
    table: Shaped | None = None,
    *,
    narrowed: bool,
    window: Any = None,
    shared: bool = False,
    scaled: bool = False,
) -> str | None:
    """Why the TPU's kernel cannot take a call; ``None``: it can.

    ``window`` is the dtype of the window's keys, which a narrow cache is computed in;
    for ``shared`` and ``scaled`` see ``Options``.
    """
    shapes = shapes_of(q, k_cache, v_cache, table)
    dtype = jnp.dtype(k_cache.dtype).name
    if narrowed:
        return "its keys are chosen by an indexer"
    if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        return "64-bit types are enabled"
    if dtype not in (*CACHE_DTYPES, *NARROW) or v_cache.dtype != k_cache.dtype:
        known = ", ".join((*CACHE_DTYPES, *NARROW))
        return f"its cache is {dtype}, and {known} are known"
    if is_narrow(dtype):
        against = _refused_narrow(shapes, dtype, window, shared, scaled)
        if against is not None:
            return against
    if shapes.width > MOST_ROWS:
        return f"its window has {shapes.width} rows, and {MOST_ROWS} are the most"
    if table is not None and table.shape[0] * table.shape[1] > MOST_TABLE:
        return f"its block table has more than {MOST_TABLE} entries"
    if _paged_badly(shapes):
        return (
            f"its pages have {shapes.page_size} slots: with {shapes.dim} channels a "
            f"head a multiple of {LANES} is read without a copy"
        )
    if shapes.dim != shapes.value_dim:
        return f"its keys have {shapes.dim} channels and its values {shapes.value_dim}"
    if shapes.dim > MOST_DIM:
        return f"its heads have {shapes.dim} channels, and {MOST_DIM} are the most"
    return None


def _refused_narrow(
    shapes: Shapes, dtype: str, window: Any, shared: bool, scaled: bool
) -> str | None:
    """What there is against a cache of one byte a number."""
    if window is None or jnp.dtype(window).name not in CACHE_DTYPES:
        return f"its window is {window}, and {', '.join(CACHE_DTYPES)} are known"
    if shared:
        return f"its keys are its values too, which is not known of {dtype} caches"
    if shapes.dim % LANES:
        return (
            f"its heads have {shapes.dim} channels: in {dtype} newer compilers copy "
            f"the cache for them each round, unless they are a multiple of {LANES}"
        )
    size = shapes.page_size
    if scaled and size is not None and size % LANES:
        return (
            f"its pages have {size} slots: scales are read without a copy from pages "
            f"of a multiple of {LANES}"
        )
    return None


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
