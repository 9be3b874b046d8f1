"""What the layouts of the block family share: Qwen3's fields and names, a block's own.

The network is Qwen3's without embedding and head. What says how it drafts stands beside
those fields or in an object of its own, ``dflash_config``; here it does not matter
where, and where it stands twice it must be the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from specjax.drafters.block.backbone import Backbone
from specjax.drafters.block.context import BlockAttention
from specjax.drafters.layouts.layout import Host
from specjax.models.axes import EMBED, VOCAB
from specjax.models.build import Builder
from specjax.models.config import AttentionConfig, GatedMLPConfig
from specjax.models.ends import Ends
from specjax.models.families.fields import Fields
from specjax.models.families.parts import attention, gated_mlp
from specjax.models.families.readings import (
    FULL,
    SLIDING,
    attention_config,
    attention_kinds,
    gated_mlp_config,
    layers,
)
from specjax.models.families.ropes import rope_settings
from specjax.models.linear import Linear
from specjax.models.stack import Block, Sublayer

NESTED = "dflash_config"
OF_DRAFTING = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "causal",
    "is_causal",
    "use_swa",
    "swa_window_size",
    "projector_type",
    "shift_label",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "num_anchors",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "use_confidence_head",
    "confidence_head_alpha",
    "confidence_head_with_markov",
)
"""Fields that may stand in ``dflash_config`` or beside it."""

Wrap = Callable[[str, Block], Block]
"""A layer's name and block to the block with what a method puts around it."""


@dataclasses.dataclass(frozen=True)
class Layers:
    """What the transformer's fields say."""

    attention: tuple[AttentionConfig, ...]
    causal: tuple[bool, ...]
    feedforward: GatedMLPConfig
    norm_eps: float
    max_positions: int


def split_fields(raw: Mapping[str, Any], where: str) -> tuple[Fields, Fields]:
    """The transformer's fields, and those of drafting, wherever they stand."""
    outer = Fields(raw, where)
    nested = outer.mapping(NESTED) or {}
    own = dict(nested)
    for name in OF_DRAFTING:
        value = raw.get(name)
        if value is None:
            continue
        if own.setdefault(name, value) != value:
            raise outer.error(name, f"contradicts {NESTED}: {own[name]!r}, {value!r}")
    rest = {k: v for k, v in raw.items() if k not in (*OF_DRAFTING, NESTED)}
    return Fields(rest, where), Fields(own, f"{where} {NESTED}")


def read_layers(
    fields: Fields, causal: Callable[[str], bool], window: int | None = None
) -> Layers:
    """Of every layer its attention, and whether it is causal within a block.

    ``causal`` answers for a kind of layer. A ``window`` from elsewhere is that of the
    sliding layers, or of all where no kinds are named.
    """
    # whatever the target is; another one's fields and norms would mean other maths
    fields.expect("model_type", "qwen3", default="qwen3")
    count = layers(fields)
    bias = fields.boolean("attention_bias", False)
    full = attention_config(
        fields,
        rope_settings(fields),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm_eps=fields.number("rms_norm_eps"),
    )
    kinds = attention_kinds(fields, count, None if window is None else 0)
    if SLIDING in kinds and window is None:
        if not fields.boolean("use_sliding_window", False):
            raise fields.error(
                "layer_types", f"{SLIDING!r} without use_sliding_window: true"
            )
        window = fields.integer("sliding_window")
    fields.ignore("use_sliding_window", "sliding_window", "max_window_layers")
    fields.ignore("tie_word_embeddings")
    reach = {FULL: None, SLIDING: window}
    found = Layers(
        attention=tuple(dataclasses.replace(full, reach=reach[k]) for k in kinds),
        causal=tuple(map(causal, kinds)),
        feedforward=gated_mlp_config(fields),
        norm_eps=fields.number("rms_norm_eps"),
        max_positions=fields.integer("max_position_embeddings"),
    )
    return found


def check_host(fields: Fields, host: Host) -> None:
    """A drafter that stands between the target's embedding and head has its sizes."""
    for name, wanted in (
        ("hidden_size", host.hidden_size),
        ("vocab_size", host.vocab_size),
    ):
        if fields.integer(name) != wanted:
            raise fields.error(
                name, f"{fields.integer(name)}, and the target's is {wanted}"
            )
    if fields.has("num_target_layers"):
        given = fields.integer("num_target_layers")
        if given != host.num_blocks:
            raise fields.error(
                "num_target_layers",
                f"{given}, and the target has {host.num_blocks}: this drafter was "
                "made for another one",
            )


def read_taps(
    own: Fields, host: Host, name: str = "target_layer_ids", *, shift: int = 1
) -> tuple[int, ...]:
    """Tap ``i + shift`` for layer id ``i``: ids name outputs of layers from 0 on, or,
    with no shift, how many layers the stream has passed."""
    ids = own.items(name, int)
    if not ids:
        raise own.error(name, "missing: the layers cannot be guessed")
    taps = tuple(i + shift for i in ids)
    for i, tap in zip(ids, taps, strict=True):
        # behind the last layer some codes are handed normed states, and some are not
        if not 0 <= tap < host.num_blocks:
            raise own.error(
                name,
                f"{i}: the target has {host.num_blocks} layers, and the last is none",
            )
    return taps


def read_mask(own: Fields, host: Host) -> int:
    """The token that stands in a slot."""
    mask = own.integer("mask_token_id", at_least=0)
    if mask >= host.vocab_size:
        raise own.error("mask_token_id", f"{mask}, of {host.vocab_size} tokens")
    return mask


def read_causal(own: Fields) -> Callable[[str], bool]:
    """Sliding layers are causal within a block and full ones are not, unless it is said
    of all of them."""
    given = [own.boolean(n) for n in ("causal", "is_causal") if own.has(n)]
    own.ignore("causal", "is_causal")
    if len(set(given)) > 1:
        raise own.error("causal", "contradicts is_causal")
    return lambda kind: given[0] if given else kind == SLIDING


def check_windows(fields: Fields, found: Layers, block_size: int) -> None:
    """A window shorter than the block would also have to end ahead of a row; and a
    block must fit the positions that the head was made for.
    """
    positions = found.max_positions
    if positions is not None and block_size > positions:
        raise fields.error(
            "block_size", f"{block_size} is more than {positions} positions"
        )
    for config, causal in zip(found.attention, found.causal, strict=True):
        if config.reach is not None and not causal and config.reach < block_size:
            raise fields.error(
                "sliding_window",
                f"{config.reach} is less than the block's {block_size} tokens, and the "
                "layer is not causal: not implemented",
            )


def read_backbone(
    found: Layers,
    make: Builder,
    host: Host,
    ends: Ends,
    wrap: Wrap | None = None,
    draft_ids: jax.Array | None = None,
    **options: Any,
) -> Backbone:
    """The tensors of the network."""
    hidden, taps = host.hidden_size, options["taps"]
    blocks = [
        _read_block(f"layers.{i}", config, causal, found, hidden, make)
        for i, (config, causal) in enumerate(
            zip(found.attention, found.causal, strict=True)
        )
    ]
    if wrap is not None:
        blocks = [wrap(f"layers.{i}", block) for i, block in enumerate(blocks)]
    return Backbone(
        fc=make.linear(
            "fc", hidden, len(taps) * hidden, bias=False, axes=(EMBED, "features")
        ),
        context_norm=make.norm("hidden_norm", hidden, found.norm_eps),
        blocks=tuple(blocks),
        norm=make.norm("norm", hidden, found.norm_eps),
        ends=ends,
        draft_ids=draft_ids,
        own=_own_names(ends, host.ends),
        max_positions=found.max_positions,
        **options,
    )


def _read_block(
    name: str,
    config: AttentionConfig,
    causal: bool,
    found: Layers,
    hidden: int,
    make: Builder,
) -> Block:
    mixer = attention(f"{name}.self_attn", hidden, config, make)
    body = gated_mlp(f"{name}.mlp", hidden, found.feedforward, make)

    def norm(part: str):
        return make.norm(f"{name}.{part}", hidden, found.norm_eps)

    return Block(
        mixer=Sublayer(norm("input_layernorm"), BlockAttention(mixer, causal=causal)),
        feedforward=Sublayer(norm("post_attention_layernorm"), body),
    )


def plain_ends(host: Host, own: Fields) -> Ends:
    """The target's embedding and head without what the target does around them: the
    authors' code takes the bare matrices, and drafters say what else they want."""
    return host.ends.replace(
        scale=own.number("input_embedding_scale", 1.0),
        softcap=own.optional_number("final_logit_softcapping"),
    )


def own_ends(make: Builder, host: Host, ends: Ends, vocab: int) -> Ends:
    """The drafter's own copies of embedding and head, where the file has any; the head
    is of ``vocab`` rows. Copies that are the target's to the bit give way to them."""
    hidden = host.hidden_size
    if make.has("embed_tokens.weight"):
        matrix = make.embedding("embed_tokens", host.vocab_size, hidden)
        if not _same(matrix, ends.embedding):
            ends = ends.replace(embedding=matrix)
    if vocab != host.vocab_size or make.has("lm_head.weight"):
        head = make.linear("lm_head", vocab, hidden, bias=False, axes=(VOCAB, EMBED))
        if not _same_linear(head, ends.head):
            ends = ends.replace(head=head)
    return ends


def _own_names(ends: Ends, shared: Ends) -> tuple[str, ...]:
    """What of the ends is not given by the target, by reference."""
    own = {
        "embed_tokens": ends.embedding is not shared.embedding,
        "lm_head": ends.head is not shared.head,
    }
    return tuple(name for name, differs in own.items() if differs)


def _same(a: jax.Array, b: jax.Array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all())


def _same_linear(a: Linear, b: Linear) -> bool:
    if (a.scale is None) != (b.scale is None):
        return False
    scales = a.scale is None or b.scale is None or _same(a.scale, b.scale)
    return scales and _same(a.weight, b.weight)


def floats(x: jax.Array | Linear) -> np.ndarray:
    """A tensor to be written. Raises ``ValueError`` for quantised weights."""
    if isinstance(x, Linear):
        if x.scale is not None:
            raise ValueError("a drafter of int8 weights cannot be written")
        x = x.weight
    return np.asarray(x)
