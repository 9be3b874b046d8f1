"""gpt-oss: ``model_type: gpt_oss``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.models.build import Builder
from specjax.models.config import (
    AttentionConfig,
    BlockConfig,
    DecoderConfig,
    MoEConfig,
    RouterConfig,
)
from specjax.models.decoder import Decoder
from specjax.models.families.defaults import DEFAULTS
from specjax.models.families.fields import Fields, layer_kinds
from specjax.models.families.parts import assemble, attention, pre_norm_block
from specjax.models.families.readings import (
    FULL,
    SLIDING,
    attention_config,
    chosen_experts,
    decoder_config,
    layers,
    sliding,
)
from specjax.models.families.ropes import rope_settings
from specjax.models.feedforward.moe import MoE

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The class's default, where a configuration says nothing of scaling."""


def config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Sinks; sliding windows in every second layer; clamped experts in all."""
    if raw.get("rope_parameters") is None and raw.get("rope_scaling") is None:
        raw = {**raw, "rope_scaling": _ROPE}
    fields = Fields(raw, "gpt_oss", DEFAULTS["gpt_oss"])
    fields.expect("hidden_act", "silu", default="silu")
    fields.ignore("initial_context_length")  # where nothing is scaled
    count = layers(fields)
    bias = fields.boolean("attention_bias")
    attention = attention_config(
        fields,
        rope_settings(fields),
        qkv_bias=bias,
        out_bias=bias,
        sinks=True,
    )
    kinds = layer_kinds(
        fields,
        count,
        (SLIDING, FULL),
        lambda i: FULL if i % 2 else SLIDING,
    )
    experts = fields.integer("num_local_experts|num_experts")
    top_k = chosen_experts(fields, experts, "num_experts_per_tok|experts_per_token")
    mixture = MoEConfig(
        num_experts=experts,
        size=fields.integer("intermediate_size"),
        router=RouterConfig(kind="chosen", top_k=top_k, bias=True),
        kind="clamped",
        limit=fields.number("swiglu_limit"),
        slope=fields.number("swiglu_alpha"),
    )
    blocks = [
        BlockConfig(mixer=mixer, feedforward=mixture)
        for mixer in sliding(attention, fields, kinds)
    ]
    return decoder_config(fields, "gpt_oss", blocks)


def build(config: DecoderConfig, make: Builder) -> Decoder:
    """Read every tensor; experts stand together, transposed, gate and up by turns."""
    hidden = config.hidden_size
    blocks = []
    for i, block in enumerate(config.blocks):
        name = f"model.layers.{i}"
        assert isinstance(block.mixer, AttentionConfig)
        assert isinstance(block.feedforward, MoEConfig)
        mixer = attention(f"{name}.self_attn", hidden, block.mixer, make)
        body = _experts(f"{name}.mlp", hidden, block.feedforward, make)
        blocks.append(pre_norm_block(config, name, mixer, body, make))
    return assemble(config, tuple(blocks), make)


def _experts(name: str, hidden: int, config: MoEConfig, make: Builder) -> MoE:
    return MoE(
        config=config,
        router=make.router(
            config, hidden, f"{name}.router.weight", bias=f"{name}.router.bias"
        ),
        experts=make.experts_fused(
            config,
            hidden,
            up=f"{name}.experts.gate_up_proj",
            down=f"{name}.experts.down_proj",
            up_bias=f"{name}.experts.gate_up_proj_bias",
            down_bias=f"{name}.experts.down_proj_bias",
            transposed=True,
            interleaved=True,
        ),
    )
