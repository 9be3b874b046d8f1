"""Tiny block drafters for toy targets: random ones, and ones that know the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.drafters.block import DSpark
from specjax.drafters.layouts import LAYOUTS
from specjax.drafters.layouts.layout import Host
from specjax.models.build import Builder, WeightType
from specjax.models.decoder import Decoder
from specjax.testing.toys import RandomReader

TOY_BLOCK: dict[str, Any] = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 8,
    "hidden_act": "silu",
    "intermediate_size": 32,
    # a window that the prompts outgrow, and one layer that sees everything
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 6,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "block_size": 5,
}

OF_METHOD: dict[str, dict[str, Any]] = {
    "dflash": {"architectures": ["DFlashDraftModel"]},
    "dflash2": {
        "architectures": ["DFlash2DraftModel"],
        "conv_kernel_size": 2,
        "conv_group_size": 4,
        "selector_rank": 6,
        "selector_top_k": 5,
    },
    "dspark": {
        "architectures": ["Qwen3DSparkModel"],
        "markov_rank": 6,
        "enable_confidence_head": True,
    },
}


class OwnTensors(RandomReader):
    """Random tensors of a drafter that shares its target's embedding and head."""

    def has(self, name: str) -> bool:
        """All but copies of the target's."""
        return name not in ("embed_tokens.weight", "lm_head.weight")


def host_of_toy(target: Decoder) -> Host:
    """What a drafter may share of a toy."""
    return Host(target.config, target.ends, target.norm)


def toy_fields(method: str, target: Decoder, **changes: Any) -> dict[str, Any]:
    """A configuration in the layout that the method's authors publish."""
    config = target.config
    own = {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_target_layers": len(config.blocks),
        "mask_token_id": config.vocab_size - 1,
        "target_layer_ids": [0, -1],
    }
    return {**TOY_BLOCK, **own, **OF_METHOD[method], **changes}


def toy_block(
    method: str,
    target: Decoder,
    seed: int = 0,
    weights: WeightType = WeightType.FLOAT32,
    **changes: Any,
) -> Any:
    """The random part of a drafter named ``method``, read through its layout."""
    raw = toy_fields(method, target, **changes)
    layout = next(x for x in LAYOUTS if x.fits(raw, frozenset()))
    return layout.build(raw, Builder(OwnTensors(seed), weights), host_of_toy(target))


def know_bigrams(part: DSpark, texts: Sequence[Sequence[int]]) -> DSpark:
    """The same drafter with a Markov head that has counted these texts' pairs.

    ``part`` must have a vanilla head as wide as the vocabulary.
    """
    vocab = part.backbone.vocab_size
    assert part.markov is not None and part.markov.rank == vocab
    counts = np.zeros((vocab, vocab), np.float32)
    for text in texts:
        np.add.at(counts, (list(text[1:]), list(text[:-1])), 8.0)
    return part.replace(
        markov=part.markov.replace(
            w1=jnp.eye(vocab, dtype=part.markov.w1.dtype),
            w2=part.markov.w2.replace(weight=jnp.asarray(counts)),
        )
    )
