"""LFM2, dense and MoE: ``model_type: lfm2 | lfm2_moe``, short convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.models.axes import EMBED, MLP
from specjax.models.build import Builder
from specjax.models.config import (
    AttentionConfig,
    BlockConfig,
    DecoderConfig,
    FeedForwardConfig,
    GatedMLPConfig,
    MoEConfig,
    RouterConfig,
    ShortConvConfig,
)
from specjax.models.decoder import Decoder
from specjax.models.families.defaults import DEFAULTS
from specjax.models.families.fields import Fields, layer_kinds
from specjax.models.families.parts import (
    assemble,
    attention,
    gated_mlp,
    mixture,
    pre_norm_block,
)
from specjax.models.families.readings import (
    FULL,
    attention_config,
    chosen_experts,
    decoder_config,
    layers,
)
from specjax.models.families.ropes import rope_settings
from specjax.models.mixers.short_conv import ShortConv

PARTS = ("w1", "w3", "w2")


def lfm2(raw: Mapping[str, Any]) -> DecoderConfig:
    """A dense feed-forward, whose width is worked out from three fields."""
    fields = Fields(raw, "lfm2", DEFAULTS["lfm2"])
    size = fields.integer("intermediate_size|block_ff_dim")
    multiplier = fields.number("block_ffn_dim_multiplier")
    multiple = fields.integer("block_multiple_of")
    if fields.boolean("block_auto_adjust_ff_dim"):
        size = int(multiplier * int(2 * size / 3))
        size = multiple * -(-size // multiple)
    count = layers(fields)
    return _config(fields, "lfm2", [GatedMLPConfig(size=size)] * count)


def lfm2_moe(raw: Mapping[str, Any]) -> DecoderConfig:
    """Experts in all layers but the first."""
    fields = Fields(raw, "lfm2_moe", DEFAULTS["lfm2_moe"])
    experts = fields.integer("num_experts|num_local_experts")
    router = RouterConfig(
        kind="sigmoid",
        top_k=chosen_experts(fields, experts),
        selection_bias=fields.boolean("use_expert_bias"),
        normalize=fields.boolean("norm_topk_prob"),
        epsilon=1e-6,
        scale=fields.number("routed_scaling_factor"),
    )
    routed = MoEConfig(
        num_experts=experts,
        size=fields.integer("moe_intermediate_size"),
        router=router,
    )
    dense = GatedMLPConfig(size=fields.integer("intermediate_size"))
    first = fields.integer("num_dense_layers", at_least=0)
    return _config(
        fields,
        "lfm2_moe",
        [routed if i >= first else dense for i in range(layers(fields))],
    )


def _config(
    fields: Fields, family: str, feedforwards: list[FeedForwardConfig]
) -> DecoderConfig:
    hidden = fields.integer("hidden_size|block_dim")
    for name in ("conv_dim", "conv_dim_out"):
        fields.expect(name, hidden, default=hidden)
    for name in ("block_use_swiglu", "use_pos_enc"):
        fields.expect(name, True, default=True)
    # of the code that trained it: no code that runs it reads them
    fields.ignore("num_heads", "block_norm_eps")
    fields.ignore("block_mlp_init_scale", "block_out_init_scale")
    fields.ignore("block_use_xavier_init", "conv_use_xavier_init")
    fields.expect("hidden_act", "silu", default="silu")
    count = len(feedforwards)
    rope = rope_settings(fields)
    fields.expect("theta", rope.theta, default=rope.theta)
    heads = attention_config(fields, rope, qk_norm_eps=fields.number("norm_eps"))
    convolution = ShortConvConfig(
        channels=hidden,
        conv_width=fields.integer("conv_L_cache", at_least=2),
        bias=fields.boolean("conv_bias", False),
    )
    kinds = _kinds(fields, count)
    blocks = [
        BlockConfig(mixer=heads if kind == FULL else convolution, feedforward=body)
        for kind, body in zip(kinds, feedforwards, strict=True)
    ]
    return decoder_config(
        fields,
        family,
        blocks,
        eps="norm_eps",
        tied="tie_word_embeddings|tie_embedding",
    )


def _kinds(fields: Fields, count: int) -> list[str]:
    """``layer_types``, or the numbers of layers of attention, or attention alone."""
    full = fields.items("full_attn_idxs", int)
    kinds = layer_kinds(
        fields,
        count,
        ("conv", FULL),
        lambda i: FULL if full is None or i in full else "conv",
    )
    told = [i for i, kind in enumerate(kinds) if kind == FULL]
    if full is not None and sorted(full) != told:
        raise fields.error("full_attn_idxs", f"{full}, but these attend: {told}")
    return kinds


def build(config: DecoderConfig, make: Builder) -> Decoder:
    """Read every tensor of the family's checkpoint layout."""
    hidden = config.hidden_size
    blocks = []
    for i, block in enumerate(config.blocks):
        name = f"model.layers.{i}"
        if isinstance(block.mixer, ShortConvConfig):
            mixer = short_convolution(f"{name}.conv", block.mixer, make)
        else:
            assert isinstance(block.mixer, AttentionConfig)
            mixer = attention(
                f"{name}.self_attn",
                hidden,
                block.mixer,
                make,
                out="out_proj",
                norms=("q_layernorm", "k_layernorm"),
            )
        part = f"{name}.feed_forward"
        if isinstance(block.feedforward, MoEConfig):
            body = mixture(
                part,
                hidden,
                block.feedforward,
                make,
                selection_bias="expert_bias",
                parts=PARTS,
            )
        else:
            assert isinstance(block.feedforward, GatedMLPConfig)
            body = gated_mlp(part, hidden, block.feedforward, make, PARTS)
        blocks.append(
            pre_norm_block(
                config, name, mixer, body, make, norms=("operator_norm", "ffn_norm")
            )
        )
    return assemble(config, tuple(blocks), make, norm="embedding_norm")


def short_convolution(name: str, config: ShortConvConfig, make: Builder) -> ShortConv:
    """A gated short convolution."""
    size, bias = config.channels, config.bias
    return ShortConv(
        config=config,
        inputs=make.linear(
            f"{name}.in_proj", 3 * size, size, bias=bias, axes=(MLP, EMBED)
        ),
        taps=make.vector(f"{name}.conv.weight", size, 1, config.conv_width)[:, 0],
        conv_bias=make.vector(f"{name}.conv.bias", size) if bias else None,
        out=make.linear(f"{name}.out_proj", size, size, bias=bias, axes=(EMBED, MLP)),
    )
