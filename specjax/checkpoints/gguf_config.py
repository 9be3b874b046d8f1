"""A Hugging Face configuration out of GGUF metadata (arch ``llama``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.gguf_header import GGUFHeader
from specjax.checkpoints.tensors import EMBEDDING, HEAD, TensorInfo

# Every key is either used below or listed here as harmless: one that is neither may
# change the maths, and is refused by name.
_USED = {
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
}
_HARMLESS = {"tensor_data_layout", "rope.scaling.finetuned"}
# Refused unless they say nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (1.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scale_linear": (1.0,),
    "use_parallel_residual": (True,),  # read by no llama graph
}

# What the converter makes of a Llama 3 rope_scaling, all released files alike.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama_config(
    header: GGUFHeader,
    infos: Mapping[str, TensorInfo],
    rope_factors: np.ndarray | None,
) -> dict[str, Any]:
    """The configuration that the original checkpoint would have had.

    ``infos`` are the tensors under their Hugging Face names, ``rope_factors`` the
    contents of ``rope_freqs.weight``: ``[head_dim / 2]`` divisors of the frequencies.

    Raises ``CheckpointError`` naming the key that is missing, contradicts the tensors
    or is not implemented.
    """
    fields = _Metadata(header)
    fields.refuse_unknown()
    hidden = fields.integer("embedding_length")
    heads = fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            raise fields.error(key, f"not implemented where it is not {head_dim}")
    theta = fields.number("rope.freq_base", 10000.0)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": _vocab_size(fields, infos),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _scaling(fields, rope_factors, theta, head_dim),
        "tie_word_embeddings": HEAD not in infos,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in infos,
        "mlp_bias": "model.layers.0.mlp.down_proj.bias" in infos,
    }
    ids = {
        f"{kind}_token_id": header.metadata.get(f"tokenizer.ggml.{kind}_token_id")
        for kind in ("bos", "eos")
    }
    return config | {name: value for name, value in ids.items() if value is not None}


class _Metadata:
    """The ``llama.*`` keys, each use checked."""

    def __init__(self, header: GGUFHeader) -> None:
        self._path = header.path
        self._values = {
            key.removeprefix("llama."): value
            for key, value in header.metadata.items()
            if key.startswith("llama.")
        }

    def error(self, key: str, problem: str) -> CheckpointError:
        value = self._values.get(key)
        return CheckpointError(
            f"{self._path}: metadata key 'llama.{key}' is {value!r}: {problem}; use "
            "the safetensors checkpoint"
        )

    def refuse_unknown(self) -> None:
        for key, value in self._values.items():
            if key in _NEUTRAL and value not in _NEUTRAL[key]:
                raise self.error(key, f"not implemented (only {_NEUTRAL[key][0]!r} is)")
            if key not in _USED | _HARMLESS | set(_NEUTRAL):
                raise self.error(key, "this key is not known and may change the maths")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._values.get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, "one positive integer is needed")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._values.get(key, default)
        if not isinstance(value, float) or not value > 0:
            raise self.error(key, "a positive number is needed")
        # The file holds float32: give back the short decimal that its author wrote.
        return float(str(np.float32(value)))


def _vocab_size(fields: _Metadata, infos: Mapping[str, TensorInfo]) -> int:
    if EMBEDDING not in infos:
        raise fields.error("vocab_size", "the file has no tensor 'token_embd.weight'")
    rows = infos[EMBEDDING].shape[0]
    if fields.integer("vocab_size", rows) != rows:
        raise fields.error("vocab_size", f"'token_embd.weight' has {rows} rows")
    return rows


def _scaling(
    fields: _Metadata, factors: np.ndarray | None, theta: float, head_dim: int
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
        raise CheckpointError(
            f"{fields._path}: tensor 'rope_freqs.weight' does not hold the divisors of "
            f"a llama3 rope_scaling ({scaling}), and no other is implemented; use the "
            "safetensors checkpoint"
        )
    return scaling


def _llama3_divisors(
    scaling: Mapping[str, Any], theta: float, head_dim: int
) -> np.ndarray:
    """``[head_dim / 2]`` divisors, worked out as the converter of GGUF files does."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    length, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    smooth = np.clip((length / wavelengths - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)
