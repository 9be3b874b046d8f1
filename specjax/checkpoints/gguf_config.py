"""A Hugging Face configuration out of GGUF metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.gguf_header import GGUFHeader
from specjax.checkpoints.gguf_metadata import Metadata
from specjax.checkpoints.tensors import EMBEDDING, HEAD, TensorInfo

_SIZES = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
    "vocab_size",
)
_SLIDING = (
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "rope.freq_base_swa",
)
_LINEAR = ("rope.scaling.type", "rope.scaling.factor")

# What the converter makes of a Llama 3 rope_scaling, all released files alike.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

GEMMA_27B_LAYERS = 62
"""Of the one Gemma 3 whose queries are not scaled by the size of a head: the file does
not say how they are, and llama.cpp knows it by its number of layers."""

Infos = Mapping[str, TensorInfo]


def hugging_face_config(
    header: GGUFHeader, infos: Infos, rope_factors: np.ndarray | None
) -> dict[str, Any]:
    """The configuration that the original checkpoint would have had.

    ``infos`` are the tensors under their Hugging Face names, ``rope_factors`` the
    contents of ``rope_freqs.weight``: ``[head_dim / 2]`` divisors of the frequencies.

    Raises ``CheckpointError`` naming the key that is missing, contradicts the tensors
    or is not implemented.
    """
    config = _CONFIGS[header.metadata["general.architecture"]](
        header, infos, rope_factors
    )
    ids = {
        f"{kind}_token_id": header.metadata.get(f"tokenizer.ggml.{kind}_token_id")
        for kind in ("bos", "eos")
    }
    return config | {name: value for name, value in ids.items() if value is not None}


def _llama(
    header: GGUFHeader, infos: Infos, factors: np.ndarray | None
) -> dict[str, Any]:
    config = _plain(Metadata(header, _SIZES), infos, factors)
    return config | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": _biased(infos),
        "mlp_bias": "model.layers.0.mlp.down_proj.bias" in infos,
    }


def _qwen2(
    header: GGUFHeader, infos: Infos, factors: np.ndarray | None
) -> dict[str, Any]:
    fields = Metadata(header, _SIZES)
    config = _plain(fields, infos, factors)
    size, heads = config.pop("head_dim"), config["num_attention_heads"]
    if size * heads != config["hidden_size"]:
        raise fields.error("attention.key_length", "not implemented in this family")
    return config | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": False,
    }


def _qwen3(
    header: GGUFHeader, infos: Infos, factors: np.ndarray | None
) -> dict[str, Any]:
    config = _plain(Metadata(header, _SIZES), infos, factors)
    return config | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "use_sliding_window": False,
        "attention_bias": _biased(infos),
    }


def _gemma3(
    header: GGUFHeader, infos: Infos, factors: np.ndarray | None
) -> dict[str, Any]:
    """The head is tied; what the file leaves out is what all of the family have."""
    capped = "final_logit_softcapping"
    fields = Metadata(header, (*_SIZES, *_SLIDING, *_LINEAR, capped))
    if factors is not None:
        raise _unknown_factors(fields, "none is known in this architecture")
    config = _sizes(fields, infos)
    layers, size = config["num_hidden_layers"], config["head_dim"]
    scalar = size
    if layers == GEMMA_27B_LAYERS:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    return (
        config
        | {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": scalar,
            "sliding_window": fields.integer("attention.sliding_window"),
            "rope_theta": fields.number("rope.freq_base", 1e6),
            "rope_local_base_freq": fields.number("rope.freq_base_swa", 1e4),
            "rope_scaling": _linear(fields),
            "final_logit_softcapping": fields.number(capped)
            if fields.has(capped)
            else None,
        }
        | _pattern(fields, layers)
    )


def _pattern(fields: Metadata, layers: int) -> dict[str, Any]:
    """Which layers slide: all but every sixth, or what the file says."""
    key = "attention.sliding_window_pattern"
    if not fields.is_list(key):
        return {"sliding_window_pattern": fields.integer(key, 6)}
    kinds = {True: "sliding_attention", False: "full_attention"}
    return {"layer_types": [kinds[flag] for flag in fields.flags(key, layers)]}


def _linear(fields: Metadata) -> dict[str, Any] | None:
    """The scaling of the layers that see everything."""
    kind, factor = _LINEAR
    if not fields.has(kind) and not fields.has(factor):
        return None
    if fields.choice(kind, ("none", "linear")) == "none":
        return None
    return {"rope_type": "linear", "factor": fields.number(factor)}


def _sizes(fields: Metadata, infos: Infos) -> dict[str, Any]:
    """What every architecture has."""
    hidden = fields.integer("embedding_length")
    heads = fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            raise fields.error(key, f"not implemented where it is not {head_dim}")
    return {
        "vocab_size": _vocab_size(fields, infos),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
    }


def _plain(
    fields: Metadata, infos: Infos, factors: np.ndarray | None
) -> dict[str, Any]:
    """Of those that are built like Llama."""
    sizes = _sizes(fields, infos)
    theta = fields.number("rope.freq_base", 10000.0)
    return sizes | {
        "hidden_act": "silu",
        "rope_theta": theta,
        "rope_scaling": _scaling(fields, factors, theta, sizes["head_dim"]),
        "tie_word_embeddings": HEAD not in infos,
    }


def _biased(infos: Infos) -> bool:
    return "model.layers.0.self_attn.q_proj.bias" in infos


def _vocab_size(fields: Metadata, infos: Infos) -> int:
    if EMBEDDING not in infos:
        raise fields.error("vocab_size", "the file has no tensor 'token_embd.weight'")
    rows = infos[EMBEDDING].shape[0]
    if fields.integer("vocab_size", rows) != rows:
        raise fields.error("vocab_size", f"'token_embd.weight' has {rows} rows")
    return rows


def _scaling(
    fields: Metadata, factors: np.ndarray | None, theta: float, head_dim: int
) -> dict[str, Any] | None:
    """The ``rope_scaling`` whose divisors the file holds.

    The file keeps the divisors and not the settings that they came from, so the
    settings of the Llama 3 releases are tried, and taken only if they give the same.
    """
    if factors is None or np.all(factors == 1.0):
        return None
    scaling = {"rope_type": "llama3", "factor": float(factors.max()), **_LLAMA3}
    wanted = _llama3_divisors(scaling, theta, head_dim)
    if factors.shape != wanted.shape or not np.allclose(factors, wanted, rtol=1e-4):
        raise _unknown_factors(
            fields, f"they are not those of a llama3 rope_scaling ({scaling})"
        )
    return scaling


def _unknown_factors(fields: Metadata, why: str) -> CheckpointError:
    return CheckpointError(
        f"{fields.path}: tensor 'rope_freqs.weight' holds divisors that are not "
        f"implemented: {why}; use the safetensors checkpoint"
    )


def _llama3_divisors(
    scaling: Mapping[str, Any], theta: float, head_dim: int
) -> np.ndarray:
    """``[head_dim / 2]`` divisors, worked out as the converter of GGUF files does."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    length, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    smooth = np.clip((length / wavelengths - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


_CONFIGS: dict[str, Callable[[GGUFHeader, Infos, np.ndarray | None], dict[str, Any]]]
_CONFIGS = {"llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3, "gemma3": _gemma3}
