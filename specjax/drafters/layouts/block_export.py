"""The network of the block family, back to Qwen3's fields and names."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from specjax.drafters.block.backbone import Backbone
from specjax.drafters.block.context import BlockAttention
from specjax.drafters.layouts.block_backbone import floats
from specjax.models.feedforward.gated_mlp import GatedMLP
from specjax.models.linear import Linear
from specjax.models.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling
from specjax.models.stack import Block

FULL, SLIDING = "full_attention", "sliding_attention"


def bodies(block: Block) -> tuple[BlockAttention, GatedMLP]:
    """A block's attention and feed-forward, without what a method puts around them."""
    assert block.mixer is not None and block.feedforward is not None
    mixer, body = block.mixer.body, block.feedforward.body
    if not isinstance(mixer, BlockAttention):
        mixer, body = mixer.body, body.body
    return mixer, body


def transformer_fields(backbone: Backbone) -> dict[str, Any]:
    """What a configuration says of the network, less what it says of drafting."""
    parts = [bodies(block) for block in backbone.blocks]
    first, mlp = parts[0]
    config = first.config
    reaches = {mixer.config.reach for mixer, _ in parts} - {None}
    assert len(reaches) <= 1, "layers slide over one window"
    return {
        "model_type": "qwen3",
        "attention_bias": config.qkv_bias,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": backbone.ends.hidden_size,
        "intermediate_size": mlp.gate.out_features,
        "layer_types": [
            FULL if mixer.config.reach is None else SLIDING for mixer, _ in parts
        ],
        "max_position_embeddings": backbone.max_positions,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": len(parts),
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": backbone.norm.eps,
        "sliding_window": reaches.pop() if reaches else None,
        "use_sliding_window": any(mixer.config.reach is not None for mixer, _ in parts),
        "tie_word_embeddings": False,
        "vocab_size": backbone.vocab_size,
        **_rope_fields(config.rope),
    }


def causal_field(backbone: Backbone) -> bool | None:
    """What must be said of all layers; ``None`` where their kinds say it.

    Raises ``ValueError`` for layers that no configuration describes.
    """
    mixers = [bodies(block)[0] for block in backbone.blocks]
    causal = [mixer.causal for mixer in mixers]
    if causal == [mixer.config.reach is not None for mixer in mixers]:
        return None
    if len(set(causal)) > 1:
        raise ValueError("some layers are causal and some not, against their kinds")
    return causal[0]


def _rope_fields(rope: Rope | None) -> dict[str, Any]:
    assert rope is not None, "the family turns by positions"
    scaling: dict[str, Any] | None = None
    if rope.scaling is not None:
        names = {LinearScaling: "linear", Llama3Scaling: "llama3", YarnScaling: "yarn"}
        kind = names[type(rope.scaling)]
        scaling = {"rope_type": kind, **dataclasses.asdict(rope.scaling)}
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def backbone_tensors(backbone: Backbone) -> dict[str, np.ndarray]:
    """The network's tensors by name, without embedding and head."""
    tensors: dict[str, np.ndarray] = {
        "fc.weight": floats(backbone.fc),
        "hidden_norm.weight": floats(backbone.context_norm.weight),
        "norm.weight": floats(backbone.norm.weight),
    }
    for i, block in enumerate(backbone.blocks):
        mixer, mlp = bodies(block)
        body = mixer.body
        assert block.mixer is not None and block.feedforward is not None
        assert body.q_norm is not None and body.k_norm is not None
        linears = {
            "self_attn.q_proj": body.q,
            "self_attn.k_proj": body.k,
            "self_attn.v_proj": body.v,
            "self_attn.o_proj": body.out,
            "mlp.gate_proj": mlp.gate,
            "mlp.up_proj": mlp.up,
            "mlp.down_proj": mlp.down,
        }
        norms = {
            "self_attn.q_norm": body.q_norm,
            "self_attn.k_norm": body.k_norm,
            "input_layernorm": block.mixer.norm,
            "post_attention_layernorm": block.feedforward.norm,
        }
        for name, linear in linears.items():
            tensors |= linear_tensors(f"layers.{i}.{name}", linear)
        for name, norm in norms.items():
            tensors[f"layers.{i}.{name}.weight"] = floats(norm.weight)
    return tensors


def linear_tensors(name: str, linear: Linear) -> dict[str, np.ndarray]:
    """A linear layer's weight, and its bias if it has one."""
    tensors = {f"{name}.weight": floats(linear)}
    if linear.bias is not None:
        tensors[f"{name}.bias"] = floats(linear.bias)
    return tensors
