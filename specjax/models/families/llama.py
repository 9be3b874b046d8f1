"""Llama and SmolLM2: ``model_type: llama``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.models.build import Builder
from specjax.models.config import AttentionConfig, BlockConfig, DecoderConfig
from specjax.models.decoder import Decoder
from specjax.models.families.defaults import DEFAULTS
from specjax.models.families.fields import Fields
from specjax.models.families.parts import (
    assemble,
    attention,
    feedforward,
    pre_norm_block,
)
from specjax.models.families.readings import (
    attention_config,
    decoder_config,
    gated_mlp_config,
    layers,
)
from specjax.models.families.ropes import rope_settings
from specjax.models.stack import Block


def config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Translate a Hugging Face configuration."""
    fields = Fields(raw, "llama", DEFAULTS["llama"])
    # splits one product into several, for training on several devices
    fields.expect("pretraining_tp", 1, default=1)
    fields.expect("rope_interleaved", False, default=False)
    bias = fields.boolean("attention_bias", False)
    block = BlockConfig(
        mixer=attention_config(
            fields, rope_settings(fields), qkv_bias=bias, out_bias=bias
        ),
        feedforward=gated_mlp_config(fields, bias=fields.boolean("mlp_bias", False)),
    )
    return decoder_config(fields, "llama", [block] * layers(fields))


def build(config: DecoderConfig, make: Builder) -> Decoder:
    """Read every tensor of the family's checkpoint layout."""
    blocks = tuple(
        build_block(config, f"model.layers.{i}", block, make)
        for i, block in enumerate(config.blocks)
    )
    return assemble(config, blocks, make)


def build_block(
    config: DecoderConfig, name: str, block: BlockConfig, make: Builder
) -> Block:
    """Read every tensor of one layer."""
    assert isinstance(block.mixer, AttentionConfig)
    hidden = config.hidden_size
    mixer = attention(f"{name}.self_attn", hidden, block.mixer, make)
    body = feedforward(f"{name}.mlp", hidden, block.feedforward, make)
    return pre_norm_block(config, name, mixer, body, make)
