"""Hydra as zankner writes it: ``hydra_lm_head.pt``, with names of its two kinds.

``mlp`` is Hydra, ``prefix-mlp`` Hydra++, with dropout between the layers (which moves
their numbers) and a Llama of one layer before them, of the target's own configuration.
The layers of a head behind its first are one layer, stored under several names. The
authors' file is a pickle: write it as ``model.safetensors``, each tensor a copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.decoding.interfaces import FINAL
from specjax.drafters.hydra import HydraHead, HydraHeads, HydraPrefix
from specjax.drafters.layouts.eagle_fields import (
    body_tensors,
    embedding_tensors,
    linear_tensors,
    norm_tensors,
    read_embedding,
)
from specjax.drafters.layouts.layout import Export, Host, Layout
from specjax.drafters.medusa import MedusaHead
from specjax.models.axes import EMBED, VOCAB
from specjax.models.build import Builder
from specjax.models.ends import Ends
from specjax.models.families import llama
from specjax.models.families.fields import Fields
from specjax.models.linear import Linear

MOST_HEADS = 64
PREFIX = "prefix_embeding_layer"
EMBEDDING = "input_embed_fn"
UNUSED = (
    rf"{PREFIX}\.embed_tokens\.weight",
    rf"{PREFIX}\.layers\.0\.self_attn\.rotary_emb\.inv_freq",
)
"""An embedding that nothing reads, and what follows from the configuration."""


@dataclasses.dataclass(frozen=True)
class Names:
    """Where one of the two kinds keeps its layers."""

    kind: str
    """``hydra_head_arch``."""
    dropped: bool
    """With a dropout before every layer."""

    def layer(self, head: int, layer: int) -> str:
        """Of a layer of a head."""
        number = 2 * layer + 1 if self.dropped else layer
        return f"hydra_mlp.{head}.{number}"

    def out(self, head: int) -> str:
        """Of an output head."""
        return f"hydra_lm_head.{head}{'.1' if self.dropped else ''}"


PLAIN, PREFIXED = Names("mlp", False), Names("prefix-mlp", True)


def fits(raw: Mapping[str, Any], names: frozenset[str]) -> bool:
    """By its own fields."""
    return "hydra_num_heads" in raw


def build(raw: Mapping[str, Any], make: Builder, host: Host) -> HydraHeads:
    """The part."""
    fields = Fields(raw, "Hydra")
    kind = fields.text("hydra_head_arch")
    known = {names.kind: names for names in (PLAIN, PREFIXED)}
    if kind not in known:
        raise fields.error(
            "hydra_head_arch",
            f"{kind!r} is not implemented (known: {', '.join(known)})",
        )
    if not fields.boolean("grounded_heads"):
        raise fields.error(
            "grounded_heads", "heads that read no drafts are Medusa's, not Hydra's"
        )
    names = known[kind]
    count = fields.count("hydra_num_heads", at_most=MOST_HEADS)
    layers = fields.integer("hydra_num_layers")
    offset = fields.integer("hidden_state_offset", 0, at_least=0)
    if offset > host.num_blocks:
        raise fields.error(
            "hidden_state_offset", f"{offset}, of a target of {host.num_blocks} layers"
        )
    fields.ignore("base_model_name_or_path")
    fields.finish()
    if make.has(f"{names.out(count)}.weight"):
        raise fields.error("hydra_num_heads", f"{count}, and the file holds more heads")
    embedding = read_embedding(host.hidden_size, fields, make, host, EMBEDDING)
    return HydraHeads(
        ends=Ends(embedding=embedding, head=host.ends.head),
        heads=tuple(_head(names, i, layers, fields, make, host) for i in range(count)),
        prefix=_prefix(fields, make, host) if names is PREFIXED else None,
        # before a block, and not behind its last norm, as soon as any is left out
        tap=FINAL if offset == 0 else host.num_blocks - offset,
        offset=offset,
        own_embedding=embedding is not host.ends.embedding,
    )


def _head(
    names: Names, head: int, layers: int, fields: Fields, make: Builder, host: Host
) -> HydraHead:
    hidden = host.hidden_size

    def linear(name: str, inputs: int) -> Linear:
        return make.linear(name, hidden, inputs, bias=True, axes=("features", EMBED))

    first, wide = names.layer(head, 0), (head + 2) * hidden
    others = [f"{names.layer(head, i)}.linear" for i in range(1, layers)]
    blocks = [linear(name, hidden) for name in others]
    for name, block in zip(others, blocks, strict=True):
        if not _alike(block, blocks[0]):
            raise fields.error(
                "hydra_num_layers",
                f"{layers}, but {name!r} is another layer than {others[0]!r}; behind "
                "its first a head has one layer, which it runs again",
            )
    out = names.out(head)
    return HydraHead(
        first=linear(f"{first}.linear", wide),
        skip=linear(f"{first}.res_connection", wide),
        rest=MedusaHead(
            blocks=tuple(blocks[:1] * (layers - 1)),
            out=make.linear(
                out, host.vocab_size, hidden, bias=True, axes=(VOCAB, EMBED)
            ),
        ),
    )


def _alike(one: Linear, other: Linear) -> bool:
    pairs = ((one.weight, other.weight), (one.bias, other.bias))
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


def _prefix(fields: Fields, make: Builder, host: Host) -> HydraPrefix:
    if host.config.family != "llama":
        raise fields.error(
            "hydra_head_arch",
            f"{PREFIXED.kind!r} has a layer like a Llama target's, and this target is "
            f"of the family {host.config.family!r}",
        )
    config = host.config
    return HydraPrefix(
        llama.build_block(config, f"{PREFIX}.layers.0", config.blocks[0], make),
        make.norm(f"{PREFIX}.norm", config.hidden_size, config.norm_eps),
    )


def export(part: HydraHeads) -> Export:
    """The same files, without the target's embedding and one that nothing reads."""
    names = PLAIN if part.prefix is None else PREFIXED
    layers = 1 + len(part.heads[0].rest.blocks)
    tensors = embedding_tensors(part, EMBEDDING)
    for i, head in enumerate(part.heads):
        first = names.layer(i, 0)
        tensors |= linear_tensors(f"{first}.linear", head.first)
        tensors |= linear_tensors(f"{first}.res_connection", head.skip)
        for layer, block in enumerate(head.rest.blocks, start=1):
            tensors |= linear_tensors(f"{names.layer(i, layer)}.linear", block)
        tensors |= linear_tensors(names.out(i), head.rest.out)
    if part.prefix is not None:
        block, name = part.prefix.block, f"{PREFIX}.layers.0"
        assert block.mixer is not None and block.feedforward is not None
        tensors |= body_tensors(name, block.mixer.body, block.feedforward)
        tensors |= norm_tensors(f"{name}.input_layernorm", block.mixer.norm)
        tensors |= norm_tensors(f"{PREFIX}.norm", part.prefix.norm)
    config = {
        "hydra_num_heads": part.num_heads,
        "hydra_num_layers": layers,
        "hydra_head_arch": names.kind,
        "grounded_heads": True,
        "hidden_state_offset": part.offset,
    }
    return Export(config, tensors)


LAYOUT = Layout("Hydra (zankner)", "hydra", fits, build, export, UNUSED)
