"""What a decoder remembers of the committed tokens: one state a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool

from specjax.models.pages import Paged, PageTable, empty_table, give_back

Mixers = Sequence[Any]
"""One a block; ``None`` where a block has none."""


class CommittedState(struct.PyTreeNode):
    """One state a block, and how many tokens they hold."""

    blocks: tuple[Any, ...]
    lengths: jax.Array  # [B] int32
    pages: PageTable | None = None  # of paged caches: one table for all blocks


def empty_state(
    mixers: Mixers, batch: int, capacity: int, paged: Paged | None
) -> CommittedState:
    """Nothing is committed yet."""

    def empty(mixer: Any) -> Any:
        if mixer is None:
            return None
        if paged is not None and pageable(mixer):
            return mixer.init_state(batch, capacity, paged)
        return mixer.init_state(batch, capacity)

    return CommittedState(
        blocks=tuple(empty(mixer) for mixer in mixers),
        lengths=jnp.zeros((batch,), jnp.int32),
        pages=None if paged is None else empty_table(paged, batch, capacity),
    )


def pageable(mixer: Any) -> bool:
    """Whether this mixer's cache may lie in pages."""
    return getattr(mixer, "pageable", False)


def lend_table(
    mixers: Mixers, blocks: tuple[Any, ...], pages: PageTable | None
) -> tuple[Any, ...]:
    """The blocks' states, with the one block table in those that are paged."""
    if pages is None:
        return blocks
    return tuple(
        old.replace(table=pages.table) if pageable(mixer) else old
        for mixer, old in zip(mixers, blocks, strict=True)
    )


def take_back_table(blocks: tuple[Any, ...]) -> tuple[Any, ...]:
    """The states without the table, of which the decoder's state holds the one copy."""
    return tuple(
        old.replace(table=None) if getattr(old, "table", None) is not None else old
        for old in blocks
    )


def release(state: CommittedState, rows: Bool[Array, " B"]) -> CommittedState:
    """The state in which these rows are empty and hold no page."""
    batch = state.lengths.shape[0]

    def clear(x: jax.Array) -> jax.Array:
        mask = rows.reshape(batch, *[1] * (x.ndim - 1))
        return jnp.where(mask, jnp.zeros((), x.dtype), x)

    # beyond a length of 0 nothing is read of what attention keeps
    blocks = tuple(
        old if hasattr(old, "table") else jax.tree.map(clear, old)
        for old in state.blocks
    )
    return CommittedState(
        blocks=blocks,
        lengths=jnp.where(rows, 0, state.lengths),
        pages=state.pages and give_back(state.pages, rows),
    )


def blank(
    mixers: Mixers, state: CommittedState, value: float | jax.Array
) -> CommittedState:
    """The state with ``value`` wherever it holds nothing that was committed."""
    lent = lend_table(mixers, state.blocks, state.pages)
    blocks = tuple(
        mixer.blank(old, state.lengths, value) if hasattr(mixer, "blank") else old
        for mixer, old in zip(mixers, lent, strict=True)
    )
    return state.replace(blocks=take_back_table(blocks))


def spoil(mixers: Mixers, state: CommittedState, row: int) -> CommittedState:
    """The state with NaN in all that it holds for one row: for tests."""
    lent = lend_table(mixers, state.blocks, state.pages)

    def spoiled(old: Any) -> Any:
        table = getattr(old, "table", None)
        at = jnp.int32(row) if table is None else table[row]

        def fill(x: jax.Array) -> jax.Array:
            floats = jnp.issubdtype(x.dtype, jnp.floating)
            return x.at[at].set(jnp.nan, mode="drop") if floats else x

        return jax.tree.map(fill, old)

    return state.replace(blocks=take_back_table(tuple(map(spoiled, lent))))
