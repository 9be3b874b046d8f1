"""Qwen2, Qwen3 and Qwen3-MoE: ``model_type: qwen2 | qwen3 | qwen3_moe``.

They are built like ``llama``; what differs is in the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.models.config import AttentionConfig, BlockConfig, DecoderConfig
from specjax.models.families.defaults import DEFAULTS
from specjax.models.families.fields import Fields
from specjax.models.families.llama import build
from specjax.models.families.readings import (
    FULL,
    SLIDING,
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
    fields = Fields(raw, "qwen2", DEFAULTS["qwen2"])
    # vision models of the name turn positions on three axes, equal for text
    fields.expect("use_mrope", False, default=False)
    attention = attention_config(fields, rope_settings(fields), qkv_bias=True)
    return _dense(fields, "qwen2", attention)


def qwen3(raw: Mapping[str, Any]) -> DecoderConfig:
    """Norms of queries and keys."""
    fields = Fields(raw, "qwen3", DEFAULTS["qwen3"])
    return _dense(fields, "qwen3", _normed(fields))


def qwen3_moe(raw: Mapping[str, Any]) -> DecoderConfig:
    """Qwen3's attention; experts in most layers."""
    fields = Fields(raw, "qwen3_moe", DEFAULTS["qwen3_moe"])
    count = layers(fields)
    fields.ignore("max_window_layers")  # here all layers slide, or none
    kinds = _window_kinds(fields, count, 0)
    if len(set(kinds)) > 1:
        raise fields.error("layer_types", "all layers of this family slide, or none")
    sparse = qwen_sparse_layers(fields, count)
    mixture = softmax_mixture_config(
        fields, normalize=fields.boolean("norm_topk_prob"), shared=False
    )
    dense = mixture if all(sparse) else gated_mlp_config(fields)
    fields.expect("hidden_act", "silu", default="silu")
    fields.ignore("intermediate_size", "shared_expert_intermediate_size")
    blocks = [
        BlockConfig(mixer=mixer, feedforward=mixture if routed else dense)
        for mixer, routed in zip(
            sliding(_normed(fields), fields, kinds), sparse, strict=True
        )
    ]
    return decoder_config(fields, "qwen3_moe", blocks)


def _normed(fields: Fields) -> AttentionConfig:
    bias = fields.boolean("attention_bias", False)
    return attention_config(
        fields,
        rope_settings(fields),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm_eps=fields.number("rms_norm_eps"),
    )


def _dense(fields: Fields, family: str, attention: AttentionConfig) -> DecoderConfig:
    first = fields.integer("max_window_layers", at_least=0)
    kinds = _window_kinds(fields, layers(fields), first)
    feedforward = gated_mlp_config(fields)
    blocks = [
        BlockConfig(mixer=mixer, feedforward=feedforward)
        for mixer in sliding(attention, fields, kinds)
    ]
    return decoder_config(fields, family, blocks)


def _window_kinds(fields: Fields, count: int, first: int) -> list[str]:
    """Windows slide from layer ``first`` on, or where ``layer_types`` says so, if they
    are switched on at all.
    """
    slides = fields.boolean("use_sliding_window", False)
    slides = slides and fields.optional_integer("sliding_window") is not None
    kinds = attention_kinds(fields, count, first if slides else None)
    if SLIDING in kinds and not slides:
        raise fields.error(
            "layer_types",
            f"{SLIDING!r} without use_sliding_window and a sliding_window; "
            f"{FULL!r} is what attends to all",
        )
    return kinds
