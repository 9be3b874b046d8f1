"""What a checkpoint layout of a drafter is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specjax.models.build import Builder
from specjax.models.config import DecoderConfig
from specjax.models.ends import Ends
from specjax.models.norms import RMSNorm


@dataclasses.dataclass(frozen=True)
class Host:
    """The target that a drafter is loaded for, as far as drafters may share it."""

    config: DecoderConfig
    ends: Ends
    """Embedding and output head, by reference."""
    norm: RMSNorm
    """The last norm."""
    raw: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The target's own ``config.json``: an MTP head is configured there."""

    @property
    def num_blocks(self) -> int:
        """The number of taps, less those of the embedding and the last norm."""
        return len(self.config.blocks)

    @property
    def hidden_size(self) -> int:
        """``D``."""
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        """``V``."""
        return self.config.vocab_size


@dataclasses.dataclass(frozen=True)
class Export:
    """A drafter's checkpoint in memory, to be written as a folder."""

    config: dict[str, Any]
    """Of ``config.json``."""
    tensors: dict[str, np.ndarray]
    """Of ``model.safetensors``, by name."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """One published way of writing one kind of drafter."""

    name: str
    """Of the layout, for messages and tables: ``"EAGLE-3 (SafeAILab, SpecForge)"``."""
    method: str
    """The drafter in the registry that runs the part: ``"eagle3"``."""
    fits: Callable[[Mapping[str, Any], frozenset[str]], bool]
    """Whether a ``config.json`` with these tensor names is of this layout."""
    build: Callable[[Mapping[str, Any], Builder, Host], Any]
    """The part, from configuration and tensors. Raises ``ConfigError`` (a
    ``ValueError``) for a field, and what the reader raises for a tensor."""
    export: Callable[[Any], Export] | None = None
    """The same, back; loading what it gives yields the same part."""
    ignore: tuple[str, ...] = ()
    """Full-match patterns of tensors that repeat what is known or serve training."""
