"""Qwen2, Qwen3 and Qwen3-MoE: ``model_type: qwen2 | qwen3 | qwen3_moe``.

They are built like ``llama``; what differs is in the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.models.config import BlockConfig, DecoderConfig
from specjax.models.families.fields import Fields
from specjax.models.families.llama import build
from specjax.models.families.readings import (
    attention_config,
    attention_kinds,
    decoder_config,
    gated_mlp_config,
    layers,
    qwen_sparse_layers,
    sliding,
    softmax_mixture_config,
)
from specjax.models.families.ropes import rope_settings

__all__ = ["build", "qwen2", "qwen3", "qwen3_moe"]


def qwen2(raw: Mapping[str, Any]) -> DecoderConfig:
    """Biases of queries, keys and values; no norms of them."""
    fields = Fields(raw, "qwen2")
    # vision models of the name turn positions on three axes, equal for text
    fields.expect("use_mrope", False, default=False)
    attention = attention_config(
        fields, rope_settings(fields), head_dim_field=False, qkv_bias=True
    )
    return _dense(fields, "qwen2", attention)


def qwen3(raw: Mapping[str, Any]) -> DecoderConfig:
    """Norms of queries and keys."""
    fields = Fields(raw, "qwen3")
    return _dense(fields, "qwen3", _normed(fields, head_dim=128))


def qwen3_moe(raw: Mapping[str, Any]) -> DecoderConfig:
    """Qwen3's attention; experts in most layers."""
    fields = Fields(raw, "qwen3_moe")
    count = layers(fields)
    # here all layers slide, or none
    slides = fields.boolean("use_sliding_window", False) and fields.has(
        "sliding_window"
    )
    fields.ignore("max_window_layers", "sliding_window")
    kinds = attention_kinds(fields, count, 0 if slides else None)
    attentions = sliding(_normed(fields, head_dim=None), fields, kinds)
    sparse = qwen_sparse_layers(fields, count)
    mixture = softmax_mixture_config(fields, normalize=False, shared=False)
    dense = mixture if all(sparse) else gated_mlp_config(fields)
    fields.expect("hidden_act", "silu", default="silu")
    fields.ignore("intermediate_size", "shared_expert_intermediate_size")
    blocks = [
        BlockConfig(mixer=mixer, feedforward=mixture if routed else dense)
        for mixer, routed in zip(attentions, sparse, strict=True)
    ]
    return decoder_config(fields, "qwen3_moe", blocks)


def _normed(fields: Fields, head_dim: int | None):
    bias = fields.boolean("attention_bias", False)
    return attention_config(
        fields,
        rope_settings(fields),
        head_dim=head_dim,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm_eps=fields.number("rms_norm_eps", 1e-6),
    )


def _dense(fields: Fields, family: str, attention) -> DecoderConfig:
    count = layers(fields)
    first = fields.integer("max_window_layers", 28, at_least=0)
    slides = fields.boolean("use_sliding_window", False)
    fields.ignore("sliding_window")
    # class defaults: a window of 4096, where sliding is on and nothing else is said
    kinds = attention_kinds(fields, count, first if slides else None)
    if not slides:
        kinds = ["full_attention"] * count
    feedforward = gated_mlp_config(fields)
    blocks = [
        BlockConfig(mixer=mixer, feedforward=feedforward)
        for mixer in sliding(attention, fields, kinds)
    ]
    return decoder_config(fields, family, blocks)
