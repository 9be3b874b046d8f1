"""Families: a checkpoint layout each, translated to the one decoder. No maths."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from specjax.models.build import Builder
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.models.families import (
    deepseek,
    gemma3,
    glm,
    gpt_oss,
    kimi,
    lfm2,
    llama,
    nemotron_h,
    qwen,
    qwen_hybrid,
)
from specjax.models.mtp import MTPModule

AHEAD = r"mtp\..*"
"""Tensors of layers that predict further tokens, where they have names of their own."""


@dataclasses.dataclass(frozen=True)
class Family:
    """How to read one kind of checkpoint."""

    config: Callable[[Mapping[str, Any]], DecoderConfig]
    """From ``config.json``; ``ConfigError`` for what is not implemented."""
    build: Callable[[DecoderConfig, Builder], Decoder]
    """Reads every tensor that the decoder needs, by the checkpoint's names."""
    images: tuple[str, ...] = ()
    """Patterns of tensors of the encoders that stand beside the decoder."""
    ahead: str | None = None
    """The pattern of tensors of layers that predict further tokens; ``None``: they are
    numbered on behind the decoder's own."""
    mtp: Callable[[DecoderConfig, Builder], tuple[MTPModule, ...]] | None = None
    """Reads the tensors of these layers; ``None``: the family has none."""

    def left_alone(self, config: DecoderConfig) -> tuple[str, ...]:
        """Patterns of tensors that belong to no decoder of this configuration."""
        return (*self.images, *self.left_to_mtp(config))

    def left_to_mtp(self, config: DecoderConfig) -> tuple[str, ...]:
        """Patterns of tensors of layers that predict further tokens."""
        if self.ahead is not None:
            return (self.ahead,) * (config.heads_ahead > 0)
        first = len(config.blocks)
        numbers = range(first, first + config.heads_ahead)
        return tuple(rf"model\.layers\.{i}\..*" for i in numbers)


def _qwen3_5(config: Callable[[Mapping[str, Any]], DecoderConfig]) -> Family:
    return Family(
        config, qwen_hybrid.build, qwen_hybrid.IMAGES, AHEAD, mtp=qwen_hybrid.mtp
    )


def _latent(config: Callable[[Mapping[str, Any]], DecoderConfig]) -> Family:
    return Family(config, deepseek.build, mtp=deepseek.mtp)


_GEMMA3 = Family(gemma3.config, gemma3.build, gemma3.IMAGES)

FAMILIES: dict[str, Family] = {
    "llama": Family(llama.config, llama.build),
    "qwen2": Family(qwen.qwen2, qwen.build),
    "qwen3": Family(qwen.qwen3, qwen.build),
    "qwen3_moe": Family(qwen.qwen3_moe, qwen.build),
    "qwen3_next": Family(
        qwen_hybrid.qwen3_next, qwen_hybrid.build, ahead=AHEAD, mtp=qwen_hybrid.mtp
    ),
    "qwen3_5": _qwen3_5(qwen_hybrid.qwen3_5),
    "qwen3_5_text": _qwen3_5(qwen_hybrid.qwen3_5),
    "qwen3_5_moe": _qwen3_5(qwen_hybrid.qwen3_5_moe),
    "qwen3_5_moe_text": _qwen3_5(qwen_hybrid.qwen3_5_moe),
    "deepseek_v3": _latent(deepseek.deepseek_v3),
    "glm4": Family(glm.glm4, glm.glm4_build),
    "glm4_moe": Family(glm.glm4_moe, glm.glm4_moe_build, mtp=glm.mtp),
    "glm4_moe_lite": _latent(deepseek.glm4_moe_lite),
    "glm_moe_dsa": _latent(deepseek.glm_moe_dsa),
    "kimi_linear": Family(kimi.config, kimi.build),
    "nemotron_h": Family(
        nemotron_h.config, nemotron_h.build, ahead=AHEAD, mtp=nemotron_h.mtp
    ),
    "lfm2": Family(lfm2.lfm2, lfm2.build),
    "lfm2_moe": Family(lfm2.lfm2_moe, lfm2.build),
    "gpt_oss": Family(gpt_oss.config, gpt_oss.build),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
}
"""By ``model_type``."""
