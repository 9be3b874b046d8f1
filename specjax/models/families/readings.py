"""Readings of configurations that several families share."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.models.config import (
    AttentionConfig,
    BlockConfig,
    DecoderConfig,
    GatedMLPConfig,
    LatentAttentionConfig,
    MoEConfig,
    RouterConfig,
)
from specjax.models.families.fields import Fields, layer_kinds
from specjax.models.families.ropes import RopeSettings

MOST_LAYERS = 1000
LATENT_EPS = 1e-6
"""Of the norms of latents: the class default of transformers' RMSNorm, which takes no
notice of the configuration's."""


def layers(fields: Fields) -> int:
    """``num_hidden_layers``."""
    return fields.count("num_hidden_layers", at_most=MOST_LAYERS)


def attention_config(
    fields: Fields,
    settings: RopeSettings | None,
    *,
    head_dim: int | None = None,
    head_dim_field: bool = True,
    **options: Any,
) -> AttentionConfig:
    """Head counts and sizes; ``head_dim`` is the family's default."""
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error(
            "num_key_value_heads", f"{kv_heads} does not divide {heads} query heads"
        )
    size = head_dim or max(1, fields.integer("hidden_size") // heads)
    if head_dim_field:
        size = fields.integer("head_dim", size)
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        rope=settings and settings.rope(size),
        **options,
    )


def sliding(
    attention: AttentionConfig, fields: Fields, kinds: list[str]
) -> list[AttentionConfig]:
    """One configuration a layer, from ``full_attention`` and ``sliding_attention``."""
    if "sliding_attention" not in kinds:
        fields.ignore("sliding_window")
        return [attention] * len(kinds)
    near = dataclasses.replace(attention, reach=fields.integer("sliding_window"))
    return [near if kind == "sliding_attention" else attention for kind in kinds]


def decoder_config(
    fields: Fields,
    family: str,
    blocks: list[BlockConfig],
    *,
    eps: tuple[str, float] = ("rms_norm_eps", 1e-6),
    tied: bool = False,
    tied_field: str | None = "tie_word_embeddings",
    positions: str = "max_position_embeddings",
    **options: Any,
) -> DecoderConfig:
    """The whole, after which no field may be left that nobody has read.

    ``tied_field`` is ``None`` in families that never tie their head.
    """
    config = DecoderConfig(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        blocks=tuple(blocks),
        norm_eps=fields.number(*eps),
        tied=tied_field is not None and fields.boolean(tied_field, default=tied),
        max_positions=fields.integer(positions, 2048),
        **options,
    )
    fields.finish()
    return config


def gated_mlp_config(
    fields: Fields, size: str = "intermediate_size", **options: Any
) -> GatedMLPConfig:
    """A dense feed-forward with SiLU."""
    fields.expect("hidden_act", "silu", default="silu")
    return GatedMLPConfig(size=fields.integer(size), **options)


def mixture_config(
    fields: Fields,
    *,
    experts: str = "n_routed_experts|num_local_experts|num_experts",
    top_k: str = "num_experts_per_tok",
    shared: str | None = "n_shared_experts",
    groups: str = "n_group",
    normalize: str = "norm_topk_prob",
    scale: float = 1.0,
) -> MoEConfig:
    """DeepSeek-V3's routing: sigmoids, a bias for the choice, groups, a scale."""
    size = fields.integer("moe_intermediate_size")
    copies = 0 if shared is None else fields.integer(shared, 1, at_least=0)
    count = fields.integer(experts)
    group_count = fields.integer(groups, 1)
    kept = fields.integer("topk_group", 1)
    if count % group_count or kept > group_count:
        raise fields.error(
            groups, f"{count} experts, {group_count} groups, {kept} of them kept"
        )
    router = RouterConfig(
        kind="sigmoid",
        top_k=_at_most(fields, top_k, fields.integer(top_k), count),
        selection_bias=True,
        groups=group_count,
        kept_groups=kept,
        normalize=fields.boolean(normalize, True),
        epsilon=1e-20,
        scale=fields.number("routed_scaling_factor", scale),
    )
    return MoEConfig(
        num_experts=count,
        size=size,
        router=router,
        shared=GatedMLPConfig(size=size * copies) if copies else None,
    )


def softmax_mixture_config(
    fields: Fields, *, normalize: bool | None, shared: bool
) -> MoEConfig:
    """Qwen's routing: a softmax over all experts. ``normalize``: the default of
    ``norm_topk_prob``, or ``None`` where there is no such field and it is done.
    """
    count = fields.integer("num_experts|num_local_experts")
    top_k = fields.integer("num_experts_per_tok")
    router = RouterConfig(
        kind="softmax",
        top_k=_at_most(fields, "num_experts_per_tok", top_k, count),
        normalize=True
        if normalize is None
        else fields.boolean("norm_topk_prob", normalize),
    )
    return MoEConfig(
        num_experts=count,
        size=fields.integer("moe_intermediate_size"),
        router=router,
        shared=GatedMLPConfig(size=fields.integer("shared_expert_intermediate_size"))
        if shared
        else None,
        shared_gate=shared,
    )


def _at_most(fields: Fields, name: str, value: int, most: int) -> int:
    if value > most:
        raise fields.error(name, f"{value} of {most} experts")
    return value


def sparse_layers(fields: Fields, count: int, dense: int) -> list[bool]:
    """Which layers are mixtures: all but the first ``dense`` ones, unless it says."""
    fields.expect("moe_layer_freq", 1, default=1)
    first = fields.integer("first_k_dense_replace", dense, at_least=0)
    kinds = fields.items("mlp_layer_types", str)
    if kinds is None:
        return [i >= first for i in range(count)]
    if len(kinds) != count or set(kinds) - {"dense", "sparse"}:
        raise fields.error(
            "mlp_layer_types", f"{count} times 'dense' or 'sparse' are needed: {kinds}"
        )
    return [kind == "sparse" for kind in kinds]


def qwen_sparse_layers(fields: Fields, count: int) -> list[bool]:
    """Which layers are mixtures, by ``decoder_sparse_step`` and ``mlp_only_layers``."""
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.items("mlp_only_layers", int) or []
    return [i not in dense and (i + 1) % step == 0 for i in range(count)]


def latent_config(
    fields: Fields, settings: RopeSettings | None, **options: Any
) -> LatentAttentionConfig:
    """DeepSeek's latent attention."""
    fields.ignore("num_key_value_heads", "head_dim", "qk_head_dim", "q_lora_rank")
    content = fields.integer("qk_nope_head_dim")
    turning = fields.integer("qk_rope_head_dim")
    factor = 1.0 if settings is None else settings.score_factor
    if settings is not None and settings.partial != 1.0:
        raise fields.error("partial_rotary_factor", "must be 1 for latent attention")
    rank = fields.integer("q_lora_rank") if fields.has("q_lora_rank") else None
    return LatentAttentionConfig(
        num_heads=fields.integer("num_attention_heads"),
        query_rank=rank,
        latent_dim=fields.integer("kv_lora_rank"),
        content_dim=content,
        rotary_dim=turning,
        value_dim=fields.integer("v_head_dim"),
        rope=settings and settings.rope(turning),
        scale=(content + turning) ** -0.5 * factor,
        latent_eps=LATENT_EPS,
        bias=fields.boolean("attention_bias", False),
        **options,
    )


def heads_ahead(fields: Fields) -> int:
    """Layers behind the decoder's own that predict further tokens."""
    return fields.integer("num_nextn_predict_layers|num_mtp_layers", 0, at_least=0)


def attention_kinds(fields: Fields, count: int, sliding_from: int | None) -> list[str]:
    """``layer_types``, or sliding windows from a layer on (``None``: nowhere)."""
    return layer_kinds(
        fields,
        count,
        ("full_attention", "sliding_attention"),
        lambda i: (
            "sliding_attention"
            if sliding_from is not None and i >= sliding_from
            else "full_attention"
        ),
    )
