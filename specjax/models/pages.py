"""Pages: a pool that the rows of a batch take slots from as they grow.

A cache is ``[pages, H, page_size, D]``; a row's block table says which page holds its
positions ``i * page_size ..``. Table and free list are arrays inside the state, so a
snapshot is a reference here too, and all of it happens under jit.

A pass writes nothing, so pages are taken when a path is committed, and only as many as
it fills. What a commit may need is promised before the round: ``room`` says how many
tokens each row may commit, and a row without room ends there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int, Num

from specjax.decoding.types import Acceptance


class PoolError(ValueError):
    """A pool of pages cannot hold what it is asked to."""


@dataclasses.dataclass(frozen=True)
class Paged:
    """Keep attention's keys and values in pages instead of one stretch a row."""

    pages: int
    """Of the pool that all rows share."""
    page_size: int = 16
    """Tokens a page."""

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.pages < 1:
            raise PoolError(f"{self}: at least one page of one token")

    def blocks(self, capacity: int) -> int:
        """Pages that a row of this capacity may hold."""
        return -(-capacity // self.page_size)


class PageTable(struct.PyTreeNode):
    """Who holds which page.

    ``free[:num_free]`` are the ids of the pages that nobody holds, in no order.
    """

    table: jax.Array  # [B, blocks] int32 page ids; ``pages`` (no page) beyond ``held``
    held: jax.Array  # [B] int32
    free: jax.Array  # [pages] int32
    num_free: jax.Array  # [] int32
    page_size: int = struct.field(pytree_node=False)

    @property
    def pages(self) -> int:
        """Of the pool."""
        return self.free.shape[0]


def empty_table(options: Paged, batch: int, capacity: int) -> PageTable:
    """Every page is free."""
    blocks = options.blocks(capacity)
    return PageTable(
        table=jnp.full((batch, blocks), options.pages, jnp.int32),
        held=jnp.zeros((batch,), jnp.int32),
        free=jnp.arange(options.pages, dtype=jnp.int32),
        num_free=jnp.int32(options.pages),
        page_size=options.page_size,
    )


def admit(options: Paged, prompt_lengths: Sequence[int]) -> None:
    """Raise ``PoolError`` if a pool cannot hold these prompts."""
    # the last prompt token's row is committed by the first round
    needed = sum(options.blocks(length) for length in prompt_lengths)
    if needed > options.pages:
        raise PoolError(
            f"the prompts need {needed} pages of {options.page_size} tokens and the "
            f"pool has {options.pages}: give it more, or send fewer requests"
        )


def room(
    pages: PageTable,
    lengths: Int[Array, " B"],
    most: Int[Array, " B"],
    active: Bool[Array, " B"],
) -> Int[Array, " B"]:
    """How many tokens each row may commit next, at most ``most``, all rows together.

    First every row is served with a page for one token, then, in order, with pages for
    all it may commit: drafts of one row never end another. A row without room has used
    up its pages, and there is none for it.
    """
    slack = pages.held * pages.page_size - lengths

    def wanted(tokens: Int[Array, " B"]) -> Int[Array, " B"]:
        return jnp.where(active, _pages_for(tokens - slack, pages.page_size), 0)

    one = _granted(wanted(jnp.minimum(most, 1)), pages.num_free)
    left = pages.num_free - jnp.sum(one, dtype=jnp.int32)
    granted = one + _granted(wanted(most) - one, left)
    return jnp.clip(slack + granted * pages.page_size, 0, most)


def _granted(wanted: Int[Array, " B"], free: Int[Array, ""]) -> Int[Array, " B"]:
    """Of what each row wants, in order, what there is."""
    before = jnp.cumsum(wanted, dtype=jnp.int32) - wanted
    return jnp.clip(free - before, 0, wanted)


def take(
    pages: PageTable, lengths: Int[Array, " B"], acceptance: Acceptance
) -> PageTable:
    """The table in which each row holds pages for its path as well."""
    needed = _pages_for(lengths + acceptance.num_tokens, pages.page_size)
    new = jnp.maximum(needed - pages.held, 0)
    first = jnp.cumsum(new) - new
    most = -(-acceptance.path.shape[1] // pages.page_size)
    step = jnp.arange(most, dtype=jnp.int32)
    taken = step < new[:, None]
    source = pages.num_free - 1 - (first[:, None] + step)
    ids = pages.free.at[source].get(mode="fill", fill_value=pages.pages)
    blocks = pages.table.shape[1]
    # an index of ``blocks`` is dropped; a negative one would wrap
    block = jnp.where(taken & (source >= 0), pages.held[:, None] + step, blocks)
    row = jnp.arange(block.shape[0], dtype=jnp.int32)[:, None]
    return pages.replace(
        table=pages.table.at[row, block].set(ids, mode="drop"),
        held=pages.held + new,
        num_free=pages.num_free - jnp.sum(new, dtype=jnp.int32),
    )


def give_back(pages: PageTable, rows: Bool[Array, " B"]) -> PageTable:
    """The table in which these rows hold nothing."""
    blocks = pages.table.shape[1]
    block = jnp.arange(blocks, dtype=jnp.int32)
    released = rows[:, None] & (block < pages.held[:, None])
    flat = released.reshape(-1)
    place = pages.num_free + jnp.cumsum(flat, dtype=jnp.int32) - 1
    place = jnp.where(flat, place, pages.pages)
    free = pages.free.at[place].set(pages.table.reshape(-1), mode="drop")
    return pages.replace(
        table=jnp.where(rows[:, None], pages.pages, pages.table),
        held=jnp.where(rows, 0, pages.held),
        free=free,
        num_free=pages.num_free + jnp.sum(flat, dtype=jnp.int32),
    )


def held_in_pages(
    table: Int[Array, "B blocks"], lengths: Int[Array, " B"], pages: int, size: int
) -> Bool[Array, "pages size"]:
    """Which slots of the pool hold a committed token."""
    start = jnp.arange(table.shape[1], dtype=jnp.int32) * size
    filled = jnp.clip(lengths[:, None] - start, 0, size)
    of_page = jnp.zeros((pages,), jnp.int32).at[table].max(filled, mode="drop")
    return jnp.arange(size, dtype=jnp.int32) < of_page[:, None]


def write_pages(
    cache: Num[Array, "pages H size *D"],
    picked: Num[Array, "B P H *D"],
    taken: Bool[Array, "B P"],
    lengths: Int[Array, " B"],
    table: Int[Array, "B blocks"],
) -> Num[Array, "pages H size *D"]:
    """Write a path's rows into the slots from ``lengths`` on, through the table."""
    pages, _, size, *_ = cache.shape
    position = lengths[:, None] + jnp.arange(taken.shape[1], dtype=jnp.int32)
    page = jnp.take_along_axis(table, position // size, axis=1, mode="clip")
    # an index of ``pages`` is dropped
    page = jnp.where(taken, page, pages)
    return cache.at[page, :, position % size].set(picked, mode="drop")


def _pages_for(tokens: Int[Array, " B"], size: int) -> Int[Array, " B"]:
    return (jnp.maximum(tokens, 0) + (size - 1)) // size
