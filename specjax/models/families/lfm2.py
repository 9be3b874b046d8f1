"""LFM2, dense and MoE: ``model_type: lfm2 | lfm2_moe``, short convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.models.axes import EMBED, MLP
from specjax.models.build import Builder
from specjax.models.config import (
    BlockConfig,
    DecoderConfig,
    FeedForwardConfig,
    GatedMLPConfig,
    MoEConfig,
    RouterConfig,
    ShortConvConfig,
)
from specjax.models.decoder import Decoder
from specjax.models.families.fields import Fields, layer_kinds
from specjax.models.families.parts import (
    assemble,
    attention,
    gated_mlp,
    mixture,
    pre_norm_block,
)
from specjax.models.families.readings import attention_config, decoder_config, layers
from specjax.models.families.ropes import rope_settings
from specjax.models.mixers.short_conv import ShortConv

PARTS = ("w1", "w3", "w2")


def lfm2(raw: Mapping[str, Any]) -> DecoderConfig:
    """A dense feed-forward, whose width is worked out from three fields."""
    fields = Fields(raw, "lfm2")
    size = fields.integer("intermediate_size|block_ff_dim")
    multiplier = fields.number("block_ffn_dim_multiplier", 1.0)
    multiple = fields.integer("block_multiple_of", 256)
    if fields.boolean("block_auto_adjust_ff_dim", True):
        size = int(multiplier * int(2 * size / 3))
        size = multiple * -(-size // multiple)
    count = layers(fields)
    return _config(fields, "lfm2", [GatedMLPConfig(size=size)] * count)


def lfm2_moe(raw: Mapping[str, Any]) -> DecoderConfig:
    """Experts in all layers but the first."""
    fields = Fields(raw, "lfm2_moe")
    experts = fields.integer("num_experts|num_local_experts")
    top_k = fields.integer("num_experts_per_tok", 4)
    if top_k > experts:
        raise fields.error("num_experts_per_tok", f"{top_k} of {experts} experts")
    router = RouterConfig(
        kind="sigmoid",
        top_k=top_k,
        selection_bias=fields.boolean("use_expert_bias", True),
        normalize=fields.boolean("norm_topk_prob", True),
        epsilon=1e-6,
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    routed = MoEConfig(
        num_experts=experts,
        size=fields.integer("moe_intermediate_size"),
        router=router,
    )
    dense = GatedMLPConfig(size=fields.integer("intermediate_size"))
    first = fields.integer("num_dense_layers", 2, at_least=0)
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
    # spellings of another time
    fields.ignore("num_heads", "block_norm_eps", "block_use_swiglu", "theta")
    fields.ignore(
        "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init"
    )
    fields.expect("hidden_act", "silu", default="silu")
    count = len(feedforwards)
    eps = fields.number("norm_eps", 1e-5)
    heads = attention_config(
        fields,
        rope_settings(fields, theta=1e6),
        qk_norm_eps=eps,
    )
    convolution = ShortConvConfig(
        channels=hidden,
        conv_width=fields.integer("conv_L_cache", 3, at_least=2),
        bias=fields.boolean("conv_bias", False),
    )
    full = fields.items("full_attn_idxs", int)
    kinds = layer_kinds(
        fields,
        count,
        ("conv", "full_attention"),
        lambda i: "full_attention" if full is None or i in full else "conv",
    )
    blocks = [
        BlockConfig(
            mixer=heads if kind == "full_attention" else convolution, feedforward=body
        )
        for kind, body in zip(kinds, feedforwards, strict=True)
    ]
    return decoder_config(
        fields,
        family,
        blocks,
        eps=("norm_eps", 1e-5),
        tied=True,
        tied_field="tie_word_embeddings|tie_embedding",
    )


def build(config: DecoderConfig, make: Builder) -> Decoder:
    """Read every tensor of the family's checkpoint layout."""
    hidden = config.hidden_size
    blocks = []
    for i, block in enumerate(config.blocks):
        name = f"model.layers.{i}"
        if isinstance(block.mixer, ShortConvConfig):
            mixer = short_convolution(f"{name}.conv", block.mixer, make)
        else:
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
