"""Gemma 3: ``model_type: gemma3_text``, and ``gemma3`` of models that see images."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax.models.build import Builder
from specjax.models.config import (
    AttentionConfig,
    BlockConfig,
    DecoderConfig,
    GatedMLPConfig,
)
from specjax.models.decoder import Decoder
from specjax.models.families.fields import layer_kinds
from specjax.models.families.parts import (
    assemble,
    attention,
    feedforward,
    pre_norm_block,
)
from specjax.models.families.readings import (
    FULL,
    SLIDING,
    attention_config,
    decoder_config,
    layers,
    window_reach,
)
from specjax.models.families.ropes import rope_of_layer
from specjax.models.families.wrapped import decoder_prefix, text_fields

IMAGES = (
    r"(model\.)?vision_tower\..*",
    r"(model\.)?multi_modal_projector\..*",
)
GELU = "gelu_pytorch_tanh"
PREFIXES = ("model.", "language_model.model.", "model.language_model.")


def config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Most layers slide; norms before and after both sublayers."""
    fields = text_fields(raw, "gemma3")
    fields.expect("hidden_activation", GELU, default=GELU)
    fields.expect("hidden_act", GELU, default=GELU)
    fields.expect("use_bidirectional_attention", False, default=False)
    # the model's own code reads it and leaves it unused
    fields.ignore("attn_logit_softcapping")
    hidden = fields.integer("hidden_size")
    bias = fields.boolean("attention_bias", False)
    full = attention_config(
        fields,
        rope_of_layer(fields, FULL, old_theta="rope_theta", scaled=True),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm_eps=fields.number("rms_norm_eps"),
        scale=fields.number("query_pre_attn_scalar") ** -0.5,
    )
    near = rope_of_layer(
        fields, SLIDING, old_theta="rope_local_base_freq", scaled=False
    )
    slide = dataclasses.replace(
        full,
        rope=near.rope(full.head_dim),
        reach=window_reach(fields),
    )
    every = fields.integer("sliding_window_pattern")
    kinds = layer_kinds(
        fields,
        layers(fields),
        (SLIDING, FULL),
        lambda i: SLIDING if (i + 1) % every else FULL,
    )
    body = GatedMLPConfig(
        size=fields.integer("intermediate_size"), activation="gelu_tanh"
    )
    blocks = [
        BlockConfig(
            mixer=slide if kind == SLIDING else full,
            feedforward=body,
            post_norms=True,
        )
        for kind in kinds
    ]
    return decoder_config(
        fields,
        "gemma3",
        blocks,
        embedding_scale=hidden**0.5,
        logit_softcap=fields.optional_number("final_logit_softcapping"),
    )


def build(config: DecoderConfig, make: Builder) -> Decoder:
    """Read every tensor of the decoder, wherever the file keeps it."""
    prefix = decoder_prefix(make, PREFIXES)
    hidden = config.hidden_size
    blocks = []
    for i, block in enumerate(config.blocks):
        name = f"{prefix}layers.{i}"
        assert isinstance(block.mixer, AttentionConfig)
        blocks.append(
            pre_norm_block(
                config,
                name,
                attention(f"{name}.self_attn", hidden, block.mixer, make, centred=1.0),
                feedforward(f"{name}.mlp", hidden, block.feedforward, make),
                make,
                norms=("input_layernorm", "pre_feedforward_layernorm"),
                post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
                centred=1.0,
            )
        )
    head = (
        "language_model.lm_head" if prefix.startswith("language_model") else "lm_head"
    )
    return assemble(config, tuple(blocks), make, prefix=prefix, head=head, centred=1.0)
