"""Medusa heads as FasterDecoding publishes them: by themselves, or merged into a model.

By themselves (``medusa_lm_head``) the names begin with the head's number; in a merged
model with ``medusa_head.``, beside the tensors of the model itself, which are the
target's and are read with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.drafters.layouts.block_export import linear_tensors
from specjax.drafters.layouts.layout import Export, Host, Layout
from specjax.drafters.medusa import MedusaHead, MedusaHeads
from specjax.models.axes import EMBED, VOCAB
from specjax.models.build import Builder
from specjax.models.families.fields import Fields

ALONE, MERGED = "", "medusa_head."
MOST_HEADS = 64


def _fits(prefix: str, raw: Mapping[str, Any], names: frozenset[str]) -> bool:
    return "medusa_num_heads" in raw and any(
        name.startswith(f"{prefix}0.") for name in names
    )


def _build(
    prefix: str, raw: Mapping[str, Any], make: Builder, host: Host
) -> MedusaHeads:
    fields = Fields(raw, "Medusa")
    count = fields.count("medusa_num_heads", at_most=MOST_HEADS)
    blocks = fields.integer("medusa_num_layers", at_least=0)
    hidden, vocab = host.hidden_size, host.vocab_size
    for name, size in (("hidden_size", hidden), ("vocab_size", vocab)):
        given = fields.integer(name, size)
        if given != size:
            raise fields.error(name, f"{given}, and the target's is {size}")
    if prefix == ALONE:
        fields.ignore("base_model_name_or_path")
        fields.finish()
    # a merged model's other fields are those of the target, which reads them
    if make.has(_names(prefix, count, blocks)[-1] + ".weight"):
        raise fields.error(
            "medusa_num_heads", f"{count}, and the file holds more heads"
        )
    return MedusaHeads(
        tuple(_head(_names(prefix, i, blocks), make, host) for i in range(count))
    )


def _head(names: list[str], make: Builder, host: Host) -> MedusaHead:
    hidden = host.hidden_size
    return MedusaHead(
        blocks=tuple(
            make.linear(name, hidden, hidden, bias=True, axes=("features", EMBED))
            for name in names[:-1]
        ),
        out=make.linear(
            names[-1], host.vocab_size, hidden, bias=False, axes=(VOCAB, EMBED)
        ),
    )


def _names(prefix: str, head: int, blocks: int) -> list[str]:
    """A head's layers, the output head last."""
    name = f"{prefix}{head}"
    return [*(f"{name}.{i}.linear" for i in range(blocks)), f"{name}.{blocks}"]


def _export(prefix: str, part: MedusaHeads) -> Export:
    blocks = {len(head.blocks) for head in part.heads}
    assert len(blocks) == 1, "heads are alike"
    layers = blocks.pop()
    config: dict[str, Any] = {
        "medusa_num_heads": part.num_heads,
        "medusa_num_layers": layers,
    }
    if prefix == MERGED:
        config |= {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": part.hidden_size,
            "vocab_size": part.vocab_size,
        }
    tensors: dict[str, np.ndarray] = {}
    for i, head in enumerate(part.heads):
        linears = [*head.blocks, head.out]
        for name, linear in zip(_names(prefix, i, layers), linears, strict=True):
            tensors |= linear_tensors(name, linear)
    return Export(config, tensors)


def _layout(name: str, prefix: str, ignore: tuple[str, ...] = ()) -> Layout:
    return Layout(
        name=name,
        method="medusa",
        fits=lambda raw, names: _fits(prefix, raw, names),
        build=lambda raw, make, host: _build(prefix, raw, make, host),
        export=lambda part: _export(prefix, part),
        ignore=ignore,
    )


LAYOUTS = (
    _layout("Medusa heads (FasterDecoding)", ALONE),
    _layout("Medusa merged (FasterDecoding)", MERGED, (r"model\..*", r"lm_head\..*")),
)
