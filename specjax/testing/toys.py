"""Tiny random targets for tests: a Llama, and a hybrid with recurrent blocks.

Their parameters are named tensors in a Hugging Face layout, so that the independent
reference (``specjax.testing.reference``) reads the same numbers without this code.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import numpy as np

from specjax.models.build import Builder, WeightType
from specjax.models.config import AttentionConfig, DecoderConfig, GatedDeltaConfig
from specjax.models.decoder import Decoder
from specjax.models.families import llama, parts
from specjax.models.families.fields import Fields
from specjax.models.families.qwen_hybrid import gated_delta

TOY_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    # random tied embeddings answer each token with itself, which hides most mistakes
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
}

TOY_HYBRID: dict[str, Any] = TOY_LLAMA | {
    "model_type": "toy_hybrid",
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}


@dataclasses.dataclass(frozen=True)
class Toy:
    """A random target, and the configuration and tensors it was built from."""

    decoder: Decoder
    config: dict[str, Any]
    tensors: dict[str, np.ndarray]


_ELSEWHERE = (
    "qkvz.weight",
    "experts.gate_up_proj",
    "block_sparse_moe.gate_proj.weight",
)
"""Endings of names of which some layouts have others."""


class RandomReader:
    """Makes every tensor that is asked for, from the seed and the tensor's name."""

    def __init__(self, seed: int, scale: float = 1.0) -> None:
        self.tensors: dict[str, np.ndarray] = {}
        self._seed = seed
        self._scale = scale

    def has(self, name: str) -> bool:
        """Whatever is asked for is there, but for names of another layout."""
        return not name.endswith(_ELSEWHERE)

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A tensor whose gains, gates and projections have the size real ones have."""
        generator = np.random.default_rng([self._seed, zlib.crc32(name.encode())])
        normal = generator.standard_normal(shape)
        if "norm" in name:
            tensor = 1.0 + 0.2 * normal
        elif name.endswith(("A_log", "dt_bias")):
            tensor = 0.5 * normal
        elif name.endswith("embed_tokens.weight"):
            tensor = self._scale * normal
        else:
            tensor = self._scale * normal / np.sqrt(shape[-1])
        self.tensors[name] = tensor.astype(np.float32)
        return self.tensors[name]


def toy_llama(
    seed: int = 0, weights: WeightType = WeightType.FLOAT32, **changes: Any
) -> Toy:
    """A two-block Llama with grouped-query attention."""
    raw = TOY_LLAMA | changes
    reader = RandomReader(seed)
    decoder = llama.build(llama.config(raw), Builder(reader, weights))
    return Toy(decoder, raw, reader.tensors)


def toy_hybrid(
    seed: int = 0, weights: WeightType = WeightType.FLOAT32, **changes: Any
) -> Toy:
    """Gated delta net, attention, gated delta net; an output head of its own."""
    raw = TOY_HYBRID | changes
    reader = RandomReader(seed)
    decoder = _build_hybrid(_hybrid_config(raw), Builder(reader, weights))
    return Toy(decoder, raw, reader.tensors)


def _hybrid_config(raw: dict[str, Any]) -> DecoderConfig:
    own = {"layer_types"} | {name for name in raw if name.startswith("linear_")}
    base = llama.config({name: raw[name] for name in raw if name not in own})
    fields = Fields(raw, "toy_hybrid")
    delta = GatedDeltaConfig(
        num_key_heads=fields.integer("linear_num_key_heads"),
        num_value_heads=fields.integer("linear_num_value_heads"),
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
        conv_width=fields.integer("linear_conv_kernel_dim"),
        norm_eps=base.norm_eps,
    )
    blocks = tuple(
        dataclasses.replace(block, mixer=delta) if kind == "linear_attention" else block
        for block, kind in zip(base.blocks, raw["layer_types"], strict=True)
    )
    return dataclasses.replace(base, family="toy_hybrid", blocks=blocks)


def _build_hybrid(config: DecoderConfig, make: Builder) -> Decoder:
    """The llama layout with Qwen3.5's ``linear_attn.*`` in the recurrent blocks, and
    norms centred at one.
    """
    hidden = config.hidden_size
    blocks = []
    for i, block in enumerate(config.blocks):
        name = f"model.layers.{i}"
        if isinstance(block.mixer, GatedDeltaConfig):
            mixer = gated_delta(f"{name}.linear_attn", hidden, block.mixer, make)
        else:
            assert isinstance(block.mixer, AttentionConfig)
            mixer = parts.attention(f"{name}.self_attn", hidden, block.mixer, make)
        body = parts.feedforward(f"{name}.mlp", hidden, block.feedforward, make)
        blocks.append(parts.pre_norm_block(config, name, mixer, body, make))
    return parts.assemble(config, tuple(blocks), make)
