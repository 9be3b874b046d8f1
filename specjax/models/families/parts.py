"""Pieces of checkpoint layouts that several families share: names to parameters."""

from __future__ import annotations

from typing import Any

import numpy as np

from specjax.models.axes import EMBED, HEADS, KV_HEADS, MLP, VOCAB, Axes
from specjax.models.build import Builder
from specjax.models.config import (
    AttentionConfig,
    DecoderConfig,
    FeedForwardConfig,
    GatedMLPConfig,
    MoEConfig,
    PlainMLPConfig,
)
from specjax.models.decoder import Decoder
from specjax.models.families.ropes import interleaved_rows
from specjax.models.feedforward.gated_mlp import GatedMLP
from specjax.models.feedforward.moe import MoE
from specjax.models.feedforward.plain_mlp import PlainMLP
from specjax.models.linear import Linear
from specjax.models.mixers.attention import Attention
from specjax.models.stack import Block, Sublayer

WIDE, NARROW = (MLP, EMBED), (EMBED, MLP)


def assemble(
    config: DecoderConfig,
    blocks: tuple[Block, ...],
    make: Builder,
    *,
    prefix: str = "model.",
    embedding: str = "embed_tokens",
    norm: str = "norm",
    head: str = "lm_head",
    centred: float = 0.0,
) -> Decoder:
    """Embedding, last norm and head around the blocks."""
    vocab, hidden = config.vocab_size, config.hidden_size
    matrix = make.embedding(f"{prefix}{embedding}", vocab, hidden)
    if config.tied:
        last = make.tied_head(matrix)
    else:
        last = make.linear(head, vocab, hidden, bias=False, axes=(VOCAB, EMBED))
    return Decoder(
        config=config,
        embedding=matrix,
        blocks=blocks,
        norm=make.norm(f"{prefix}{norm}", hidden, config.norm_eps, centred=centred),
        head=last,
    )


def pre_norm_block(
    config: DecoderConfig,
    name: str,
    mixer: Any,
    feedforward: Any,
    make: Builder,
    *,
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
    post_norms: tuple[str, str] | None = None,
    centred: float = 0.0,
) -> Block:
    """A block from its two bodies and the names of its norms."""

    def sublayer(body: Any, norm: str, after: str | None) -> Sublayer:
        def read(part: str):
            return make.norm(
                f"{name}.{part}", config.hidden_size, config.norm_eps, centred=centred
            )

        return Sublayer(read(norm), body, None if after is None else read(after))

    after = post_norms or (None, None)
    return Block(
        mixer=sublayer(mixer, norms[0], after[0]),
        feedforward=sublayer(feedforward, norms[1], after[1]),
    )


def reordered(
    make: Builder,
    name: str,
    outputs: int,
    inputs: int,
    rows: list[int] | np.ndarray,
    *,
    bias: bool,
    axes: Axes,
) -> Linear:
    """A linear layer of some of a tensor's rows, in another order."""
    weight = make.read(f"{name}.weight", outputs, inputs)[np.asarray(rows)]
    offset = make.read(f"{name}.bias", outputs)[np.asarray(rows)] if bias else None
    return make.linear_from(weight, offset, axes)


def attention(
    name: str,
    hidden: int,
    config: AttentionConfig,
    make: Builder,
    *,
    out: str = "o_proj",
    norms: tuple[str, str] = ("q_norm", "k_norm"),
    centred: float = 0.0,
    interleaved: bool = False,
) -> Attention:
    """The projections of an attention block, and what else its configuration asks for.

    A gated block's ``q_proj`` holds, head by head, the query and then the gate.
    ``interleaved``: the checkpoint turns neighbouring dimensions.
    """
    size = config.head_dim
    queries, keys = config.num_heads * size, config.num_kv_heads * size
    bias = config.qkv_bias

    def turned(part: str, heads: int, axes: Axes) -> Linear:
        full, count = f"{name}.{part}", heads * size
        if not interleaved:
            return make.linear(full, count, hidden, bias=bias, axes=axes)
        assert config.rope is not None
        rows = interleaved_rows(heads, size, 0, config.rope.dims)
        return reordered(make, full, count, hidden, rows, bias=bias, axes=axes)

    def half(which: int) -> Linear:
        rows = np.arange(2 * queries).reshape(-1, 2, size)[:, which].reshape(-1)
        return reordered(
            make,
            f"{name}.q_proj",
            2 * queries,
            hidden,
            rows,
            bias=bias,
            axes=(HEADS, EMBED),
        )

    def norm(part: str):
        if config.qk_norm_eps is None:
            return None
        return make.norm(f"{name}.{part}", size, config.qk_norm_eps, centred=centred)

    return Attention(
        config=config,
        q=half(0)
        if config.out_gate
        else turned("q_proj", config.num_heads, (HEADS, EMBED)),
        gate=half(1) if config.out_gate else None,
        k=turned("k_proj", config.num_kv_heads, (KV_HEADS, EMBED)),
        v=make.linear(
            f"{name}.v_proj", keys, hidden, bias=bias, axes=(KV_HEADS, EMBED)
        ),
        out=make.linear(
            f"{name}.{out}", hidden, queries, bias=config.out_bias, axes=(EMBED, HEADS)
        ),
        q_norm=norm(norms[0]),
        k_norm=norm(norms[1]),
        sinks=make.vector(f"{name}.sinks", config.num_heads) if config.sinks else None,
    )


def gated_mlp(
    name: str,
    hidden: int,
    config: GatedMLPConfig,
    make: Builder,
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> GatedMLP:
    """The three projections of a gated MLP."""
    size, bias = config.size, config.bias

    def linear(part: str, outputs: int, inputs: int, axes: Axes) -> Linear:
        return make.linear(f"{name}.{part}", outputs, inputs, bias=bias, axes=axes)

    return GatedMLP(
        config=config,
        gate=linear(parts[0], size, hidden, WIDE),
        up=linear(parts[1], size, hidden, WIDE),
        down=linear(parts[2], hidden, size, NARROW),
    )


def plain_mlp(
    name: str, hidden: int, config: PlainMLPConfig, make: Builder
) -> PlainMLP:
    """The two projections of an MLP without a gate."""
    size, bias = config.size, config.bias
    return PlainMLP(
        config=config,
        up=make.linear(f"{name}.up_proj", size, hidden, bias=bias, axes=WIDE),
        down=make.linear(f"{name}.down_proj", hidden, size, bias=bias, axes=NARROW),
    )


def mixture(
    name: str,
    hidden: int,
    config: MoEConfig,
    make: Builder,
    *,
    router: str = "gate",
    selection_bias: str = "gate.e_score_correction_bias",
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    shared: str = "shared_experts",
    latent_bias: bool = False,
) -> MoE:
    """Experts that are stored one by one, or all in one (Qwen3.5's files)."""
    count, latent = range(config.num_experts), config.latent_dim

    def names(part: str) -> list[str]:
        return [f"{name}.experts.{e}.{part}" for e in count]

    if config.kind == "gated" and make.has(f"{name}.experts.gate_up_proj"):
        experts = make.experts_fused(
            config,
            hidden,
            up=f"{name}.experts.gate_up_proj",
            down=f"{name}.experts.down_proj",
        )
    else:
        experts = make.experts_from_parts(
            config,
            hidden,
            gate=names(parts[0]) if config.kind == "gated" else None,
            up=names(parts[1]),
            down=names(parts[2]),
        )
    bias = f"{name}.{selection_bias}" if config.router.selection_bias else None
    return MoE(
        config=config,
        router=make.router(
            config, hidden, f"{name}.{router}.weight", selection_bias=bias
        ),
        experts=experts,
        shared=config.shared
        and feedforward(f"{name}.{shared}", hidden, config.shared, make),
        shared_gate=make.linear(
            f"{name}.shared_expert_gate", 1, hidden, bias=False, axes=("one", EMBED)
        )
        if config.shared_gate
        else None,
        latent_in=None
        if latent is None
        else make.linear(
            f"{name}.fc1_latent_proj",
            latent,
            hidden,
            bias=latent_bias,
            axes=("latent", EMBED),
        ),
        latent_out=None
        if latent is None
        else make.linear(
            f"{name}.fc2_latent_proj",
            hidden,
            latent,
            bias=latent_bias,
            axes=(EMBED, "latent"),
        ),
    )


def feedforward(
    name: str,
    hidden: int,
    config: FeedForwardConfig | None,
    make: Builder,
    **options: Any,
) -> Any:
    """Whatever the configuration asks for; ``options`` are a mixture's."""
    assert config is not None, f"{name}: the block has no feed-forward"
    match config:
        case GatedMLPConfig():
            return gated_mlp(name, hidden, config, make)
        case PlainMLPConfig():
            return plain_mlp(name, hidden, config, make)
        case MoEConfig():
            return mixture(name, hidden, config, make, **options)
