"""Nemotron-H and Nemotron 3: ``model_type: nemotron_h``, one sublayer a block."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax.models.axes import EMBED, MLP
from specjax.models.build import Builder
from specjax.models.config import (
    AheadConfig,
    AttentionConfig,
    BlockConfig,
    DecoderConfig,
    FeedForwardConfig,
    Mamba2Config,
    MoEConfig,
    PlainMLPConfig,
)
from specjax.models.decoder import Decoder
from specjax.models.families.ahead import ahead_of, mtp_module
from specjax.models.families.defaults import DEFAULTS
from specjax.models.families.fields import ConfigError, Fields
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
    few_ahead,
    mixture_config,
)
from specjax.models.linear import Linear
from specjax.models.mixers.mamba2 import Mamba2
from specjax.models.mtp import MTPModule
from specjax.models.norms import GroupedRMSNorm
from specjax.models.stack import Block, Sublayer

_LETTERS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}
_EPS = "layer_norm_epsilon|rms_norm_eps"
_PATTERN, _AHEAD = "hybrid_override_pattern", "mtp_hybrid_override_pattern"
_USUAL = ("attention", "moe")
"""Blocks of a layer that predicts further tokens, where the file does not list them."""
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
    # of no layer
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
    kinds = _kinds(fields, _PATTERN, "layers_block_type|layer_types")
    count = few_ahead(fields, "num_nextn_predict_layers")
    further = _kinds(fields, _AHEAD, "mtp_layers_block_type", _USUAL) if count else []
    fields.ignore(_AHEAD, "mtp_layers_block_type")
    if fields.has("num_hidden_layers"):
        fields.expect("num_hidden_layers", len(kinds), default=len(kinds))
    made = {kind: parts[kind]() for kind in dict.fromkeys([*kinds, *further])}
    ahead = AheadConfig(blocks=tuple(made[kind] for kind in further))
    return decoder_config(
        fields,
        "nemotron_h",
        [made[kind] for kind in kinds],
        eps=_EPS,
        tied=None,
        heads_ahead=count,
        ahead=ahead if further else None,
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


def _kinds(
    fields: Fields, pattern: str, listed: str, otherwise: Sequence[str] = ()
) -> list[str]:
    """One kind a block, from the letters, or from a list of names old or new."""
    names = fields.items(listed, str)
    fields.ignore(pattern)
    spelt = names
    if fields.has(pattern):
        spelt = [_LETTERS.get(letter, letter) for letter in fields.text(pattern)]
    spelt = spelt or otherwise
    kinds = [_NAMES.get(name, name) for name in names or spelt]
    if not kinds:
        raise fields.error(pattern, "missing or empty")
    if [_NAMES.get(name, name) for name in spelt] != kinds:
        raise fields.error(pattern, f"contradicts {listed.split('|')[0]}: {names}")
    for kind in kinds:
        if kind not in _LETTERS.values():
            raise fields.error(
                f"{pattern} or {listed.split('|')[0]}",
                f"{kind!r} is not implemented ({', '.join(_LETTERS)} or "
                f"{', '.join(_LETTERS.values())} are)",
            )
    if len(kinds) > MOST_LAYERS:
        raise fields.error(pattern, f"{len(kinds)} layers")
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
    blocks = tuple(
        _block(config, f"backbone.layers.{i}", block, make)
        for i, block in enumerate(config.blocks)
    )
    return assemble(
        config,
        blocks,
        make,
        prefix="backbone.",
        embedding="embeddings",
        norm="norm_f",
    )


def mtp(config: DecoderConfig, make: Builder) -> tuple[MTPModule, ...]:
    """The one layer that predicts a further token: its blocks are numbered like layers.

    The first holds what joins embedding and hidden state, the last the final norm.
    """
    ahead = ahead_of(config)
    if config.heads_ahead > 1:
        raise ConfigError(
            f"config field 'num_nextn_predict_layers': {config.heads_ahead} is not "
            "implemented for nemotron_h, whose files name the blocks of one"
        )
    names = [f"mtp.layers.{i}" for i in range(len(ahead.blocks))]
    blocks = tuple(
        _block(config, name, block, make)
        for name, block in zip(names, ahead.blocks, strict=True)
    )
    norms = (
        f"{names[0]}.enorm",
        f"{names[0]}.hnorm",
        f"{names[-1]}.final_layernorm",
    )
    return (mtp_module(config, blocks, make, norms=norms, join=f"{names[0]}.eh_proj"),)


def _block(
    config: DecoderConfig, name: str, block: BlockConfig, make: Builder
) -> Block:
    hidden, part = config.hidden_size, f"{name}.mixer"
    norm = make.norm(f"{name}.norm", hidden, config.norm_eps)
    match block.mixer:
        case Mamba2Config():
            mixer = mamba2(part, hidden, block.mixer, make)
            return Block(mixer=Sublayer(norm, mixer), feedforward=None)
        case AttentionConfig():
            mixer = attention(part, hidden, block.mixer, make)
            return Block(mixer=Sublayer(norm, mixer), feedforward=None)
        case _:
            assert block.feedforward is not None
            inner = _feedforward(part, hidden, block.feedforward, make)
            return Block(mixer=None, feedforward=Sublayer(norm, inner))


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
