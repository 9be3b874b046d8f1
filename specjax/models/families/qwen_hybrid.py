"""Qwen3-Next and Qwen3.5, dense and MoE: gated delta nets between gated attention.

``model_type: qwen3_next | qwen3_5 | qwen3_5_moe``, the last two also with ``_text``.
Files of models that see images hold the decoder under ``model.language_model``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.models.axes import EMBED, HEADS
from specjax.models.build import Builder
from specjax.models.config import (
    AheadConfig,
    AttentionConfig,
    BlockConfig,
    DecoderConfig,
    GatedDeltaConfig,
)
from specjax.models.decoder import Decoder
from specjax.models.families.ahead import ahead_of, mtp_module
from specjax.models.families.defaults import DEFAULTS
from specjax.models.families.fields import ConfigError, Fields, layer_kinds
from specjax.models.families.parts import (
    assemble,
    attention,
    feedforward,
    pre_norm_block,
    reordered,
)
from specjax.models.families.readings import (
    attention_config,
    decoder_config,
    few_ahead,
    gated_mlp_config,
    layers,
    qwen_sparse_layers,
    softmax_mixture_config,
)
from specjax.models.families.ropes import rope_settings
from specjax.models.families.wrapped import decoder_prefix, text_fields
from specjax.models.linear import Linear
from specjax.models.mixers.gated_delta import GatedDelta
from specjax.models.mtp import MTPModule
from specjax.models.stack import Block

IMAGES = (r"model\.visual\..*", r"visual\..*")


def qwen3_next(raw: Mapping[str, Any]) -> DecoderConfig:
    """Experts in every layer, unless the configuration names dense ones."""
    fields = Fields(raw, "qwen3_next", DEFAULTS["qwen3_next"])
    count = layers(fields)
    sparse = qwen_sparse_layers(fields, count)
    mixture = softmax_mixture_config(
        fields, normalize=fields.boolean("norm_topk_prob"), shared=True
    )
    dense = mixture if all(sparse) else gated_mlp_config(fields)
    bodies = [mixture if routed else dense for routed in sparse]
    ahead = mixture if any(sparse) else dense
    return _config(fields, "qwen3_next", bodies, ahead)


def qwen3_5(raw: Mapping[str, Any]) -> DecoderConfig:
    """A dense feed-forward in every layer."""
    fields = text_fields(raw, "qwen3_5")
    fields.expect("mlp_only_layers", [], default=[])  # all layers are dense
    body = gated_mlp_config(fields)
    return _config(fields, "qwen3_5", [body] * layers(fields), body)


def qwen3_5_moe(raw: Mapping[str, Any]) -> DecoderConfig:
    """Experts in every layer, their weights always normalised."""
    fields = text_fields(raw, "qwen3_5_moe")
    fields.expect("norm_topk_prob", True, default=True)
    if not all(qwen_sparse_layers(fields, layers(fields))):
        raise fields.error("mlp_only_layers", "dense layers are not implemented here")
    mixture = softmax_mixture_config(fields, normalize=True, shared=True)
    return _config(fields, "qwen3_5_moe", [mixture] * layers(fields), mixture)


def _config(
    fields: Fields, family: str, feedforwards: list[Any], ahead_body: Any
) -> DecoderConfig:
    fields.expect("hidden_act", "silu", default="silu")
    fields.expect("attn_output_gate", True, default=True)
    fields.expect("use_sliding_window", False, default=False)
    fields.ignore("sliding_window", "max_window_layers")
    # of the recurrent layers; another name of the same function
    if fields.text("output_gate_type", "silu") != "swish":
        fields.expect("output_gate_type", "silu", default="silu")
    fields.ignore("intermediate_size")
    ahead = few_ahead(fields, "mtp_num_hidden_layers|num_nextn_predict_layers")
    eps = fields.number("rms_norm_eps")
    bias = fields.boolean("attention_bias", False)
    gated = attention_config(
        fields,
        rope_settings(fields, partial=True),
        qkv_bias=bias,
        out_bias=bias,
        out_gate=True,
        qk_norm_eps=eps,
    )
    keys = fields.integer("linear_num_key_heads")
    values = fields.integer("linear_num_value_heads")
    if values % keys:
        raise fields.error("linear_num_value_heads", f"{values}, for {keys} key heads")
    delta = GatedDeltaConfig(
        num_key_heads=keys,
        num_value_heads=values,
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
        conv_width=fields.integer("linear_conv_kernel_dim", at_least=2),
        norm_eps=eps,
    )
    every = fields.integer("full_attention_interval")
    kinds = layer_kinds(
        fields,
        len(feedforwards),
        ("linear_attention", "full_attention"),
        lambda i: "linear_attention" if (i + 1) % every else "full_attention",
    )
    blocks = [
        BlockConfig(
            mixer=delta if kind == "linear_attention" else gated, feedforward=body
        )
        for kind, body in zip(kinds, feedforwards, strict=True)
    ]
    layer = AheadConfig(
        # of full attention, whatever kind would come next
        blocks=(BlockConfig(mixer=gated, feedforward=ahead_body),),
        own_embedding=fields.boolean("mtp_use_dedicated_embeddings", False),
    )
    return decoder_config(fields, family, blocks, heads_ahead=ahead, ahead=layer)


def build(config: DecoderConfig, make: Builder) -> Decoder:
    """Read every tensor of the decoder, wherever the file keeps it."""
    prefix = decoder_prefix(make, ("model.", "model.language_model."))
    blocks = tuple(
        _block(config, f"{prefix}layers.{i}", block, make)
        for i, block in enumerate(config.blocks)
    )
    return assemble(config, blocks, make, prefix=prefix, centred=1.0)


def mtp(config: DecoderConfig, make: Builder) -> tuple[MTPModule, ...]:
    """The layers that predict further tokens: all but their blocks they share."""
    ahead = ahead_of(config)
    if ahead.own_embedding:
        raise ConfigError(
            "config field 'mtp_use_dedicated_embeddings': true is not implemented"
        )
    names = [f"mtp.layers.{i}" for i in range(config.heads_ahead)]
    blocks = [_block(config, name, ahead.blocks[0], make) for name in names]
    return tuple(
        mtp_module(
            config,
            (block,),
            make,
            norms=("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
            join="mtp.fc",
            centred=1.0,
        )
        for block in blocks
    )


def _block(
    config: DecoderConfig, name: str, block: BlockConfig, make: Builder
) -> Block:
    hidden = config.hidden_size
    if isinstance(block.mixer, GatedDeltaConfig):
        mixer = gated_delta(f"{name}.linear_attn", hidden, block.mixer, make)
    else:
        assert isinstance(block.mixer, AttentionConfig)
        mixer = attention(f"{name}.self_attn", hidden, block.mixer, make, centred=1.0)
    body = feedforward(
        f"{name}.mlp", hidden, block.feedforward, make, shared="shared_expert"
    )
    return pre_norm_block(config, name, mixer, body, make, centred=1.0)


def gated_delta(
    name: str, hidden: int, config: GatedDeltaConfig, make: Builder
) -> GatedDelta:
    """A gated delta net in either layout.

    Qwen3.5 stores ``qkv``, ``z``, ``b`` and ``a`` apart. Qwen3-Next stores, key head by
    key head, its query, key, values and gates in one tensor, and ``b`` and ``a`` in
    another.
    """
    heads, values = config.num_value_heads, config.num_value_heads * config.value_dim
    channels = config.channels
    if make.has(f"{name}.in_proj_qkvz.weight"):
        qkv, gate, beta, decay = _grouped(name, hidden, config, make)
    else:

        def linear(part: str, outputs: int) -> Linear:
            return make.linear(
                f"{name}.{part}", outputs, hidden, bias=False, axes=(HEADS, EMBED)
            )

        qkv, gate = linear("in_proj_qkv", channels), linear("in_proj_z", values)
        beta, decay = linear("in_proj_b", heads), linear("in_proj_a", heads)
    taps = make.vector(f"{name}.conv1d.weight", channels, 1, config.conv_width)
    return GatedDelta(
        config=config,
        qkv=qkv,
        gate=gate,
        beta=beta,
        decay=decay,
        taps=taps[:, 0],
        log_rate=make.vector(f"{name}.A_log", heads),
        decay_bias=make.vector(f"{name}.dt_bias", heads),
        norm=make.norm(f"{name}.norm", config.value_dim, config.norm_eps),
        out=make.linear(
            f"{name}.out_proj", hidden, values, bias=False, axes=(EMBED, HEADS)
        ),
    )


def _grouped(
    name: str, hidden: int, config: GatedDeltaConfig, make: Builder
) -> tuple[Linear, Linear, Linear, Linear]:
    """``qkv``, ``z``, ``b`` and ``a`` out of tensors that are grouped by key head."""
    groups, dk = config.num_key_heads, config.key_dim
    repeat = config.num_value_heads // groups
    dv = repeat * config.value_dim
    width = 2 * dk + 2 * dv
    rows = np.arange(groups * width).reshape(groups, width)
    q, k, v, z = np.split(rows, [dk, 2 * dk, 2 * dk + dv], axis=1)
    order = np.concatenate([part.reshape(-1) for part in (q, k, v)])

    def pick(part: str, outputs: int, chosen: np.ndarray) -> Linear:
        return reordered(
            make,
            f"{name}.{part}",
            outputs,
            hidden,
            chosen.reshape(-1),
            bias=False,
            axes=(HEADS, EMBED),
        )

    pairs = np.arange(groups * 2 * repeat).reshape(groups, 2 * repeat)
    return (
        pick("in_proj_qkvz", groups * width, order),
        pick("in_proj_qkvz", groups * width, z),
        pick("in_proj_ba", pairs.size, pairs[:, :repeat]),
        pick("in_proj_ba", pairs.size, pairs[:, repeat:]),
    )
