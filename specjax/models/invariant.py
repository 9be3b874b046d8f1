"""The invariant mode: a token's bits depend on its position and its prefix alone.

By default they depend a little on the window too: products of another width take other
kernels, keys are read from the window instead of the cache, recurrences are computed as
matrix products. In this mode products run in tiles of one row count, attention reads
every row's keys in the order of the cache wherever they come from, and recurrences
advance row by row. Speculative and plain decoding then agree bit for bit, in bfloat16
as well, and so do prefill and decoding, and batches of any size.

That rests on the backend's products treating the rows of a tile alike, and on its
compiling the rest alike at every width, which no backend promises. So it is looked at
before it is relied on: ``check_invariant``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.types import Acceptance
from specjax.decoding.windows import chunk_window
from specjax.models.decoder import Decoder
from specjax.models.feedforward.moe import MoE
from specjax.models.linear import Linear
from specjax.models.memory import with_recurrence
from specjax.models.mixers.attention import Attention
from specjax.models.mixers.latent_attention import LatentAttention
from specjax.models.recurrence import Snapshot

TILE = 16
"""Rows of a product: windows up to this cost what a plain step costs in this mode."""

_EVERY_WINDOW = 1 << 30


class NotInvariant(ValueError):
    """The mode cannot be had for this model, or on this backend."""


def invariant(decoder: Decoder, tile: int = TILE) -> Decoder:
    """The decoder in invariant mode.

    Raises ``NotInvariant`` for what cannot be had so: mixtures of experts, in which a
    row's place among its expert's rows is chance, and indexers.
    """
    for number, block in enumerate(decoder.blocks):
        if block.feedforward is not None and isinstance(block.feedforward.body, MoE):
            raise NotInvariant(
                f"block {number} is a mixture of experts, whose products have as many "
                "rows as the router sends: there is no invariant mode for it"
            )
        mixer = block.mixer and block.mixer.body
        chooses = isinstance(mixer, LatentAttention) and (
            mixer.indexer is not None or mixer.config.chosen_before
        )
        if chooses:
            raise NotInvariant(
                f"block {number} attends to the keys that an indexer chooses: there is "
                "no invariant mode for it"
            )
    serial = with_recurrence(decoder, Snapshot(rows=_EVERY_WINDOW))
    return _tiled(serial, tile).replace(tile=tile)


def _tiled(node: Any, tile: int) -> Any:
    """The tree with every product in tiles, and attention row by row."""
    if isinstance(node, Linear):
        return node.replace(tile=tile)
    if isinstance(node, tuple):
        return tuple(_tiled(part, tile) for part in node)
    if not dataclasses.is_dataclass(node) or isinstance(node, type):
        return node
    fields = {
        field.name: _tiled(getattr(node, field.name), tile)
        for field in dataclasses.fields(node)
        if field.metadata.get("pytree_node", True)
    }
    if isinstance(node, Attention | LatentAttention):
        fields["tile"] = tile
    return dataclasses.replace(node, **fields)


def check_invariant(
    decoder: Decoder, widths: tuple[int, ...], *, tokens: int = 40, seed: int = 0
) -> None:
    """Raise ``NotInvariant`` unless windows of all widths give the same bits.

    Decodes one random text through windows of each width, alone and as the second row
    of a batch, and compares logits and, at the end, the state.
    """
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, decoder.vocab_size, tokens)
    wanted = window_bits(decoder, ids, widths[0], batch=1)
    for batch in (1, 2):
        for width in widths:
            got = window_bits(decoder, ids, width, batch=batch)
            for position, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
                if ours.tobytes() != theirs.tobytes():
                    where = (
                        f"the logits of position {position}"
                        if position < tokens
                        else "the state"
                    )
                    raise NotInvariant(
                        f"{where} are not the same bits in windows of {width} rows, "
                        f"batch {batch}, as in windows of {widths[0]}: this backend's "
                        "arithmetic depends on a row's place in products with such "
                        "weights; load the model in another type, or give invariant() "
                        "another tile"
                    )


def window_bits(
    decoder: Decoder, ids: np.ndarray, width: int, batch: int
) -> list[np.ndarray]:
    """Logits by position, and the state's arrays, of the batch's last row."""
    tokens = jnp.asarray(np.stack([ids[::-1]] * (batch - 1) + [ids]), jnp.int32)
    state = decoder.init(batch, -(-len(ids) // 128) * 128)
    rows: list[np.ndarray] = []
    for start in range(0, len(ids), width):
        state, logits = _advance(decoder, state, tokens, jnp.int32(start), width=width)
        rows += list(np.asarray(logits[-1]))[: len(ids) - start]
    shown = jax.tree.leaves(decoder.canonical(state))
    return rows + [np.asarray(leaf[-1]) for leaf in shown]


def _advance_once(
    decoder: Decoder, state: Any, tokens: jax.Array, start: jax.Array, *, width: int
) -> tuple[Any, jax.Array]:
    batch, length = tokens.shape
    starts = jnp.broadcast_to(start, (batch,))
    stops = jnp.full((batch,), length, jnp.int32)
    window = chunk_window(tokens, starts, stops, width)
    verdict = decoder.verify(state, window)
    slots = jnp.arange(width, dtype=jnp.int32)
    acceptance = Acceptance(
        path=jnp.broadcast_to(slots, (batch, width)),
        tokens=window.tokens,
        num_tokens=window.valid.sum(axis=1, dtype=jnp.int32),
    )
    assert verdict.logits is not None
    return decoder.commit(state, verdict.pending, acceptance), verdict.logits


_advance = jax.jit(_advance_once, static_argnames="width")
