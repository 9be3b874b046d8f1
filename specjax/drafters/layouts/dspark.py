"""DSpark in its three published layouts: DeepSpec's flat one, SpecForge's nested one,
and the speculators library's, which may have a vocabulary of its own.

A speculators checkpoint of DFlash is read here as well: it is a DSpark without heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.drafters.block.backbone import Backbone
from specjax.drafters.block.dspark import (
    ConfidenceHead,
    DSpark,
    GatedMarkov,
    Markov,
    RecurrentMarkov,
)
from specjax.drafters.layouts.block_backbone import (
    NESTED,
    SLIDING,
    check_host,
    check_windows,
    floats,
    own_ends,
    plain_ends,
    read_backbone,
    read_causal,
    read_layers,
    read_mask,
    read_taps,
    split_fields,
)
from specjax.drafters.layouts.block_export import (
    backbone_tensors,
    bodies,
    causal_field,
    linear_tensors,
    transformer_fields,
)
from specjax.drafters.layouts.layout import Export, Host, Layout
from specjax.models.axes import EMBED, VOCAB
from specjax.models.build import Builder
from specjax.models.families.defaults import DEFAULTS
from specjax.models.families.fields import Fields
from specjax.models.linear import Linear

KINDS = {head.kind: head for head in (Markov, GatedMarkov, RecurrentMarkov)}
FLAT, SPECFORGE, SPECULATORS = "Qwen3DSparkModel", "DSparkDraftModel", "dspark"
LAYERS = "transformer_layer_config"


def fits_flat(raw: Mapping[str, Any], names: frozenset[str]) -> bool:
    """DeepSpec's: all fields beside each other."""
    return FLAT in (raw.get("architectures") or ())


def fits_nested(raw: Mapping[str, Any], names: frozenset[str]) -> bool:
    """SpecForge's, whatever architecture it gives."""
    nested = raw.get(NESTED)
    said = isinstance(nested, Mapping) and nested.get("projector_type") == "dspark"
    return said or SPECFORGE in (raw.get("architectures") or ())


def fits_speculators(raw: Mapping[str, Any], names: frozenset[str]) -> bool:
    """The speculators library's."""
    return raw.get("speculators_model_type") in ("dspark", "dflash")


def build(raw: Mapping[str, Any], make: Builder, host: Host) -> DSpark:
    """From DeepSpec's or SpecForge's fields."""
    fields, own = split_fields(raw, "DSpark")
    own.expect("projector_type", "dspark", default="dspark")
    own.ignore("num_anchors", "confidence_head_alpha")  # of training
    window = own.integer("swa_window_size") if own.boolean("use_swa", False) else None
    own.ignore("swa_window_size")
    check_host(fields, host)
    found = read_layers(fields, read_causal(own), window)
    from_anchor = own.boolean("shift_label", True)
    block_size = own.integer("block_size", at_least=1 if from_anchor else 2)
    check_windows(fields, found, block_size)
    options: dict[str, Any] = {
        "taps": read_taps(own, host),
        "mask_token": read_mask(own, host),
        "block_size": block_size,
        "from_anchor": from_anchor,
    }
    ends = own_ends(make, host, plain_ends(host, own), host.vocab_size)
    heads = _heads(own, make, host, host.vocab_size)
    fields.finish()
    own.finish()
    return DSpark(read_backbone(found, make, host, ends, **options), *heads)


def build_speculators(raw: Mapping[str, Any], make: Builder, host: Host) -> DSpark:
    """From the speculators library's fields; what it leaves out is its default."""
    dspark = raw.get("speculators_model_type") == "dspark"
    own = Fields(raw, "speculators")
    layer_fields = own.mapping(LAYERS)
    if layer_fields is None:
        raise own.error(LAYERS, "missing")
    own.ignore("speculators_config", "speculators_version", "speculators_model_type")
    own.ignore("tie_word_embeddings")
    fields = Fields(layer_fields, LAYERS, DEFAULTS["qwen3"])
    check_host(fields, host)
    wide = own.integer("target_hidden_size", host.hidden_size)
    if wide != host.hidden_size:
        raise own.error(
            "target_hidden_size", f"{wide}, and the target's is {host.hidden_size}"
        )
    causal = not own.boolean("sliding_window_non_causal", False)
    found = read_layers(fields, lambda kind: causal and kind == SLIDING)
    from_anchor = own.boolean("sample_from_anchor", dspark)
    block_size = own.integer("block_size", 8, at_least=1 if from_anchor else 2)
    check_windows(fields, found, block_size)
    vocab = own.integer("draft_vocab_size", host.vocab_size)
    ends = own_ends(make, host, plain_ends(host, own), vocab)
    draft_ids = None
    if vocab != host.vocab_size:
        draft_ids = _draft_ids(own, vocab, make, host)
    options: dict[str, Any] = {
        "taps": read_taps(own, host, "aux_hidden_state_layer_ids", shift=0),
        "mask_token": read_mask(own, host),
        "block_size": block_size,
        "from_anchor": from_anchor,
        "draft_ids": draft_ids,
    }
    heads = _heads(own, make, host, vocab) if dspark else (None, None)
    fields.finish()
    own.finish()
    return DSpark(read_backbone(found, make, host, ends, **options), *heads)


def _draft_ids(own: Fields, vocab: int, make: Builder, host: Host) -> jax.Array:
    """The draft vocabulary as target ids: ``d2t`` holds how far each lies behind."""
    offsets = make.integers("d2t", vocab).astype(np.int64)
    ids = offsets + np.arange(vocab)
    if len(set(ids.tolist())) < vocab or ids.min() < 0 or ids.max() >= host.vocab_size:
        raise own.error("draft_vocab_size", "d2t does not name as many target tokens")
    if make.has("t2d"):
        marked = np.flatnonzero(make.integers("t2d", host.vocab_size))
        if not np.array_equal(marked, np.sort(ids)):
            raise own.error("draft_vocab_size", "d2t and t2d name different tokens")
    return jnp.asarray(ids, jnp.int32)


def _heads(
    own: Fields, make: Builder, host: Host, vocab: int
) -> tuple[Markov | None, ConfidenceHead | None]:
    """The Markov head and the confidence head, as far as there are any."""
    hidden, rank = host.hidden_size, own.integer("markov_rank", 256, at_least=0)
    kind = own.text("markov_head_type", "vanilla")
    if kind not in KINDS:
        raise own.error("markov_head_type", f"{kind!r}; {', '.join(KINDS)} are known")
    markov = _markov(kind, rank, make, host, vocab) if rank else None
    with_markov = own.boolean("confidence_head_with_markov", True)
    there = make.has("confidence_head.proj.weight")
    if not own.boolean("enable_confidence_head|use_confidence_head", there):
        return markov, None
    if with_markov and markov is None:
        raise own.error(
            "confidence_head_with_markov", "true, and there is no Markov head"
        )
    width = hidden + (rank if with_markov else 0)
    proj = make.linear("confidence_head.proj", 1, width, bias=True, axes=("one", EMBED))
    return markov, ConfidenceHead(proj, with_markov)


def _markov(kind: str, rank: int, make: Builder, host: Host, vocab: int) -> Markov:
    hidden, name = host.hidden_size, "markov_head"

    def linear(part: str, outputs: int, inputs: int, bias: bool) -> Linear:
        return make.linear(
            f"{name}.{part}", outputs, inputs, bias=bias, axes=("rank", EMBED)
        )

    w1 = make.embedding(f"{name}.markov_w1", host.vocab_size, rank)
    w2 = make.linear(f"{name}.markov_w2", vocab, rank, bias=False, axes=(VOCAB, "rank"))
    if kind == GatedMarkov.kind:
        return GatedMarkov(w1, w2, linear("gate_proj", rank, hidden + rank, True))
    if kind == RecurrentMarkov.kind:
        joint = linear("joint_proj", 3 * rank, 2 * rank + hidden, True)
        return RecurrentMarkov(w1, w2, joint)
    return Markov(w1, w2)


def _head_fields(part: DSpark) -> dict[str, Any]:
    markov, confidence = part.markov, part.confidence
    return {
        "markov_rank": 0 if markov is None else markov.rank,
        "markov_head_type": "vanilla" if markov is None else markov.kind,
        "enable_confidence_head": confidence is not None,
        "confidence_head_with_markov": confidence is not None
        and confidence.with_markov,
    }


def _tensors(part: DSpark) -> dict[str, np.ndarray]:
    tensors, markov = backbone_tensors(part.backbone), part.markov
    if markov is not None:
        tensors["markov_head.markov_w1.weight"] = floats(markov.w1)
        tensors |= linear_tensors("markov_head.markov_w2", markov.w2)
    if isinstance(markov, GatedMarkov):
        tensors |= linear_tensors("markov_head.gate_proj", markov.gate)
    if isinstance(markov, RecurrentMarkov):
        tensors |= linear_tensors("markov_head.joint_proj", markov.joint)
    if part.confidence is not None:
        tensors |= linear_tensors("confidence_head.proj", part.confidence.proj)
    return tensors


def _drafting(part: DSpark) -> dict[str, Any]:
    """What says how it drafts, in DeepSpec's and in SpecForge's layout."""
    backbone = part.backbone
    _no_own_vocabulary(part)
    own: dict[str, Any] = {
        "mask_token_id": backbone.mask_token,
        "target_layer_ids": [tap - 1 for tap in backbone.taps],
        **_head_fields(part),
    }
    causal = causal_field(backbone)
    if causal is not None:
        own["causal"] = causal
    if not backbone.from_anchor:
        own["shift_label"] = False
    return own | _around_ends(backbone)


def _around_ends(backbone: Backbone) -> dict[str, Any]:
    """What is done to embeddings and to logits, where anything is."""
    fields: dict[str, Any] = {}
    if backbone.ends.scale != 1.0:
        fields["input_embedding_scale"] = backbone.ends.scale
    if backbone.ends.softcap is not None:
        fields["final_logit_softcapping"] = backbone.ends.softcap
    return fields


def _own_ends(backbone: Backbone) -> dict[str, np.ndarray]:
    """Embedding and head, where they are not the target's."""
    tensors: dict[str, np.ndarray] = {}
    if "embed_tokens" in backbone.own:
        tensors["embed_tokens.weight"] = floats(backbone.ends.embedding)
    if "lm_head" in backbone.own:
        tensors |= linear_tensors("lm_head", backbone.ends.head)
    return tensors


def _no_own_vocabulary(part: DSpark) -> None:
    if part.backbone.draft_ids is not None:
        raise ValueError(
            "only the speculators layout has a draft vocabulary: write it there"
        )


def export_flat(part: DSpark) -> Export:
    """DeepSpec's files, with copies of embedding and head."""
    backbone = part.backbone
    config = {
        "architectures": [FLAT],
        **transformer_fields(backbone),
        "block_size": backbone.block_size,
        **_drafting(part),
    }
    tensors = _tensors(part)
    tensors["embed_tokens.weight"] = floats(backbone.ends.embedding)
    tensors |= linear_tensors("lm_head", backbone.ends.head)
    return Export(config, tensors)


def export_nested(part: DSpark) -> Export:
    """SpecForge's files; embedding and head only where they are not the target's."""
    config = {
        "architectures": [SPECFORGE],
        **transformer_fields(part.backbone),
        "block_size": part.backbone.block_size,
        NESTED: {"projector_type": "dspark", **_drafting(part)},
    }
    return Export(config, _tensors(part) | _own_ends(part.backbone))


def export_speculators(part: DSpark) -> Export:
    """The speculators library's files."""
    backbone, ids = part.backbone, part.backbone.draft_ids
    sliding = [m for m, _ in map(bodies, backbone.blocks) if m.config.reach is not None]
    dspark = part.markov is not None or part.confidence is not None
    vocab = backbone.vocab_size if ids is None else len(ids)
    config: dict[str, Any] = {
        "architectures": ["DSparkSpeculator" if dspark else "DFlashSpeculator"],
        "speculators_model_type": "dspark" if dspark else "dflash",
        LAYERS: transformer_fields(backbone),
        "aux_hidden_state_layer_ids": list(backbone.taps),
        "block_size": backbone.block_size,
        "mask_token_id": backbone.mask_token,
        "sample_from_anchor": backbone.from_anchor,
        "sliding_window_non_causal": any(not mixer.causal for mixer in sliding),
        "draft_vocab_size": vocab,
        **(_head_fields(part) if dspark else {}),
        **_around_ends(backbone),
    }
    tensors = _tensors(part) | _own_ends(backbone)
    if ids is not None:
        chosen = np.asarray(ids, np.int64)
        mapped = np.zeros((backbone.vocab_size,), bool)
        mapped[chosen] = True
        tensors |= {"d2t": chosen - np.arange(vocab), "t2d": mapped}
    return Export(config, tensors)


LAYOUTS = (
    Layout("DSpark (DeepSpec)", "dspark", fits_flat, build, export_flat),
    Layout("DSpark (SpecForge)", "dspark", fits_nested, build, export_nested),
    Layout(
        "DSpark (speculators)",
        "dspark",
        fits_speculators,
        build_speculators,
        export_speculators,
    ),
)
