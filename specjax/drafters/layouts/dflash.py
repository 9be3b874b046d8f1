"""DFlash and DFlash2 as z-lab publishes them; SpecForge writes the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.drafters.block.backbone import Backbone
from specjax.drafters.block.dflash import DFlash
from specjax.drafters.block.dflash2 import (
    ConvolvedAttention,
    ConvolvedFeedForward,
    DFlash2,
    DynamicConvolution,
    Selector,
)
from specjax.drafters.layouts.block_backbone import (
    NESTED,
    Wrap,
    check_host,
    check_windows,
    floats,
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
    causal_field,
    linear_tensors,
    transformer_fields,
)
from specjax.drafters.layouts.layout import Export, Host, Layout
from specjax.models.axes import EMBED
from specjax.models.build import Builder
from specjax.models.families.fields import Fields
from specjax.models.stack import Block

PLAIN, SECOND = "DFlashDraftModel", "DFlash2DraftModel"


def _fits(name: str, raw: Mapping[str, Any], names: frozenset[str]) -> bool:
    """By the architecture; SpecForge gives DSpark the same one, and says so within."""
    nested = raw.get(NESTED)
    other = isinstance(nested, Mapping) and nested.get("projector_type")
    return (
        name in (raw.get("architectures") or ())
        and not other
        and "speculators_model_type" not in raw
    )


def fits(raw: Mapping[str, Any], names: frozenset[str]) -> bool:
    """Whether it is a DFlash checkpoint."""
    return _fits(PLAIN, raw, names)


def fits2(raw: Mapping[str, Any], names: frozenset[str]) -> bool:
    """Whether it is a DFlash2 checkpoint."""
    return _fits(SECOND, raw, names)


def build(raw: Mapping[str, Any], make: Builder, host: Host) -> DFlash:
    """DFlash's part."""
    fields, own = split_fields(raw, "DFlash")
    return DFlash(_backbone(fields, own, make, host, None))


def build2(raw: Mapping[str, Any], make: Builder, host: Host) -> DFlash2:
    """DFlash2's part."""
    fields, own = split_fields(raw, "DFlash2")
    taps, groups = own.integer("conv_kernel_size"), _groups(own, host)
    if taps > own.integer("block_size"):
        raise own.error("conv_kernel_size", f"{taps} is more than the block's tokens")

    def wrap(name: str, block: Block) -> Block:
        assert block.mixer is not None and block.feedforward is not None
        return Block(
            mixer=block.mixer.replace(
                body=ConvolvedAttention(
                    block.mixer.body,
                    _convolution(f"{name}.attention_conv", taps, groups, make, host),
                )
            ),
            feedforward=block.feedforward.replace(
                body=ConvolvedFeedForward(
                    block.feedforward.body,
                    _convolution(f"{name}.mlp_conv", taps, groups, make, host),
                )
            ),
        )

    rank, top_k = own.integer("selector_rank"), own.integer("selector_top_k")
    if top_k > host.vocab_size:
        raise own.error("selector_top_k", f"{top_k} of {host.vocab_size} tokens")
    backbone = _backbone(fields, own, make, host, wrap)
    return DFlash2(backbone, _selector(rank, top_k, make, host))


def _groups(own: Fields, host: Host) -> int:
    size = own.integer("conv_group_size")
    if host.hidden_size % size:
        raise own.error(
            "conv_group_size", f"{size} does not divide {host.hidden_size} channels"
        )
    return host.hidden_size // size


def _backbone(
    fields: Fields, own: Fields, make: Builder, host: Host, wrap: Wrap | None
) -> Backbone:
    window = None
    if own.boolean("use_swa", False):
        window = own.integer("swa_window_size")
    own.ignore("swa_window_size")
    check_host(fields, host)
    found = read_layers(fields, read_causal(own), window)
    block_size = own.integer("block_size", at_least=2)
    check_windows(fields, found, block_size)
    ends = plain_ends(host, own)
    options: dict[str, Any] = {
        "taps": read_taps(own, host),
        "mask_token": read_mask(own, host),
        "block_size": block_size,
        "multiplier": own.number("output_multiplier", 1.0),
    }
    fields.finish()
    own.finish()
    return read_backbone(found, make, host, ends, wrap, **options)


def _convolution(
    name: str, taps: int, groups: int, make: Builder, host: Host
) -> DynamicConvolution:
    hidden = host.hidden_size
    return DynamicConvolution(
        base=make.vector(f"{name}.base_kernel", 2, taps, hidden),
        projection=make.linear(
            f"{name}.kernel_projection",
            2 * taps * groups,
            hidden,
            bias=False,
            axes=("kernels", EMBED),
        ),
    )


def _selector(rank: int, top_k: int, make: Builder, host: Host) -> Selector:
    def codebook(part: str):
        matrix = make.read(f"candidate_selector.{part}", host.vocab_size, rank)
        return make.dense(matrix)

    return Selector(
        predecessors=codebook("predecessor_codebook"),
        successors=codebook("successor_codebook"),
        projection=make.linear(
            "candidate_selector.hidden_projection",
            rank,
            host.hidden_size,
            bias=False,
            axes=("rank", EMBED),
        ),
        top_k=top_k,
    )


def _drafting(backbone: Backbone) -> dict[str, Any]:
    """What ``dflash_config`` holds."""
    own: dict[str, Any] = {
        "mask_token_id": backbone.mask_token,
        "target_layer_ids": [tap - 1 for tap in backbone.taps],
    }
    causal, cap = causal_field(backbone), backbone.ends.softcap
    if causal is not None:
        own["causal"] = causal
    if backbone.ends.scale != 1.0:
        own["input_embedding_scale"] = backbone.ends.scale
    if backbone.multiplier != 1.0:
        own["output_multiplier"] = backbone.multiplier
    if cap is not None:
        own["final_logit_softcapping"] = cap
    return own


def export(part: DFlash) -> Export:
    """DFlash's files."""
    backbone = part.backbone
    config = {
        "architectures": [PLAIN],
        **transformer_fields(backbone),
        "block_size": backbone.block_size,
        NESTED: _drafting(backbone),
    }
    return Export(config, backbone_tensors(backbone))


def export2(part: DFlash2) -> Export:
    """DFlash2's files."""
    backbone, selector = part.backbone, part.selector
    tensors = backbone_tensors(backbone)
    convolution = None
    for i, block in enumerate(backbone.blocks):
        assert block.mixer is not None and block.feedforward is not None
        for name, body in (
            ("attention_conv", block.mixer.body),
            ("mlp_conv", block.feedforward.body),
        ):
            convolution = body.conv
            tensors |= _convolution_tensors(f"layers.{i}.{name}", convolution)
    assert convolution is not None
    groups = convolution.projection.out_features // (2 * convolution.taps)
    own = _drafting(backbone) | {
        "conv_kernel_size": convolution.taps,
        "conv_group_size": backbone.ends.hidden_size // groups,
        "selector_rank": selector.predecessors.shape[1],
        "selector_top_k": selector.top_k,
    }
    tensors |= {
        "candidate_selector.predecessor_codebook": floats(selector.predecessors),
        "candidate_selector.successor_codebook": floats(selector.successors),
        **linear_tensors("candidate_selector.hidden_projection", selector.projection),
    }
    config = {
        "architectures": [SECOND],
        **transformer_fields(backbone),
        "block_size": backbone.block_size,
        NESTED: own,
    }
    return Export(config, tensors)


def _convolution_tensors(
    name: str, convolution: DynamicConvolution
) -> dict[str, np.ndarray]:
    return {
        f"{name}.base_kernel": floats(convolution.base),
        **linear_tensors(f"{name}.kernel_projection", convolution.projection),
    }


LAYOUTS = (
    Layout("DFlash (z-lab, SpecForge)", "dflash", fits, build, export),
    Layout("DFlash2 (z-lab, SpecForge)", "dflash2", fits2, build2, export2),
)
