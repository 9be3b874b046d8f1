"""Blocks one after the other, on whatever vectors they are given.

What a decoder is between its embedding and its last norm, and what a draft head that is
made of the same blocks runs on features of the target.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.decoding.kinds import kinds
from specjax.decoding.types import Acceptance, Window
from specjax.models.committed import CommittedState, lend_table, take_back_table
from specjax.models.mixers.base import Aids, Chosen, RotaryTables
from specjax.models.norms import RMSNorm
from specjax.models.pages import take
from specjax.models.rope import Rope


class Sublayer(struct.PyTreeNode):
    """``x += post_norm(body(norm x))``; most have no ``post_norm``."""

    norm: RMSNorm
    body: Any
    post_norm: RMSNorm | None = None

    def add(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """What the body made, added to the residual stream."""
        return x + (y if self.post_norm is None else self.post_norm(y))


class Block(struct.PyTreeNode):
    """A mixer and a feed-forward, one after the other. One of them may be absent."""

    mixer: Sublayer | None
    feedforward: Sublayer | None


def run_blocks(
    blocks: Sequence[Block],
    x: Float[Array, "B W D"],
    window: Window,
    state: CommittedState,
    *,
    chosen: Chosen | None = None,
) -> tuple[list[Float[Array, "B W D"]], tuple[Any, ...]]:
    """The residual stream before the blocks and after each, and what to commit.

    ``chosen`` are the keys for blocks that have no indexer above them.
    """
    mixers = mixers_of(blocks)
    tables = rotary_tables(mixers, window.positions, x.dtype)
    streams, pending = [x], []
    lent = lend_table(mixers, state.blocks, state.pages)
    for block, mixer, own in zip(blocks, mixers, lent, strict=True):
        aids = Aids(rotary=tables.get(rope_of(mixer)), chosen=chosen)
        x, added, chosen = _run_block(
            block, x, window, own, state.lengths, aids, kinds=kinds(block)
        )
        streams.append(x)
        pending.append(added)
    return streams, tuple(pending)


def commit_mixers(
    mixers: Sequence[Any], state: CommittedState, pending: Any, acceptance: Acceptance
) -> CommittedState:
    """Fold the accepted path into every mixer's state; ``None`` has none."""
    pages = state.pages and take(state.pages, state.lengths, acceptance)
    blocks = tuple(
        mixer
        and _commit_mixer(
            mixer, old, added, acceptance, state.lengths, kinds=kinds(mixer)
        )
        for mixer, old, added in zip(
            mixers, lend_table(mixers, state.blocks, pages), pending, strict=True
        )
    )
    lengths = state.lengths + acceptance.num_tokens
    return CommittedState(take_back_table(blocks), lengths, pages)


def canonical_mixers(mixers: Sequence[Any], state: CommittedState) -> CommittedState:
    """The comparable form of a state: see each mixer's ``canonical``."""
    lent = lend_table(mixers, state.blocks, state.pages)
    blocks = tuple(
        mixer and mixer.canonical(old, state.lengths)
        for mixer, old in zip(mixers, lent, strict=True)
    )
    return CommittedState(blocks, state.lengths)


def mixers_of(blocks: Sequence[Block]) -> tuple[Any, ...]:
    """One a block; ``None`` where it has none."""
    return tuple(block.mixer and block.mixer.body for block in blocks)


def rope_of(mixer: Any) -> Rope | None:
    """How a mixer turns its heads, if it does."""
    return mixer and getattr(mixer.config, "rope", None)


def rotary_tables(
    mixers: Sequence[Any], positions: Int[Array, "B W"], dtype: jnp.dtype
) -> dict[Rope | None, RotaryTables]:
    """Of every rope that the mixers use."""
    ropes = {rope for rope in map(rope_of, mixers) if rope is not None}
    return {rope: RotaryTables(*rope.tables(positions, dtype)) for rope in ropes}


# Blocks of one kind have one shape, so under jit they are traced and lowered once, not
# once a block: for thirty blocks that is most of the time to a first token. XLA inlines
# the calls, and the compiled program is the unrolled one.


@partial(jax.jit, static_argnames="kinds")
def _run_block(
    block: Block,
    x: jax.Array,
    window: Window,
    state: Any,
    lengths: jax.Array,
    aids: Aids,
    *,
    kinds: Hashable,
) -> tuple[jax.Array, Any, Chosen | None]:
    added = None
    if block.mixer is not None:
        mixer, normed = block.mixer.body, block.mixer.norm(x)
        if getattr(mixer, "indexer", None) is not None:
            chosen = mixer.choose(normed, window, state, lengths, aids)
            aids = aids.replace(chosen=chosen)
        y, added = mixer.mix(normed, window, state, lengths, aids)
        x = block.mixer.add(x, y)
    if block.feedforward is not None:
        y = block.feedforward.body(block.feedforward.norm(x), window.valid)
        x = block.feedforward.add(x, y)
    return x, added, aids.chosen


@partial(jax.jit, static_argnames="kinds")
def _commit_mixer(
    mixer: Any,
    state: Any,
    pending: Any,
    acceptance: Acceptance,
    lengths: jax.Array,
    *,
    kinds: Hashable,
) -> Any:
    return mixer.commit(state, pending, acceptance, lengths)
