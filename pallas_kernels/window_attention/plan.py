"""How a call of window attention is cut into tiles, and which calls a kernel takes.

All of it follows from shapes, dtypes and options, before anything is lowered.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

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

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.q_heads // self.kv_heads

    @property
    def rows(self) -> int:
        """What one KV head is read for: its query heads by the window's rows."""
        return self.group * self.width


def shapes_of(q: Shaped, k_cache: Shaped, v_cache: Shaped) -> Shapes:
    """Of queries ``[B, W, Hq, D]`` and a contiguous cache ``[B, H, T, D]``."""
    batch, width, q_heads, dim = q.shape
    return Shapes(
        batch=batch,
        width=width,
        q_heads=q_heads,
        kv_heads=k_cache.shape[1],
        dim=dim,
        value_dim=v_cache.shape[3],
        capacity=k_cache.shape[2],
    )


@dataclasses.dataclass(frozen=True)
class Plan:
    """Tiles of one call: the grid is batch, heads, rows, and steps over the cache."""

    heads: int
    """KV heads of a step."""
    row_tile: int
    row_tiles: int
    block: int
    """Cache slots of a step."""
    blocks: int
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


def make_plan(shapes: Shapes, dtype: jnp.dtype, *, block: int | None = None) -> Plan:
    """Tiles for a cache of this dtype; ``block`` overrides the slots of a step."""
    whole = 8 * 4 // jnp.dtype(dtype).itemsize  # rows of one packed tile
    row_tiles = -(-shapes.rows // ROW_TILE)
    row_tile = _up(-(-shapes.rows // row_tiles), whole)
    if block is None:
        block = 512
    if block % LANES:
        raise ValueError(f"blocks of {block} slots: a multiple of {LANES} is copied")
    block = min(block, shapes.capacity)
    key_bytes = block * _up(shapes.dim, LANES) * jnp.dtype(dtype).itemsize
    heads = max(
        n
        for n in range(1, shapes.kv_heads + 1)
        if shapes.kv_heads % n == 0
        and (n == 1 or (n * row_tile <= ROW_TILE and n * key_bytes <= BLOCK_BYTES))
    )
    return Plan(
        heads=heads,
        row_tile=row_tile,
        row_tiles=row_tiles,
        block=block,
        blocks=-(-shapes.capacity // block),
        capacity=shapes.capacity,
        turned=shapes.dim % LANES != 0,
        window=_up(shapes.width, whole),
    )


def refusal(
    q: Shaped, k_cache: Shaped, v_cache: Shaped, *, narrowed: bool
) -> str | None:
    """Why the TPU's kernel cannot take a call; ``None``: it can."""
    shapes = shapes_of(q, k_cache, v_cache)
    dtype = jnp.dtype(k_cache.dtype).name
    if narrowed:
        return "its keys are chosen by an indexer"
    if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        return "64-bit types are enabled"
    if dtype not in CACHE_DTYPES or v_cache.dtype != k_cache.dtype:
        return f"its cache is {dtype}, and {', '.join(CACHE_DTYPES)} are known"
    if shapes.width > MOST_ROWS:
        return f"its window has {shapes.width} rows, and {MOST_ROWS} are the most"
    if shapes.dim != shapes.value_dim:
        return f"its keys have {shapes.dim} channels and its values {shapes.value_dim}"
    if shapes.dim > MOST_DIM:
        return f"its heads have {shapes.dim} channels, and {MOST_DIM} are the most"
    return None


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
