"""Choosing how a loaded decoder remembers: rollback strategies, narrow caches."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.models.config import GatedDeltaConfig, Mamba2Config
from specjax.models.decoder import Decoder
from specjax.models.mixers.attention import Attention
from specjax.models.mixers.codecs import Codec
from specjax.models.mixers.latent_attention import LatentAttention
from specjax.models.recurrence import Replay, Ring, Snapshot, Strategy
from specjax.models.stack import Block

STRATEGIES: dict[str, Strategy] = {
    "replay": Replay(),
    "snapshot": Snapshot(),
    "ring": Ring(),
    "ring-bfloat16": Ring(dtype="bfloat16"),
}
"""By the names that the command line uses."""


def with_recurrence(decoder: Decoder, strategy: Strategy) -> Decoder:
    """The decoder whose recurrent layers take in accepted inputs by this strategy.

    The parameters are the same, and so is what it computes, to rounding; the states are
    others, so choose before a run starts. Decoders without recurrent layers stay as
    they are.
    """
    blocks = tuple(_with_recurrence(block, strategy) for block in decoder.blocks)
    configs = tuple(
        dataclasses.replace(
            told, mixer=block.mixer.body.config if block.mixer else told.mixer
        )
        for told, block in zip(decoder.config.blocks, blocks, strict=True)
    )
    config = dataclasses.replace(decoder.config, blocks=configs)
    return decoder.replace(blocks=blocks, config=config)


class CacheError(ValueError):
    """A decoder cannot keep what it has read in the way asked for."""


def with_codec(decoder: Decoder, codec: Codec | None) -> Decoder:
    """The decoder whose attention keeps keys and values as ``codec`` rounds them.

    That is another model, as one with rounded weights is: its windows see what its
    cache will hold, so drafts still change no token. ``None``: no rounding beyond that
    of the cache's dtype. The states are others, so choose before a run starts.

    Raises ``CacheError`` if a block keeps latents, or no block keeps keys.
    """
    mixers = decoder.mixers
    for number, mixer in enumerate(mixers):
        if codec is not None and isinstance(mixer, LatentAttention):
            raise CacheError(
                f"block {number} is latent attention, whose cache holds latents: they "
                f"are kept in the weights' dtype, not in {codec.dtype}"
            )
    if codec is not None and not any(isinstance(x, Attention) for x in mixers):
        raise CacheError("no block has a cache of keys and values")
    blocks = tuple(_with_codec(block, codec) for block in decoder.blocks)
    return decoder.replace(blocks=blocks)


def _with_codec(block: Block, codec: Codec | None) -> Block:
    if block.mixer is None or not isinstance(block.mixer.body, Attention):
        return block
    body = block.mixer.body.replace(codec=codec)
    return block.replace(mixer=block.mixer.replace(body=body))


def has_recurrence(decoder: Decoder) -> bool:
    """Whether a strategy makes any difference to it."""
    return any(block.mixer and _recurs(block.mixer.body) for block in decoder.blocks)


def _recurs(mixer: Any) -> bool:
    return isinstance(mixer.config, GatedDeltaConfig | Mamba2Config)


def _with_recurrence(block: Block, strategy: Strategy) -> Block:
    if block.mixer is None:
        return block
    mixer = block.mixer.body
    if not _recurs(mixer):
        return block
    config = dataclasses.replace(mixer.config, recurrence=strategy)
    return block.replace(mixer=block.mixer.replace(body=mixer.replace(config=config)))
