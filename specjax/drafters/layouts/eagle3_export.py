"""EAGLE-3's heads, back to their published names and fields."""

from __future__ import annotations

from typing import Any

import numpy as np

from specjax.drafters.eagle.eagle3 import Eagle3Head, Recycled
from specjax.drafters.layouts.eagle_fields import (
    body_tensors,
    embedding_tensors,
    linear_tensors,
    norm_tensors,
    transformer_fields,
)
from specjax.drafters.layouts.layout import Export

IDS = "eagle_aux_hidden_state_layer_ids"


def export(first: str, nested: bool, part: Eagle3Head) -> Export:
    """Files whose first block is called ``first``; ``nested`` as speculators has it."""
    mlp = part.first.feedforward.body.config
    llama = {
        **transformer_fields(
            part.first.mixer,
            1 + len(part.others),
            mlp.size,
            part.hidden_size,
            part.norm.eps,
        ),
        "mlp_bias": mlp.bias,
        "max_position_embeddings": part.max_positions,
        "vocab_size": part.vocab_size,
    }
    taps = len(part.taps)
    own: dict[str, Any] = {
        "draft_vocab_size": part.ends.head.out_features,
        "target_hidden_size": part.fc.weight.shape[1] // taps,
        "fc_norm": part.tap_norms is not None,
        "norm_before_fc": part.fused_norm is not None,
        "norm_before_residual": part.first.residual_normed,
        "norm_output": part.recycled is Recycled.BEHIND_NORM,
        "recycled_hidden": part.recycled.value,
        IDS: list(part.taps),
    }
    if nested:
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": llama,
            **own,
        }
    else:
        config = {"architectures": ["LlamaForCausalLMEagle3"], **llama, **own}
    return Export(config, tensors(first, part))


def tensors(first: str, part: Eagle3Head) -> dict[str, np.ndarray]:
    """By name; an embedding that is the target's is left out."""
    block = part.first
    found = {
        **embedding_tensors(part),
        **linear_tensors("lm_head", part.ends.head),
        **linear_tensors("fc", part.fc),
        **norm_tensors("norm", part.norm),
        **norm_tensors(f"{first}.input_layernorm", block.token_norm),
        **norm_tensors(f"{first}.hidden_norm", block.hidden_norm),
        **body_tensors(first, block.mixer, block.feedforward),
    }
    for i, other in enumerate(part.others, start=1):
        assert other.mixer is not None and other.feedforward is not None
        found |= body_tensors(f"layers.{i}", other.mixer.body, other.feedforward)
        found |= norm_tensors(f"layers.{i}.input_layernorm", other.mixer.norm)
    for i, norm in enumerate(part.tap_norms or ()):
        found |= norm_tensors(f"fc_norm.{i}", norm)
    if part.fused_norm is not None:
        found |= norm_tensors("input_norm", part.fused_norm)
    if part.vocabulary is not None:
        ids = np.asarray(part.vocabulary.ids, np.int64)
        mapped = np.zeros(part.vocab_size, bool)
        mapped[ids] = True
        found |= {"d2t": ids - np.arange(len(ids)), "t2d": mapped}
    return found
