"""Nemotron-H and Nemotron 3: ``model_type: nemotron_h``, one sublayer a block."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.models.axes import EMBED, MLP
from specjax.models.build import Builder
from specjax.models.config import (
    AttentionConfig,
    BlockConfig,
    DecoderConfig,
    FeedForwardConfig,
    Mamba2Config,
    MoEConfig,
    PlainMLPConfig,
)
from specjax.models.decoder import Decoder
from specjax.models.families.defaults import DEFAULTS
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
from specjax.models.stack import Block, Sublayer

_LETTERS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}
_EPS = "layer_norm_epsilon|rms_norm_eps"
_WITHOUT_EFFECT = (
    # positions do not turn
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
    # the sizes of blocks follow from other fields, and their number from the kinds
    *("expand", "mamba_expand", "time_step_rank", "n_shared_experts"),
    # how steps are drawn before training
    *("time_step_min", "time_step_max", "time_step_floor"),
    *("mamba_dt_min", "mamba_dt_max", "mamba_dt_init_floor"),
    # biases that the model's own code does not make: a file that has them is refused
    *("attention_bias", "mamba_proj_bias"),
    # how the work is done, and in what precision
    *("chunk_size", "mamba_chunk_size", "residual_in_fp32"),
    "moe_shared_expert_overlap",
    # of layers that predict further tokens, and of no layer
    *("mtp_hybrid_override_pattern", "mtp_layers_block_type"),
    *("norm_eps", "hidden_act"),
)


def config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Mamba2, attention without positions, MLPs and experts, in any order."""
    known = DEFAULTS["nemotron_h"]
    fields = Fields(raw, "nemotron_h", known)
    fields.expect("mlp_hidden_act", "relu2", default="relu2")
    fields.expect("mamba_hidden_act", "silu", default="silu")
    fields.refuse("sliding_window", "sliding windows of this family")
    _check_steps(fields)
    # what is said of kinds of block that are not there is known all the same
    fields.ignore(*_WITHOUT_EFFECT, *known)
    parts = {
        "mamba": lambda: BlockConfig(mixer=_mamba(fields), feedforward=None),
        "attention": lambda: BlockConfig(
            mixer=attention_config(fields, None), feedforward=None
        ),
        "moe": lambda: BlockConfig(mixer=None, feedforward=_mixture(fields)),
        "mlp": lambda: BlockConfig(mixer=None, feedforward=_mlp(fields)),
    }
    kinds = _kinds(fields)
    made = {kind: parts[kind]() for kind in dict.fromkeys(kinds)}
    return decoder_config(
        fields,
        "nemotron_h",
        [made[kind] for kind in kinds],
        eps=_EPS,
        tied=None,
        heads_ahead=fields.integer("num_nextn_predict_layers", at_least=0),
    )


def _check_steps(fields: Fields) -> None:
    """Refuse limits of the steps' sizes, but for those that limit nothing."""
    name = "time_step_limit|mamba_dt_limit"
    limits = fields.anything(name)
    if limits is None:
        return
    # JSON has no infinity, and there are several ways around that
    free = (math.inf, "inf", "Infinity", {"__float__": "Infinity"})
    if not isinstance(limits, list | tuple) or len(limits) != 2:
        raise fields.error(name, f"two numbers are needed, found {limits!r}")
    if limits[0] != 0 or limits[1] not in free:
        raise fields.error(name, f"{limits!r} is not implemented (only 0, inf is)")


def _kinds(fields: Fields) -> list[str]:
    """One kind a block, from the letters, or from a list of names old or new."""
    pattern = "hybrid_override_pattern"
    names = fields.items("layers_block_type|layer_types", str)
    fields.ignore(pattern)
    spelt = names
    if fields.has(pattern):
        spelt = [_LETTERS.get(letter, letter) for letter in fields.text(pattern)]
    kinds = [_NAMES.get(name, name) for name in names or spelt or ()]
    if not kinds:
        raise fields.error(pattern, "missing or empty")
    if [_NAMES.get(name, name) for name in spelt or ()] != kinds:
        raise fields.error(pattern, f"contradicts layers_block_type: {names}")
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


def _mamba(fields: Fields) -> Mamba2Config:
    return Mamba2Config(
        num_heads=fields.integer("mamba_num_heads"),
        head_dim=fields.integer("mamba_head_dim"),
        state_dim=fields.integer("ssm_state_size"),
        num_groups=fields.integer("n_groups|mamba_n_groups"),
        conv_width=fields.integer("conv_kernel|mamba_d_conv", at_least=2),
        conv_bias=fields.boolean("use_conv_bias|mamba_conv_bias"),
        bias=fields.boolean("use_bias"),
        norm_eps=fields.number(_EPS),
    )


def _mlp(fields: Fields) -> PlainMLPConfig:
    return PlainMLPConfig(
        size=fields.integer("intermediate_size"), bias=fields.boolean("mlp_bias")
    )


def _mixture(fields: Fields) -> MoEConfig:
    routed = mixture_config(fields, shared=None)
    shared = PlainMLPConfig(
        size=fields.integer("moe_shared_expert_intermediate_size"),
        bias=fields.boolean("mlp_bias"),
    )
    return dataclasses.replace(
        routed,
        kind="plain",
        latent_dim=fields.optional_integer("moe_latent_size"),
        shared=shared,
    )


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
                inner = _feedforward(part, hidden, block.feedforward, make)
                blocks.append(Block(mixer=None, feedforward=Sublayer(norm, inner)))
    return assemble(
        config,
        tuple(blocks),
        make,
        prefix="backbone.",
        embedding="embeddings",
        norm="norm_f",
    )


def _feedforward(
    name: str, hidden: int, config: FeedForwardConfig, make: Builder
) -> Any:
    if not isinstance(config, MoEConfig):
        return feedforward(name, hidden, config, make)
    # one flag is for the shared expert and for what stands around the others
    bias = config.shared is not None and config.shared.bias
    return feedforward(name, hidden, config, make, latent_bias=bias)


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
