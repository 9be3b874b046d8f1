"""DeepSeek-V3 and the GLMs that are built like it.

``model_type: deepseek_v3 | glm4_moe_lite | glm_moe_dsa``: latent attention and sigmoid
routing. GLM-5 (``glm_moe_dsa``) adds an indexer, in every layer or in some.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax.models.build import Builder
from specjax.models.config import (
    AheadConfig,
    BlockConfig,
    DecoderConfig,
    IndexerConfig,
    LatentAttentionConfig,
)
from specjax.models.decoder import Decoder
from specjax.models.families.ahead import ahead_of, numbered_modules
from specjax.models.families.defaults import DEFAULTS
from specjax.models.families.fields import Fields, layer_kinds
from specjax.models.families.latents import latent_attention
from specjax.models.families.parts import (
    assemble,
    feedforward,
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
from specjax.models.families.ropes import rope_settings
from specjax.models.mtp import MTPModule
from specjax.models.stack import Block

_INDEXED = ("indexed_attention", "deepseek_sparse_attention")
"""The new and the old name of the one kind of layer in GLM-5."""


def deepseek_v3(raw: Mapping[str, Any]) -> DecoderConfig:
    """Latent attention; groups of experts."""
    return _config(_fields(raw, "deepseek_v3"), "deepseek_v3")


def glm4_moe_lite(raw: Mapping[str, Any]) -> DecoderConfig:
    """GLM-4.7-Flash."""
    return _config(_fields(raw, "glm4_moe_lite"), "glm4_moe_lite")


def glm_moe_dsa(raw: Mapping[str, Any]) -> DecoderConfig:
    """GLM-5: each layer attends to the keys that an indexer has chosen."""
    fields = _fields(raw, "glm_moe_dsa")
    count = layers(fields)
    layer_kinds(fields, count, _INDEXED, lambda _: _INDEXED[0])
    fields.expect("mlp_bias", False, default=False)
    fields.expect("rope_interleave", True, default=True)
    fields.expect("indexer_rope_interleave", True, default=True)
    fields.ignore("moe_router_dtype")  # never less than float32 here
    shared = fields.boolean("index_share_for_mtp_iteration", False)
    indexer = IndexerConfig(
        num_heads=fields.integer("index_n_heads"),
        head_dim=fields.integer("index_head_dim"),
        top_k=fields.integer("index_topk"),
    )
    own = _own_indexers(fields, count)
    config = _config(fields, "glm_moe_dsa")

    def indexed(block: BlockConfig, has_own: bool) -> BlockConfig:
        assert isinstance(block.mixer, LatentAttentionConfig)
        if block.mixer.query_rank is None:
            raise fields.error("q_lora_rank", "missing; the indexer reads that latent")
        if indexer.head_dim < block.mixer.rotary_dim:
            raise fields.error("index_head_dim", "less than qk_rope_head_dim turn")
        mixer = dataclasses.replace(
            block.mixer,
            indexer=indexer if has_own else None,
            chosen_before=not has_own,
        )
        return dataclasses.replace(block, mixer=mixer)

    ahead = ahead_of(config)
    return dataclasses.replace(
        config,
        blocks=tuple(map(indexed, config.blocks, own)),
        ahead=dataclasses.replace(
            ahead,
            # which has an indexer of its own, whatever the layers below share
            blocks=tuple(indexed(block, True) for block in ahead.blocks),
            shares_choice=shared,
        ),
    )


def _own_indexers(fields: Fields, count: int) -> list[bool]:
    """Which layers have an indexer; the others share the choice of the one above."""
    kinds = fields.items("indexer_types", str)
    every = fields.integer("index_topk_freq")
    offset = fields.integer("index_skip_topk_offset", at_least=0)
    fields.ignore("index_topk_pattern")
    if fields.has("index_topk_pattern"):
        pattern = fields.text("index_topk_pattern")
        told = {"F": "full", "S": "shared"}
        spelt = [told.get(letter, letter) for letter in pattern]
        if kinds is not None and kinds != spelt:
            raise fields.error("index_topk_pattern", "contradicts indexer_types")
        kinds = spelt
    if kinds is None:
        kinds = [
            "shared" if max(i - offset + 1, 0) % every else "full" for i in range(count)
        ]
    if len(kinds) != count or set(kinds) - {"full", "shared"}:
        raise fields.error(
            "indexer_types", f"{count} times 'full' or 'shared' are needed: {kinds}"
        )
    if kinds[0] != "full":
        raise fields.error("indexer_types", "the first layer needs an indexer")
    return [kind == "full" for kind in kinds]


def _fields(raw: Mapping[str, Any], family: str) -> Fields:
    return Fields(raw, family, DEFAULTS[family])


def _config(fields: Fields, family: str) -> DecoderConfig:
    fields.expect("scoring_func", "sigmoid", default="sigmoid")
    fields.expect("topk_method", "noaux_tc", default="noaux_tc")
    fields.expect("pretraining_tp", 1, default=1)
    ahead = heads_ahead(fields)
    count = layers(fields)
    mixer = latent_config(
        fields,
        rope_settings(fields),
        rotary_pairs=fields.boolean("rope_interleave", True),
    )
    mixture, plain = mixture_config(fields), gated_mlp_config(fields)
    blocks = [
        BlockConfig(mixer=mixer, feedforward=mixture if routed else plain)
        for routed in sparse_layers(fields, count)
    ]
    layer = AheadConfig(blocks=(BlockConfig(mixer=mixer, feedforward=mixture),))
    return decoder_config(fields, family, blocks, heads_ahead=ahead, ahead=layer)


def build(config: DecoderConfig, make: Builder) -> Decoder:
    """Read every tensor of the decoder."""
    blocks = tuple(
        _block(config, f"model.layers.{i}", block, make)
        for i, block in enumerate(config.blocks)
    )
    return assemble(config, blocks, make)


def mtp(config: DecoderConfig, make: Builder) -> tuple[MTPModule, ...]:
    """The layers that predict further tokens."""
    return numbered_modules(config, make, _block)


def _block(
    config: DecoderConfig, name: str, block: BlockConfig, make: Builder
) -> Block:
    assert isinstance(block.mixer, LatentAttentionConfig)
    hidden = config.hidden_size
    mixer = latent_attention(f"{name}.self_attn", hidden, block.mixer, make)
    body = feedforward(f"{name}.mlp", hidden, block.feedforward, make)
    return pre_norm_block(config, name, mixer, body, make)
