"""Sizes of the recurrent layers of real models, for tests and benchmarks."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaSpec:
    """One layer's heads, as its published configuration has them."""

    heads: int
    """Of the state, and of values."""
    key_heads: int
    key_dim: int = 128
    value_dim: int = 128
    channel_decay: bool = False
    delta: bool = True

    @property
    def decays(self) -> tuple[int, ...]:
        """Of one row: ``[H]`` or ``[H, dk]``."""
        return (self.heads, self.key_dim) if self.channel_decay else (self.heads,)


MODELS = {
    "qwen3-next-80b": DeltaSpec(heads=32, key_heads=16),
    "qwen3.5-27b": DeltaSpec(heads=48, key_heads=16),
    "kimi-linear-48b": DeltaSpec(heads=32, key_heads=32, channel_decay=True),
    "nemotron-h-8b": DeltaSpec(heads=128, key_heads=8, value_dim=64, delta=False),
}
