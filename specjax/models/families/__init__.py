"""Families: a checkpoint layout each, translated to the one decoder. No maths."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from specjax.models.build import Builder
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.models.families import llama


@dataclasses.dataclass(frozen=True)
class Family:
    """How to read one kind of checkpoint."""

    config: Callable[[Mapping[str, Any]], DecoderConfig]
    """From ``config.json``; ``ConfigError`` for what is not implemented."""
    build: Callable[[DecoderConfig, Builder], Decoder]
    """Reads every tensor that the decoder needs, by the checkpoint's names."""
    ignore: tuple[str, ...] = ()
    """Patterns of tensors that the decoder leaves alone on purpose."""


FAMILIES: dict[str, Family] = {
    "llama": Family(llama.config, llama.build),
}
"""By ``model_type``."""
