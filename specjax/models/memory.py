"""Choosing how a loaded decoder remembers: rollback strategies, pages."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.models.config import GatedDeltaConfig, Mamba2Config
from specjax.models.decoder import Decoder
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
