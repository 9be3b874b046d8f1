"""Llama and SmolLM2: ``model_type: llama``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.models.axes import EMBED, HEADS, KV_HEADS, MLP, VOCAB
from specjax.models.build import Builder
from specjax.models.config import (
    AttentionConfig,
    BlockConfig,
    DecoderConfig,
    GatedMLPConfig,
)
from specjax.models.decoder import Block, Decoder, Sublayer
from specjax.models.families.fields import Fields
from specjax.models.feedforward.gated_mlp import GatedMLP
from specjax.models.mixers.attention import Attention
from specjax.models.rope import Llama3Scaling, Rope


def config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Translate a Hugging Face configuration; both old and new rope spellings."""
    fields = Fields(raw, "llama")
    fields.expect("hidden_act", "silu", default="silu")
    fields.expect("pretraining_tp", 1, default=1)
    fields.refuse("quantization_config", "quantised checkpoints of this layout")
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", default=hidden // heads)
    kv_heads = fields.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise fields.error(
            "num_key_value_heads", f"{kv_heads} does not divide {heads} query heads"
        )
    bias = fields.boolean("attention_bias", default=False)
    mixer = AttentionConfig(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=rope(fields, head_dim),
        qkv_bias=bias,
        out_bias=bias,
    )
    feedforward = GatedMLPConfig(
        size=fields.integer("intermediate_size"),
        bias=fields.boolean("mlp_bias", default=False),
    )
    block = BlockConfig(mixer=mixer, feedforward=feedforward)
    return DecoderConfig(
        family="llama",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        blocks=(block,) * fields.count("num_hidden_layers", at_most=1000),
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
        tied=fields.boolean("tie_word_embeddings", default=False),
        max_positions=fields.integer("max_position_embeddings", default=2048),
    )


def rope(fields: Fields, dims: int) -> Rope:
    """Rotary settings from ``rope_parameters`` or ``rope_theta`` + ``rope_scaling``."""
    new = fields.mapping("rope_parameters")
    scaling = new if new is not None else fields.mapping("rope_scaling")
    where = Fields(new, "llama rope_parameters") if new else fields
    theta = where.number("rope_theta", default=fields.number("rope_theta", 10000.0))
    if scaling is None:
        return Rope(theta=theta, dims=dims)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return Rope(theta=theta, dims=dims)
    if kind != "llama3":
        raise fields.error("rope_scaling", f"rope type {kind!r} (default and llama3)")
    part = Fields(scaling, "llama rope_scaling")
    scaled = Llama3Scaling(
        factor=part.number("factor"),
        low_freq_factor=part.number("low_freq_factor"),
        high_freq_factor=part.number("high_freq_factor"),
        original_max_position_embeddings=part.integer(
            "original_max_position_embeddings"
        ),
    )
    return Rope(theta=theta, dims=dims, scaling=scaled)


def build(config: DecoderConfig, make: Builder) -> Decoder:
    """Read every tensor of the family's checkpoint layout."""
    blocks = tuple(
        _block(f"model.layers.{i}", config, block, make)
        for i, block in enumerate(config.blocks)
    )
    return assemble(config, blocks, make)


def assemble(
    config: DecoderConfig, blocks: tuple[Block, ...], make: Builder
) -> Decoder:
    """Embedding, last norm and head around the blocks."""
    vocab, hidden = config.vocab_size, config.hidden_size
    embedding = make.embedding("model.embed_tokens", vocab, hidden)
    if config.tied:
        head = make.tied_head(embedding)
    else:
        head = make.linear("lm_head", vocab, hidden, bias=False, axes=(VOCAB, EMBED))
    return Decoder(
        config=config,
        embedding=embedding,
        blocks=blocks,
        norm=make.norm("model.norm", hidden, config.norm_eps),
        head=head,
    )


def _block(
    name: str, config: DecoderConfig, block: BlockConfig, make: Builder
) -> Block:
    hidden, eps = config.hidden_size, config.norm_eps
    assert isinstance(block.mixer, AttentionConfig)
    assert isinstance(block.feedforward, GatedMLPConfig)
    return Block(
        mixer=Sublayer(
            norm=make.norm(f"{name}.input_layernorm", hidden, eps),
            body=attention(f"{name}.self_attn", hidden, block.mixer, make),
        ),
        feedforward=Sublayer(
            norm=make.norm(f"{name}.post_attention_layernorm", hidden, eps),
            body=gated_mlp(f"{name}.mlp", hidden, block.feedforward, make),
        ),
    )


def attention(
    name: str, hidden: int, config: AttentionConfig, make: Builder
) -> Attention:
    """The four projections of an attention block."""
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    bias = config.qkv_bias
    return Attention(
        config=config,
        q=make.linear(
            f"{name}.q_proj", queries, hidden, bias=bias, axes=(HEADS, EMBED)
        ),
        k=make.linear(
            f"{name}.k_proj", keys, hidden, bias=bias, axes=(KV_HEADS, EMBED)
        ),
        v=make.linear(
            f"{name}.v_proj", keys, hidden, bias=bias, axes=(KV_HEADS, EMBED)
        ),
        out=make.linear(
            f"{name}.o_proj", hidden, queries, bias=config.out_bias, axes=(EMBED, HEADS)
        ),
    )


def gated_mlp(
    name: str, hidden: int, config: GatedMLPConfig, make: Builder
) -> GatedMLP:
    """The three projections of a gated MLP."""
    wide, narrow = (MLP, EMBED), (EMBED, MLP)
    size, bias = config.size, config.bias
    return GatedMLP(
        config=config,
        gate=make.linear(f"{name}.gate_proj", size, hidden, bias=bias, axes=wide),
        up=make.linear(f"{name}.up_proj", size, hidden, bias=bias, axes=wide),
        down=make.linear(f"{name}.down_proj", hidden, size, bias=bias, axes=narrow),
    )
