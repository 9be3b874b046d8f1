"""GLM-4, dense and MoE: ``model_type: glm4 | glm4_moe``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.models.build import Builder
from specjax.models.config import (
    AheadConfig,
    AttentionConfig,
    BlockConfig,
    DecoderConfig,
    GatedMLPConfig,
)
from specjax.models.decoder import Decoder
from specjax.models.families.ahead import numbered_modules
from specjax.models.families.defaults import DEFAULTS
from specjax.models.families.fields import Fields
from specjax.models.families.llama import build as glm4_moe_build
from specjax.models.families.llama import build_block
from specjax.models.families.parts import (
    NARROW,
    WIDE,
    assemble,
    attention,
    pre_norm_block,
    reordered,
)
from specjax.models.families.readings import (
    attention_config,
    decoder_config,
    gated_mlp_config,
    heads_ahead,
    layers,
    mixture_config,
    sparse_layers,
)
from specjax.models.families.ropes import rope_settings
from specjax.models.feedforward.gated_mlp import GatedMLP
from specjax.models.mtp import MTPModule

__all__ = ["glm4", "glm4_build", "glm4_moe", "glm4_moe_build", "mtp"]


def glm4(raw: Mapping[str, Any]) -> DecoderConfig:
    """Norms before and after both sublayers; half of a head turns, pair by pair."""
    fields = Fields(raw, "glm4", DEFAULTS["glm4"])
    block = BlockConfig(
        mixer=attention_config(
            fields,
            rope_settings(fields, partial=True),
            qkv_bias=fields.boolean("attention_bias"),
        ),
        feedforward=gated_mlp_config(fields),
        post_norms=True,
    )
    return decoder_config(fields, "glm4", [block] * layers(fields))


def glm4_moe(raw: Mapping[str, Any]) -> DecoderConfig:
    """GLM-4.5 to 4.7: grouped-query attention and DeepSeek's routing."""
    fields = Fields(raw, "glm4_moe", DEFAULTS["glm4_moe"])
    fields.expect("topk_method", "noaux_tc", default="noaux_tc")
    fields.expect("scoring_func", "sigmoid", default="sigmoid")
    eps = fields.number("rms_norm_eps")
    normed = fields.boolean("use_qk_norm", False)
    mixer = attention_config(
        fields,
        rope_settings(fields, partial=True),
        qkv_bias=fields.boolean("attention_bias", False),
        qk_norm_eps=eps if normed else None,
    )
    mixture, plain = mixture_config(fields), gated_mlp_config(fields)
    blocks = [
        BlockConfig(mixer=mixer, feedforward=mixture if routed else plain)
        for routed in sparse_layers(fields, layers(fields))
    ]
    ahead = heads_ahead(fields)
    layer = AheadConfig(blocks=(BlockConfig(mixer=mixer, feedforward=mixture),))
    return decoder_config(fields, "glm4_moe", blocks, heads_ahead=ahead, ahead=layer)


def mtp(config: DecoderConfig, make: Builder) -> tuple[MTPModule, ...]:
    """The layers of GLM-4.5 to 4.7 that predict further tokens."""
    return numbered_modules(config, make, build_block)


def glm4_build(config: DecoderConfig, make: Builder) -> Decoder:
    """Read every tensor of the dense layout."""
    hidden = config.hidden_size
    blocks = []
    for i, block in enumerate(config.blocks):
        name = f"model.layers.{i}"
        assert isinstance(block.mixer, AttentionConfig)
        assert isinstance(block.feedforward, GatedMLPConfig)
        blocks.append(
            pre_norm_block(
                config,
                name,
                attention(
                    f"{name}.self_attn", hidden, block.mixer, make, interleaved=True
                ),
                _fused_mlp(f"{name}.mlp", hidden, block.feedforward, make),
                make,
                post_norms=("post_self_attn_layernorm", "post_mlp_layernorm"),
            )
        )
    return assemble(config, tuple(blocks), make)


def _fused_mlp(
    name: str, hidden: int, config: GatedMLPConfig, make: Builder
) -> GatedMLP:
    """Gate and up are one tensor, the gate's rows first."""
    size = config.size

    def half(start: int):
        rows = np.arange(start, start + size)
        return reordered(
            make, f"{name}.gate_up_proj", 2 * size, hidden, rows, bias=False, axes=WIDE
        )

    down = make.linear(f"{name}.down_proj", hidden, size, bias=False, axes=NARROW)
    return GatedMLP(config=config, gate=half(0), up=half(size), down=down)
