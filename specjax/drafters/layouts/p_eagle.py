"""P-EAGLE as speculators writes it: EAGLE-3's files, and what stands in the slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.drafters.eagle.parallel import ParallelHead
from specjax.drafters.layouts.eagle3 import (
    NESTED,
    SPECULATORS,
    read_head,
    split_fields,
)
from specjax.drafters.layouts.eagle3_export import export as export_head
from specjax.drafters.layouts.layout import Export, Host, Layout
from specjax.models.build import Builder


def fits(raw: Mapping[str, Any], names: frozenset[str]) -> bool:
    """By the vector that stands in the slots."""
    there = {"mask_hidden", f"{SPECULATORS.first}.hidden_norm.weight"}
    return names >= there and NESTED in raw


def build(raw: Mapping[str, Any], make: Builder, host: Host) -> ParallelHead:
    """The part."""
    fields, own = split_fields(SPECULATORS, raw, "P-EAGLE")
    mask = own.integer("mask_token_id|ptd_token_id", at_least=0)
    if mask >= host.vocab_size:
        raise own.error("mask_token_id", f"{mask}, of {host.vocab_size} tokens")
    # of training: which depths of which rows it saw
    own.ignore("para_depths", "num_depths", "max_seq_len", "prediction_loss_weight")
    own.ignore("down_sample_ratio", "down_sample_ratio_min")
    head = read_head(SPECULATORS, fields, own, make, host)
    fields.finish()
    own.finish()
    wide = head.fc.weight.shape[1]
    return ParallelHead(
        head=head,
        mask_hidden=make.vector("mask_hidden", 1, 1, wide)[0, 0],
        mask_token=mask,
    )


def export(part: ParallelHead) -> Export:
    """The same files."""
    files = export_head(SPECULATORS.first, True, part.head)
    config = files.config | {
        "architectures": ["PEagleSpeculator"],
        "speculators_model_type": "peagle",
        "mask_token_id": part.mask_token,
    }
    masks = {"mask_hidden": np.asarray(part.mask_hidden)[None, None]}
    return Export(config, files.tensors | masks)


LAYOUT = Layout("P-EAGLE (speculators)", "p-eagle", fits, build, export)
