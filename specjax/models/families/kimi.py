"""Kimi-Linear: ``model_type: kimi_linear``, Kimi delta attention beside latents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.models.axes import EMBED, HEADS, Axes
from specjax.models.build import Builder
from specjax.models.config import (
    BlockConfig,
    DecoderConfig,
    FeedForwardConfig,
    GatedDeltaConfig,
    LatentAttentionConfig,
    MoEConfig,
)
from specjax.models.decoder import Decoder
from specjax.models.families.defaults import DEFAULTS
from specjax.models.families.fields import Fields, layer_kinds
from specjax.models.families.latents import latent_attention
from specjax.models.families.parts import (
    assemble,
    feedforward,
    mixture,
    pre_norm_block,
)
from specjax.models.families.readings import (
    decoder_config,
    gated_mlp_config,
    heads_ahead,
    latent_config,
    layers,
    mixture_config,
    sparse_layers,
)
from specjax.models.linear import Linear
from specjax.models.mixers.gated_delta import GatedDelta, LowRank

_LINEAR, _FULL = "linear_attention", "full_attention"


def config(raw: Mapping[str, Any]) -> DecoderConfig:
    """No rotary positions anywhere."""
    fields = Fields(raw, "kimi_linear", DEFAULTS["kimi_linear"])
    fields.expect("mla_use_nope", True, default=True)
    fields.expect("moe_router_activation_func", "sigmoid", default="sigmoid")
    if fields.integer("num_expert_group|n_group") > 1:
        fields.expect("use_grouped_topk", True, default=True)
    fields.ignore("use_grouped_topk")
    fields.expect("pretraining_tp", 1, default=1)
    # nothing turns
    fields.ignore("rope_theta", "rope_scaling", "rope_parameters")
    fields.ignore("partial_rotary_factor")
    count = layers(fields)
    delta, kinds = _delta(fields, count)
    latent = latent_config(fields, None)
    mixture = mixture_config(
        fields,
        experts="num_experts|num_local_experts|n_routed_experts",
        top_k="num_experts_per_token|num_experts_per_tok",
        shared="num_shared_experts|n_shared_experts",
        groups="num_expert_group|n_group",
        normalize="moe_renormalize|norm_topk_prob",
    )
    plain = gated_mlp_config(fields)
    blocks = [
        BlockConfig(
            mixer=delta if kind == _LINEAR else latent,
            feedforward=mixture if routed else plain,
        )
        for kind, routed in zip(kinds, sparse_layers(fields, count), strict=True)
    ]
    ahead = heads_ahead(fields)
    return decoder_config(
        fields,
        "kimi_linear",
        blocks,
        tied=None,
        positions="model_max_length|max_position_embeddings",
        heads_ahead=ahead,
    )


def _delta(fields: Fields, count: int) -> tuple[GatedDeltaConfig, list[str]]:
    """The recurrent layers, and which they are.

    Old: all of it in ``linear_attn_config``. New: fields of their own.
    """
    told = fields.mapping("linear_attn_config")
    part = Fields(told or {}, "kimi_linear linear_attn_config")

    def either(old: str, new: str) -> int:
        beside = fields.integer(new)
        within = part.integer(old, beside)
        if fields.has(new) and within != beside:
            raise fields.error(new, f"contradicts linear_attn_config: {beside}")
        return within

    heads = either("num_heads", "linear_num_heads")
    size = either("head_dim", "linear_head_dim")
    width = either("short_conv_kernel_size", "linear_conv_kernel_dim")
    listed = _listed_kinds(part, count)
    floor = part.negative_number("gate_lower_bound")
    part.finish()
    kinds = layer_kinds(
        fields,
        count,
        (_LINEAR, _FULL),
        lambda i: listed[i] if listed else _FULL if i and i % 4 == 0 else _LINEAR,
    )
    if listed is not None and kinds != listed:
        raise fields.error("layer_types", "contradicts linear_attn_config")
    delta = GatedDeltaConfig(
        num_key_heads=heads,
        num_value_heads=heads,
        key_dim=size,
        value_dim=size,
        conv_width=width,
        norm_eps=fields.number("rms_norm_eps"),
        channel_decay=True,
        gate_rank=size,
        gate="sigmoid",
        decay_floor=floor,
    )
    return delta, kinds


def _listed_kinds(part: Fields, count: int) -> list[str] | None:
    """From two lists of layers, which count from 1; ``None`` without them."""
    full, linear = part.items("full_attn_layers", int), part.items("kda_layers", int)
    if full is None or linear is None:
        return None
    if sorted(full + linear) != list(range(1, count + 1)):
        raise part.error(
            "full_attn_layers",
            f"with kda_layers it must name each of the {count} layers once, from 1 on: "
            f"{full}, {linear}",
        )
    return [_FULL if i + 1 in full else _LINEAR for i in range(count)]


def build(config: DecoderConfig, make: Builder) -> Decoder:
    """Read every tensor of the family's checkpoint layout."""
    hidden = config.hidden_size
    blocks = []
    for i, block in enumerate(config.blocks):
        name = f"model.layers.{i}"
        if isinstance(block.mixer, GatedDeltaConfig):
            mixer = kimi_delta(f"{name}.self_attn", hidden, block.mixer, make)
        else:
            assert isinstance(block.mixer, LatentAttentionConfig)
            mixer = latent_attention(f"{name}.self_attn", hidden, block.mixer, make)
        body = _feedforward(name, hidden, block.feedforward, make)
        blocks.append(pre_norm_block(config, name, mixer, body, make))
    return assemble(config, tuple(blocks), make)


def _feedforward(
    name: str, hidden: int, config: FeedForwardConfig | None, make: Builder
) -> Any:
    """Released files and those that transformers writes differ in what they call it."""
    moe = f"{name}.block_sparse_moe"
    if not isinstance(config, MoEConfig):
        part = moe if make.has(f"{moe}.gate_proj.weight") else f"{name}.mlp"
        return feedforward(part, hidden, config, make)
    if make.has(f"{moe}.gate.weight"):
        return mixture(moe, hidden, config, make, parts=("w1", "w3", "w2"))
    return mixture(f"{name}.mlp", hidden, config, make)


def kimi_delta(
    name: str, hidden: int, config: GatedDeltaConfig, make: Builder
) -> GatedDelta:
    """Kimi delta attention: three projections, and three convolutions, as one."""
    heads, size = config.num_value_heads, config.value_dim
    values = heads * size

    def linear(part: str, outputs: int, inputs: int, axes: Axes) -> Linear:
        return make.linear(f"{name}.{part}", outputs, inputs, bias=False, axes=axes)

    def narrow(part: str) -> LowRank:
        """Through a layer as wide as one head."""
        return LowRank(
            down=linear(f"{part}_a_proj", size, hidden, ("rank", EMBED)),
            up=linear(f"{part}_b_proj", values, size, (HEADS, "rank")),
        )

    kinds = ("q", "k", "v")
    weights = [
        make.read(f"{name}.{kind}_proj.weight", values, hidden) for kind in kinds
    ]
    taps = [
        make.vector(f"{name}.{kind}_conv1d.weight", values, 1, config.conv_width)[:, 0]
        for kind in kinds
    ]
    return GatedDelta(
        config=config,
        qkv=make.linear_from(np.concatenate(weights), None, (HEADS, EMBED)),
        gate=narrow("g"),
        beta=linear("b_proj", heads, hidden, (HEADS, EMBED)),
        decay=narrow("f"),
        taps=jnp.concatenate(taps),
        log_rate=make.vector(f"{name}.A_log", 1, 1, heads, 1)[0, 0, :, 0],
        decay_bias=make.vector(f"{name}.dt_bias", values).reshape(heads, size),
        norm=make.norm(f"{name}.o_norm", size, config.norm_eps),
        out=linear("o_proj", hidden, values, (EMBED, HEADS)),
    )
