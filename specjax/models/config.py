"""What a decoder is made of: a list of blocks, each a mixer and a feed-forward.

These are static, hashable descriptions. A family file translates a checkpoint's own
configuration into them; nothing in here knows a family by name.
"""

from __future__ import annotations

import dataclasses

from specjax.models.rope import Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Grouped-query softmax attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    qkv_bias: bool = False
    out_bias: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads = {self.num_heads} is not a multiple of "
                f"num_kv_heads = {self.num_kv_heads}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig:
    """Gated delta rule with a scalar gate a head (GDN) and its short convolution."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm_eps: float

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_value_heads = {self.num_value_heads} is not a multiple of "
                f"num_key_heads = {self.num_key_heads}"
            )

    @property
    def channels(self) -> int:
        """Convolved channels: queries, keys and values."""
        keys = self.num_key_heads * self.key_dim
        return 2 * keys + self.num_value_heads * self.value_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedMLPConfig:
    """``down(silu(gate x) * up x)``."""

    size: int
    bias: bool = False


MixerConfig = AttentionConfig | GatedDeltaConfig
FeedForwardConfig = GatedMLPConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """One residual block: mixer, then feed-forward, each behind a norm."""

    mixer: MixerConfig
    feedforward: FeedForwardConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A whole decoder."""

    family: str
    vocab_size: int
    hidden_size: int
    blocks: tuple[BlockConfig, ...]
    norm_eps: float
    tied: bool
    """Whether the output head is the embedding matrix."""
    max_positions: int
    """Positions the model was made for."""
