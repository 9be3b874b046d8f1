"""How a call of window attention is cut for a Hopper GPU, and which calls it takes.

A tile is 64 rows, which is what its matrix units multiply at once: the query heads of
one KV head by the window's rows fill it. One block of threads has one tile and a share
of the cache. With G query heads a KV head, windows of up to 64 / G rows cost one pass
over the cache, and each further tile one more, which the second-level cache may hold.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import compat, hopper
from pallas_kernels.window_attention.narrow import NARROW, is_narrow
from pallas_kernels.window_attention.plan import (
    MOST_ROWS,
    Options,
    Shaped,
    Shapes,
    shapes_of,
)

TILE = 64
"""Rows of a product, and cache slots of a step."""

SWIZZLES = (128, 64, 32)
"""Bytes of a row of shared memory that lie together for the matrix units."""

MOST_DIM = 256
"""Of a head: the sum of a tile's values lies in registers, half of them at 256."""

WIDE = "bfloat16"
"""What is multiplied, and the dtype of a cache that holds no codes."""

MOST_LATENT = 576 if compat.VERSION >= (0, 12) else 256
"""Of a latent row, which two warpgroups share: DeepSeek's. Queries, two steps and their
weights then fill the shared memory. What older JAX makes of it spills registers."""

BUFFER_BYTES = 64 << 10
"""For slots that are on their way, and for a step of codes that has been widened, so
that two blocks of threads fit side by side."""

BESIDE = 4 << 10
"""Bytes of shared memory that Pallas takes beside what is asked for: 2 KB for sums that
cross warps, barriers, and up to 1 KB to begin where it must."""

SHORTEST = 4
"""Steps that a share of the cache should have, at least."""

ALIGNED = 8
"""Slots of a tile of shared memory: a copy begins at a multiple of these."""

SCALES = 32
"""Scales of a copy, at least: it moves 128 bytes or more."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The grid is shares of the cache, tiles of rows, and KV heads by batch rows."""

    row_tiles: int
    window: int
    """Window rows as keys, made up to what a product may sum over, or to a step."""
    stages: int
    """Steps whose slots are on their way at once."""
    blocks: int
    """Steps over the whole cache."""
    splits: int
    """Shares of the cache, merged behind the kernel."""
    pieces: int
    """Copies of a step: a page's slots may be fewer than a step's."""
    latent: bool = False
    """Keys are the values too."""
    codes: str | None = None
    """The dtype of a narrow cache."""
    scaled: bool = False
    """Whose slots have scales."""

    @property
    def rows(self) -> int:
        """Of one KV head, made up to whole tiles."""
        return self.row_tiles * TILE

    @property
    def piece(self) -> int:
        """Slots of one copy."""
        return TILE // self.pieces


def make_plan(
    shapes: Shapes,
    *,
    latent: bool = False,
    cache: Any = WIDE,
    scaled: bool = False,
    splits: int | None = None,
) -> Plan:
    """For a ``cache`` of this dtype; ``splits`` overrides the shares of the cache."""
    size, codes = shapes.page_size, jnp.dtype(cache).name
    plan = Plan(
        row_tiles=-(-shapes.rows // TILE),
        window=TILE if latent else -(-shapes.width // 16) * 16,
        stages=2,
        blocks=-(-shapes.capacity // TILE),
        splits=1,
        pieces=1 if size is None or size >= TILE else TILE // size,
        latent=latent,
        codes=codes if is_narrow(codes) else None,
        scaled=scaled,
    )
    left = BUFFER_BYTES - _wide_bytes(shapes, plan)
    stages = min(max(left // _step_bytes(shapes, plan), 2), 4)
    plan = dataclasses.replace(plan, stages=stages)
    if shared_bytes(shapes, plan) > hopper.SHARED_BYTES:
        # wide windows of wide heads, which wait for products more than for memory
        plan = dataclasses.replace(plan, stages=1)
    if splits is None:
        # as many blocks of threads as run at once, and none with too little to do
        side_by_side = min(hopper.SHARED_BYTES // shared_bytes(shapes, plan), 2)
        tiles = plan.row_tiles * shapes.kv_heads * shapes.batch
        running = side_by_side * hopper.MULTIPROCESSORS
        splits = max(min(running // tiles, plan.blocks // SHORTEST), 1)
    return dataclasses.replace(plan, splits=splits)


def swizzle_of(width: int) -> int:
    """The widest for rows of as many bfloat16 numbers, a multiple of 16."""
    return next(n for n in SWIZZLES if 2 * width % n == 0)


def shared_bytes(shapes: Shapes, plan: Plan) -> int:
    """Of shared memory, for queries, keys, values and weights, and ``BESIDE`` those.

    Latent rows are summed up without shared memory, and barriers are all there is.
    """
    steps = plan.stages * _step_bytes(shapes, plan) + _wide_bytes(shapes, plan)
    if plan.latent:  # the window is a step, and rows say how much older sums fade
        return 2 * TILE * (shapes.dim + TILE) + 4 * TILE + steps
    rows = TILE + 2 * plan.window
    weights = TILE * (plan.window + TILE)
    return 2 * (rows * shapes.dim + weights) + steps + BESIDE


def _step_bytes(shapes: Shapes, plan: Plan) -> int:
    """Of a step's keys and values, as they are copied, and of their scales."""
    slot = shapes.dim * (2 if plan.codes is None else 1) + 4 * plan.scaled
    return (1 if plan.latent else 2) * TILE * slot


def _wide_bytes(shapes: Shapes, plan: Plan) -> int:
    """Of a step's keys and values as they are multiplied, if they hold codes."""
    return 0 if plan.codes is None else 2 * 2 * TILE * shapes.dim


def refusal(
    q: Shaped,
    k_cache: Shaped,
    v_cache: Shaped,
    table: Shaped | None,
    options: Options,
    *,
    narrowed: bool,
    window: Any = None,
) -> str | None:
    """Why the kernel for Hopper cannot take a call; ``None``: it can.

    ``window`` is the dtype of the window's keys, which a narrow cache is computed in.
    """
    shapes = shapes_of(q, k_cache, v_cache, table)
    elsewhere = hopper.absent()
    if elsewhere is not None:
        return elsewhere
    if narrowed:
        return "its keys are chosen by an indexer"
    if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        return "64-bit types are enabled"
    dtype = jnp.dtype(k_cache.dtype).name
    if dtype not in (WIDE, *NARROW) or v_cache.dtype != k_cache.dtype:
        return f"its cache is {dtype}, and {', '.join((WIDE, *NARROW))} are known"
    if is_narrow(dtype):
        if window is None or jnp.dtype(window).name != WIDE:
            return f"its window is {window}, and of {dtype} caches only {WIDE} is known"
        if options.shared:
            return f"its keys are its values too, which is not known of {dtype} caches"
    if shapes.width > MOST_ROWS:
        return f"its window has {shapes.width} rows, and {MOST_ROWS} are the most"
    if shapes.dim != shapes.value_dim:
        return f"its keys have {shapes.dim} channels and its values {shapes.value_dim}"
    most = MOST_LATENT if options.shared else MOST_DIM
    if shapes.dim % 16 or shapes.dim > most:
        return (
            f"its {'latent rows' if options.shared else 'heads'} have {shapes.dim} "
            f"channels: a multiple of 16, at most {most}, is known"
        )
    return _refused_slots(shapes, options)


def _refused_slots(shapes: Shapes, options: Options) -> str | None:
    size = shapes.page_size
    if size is not None:
        if size % ALIGNED or (size % TILE and TILE % size):
            return f"its pages have {size} slots: 8, 16, 32 or a multiple of 64 is read"
        if options.scaled and size < SCALES:
            return (
                f"its pages have {size} slots: scales are copied from pages of "
                f"{SCALES} or more"
            )
        return None
    if shapes.capacity % ALIGNED or shapes.capacity < TILE:
        return (
            f"its cache has {shapes.capacity} slots: a multiple of {ALIGNED}, at "
            f"least {TILE}, is read"
        )
    return None
