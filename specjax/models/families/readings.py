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
SLIDING, FULL = "sliding_attention", "full_attention"


def layers(fields: Fields) -> int:
    """``num_hidden_layers``."""
    return fields.count("num_hidden_layers", at_most=MOST_LAYERS)


def attention_config(
    fields: Fields, settings: RopeSettings | None, **options: Any
) -> AttentionConfig:
    """Head counts and sizes; what a null or no value means is every family's."""
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error(
            "num_key_value_heads", f"{kv_heads} does not divide {heads} query heads"
        )
    size = fields.integer("head_dim", max(1, fields.integer("hidden_size") // heads))
    rope = settings and settings.rope(size)
    if rope is not None and rope.dims + rope.dims % 2 > size:
        raise fields.error("head_dim", f"{size} dimensions do not turn in pairs")
    return AttentionConfig(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=size, rope=rope, **options
    )


def window_reach(fields: Fields) -> int:
    """How far a sliding layer looks back; a null would mean one that does not slide."""
    if fields.is_null("sliding_window"):
        raise fields.error(
            "sliding_window",
            f"null, but there are {SLIDING!r} layers, which need a width; if none "
            "slides, let layer_types say so",
        )
    return fields.integer("sliding_window")


def sliding(
    attention: AttentionConfig, fields: Fields, kinds: list[str]
) -> list[AttentionConfig]:
    """One configuration a layer, from ``full_attention`` and ``sliding_attention``."""
    if SLIDING not in kinds:
        fields.ignore("sliding_window")
        return [attention] * len(kinds)
    near = dataclasses.replace(attention, reach=window_reach(fields))
    return [near if kind == SLIDING else attention for kind in kinds]


def decoder_config(
    fields: Fields,
    family: str,
    blocks: list[BlockConfig],
    *,
    eps: str = "rms_norm_eps",
    tied: str | None = "tie_word_embeddings",
    positions: str = "max_position_embeddings",
    **options: Any,
) -> DecoderConfig:
    """The whole, after which no field may be left that nobody has read.

    ``tied`` is ``None`` in families whose own code never ties the head: whatever the
    field says, their files hold one.
    """
    fields.ignore("tie_word_embeddings")
    config = DecoderConfig(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        blocks=tuple(blocks),
        norm_eps=fields.number(eps),
        tied=tied is not None and fields.boolean(tied, False),
        max_positions=fields.integer(positions),
        **options,
    )
    fields.finish()
    return config


def gated_mlp_config(fields: Fields, **options: Any) -> GatedMLPConfig:
    """A dense feed-forward with SiLU."""
    fields.expect("hidden_act", "silu", default="silu")
    return GatedMLPConfig(size=fields.integer("intermediate_size"), **options)


def mixture_config(
    fields: Fields,
    *,
    experts: str = "n_routed_experts|num_local_experts|num_experts",
    top_k: str = "num_experts_per_tok",
    shared: str | None = "n_shared_experts",
    groups: str = "n_group",
    normalize: str = "norm_topk_prob",
) -> MoEConfig:
    """DeepSeek-V3's routing: sigmoids, a bias for the choice, groups, a scale."""
    size = fields.integer("moe_intermediate_size")
    copies = 0 if shared is None else fields.integer(shared, at_least=0)
    count = fields.integer(experts)
    group_count, kept = fields.integer(groups, 1), fields.integer("topk_group", 1)
    if count % group_count or kept > group_count:
        raise fields.error(
            groups, f"{count} experts, {group_count} groups, {kept} of them kept"
        )
    router = RouterConfig(
        kind="sigmoid",
        top_k=chosen_experts(fields, count, top_k),
        selection_bias=True,
        groups=group_count,
        kept_groups=kept,
        normalize=fields.boolean(normalize, True),
        epsilon=1e-20,
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    return MoEConfig(
        num_experts=count,
        size=size,
        router=router,
        shared=GatedMLPConfig(size=size * copies) if copies else None,
    )


def softmax_mixture_config(
    fields: Fields, *, normalize: bool, shared: bool
) -> MoEConfig:
    """Qwen's routing: a softmax over all experts."""
    count = fields.integer("num_experts|num_local_experts")
    shared_size = "shared_expert_intermediate_size"
    return MoEConfig(
        num_experts=count,
        size=fields.integer("moe_intermediate_size"),
        router=RouterConfig(
            kind="softmax", top_k=chosen_experts(fields, count), normalize=normalize
        ),
        shared=GatedMLPConfig(size=fields.integer(shared_size)) if shared else None,
        shared_gate=shared,
    )


def chosen_experts(
    fields: Fields, count: int, name: str = "num_experts_per_tok"
) -> int:
    """How many of ``count`` experts a token goes to."""
    chosen = fields.integer(name)
    if chosen > count:
        raise fields.error(name, f"{chosen} of {count} experts")
    return chosen


def sparse_layers(fields: Fields, count: int) -> list[bool]:
    """Which layers are mixtures: all but the first few, unless a list says which."""
    fields.expect("moe_layer_freq", 1, default=1)
    first = fields.integer("first_k_dense_replace", at_least=0)
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
    beyond = [layer for layer in dense if not 0 <= layer < count]
    if beyond:
        raise fields.error(
            "mlp_only_layers", f"there are layers 0 to {count - 1}, found {beyond}"
        )
    return [i not in dense and (i + 1) % step == 0 for i in range(count)]


def latent_config(
    fields: Fields, settings: RopeSettings | None, **options: Any
) -> LatentAttentionConfig:
    """DeepSeek's latent attention."""
    # repeated by other fields: every head has a key of its own
    fields.ignore("num_key_value_heads", "head_dim", "qk_head_dim")
    content = fields.integer("qk_nope_head_dim")
    turning = fields.integer("qk_rope_head_dim")
    factor = 1.0 if settings is None else settings.score_factor
    return LatentAttentionConfig(
        num_heads=fields.integer("num_attention_heads"),
        query_rank=fields.optional_integer("q_lora_rank"),
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
    name = "num_nextn_predict_layers|num_mtp_layers"
    return few_ahead(fields, name)


MOST_AHEAD = 64
"""Layers that predict further tokens; more must be a mistake."""


def few_ahead(fields: Fields, name: str) -> int:
    """A number of such layers; none is a number too."""
    count = fields.integer(name, at_least=0)
    if count > MOST_AHEAD:
        raise fields.error(
            name, f"{count} is more than {MOST_AHEAD}, the most there is"
        )
    return count


def attention_kinds(fields: Fields, count: int, sliding_from: int | None) -> list[str]:
    """``layer_types``, or sliding windows from a layer on (``None``: nowhere)."""
    return layer_kinds(
        fields,
        count,
        (FULL, SLIDING),
        lambda i: SLIDING if sliding_from is not None and i >= sliding_from else FULL,
    )
