"""Nemotron-H and Nemotron 3: ``model_type: nemotron_h``, one sublayer a block."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.models.axes import EMBED, MLP
from specjax.models.build import Builder
from specjax.models.config import (
    AttentionConfig,
    BlockConfig,
    DecoderConfig,
    Mamba2Config,
    MoEConfig,
    PlainMLPConfig,
)
from specjax.models.decoder import Block, Decoder, Sublayer
from specjax.models.families.fields import Fields
from specjax.models.families.parts import (
    assemble,
    attention,
    feedforward,
    reordered,
)
from specjax.models.families.readings import (
    MOST_LAYERS,
    attention_config,
    decoder_config,
    mixture_config,
)
from specjax.models.linear import Linear
from specjax.models.mixers.mamba2 import Mamba2
from specjax.models.norms import GroupedRMSNorm

HEADS_AHEAD = (r"mtp\..*",)
_LETTERS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}


def config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Mamba2, attention without positions, MLPs and experts, in any order."""
    fields = Fields(raw, "nemotron_h")
    fields.expect("mlp_hidden_act", "relu2", default="relu2")
    fields.expect("mamba_hidden_act", "silu", default="silu")
    fields.expect("attention_bias", False, default=False)
    fields.expect("mamba_proj_bias", False, default=False)
    fields.refuse("sliding_window", "sliding windows of this family")
    # positions do not turn; the rest is about training and about storing the state
    fields.ignore("rope_theta", "rope_scaling", "rope_parameters", "expand")
    fields.ignore("partial_rotary_factor", "chunk_size", "mamba_chunk_size", "norm_eps")
    fields.ignore(
        "time_step_min", "time_step_max", "time_step_floor", "residual_in_fp32"
    )
    fields.ignore("time_step_limit", "mamba_expand", "time_step_rank", "mamba_dt_min")
    fields.ignore("mamba_dt_max", "mamba_dt_limit", "mamba_dt_init_floor")
    fields.ignore("num_nextn_predict_layers", "mtp_hybrid_override_pattern")
    fields.ignore("mtp_layers_block_type", "moe_shared_expert_overlap", "hidden_act")
    fields.ignore("tie_word_embeddings", "num_hidden_layers")  # see below
    fields.ignore("n_routed_experts", "n_shared_experts", "num_experts_per_tok")
    fields.ignore("moe_intermediate_size", "moe_shared_expert_intermediate_size")
    fields.ignore("moe_latent_size", "n_group", "topk_group", "norm_topk_prob")
    fields.ignore("routed_scaling_factor", "intermediate_size")
    eps = fields.number("layer_norm_epsilon|rms_norm_eps", 1e-5)
    parts = {
        "mamba": lambda: BlockConfig(mixer=_mamba(fields, eps), feedforward=None),
        "attention": lambda: BlockConfig(
            mixer=attention_config(fields, None, head_dim=128), feedforward=None
        ),
        "moe": lambda: BlockConfig(mixer=None, feedforward=_mixture(fields)),
        "mlp": lambda: BlockConfig(mixer=None, feedforward=_mlp(fields)),
    }
    kinds = _kinds(fields)
    made = {kind: parts[kind]() for kind in dict.fromkeys(kinds)}
    # read them all the same: a field of a kind that is not there is no stranger
    for kind in ("mamba", "attention"):
        fields.ignore(*_FIELDS[kind])
    return decoder_config(
        fields,
        "nemotron_h",
        [made[kind] for kind in kinds],
        eps=("layer_norm_epsilon|rms_norm_eps", 1e-5),
        # the model's own code never ties, whatever the field says
        tied_field=None,
    )


_FIELDS = {
    "mamba": (
        "mamba_num_heads",
        "mamba_head_dim",
        "ssm_state_size",
        "n_groups",
        "conv_kernel",
        "use_conv_bias",
        "use_bias",
        "mlp_bias",
    ),
    "attention": ("num_attention_heads", "num_key_value_heads", "head_dim"),
}


def _kinds(fields: Fields) -> list[str]:
    """One kind a block, from the letters, or from a list of names old or new."""
    names = fields.items("layers_block_type|layer_types", str)
    if fields.has("hybrid_override_pattern"):
        letters = fields.text("hybrid_override_pattern")
        names = names or [_LETTERS.get(letter, letter) for letter in letters]
    if not names:
        raise fields.error("hybrid_override_pattern", "missing or empty")
    kinds = [_NAMES.get(name, name) for name in names]
    for kind in kinds:
        if kind not in _LETTERS.values():
            raise fields.error(
                "hybrid_override_pattern or layers_block_type",
                f"{kind!r} is not implemented ({', '.join(_LETTERS)} or "
                f"{', '.join(_LETTERS.values())} are)",
            )
    if len(kinds) > MOST_LAYERS:
        raise fields.error("hybrid_override_pattern", f"{len(kinds)} layers")
    if fields.has("num_hidden_layers"):
        fields.expect("num_hidden_layers", len(kinds), default=len(kinds))
    return kinds


def _mamba(fields: Fields, eps: float) -> Mamba2Config:
    return Mamba2Config(
        num_heads=fields.integer("mamba_num_heads", 128),
        head_dim=fields.integer("mamba_head_dim", 64),
        state_dim=fields.integer("ssm_state_size", 128),
        num_groups=fields.integer("n_groups|mamba_n_groups", 8),
        conv_width=fields.integer("conv_kernel|mamba_d_conv", 4, at_least=2),
        conv_bias=fields.boolean("use_conv_bias|mamba_conv_bias", True),
        bias=fields.boolean("use_bias", False),
        norm_eps=eps,
    )


def _mlp(fields: Fields) -> PlainMLPConfig:
    return PlainMLPConfig(
        size=fields.integer("intermediate_size"), bias=fields.boolean("mlp_bias", False)
    )


def _mixture(fields: Fields) -> MoEConfig:
    routed = mixture_config(fields, shared=None)
    latent = (
        fields.integer("moe_latent_size") if fields.has("moe_latent_size") else None
    )
    shared = PlainMLPConfig(
        size=fields.integer("moe_shared_expert_intermediate_size"),
        bias=fields.boolean("mlp_bias", False),
    )
    return dataclasses.replace(routed, kind="plain", latent_dim=latent, shared=shared)


def build(config: DecoderConfig, make: Builder) -> Decoder:
    """Read every tensor of the family's checkpoint layout."""
    hidden = config.hidden_size
    blocks = []
    for i, block in enumerate(config.blocks):
        name = f"backbone.layers.{i}"
        norm = make.norm(f"{name}.norm", hidden, config.norm_eps)
        part = f"{name}.mixer"
        match block.mixer:
            case Mamba2Config():
                body = Sublayer(norm, mamba2(part, hidden, block.mixer, make))
                blocks.append(Block(mixer=body, feedforward=None))
            case AttentionConfig():
                body = Sublayer(norm, attention(part, hidden, block.mixer, make))
                blocks.append(Block(mixer=body, feedforward=None))
            case _:
                assert block.feedforward is not None
                inner = feedforward(part, hidden, block.feedforward, make)
                blocks.append(Block(mixer=None, feedforward=Sublayer(norm, inner)))
    return assemble(
        config,
        tuple(blocks),
        make,
        prefix="backbone.",
        embedding="embeddings",
        norm="norm_f",
    )


def mamba2(name: str, hidden: int, config: Mamba2Config, make: Builder) -> Mamba2:
    """A Mamba2 layer, its one input projection split in three."""
    heads, values, channels = config.num_heads, config.values, config.channels
    width = values + channels + heads

    def rows(start: int, count: int) -> Linear:
        return reordered(
            make,
            f"{name}.in_proj",
            width,
            hidden,
            np.arange(start, start + count),
            bias=config.bias,
            axes=(MLP, EMBED),
        )

    return Mamba2(
        config=config,
        gate=rows(0, values),
        inputs=rows(values, channels),
        steps=rows(values + channels, heads),
        taps=make.vector(f"{name}.conv1d.weight", channels, 1, config.conv_width)[:, 0],
        conv_bias=make.vector(f"{name}.conv1d.bias", channels)
        if config.conv_bias
        else None,
        log_rate=make.vector(f"{name}.A_log", heads),
        step_bias=make.vector(f"{name}.dt_bias", heads),
        skip=make.vector(f"{name}.D", heads),
        norm=GroupedRMSNorm(
            weight=make.vector(f"{name}.norm.weight", values),
            eps=config.norm_eps,
            groups=config.num_groups,
        ),
        out=make.linear(
            f"{name}.out_proj", hidden, values, bias=config.bias, axes=(EMBED, MLP)
        ),
    )
