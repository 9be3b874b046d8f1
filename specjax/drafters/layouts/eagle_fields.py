"""What the layouts of EAGLE's heads share: Llama's fields and names, shared ends."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from specjax.drafters.layouts.layout import Host
from specjax.models.axes import EMBED, HEADS, KV_HEADS
from specjax.models.build import Builder
from specjax.models.config import AttentionConfig, GatedMLPConfig
from specjax.models.families.fields import Fields
from specjax.models.families.parts import gated_mlp
from specjax.models.families.readings import attention_config, gated_mlp_config, layers
from specjax.models.families.ropes import rope_settings
from specjax.models.linear import Linear
from specjax.models.mixers.attention import Attention
from specjax.models.norms import RMSNorm
from specjax.models.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling
from specjax.models.stack import Block, Sublayer

_SCALINGS = {LinearScaling: "linear", Llama3Scaling: "llama3", YarnScaling: "yarn"}


@dataclasses.dataclass(frozen=True)
class Transformer:
    """What a Llama's fields say of a head's blocks."""

    attention: AttentionConfig
    feedforward: GatedMLPConfig
    layers: int
    hidden: int
    eps: float
    max_positions: int


def read_transformer(fields: Fields, host: Host) -> Transformer:
    """A Llama's fields, with the target's vocabulary."""
    fields.expect("model_type", "llama", default="llama")
    fields.expect("pretraining_tp", 1, default=1)
    fields.expect("rope_interleaved", False, default=False)
    # the embedding and the output head of a head never are one
    fields.ignore("tie_word_embeddings")
    vocab = fields.integer("vocab_size")
    if vocab != host.vocab_size:
        raise fields.error(
            "vocab_size", f"{vocab}, and the target's is {host.vocab_size}"
        )
    out_bias = fields.boolean("attention_bias", False)
    return Transformer(
        attention=attention_config(
            fields,
            rope_settings(fields),
            qkv_bias=fields.boolean("qkv_bias", out_bias),
            out_bias=out_bias,
        ),
        feedforward=gated_mlp_config(fields, bias=fields.boolean("mlp_bias", False)),
        layers=layers(fields),
        hidden=fields.integer("hidden_size"),
        eps=fields.number("rms_norm_eps"),
        max_positions=fields.integer("max_position_embeddings"),
    )


def read_attention(
    name: str, inputs: int, found: Transformer, make: Builder
) -> Attention:
    """An attention whose input may be wider than what it adds to."""
    config, hidden = found.attention, found.hidden
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim

    def linear(part: str, outputs: int, axis: str) -> Linear:
        return make.linear(
            f"{name}.{part}", outputs, inputs, bias=config.qkv_bias, axes=(axis, EMBED)
        )

    return Attention(
        config=config,
        q=linear("q_proj", queries, HEADS),
        k=linear("k_proj", keys, KV_HEADS),
        v=linear("v_proj", keys, KV_HEADS),
        out=make.linear(
            f"{name}.o_proj",
            hidden,
            queries,
            bias=config.out_bias,
            axes=(EMBED, HEADS),
        ),
    )


def read_feedforward(name: str, found: Transformer, make: Builder) -> Sublayer:
    """A gated MLP behind its norm."""
    return Sublayer(
        make.norm(f"{name}.post_attention_layernorm", found.hidden, found.eps),
        gated_mlp(f"{name}.mlp", found.hidden, found.feedforward, make),
    )


def read_block(name: str, found: Transformer, make: Builder, norm: Any = None) -> Block:
    """An ordinary block; ``norm`` stands in for the one before its attention."""
    if norm is None:
        norm = make.norm(f"{name}.input_layernorm", found.hidden, found.eps)
    mixer = read_attention(f"{name}.self_attn", found.hidden, found, make)
    return Block(Sublayer(norm, mixer), read_feedforward(name, found, make))


def read_embedding(
    hidden: int, fields: Fields, make: Builder, host: Host, name: str = "embed_tokens"
) -> jax.Array:
    """The stored embedding, or the target's where there is none or it is the same."""
    shared = host.ends.embedding
    if make.has(f"{name}.weight"):
        matrix = make.embedding(name, host.vocab_size, hidden)
        alike = matrix.shape == shared.shape
        # a copy may have been rounded to the head's own type
        alike = alike and bool((matrix == shared.astype(matrix.dtype)).all())
        return shared if alike else matrix
    if hidden != host.hidden_size:
        raise fields.error(
            "hidden_size",
            f"{hidden}, and the target's embedding, which the head shares, has "
            f"{host.hidden_size}",
        )
    return shared


def embedding_tensors(part: Any, name: str = "embed_tokens") -> dict[str, np.ndarray]:
    """The embedding, if it is the head's own. The target's is not written: whoever
    reads the files has it, perhaps in another type than the head's."""
    if not part.own_embedding:
        return {}
    return {f"{name}.weight": np.asarray(part.ends.embedding)}


def transformer_fields(
    attention: Attention, blocks: int, size: int, hidden: int, eps: float
) -> dict[str, Any]:
    """A Llama's fields, back."""
    config, rope = attention.config, attention.config.rope
    assert isinstance(rope, Rope), "Llama turns by positions"
    scaling = None
    if rope.scaling is not None:
        kind = _SCALINGS[type(rope.scaling)]
        scaling = {"rope_type": kind, **dataclasses.asdict(rope.scaling)}
    return {
        "model_type": "llama",
        "attention_bias": config.out_bias,
        "qkv_bias": config.qkv_bias,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": size,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": blocks,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": eps,
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": False,
    }


def linear_tensors(name: str, linear: Linear) -> dict[str, np.ndarray]:
    """A linear layer's tensors. Raises ``ValueError`` for quantised weights."""
    if linear.scale is not None:
        raise ValueError(f"{name}: a drafter of int8 weights cannot be written")
    tensors = {f"{name}.weight": np.asarray(linear.weight)}
    if linear.bias is not None:
        tensors[f"{name}.bias"] = np.asarray(linear.bias)
    return tensors


def norm_tensors(name: str, norm: RMSNorm) -> dict[str, np.ndarray]:
    """A norm's weight."""
    return {f"{name}.weight": np.asarray(norm.weight)}


def body_tensors(
    name: str, mixer: Attention, feedforward: Sublayer
) -> dict[str, np.ndarray]:
    """Attention and feed-forward of a block, and the norm between them."""
    mlp = feedforward.body
    linears = {
        "self_attn.q_proj": mixer.q,
        "self_attn.k_proj": mixer.k,
        "self_attn.v_proj": mixer.v,
        "self_attn.o_proj": mixer.out,
        "mlp.gate_proj": mlp.gate,
        "mlp.up_proj": mlp.up,
        "mlp.down_proj": mlp.down,
    }
    tensors = norm_tensors(f"{name}.post_attention_layernorm", feedforward.norm)
    for part, linear in linears.items():
        tensors |= linear_tensors(f"{name}.{part}", linear)
    return tensors
