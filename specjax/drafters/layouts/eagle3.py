"""EAGLE-3 in its three published layouts, which differ in names and configuration.

SafeAILab and SpecForge call the first block ``midlayer`` and vLLM calls it
``layers.0``; both keep a Llama's fields beside those of drafting. speculators puts a
Llama's fields into ``transformer_layer_config``, with vLLM's names.

What a drafted row hands on is named by ``recycled_hidden`` ("pre-norm" or "post-norm"),
a field of ours that every export writes. Where it is missing, ``norm_output: true``
means "post-norm" to speculators and vLLM. In the ``midlayer`` layout it is read as
"pre-norm": SpecForge trained such checkpoints until September 2026, whatever served
them. If one of a later day drafts badly from the second token on, write
``"recycled_hidden": "post-norm"`` into its configuration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from specjax.drafters.eagle.eagle3 import Eagle3Head, PairBlock, Recycled
from specjax.drafters.eagle.vocabulary import DraftVocabulary, draft_vocabulary
from specjax.drafters.layouts.eagle3_export import export
from specjax.drafters.layouts.eagle_fields import (
    Transformer,
    read_attention,
    read_block,
    read_embedding,
    read_feedforward,
    read_transformer,
)
from specjax.drafters.layouts.layout import Host, Layout
from specjax.models.axes import EMBED, VOCAB
from specjax.models.build import Builder
from specjax.models.ends import Ends
from specjax.models.families.fields import Fields
from specjax.models.linear import Linear

NESTED, IDS = "transformer_layer_config", "eagle_aux_hidden_state_layer_ids"


@dataclasses.dataclass(frozen=True)
class Style:
    """One of the ways in which EAGLE-3 is written."""

    first: str
    """The name of the first block."""
    nested: bool = False
    """A Llama's fields stand in an object of their own."""


AUTHORS, VLLM = Style("midlayer"), Style("layers.0")
SPECULATORS = Style("layers.0", nested=True)


def fits(style: Style, raw: Mapping[str, Any], names: frozenset[str]) -> bool:
    """By the names, and by where a Llama's fields are."""
    there = f"{style.first}.hidden_norm.weight" in names
    return there and "mask_hidden" not in names and (NESTED in raw) == style.nested


def split_fields(
    style: Style, raw: Mapping[str, Any], where: str
) -> tuple[Fields, Fields]:
    """A Llama's fields, and those of drafting."""
    own = Fields(raw, where)
    if not style.nested:
        return own, own
    nested = own.mapping(NESTED)
    if nested is None:
        raise own.error(NESTED, "an object is needed, found null")
    own.ignore("speculators_config", "speculators_model_type", "speculators_version")
    # repeated within, and of training
    own.ignore("tie_word_embeddings", "embed_requires_grad", "enable_sp_ulysses")
    return Fields(nested, f"{where} {NESTED}"), own


def build(
    style: Style, raw: Mapping[str, Any], make: Builder, host: Host
) -> Eagle3Head:
    """The part."""
    fields, own = split_fields(style, raw, "EAGLE-3")
    part = read_head(style, fields, own, make, host)
    fields.finish()
    own.finish()
    return part


def read_head(
    style: Style, fields: Fields, own: Fields, make: Builder, host: Host
) -> Eagle3Head:
    """The network, from fields of which others may be left."""
    found = read_transformer(fields, host)
    if style is AUTHORS and found.layers != 1:
        raise fields.error("num_hidden_layers", f"{found.layers}, and midlayer is one")
    taps, hidden, eps = _taps(style, own, host), found.hidden, found.eps
    size = own.integer("target_hidden_size", hidden)
    if size != host.hidden_size:
        raise own.error(
            "target_hidden_size", f"{size}, and the target's is {host.hidden_size}"
        )
    wide, recycled = len(taps) * size, _recycled(style, own)
    by_tap = own.boolean("fc_norm", False)
    fused = _fused(own)
    vocabulary, head = _output(own, hidden, make, host)
    embedding = read_embedding(hidden, fields, make, host)
    return Eagle3Head(
        ends=Ends(embedding=embedding, head=head),
        fc=make.linear("fc", hidden, wide, bias=False, axes=(EMBED, "features")),
        first=_first(
            style.first, found, make, own.boolean("norm_before_residual", False)
        ),
        others=tuple(
            read_block(f"layers.{i}", found, make) for i in range(1, found.layers)
        ),
        norm=make.norm("norm", hidden, eps),
        vocabulary=vocabulary,
        tap_norms=tuple(make.norm(f"fc_norm.{i}", size, eps) for i in range(len(taps)))
        if by_tap
        else None,
        fused_norm=make.norm("input_norm", wide, eps) if fused else None,
        taps=taps,
        recycled=recycled,
        max_positions=found.max_positions,
        own_embedding=embedding is not host.ends.embedding,
    )


def _first(
    name: str, found: Transformer, make: Builder, residual_normed: bool
) -> PairBlock:
    hidden, eps = found.hidden, found.eps
    return PairBlock(
        token_norm=make.norm(f"{name}.input_layernorm", hidden, eps),
        hidden_norm=make.norm(f"{name}.hidden_norm", hidden, eps),
        mixer=read_attention(f"{name}.self_attn", 2 * hidden, found, make),
        feedforward=read_feedforward(name, found, make),
        residual_normed=residual_normed,
    )


def _fused(own: Fields) -> bool:
    """Whether all taps are normed together, as either of two places may say."""
    nested = Fields(own.mapping("eagle_config") or {}, "eagle_config")
    name = "norm_before_fc"
    inner = nested.boolean(name, False)
    outer = own.boolean(name, inner)
    if nested.has(name) and outer != inner:
        raise own.error(name, f"contradicts eagle_config: {outer} and {inner}")
    return outer


def _taps(style: Style, own: Fields, host: Host) -> tuple[int, ...]:
    """How many blocks the streams have passed; the usual ones where none is told."""
    nested = Fields(own.mapping("eagle_config") or {}, "eagle_config")
    nested.expect("use_aux_hidden_state", True, default=True)
    inner, outer = nested.items(IDS, int), own.items(IDS, int)
    nested.ignore("norm_before_fc")
    nested.finish()
    if inner is not None and outer is not None and inner != outer:
        raise own.error(IDS, f"contradicts eagle_config: {outer} and {inner}")
    count, ids = host.num_blocks, inner if outer is None else outer
    if ids is None:
        ids = [2, count // 2, count - 3]
        if not ids[0] < ids[1] < ids[2]:
            raise own.error(
                IDS, f"missing, and the usual 2, L/2, L-3 does not fit {count} layers"
            )
    if not ids or not all(0 <= i < count for i in ids):
        # HF's last hidden state is normed, and others' is not
        raise own.error(IDS, f"{ids}: the target has {count} layers, the last is none")
    if own.has("num_aux_hidden_states"):
        given = own.integer("num_aux_hidden_states")
        if given != len(ids):
            raise own.error("num_aux_hidden_states", f"{given}, for {len(ids)} layers")
    return tuple(ids)


def _recycled(style: Style, own: Fields) -> Recycled:
    normed = own.boolean("norm_output") if own.has("norm_output") else None
    if own.has("recycled_hidden"):
        told = own.text("recycled_hidden")
        if told not in [r.value for r in Recycled]:
            raise own.error("recycled_hidden", f"{told!r}: 'pre-norm' or 'post-norm'")
        if told == Recycled.BEHIND_NORM.value and normed is False:
            raise own.error("recycled_hidden", "'post-norm' contradicts norm_output")
        return Recycled(told)
    if style is AUTHORS:
        if normed is False:
            raise own.error(
                "norm_output",
                "false means no norm before the output head to one trainer of this "
                "layout, and means nothing to others; for the latter, add "
                '"recycled_hidden": "pre-norm"',
            )
        return Recycled.BEFORE_NORM
    return Recycled.BEHIND_NORM if normed else Recycled.BEFORE_NORM


def _output(
    own: Fields, hidden: int, make: Builder, host: Host
) -> tuple[DraftVocabulary | None, Linear]:
    """The output head, and which of the target's tokens its rows are."""
    size, vocab = own.integer("draft_vocab_size"), host.vocab_size
    head = make.linear("lm_head", size, hidden, bias=False, axes=(VOCAB, EMBED))
    if size == vocab and not make.has("d2t"):
        return None, head
    offsets = make.integers("d2t", size)
    try:
        vocabulary = draft_vocabulary(offsets, vocab)
    except ValueError as error:
        raise own.error("draft_vocab_size", str(error)) from error
    if make.has("t2d"):
        mapped = make.integers("t2d", vocab).astype(bool)
        if mapped.sum() != size or not mapped[vocabulary.ids].all():
            raise own.error("draft_vocab_size", "d2t and t2d name different tokens")
    return vocabulary, head


def _layout(name: str, style: Style) -> Layout:
    return Layout(
        f"EAGLE-3 ({name})",
        "eagle3",
        partial(fits, style),
        partial(build, style),
        partial(export, style.first, style.nested),
    )


LAYOUTS = (
    _layout("SafeAILab, SpecForge", AUTHORS),
    _layout("vLLM", VLLM),
    _layout("speculators", SPECULATORS),
)
