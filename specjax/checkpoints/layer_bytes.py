"""What the layers of a decoder keep of a row, and what a pass needs beside it."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

import numpy as np

from specjax.models.config import (
    AttentionConfig,
    DecoderConfig,
    GatedDeltaConfig,
    LatentAttentionConfig,
    Mamba2Config,
    MixerConfig,
    ShortConvConfig,
)
from specjax.models.recurrence import Replay, Ring, Snapshot

WINDOW = 9
"""Rows of a pass, unless something else is asked for: eight drafts and the anchor."""

STATE = np.dtype(np.float32)
"""Of recurrent states, whatever the weights are stored as."""


@dataclasses.dataclass(frozen=True)
class Scratch:
    """Of one recurrent layer: bytes a batch row for a window, by strategy."""

    mixer: str
    layers: int
    """How many layers are of this size."""
    window: int
    matrix: int
    """The state itself, which every strategy has once."""
    snapshot: int
    """A state a window row."""
    replay: int
    """A record (key, update, decay) a window row."""
    ring: int
    """The same, and records of the tokens since the state was last written."""


def kv_bytes_per_token(mixer: MixerConfig) -> int:
    """What a token adds to a layer's cache of two-byte numbers while nothing leaves."""
    if isinstance(mixer, AttentionConfig) and mixer.reach is None:
        return 2 * 2 * mixer.num_kv_heads * mixer.head_dim
    if isinstance(mixer, LatentAttentionConfig):
        indexed = 0 if mixer.indexer is None else mixer.indexer.head_dim
        return 2 * (mixer.latent_dim + mixer.rotary_dim + indexed)
    return 0


def window_bytes_per_row(mixer: MixerConfig) -> int:
    """What a layer with a sliding window keeps at most, in two-byte numbers."""
    if isinstance(mixer, AttentionConfig) and mixer.reach is not None:
        return mixer.reach * 2 * 2 * mixer.num_kv_heads * mixer.head_dim
    return 0


def state_bytes_per_row(mixer: MixerConfig) -> int:
    """What a recurrent layer keeps: its matrix and its convolution's last inputs."""
    if not isinstance(mixer, GatedDeltaConfig | Mamba2Config | ShortConvConfig):
        return 0
    recurrent = not isinstance(mixer, ShortConvConfig)
    matrix = mixer.matrix_shape.matrix if recurrent else 0
    return STATE.itemsize * (matrix + (mixer.conv_width - 1) * mixer.channels)


def scratch_bytes(config: DecoderConfig, window: int) -> tuple[Scratch, ...]:
    """For each kind of recurrent layer that the decoder has."""
    mixers = [block.mixer for block in config.blocks]
    shapes = Counter(
        (kind_of(mixer), mixer.matrix_shape)
        for mixer in mixers
        if isinstance(mixer, GatedDeltaConfig | Mamba2Config)
    )
    return tuple(
        Scratch(
            mixer=kind,
            layers=layers,
            window=window,
            matrix=STATE.itemsize * shape.matrix,
            snapshot=Snapshot(rows=window).scratch_bytes(shape, window, STATE),
            replay=Replay().scratch_bytes(shape, window, STATE),
            ring=Ring().scratch_bytes(shape, window, STATE),
        )
        for (kind, shape), layers in shapes.items()
    )


def kind_of(mixer: MixerConfig | None) -> str:
    """``"gated_delta"``; ``"none"`` for a block without a mixer."""
    if mixer is None:
        return "none"
    name = type(mixer).__name__.removesuffix("Config")
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
