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
from specjax.models.families.fields import Fields, layer_kinds
from specjax.models.families.parts import assemble, attention, pre_norm_block
from specjax.models.families.readings import (
    attention_config,
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
    fields = Fields(raw, "gpt_oss")
    fields.expect("hidden_act", "silu", default="silu")
    fields.expect("swiglu_alpha", 1.702, default=1.702)
    fields.ignore("experts_per_token", "initial_context_length")
    count = layers(fields)
    bias = fields.boolean("attention_bias", True)
    attention = attention_config(
        fields,
        rope_settings(fields, theta=150000.0),
        head_dim=64,
        qkv_bias=bias,
        out_bias=bias,
        sinks=True,
    )
    kinds = layer_kinds(
        fields,
        count,
        ("sliding_attention", "full_attention"),
        lambda i: "full_attention" if i % 2 else "sliding_attention",
    )
    experts = fields.integer("num_local_experts|num_experts")
    top_k = fields.integer("num_experts_per_tok|experts_per_token", 4)
    if top_k > experts:
        raise fields.error("num_experts_per_tok", f"{top_k} of {experts} experts")
    mixture = MoEConfig(
        num_experts=experts,
        size=fields.integer("intermediate_size"),
        router=RouterConfig(kind="chosen", top_k=top_k, bias=True),
        kind="clamped",
        limit=fields.number("swiglu_limit", 7.0),
    )
    blocks = [
        BlockConfig(mixer=mixer, feedforward=mixture)
        for mixer in sliding(attention, fields, kinds)
    ]
    return decoder_config(fields, "gpt_oss", blocks, eps=("rms_norm_eps", 1e-5))


def build(config: DecoderConfig, make: Builder) -> Decoder:
    """Read every tensor; experts are stored together, transposed, gate and up by turns."""
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
