"""EAGLE as SafeAILab publishes it: ``fc``, ``layers.i`` and no output head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.drafters.eagle.eagle1 import AsItIs, Eagle1Head
from specjax.drafters.layouts.eagle_fields import (
    body_tensors,
    embedding_tensors,
    linear_tensors,
    norm_tensors,
    read_block,
    read_embedding,
    read_transformer,
    transformer_fields,
)
from specjax.drafters.layouts.layout import Export, Host, Layout
from specjax.models.axes import EMBED
from specjax.models.build import Builder
from specjax.models.ends import Ends
from specjax.models.families.fields import Fields

USUAL = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
"""Of the class that the authors' code reads the configuration with."""

_THERE = {
    "fc.weight",
    "layers.0.self_attn.q_proj.weight",
    "layers.0.mlp.up_proj.weight",
}
_NOT_THERE = {"norm.weight", "hidden_norm.weight", "layers.0.input_layernorm.weight"}


def fits(raw: Mapping[str, Any], names: frozenset[str]) -> bool:
    """By the names: its first layer has no norm before the attention, and no norm
    stands last."""
    return names >= _THERE and not names & _NOT_THERE


def build(raw: Mapping[str, Any], make: Builder, host: Host) -> Eagle1Head:
    """The part. ``bias`` is that of ``fc``, which has one unless told otherwise."""
    fields = Fields(raw, "EAGLE", USUAL)
    found = read_transformer(fields, host)
    hidden = found.hidden
    if hidden != host.hidden_size:
        raise fields.error(
            "hidden_size", f"{hidden}, and the target's is {host.hidden_size}"
        )
    bias = fields.boolean("bias", True)
    fields.finish()
    embedding = read_embedding(hidden, fields, make, host)
    blocks = [
        read_block(f"layers.{i}", found, make, None if i else AsItIs())
        for i in range(found.layers)
    ]
    return Eagle1Head(
        ends=Ends(embedding=embedding, head=host.ends.head),
        fc=make.linear("fc", hidden, 2 * hidden, bias=bias, axes=(EMBED, "features")),
        blocks=tuple(blocks),
        max_positions=found.max_positions,
        own_embedding=embedding is not host.ends.embedding,
    )


def export(part: Eagle1Head) -> Export:
    """The same files; an embedding that is the target's is left out."""
    first = part.blocks[0]
    assert first.mixer is not None and first.feedforward is not None
    config = {
        "architectures": ["LlamaForCausalLM"],
        **transformer_fields(
            first.mixer.body,
            len(part.blocks),
            first.feedforward.body.config.size,
            part.hidden_size,
            first.feedforward.norm.eps,
        ),
        "mlp_bias": first.feedforward.body.config.bias,
        "bias": part.fc.bias is not None,
        "max_position_embeddings": part.max_positions,
        "vocab_size": part.vocab_size,
    }
    tensors = {
        **embedding_tensors(part),
        **linear_tensors("fc", part.fc),
    }
    for i, block in enumerate(part.blocks):
        assert block.mixer is not None and block.feedforward is not None
        name = f"layers.{i}"
        tensors |= body_tensors(name, block.mixer.body, block.feedforward)
        if i:
            tensors |= norm_tensors(f"{name}.input_layernorm", block.mixer.norm)
    return Export(config, tensors)


LAYOUT = Layout("EAGLE (SafeAILab)", "eagle1", fits, build, export)
