"""Configurations with the fields that released checkpoints carry, and what they mean.

``tests/data/configs`` holds them: names and sizes are those of the models' public
``config.json`` as far as they are known, ids of special tokens and versions are not.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specjax.checkpoints.load import decoder_config
from specjax.models.config import AttentionConfig, DecoderConfig, MoEConfig
from specjax.models.rope import LinearScaling, Llama3Scaling, YarnScaling

CONFIGS = Path(__file__).parent.parent / "data" / "configs"


def read(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def parse(raw: dict[str, Any]) -> DecoderConfig:
    return decoder_config(raw, Path("config.json"))[1]


def layers(config: DecoderConfig) -> Counter[str]:
    """How many layers of each kind of mixer and feed-forward."""
    kinds: Counter[str] = Counter()
    for block in config.blocks:
        for part in (block.mixer, block.feedforward):
            name = "nothing" if part is None else type(part).__name__[: -len("Config")]
            if isinstance(part, AttentionConfig) and part.reach is not None:
                name = "Sliding"
            kinds[name] += part is not None
    return +kinds


LAYERS = {
    "llama-3.2-1b": {"Attention": 16, "GatedMLP": 16},
    "smollm2-135m": {"Attention": 30, "GatedMLP": 30},
    "qwen2.5-7b": {"Attention": 28, "GatedMLP": 28},
    "qwen3-4b": {"Attention": 36, "GatedMLP": 36},
    "qwen3-30b-a3b": {"Attention": 48, "MoE": 48},
    "qwen3-next-80b-a3b": {"GatedDelta": 36, "Attention": 12, "MoE": 48},
    "qwen3.5-27b": {"GatedDelta": 48, "Attention": 16, "GatedMLP": 64},
    "qwen3.5-35b-a3b": {"GatedDelta": 30, "Attention": 10, "MoE": 40},
    "kimi-linear-48b-a3b": {
        "GatedDelta": 20,
        "LatentAttention": 7,
        "GatedMLP": 1,
        "MoE": 26,
    },
    "deepseek-v3": {"LatentAttention": 61, "GatedMLP": 3, "MoE": 58},
    "glm-4-9b-0414": {"Attention": 40, "GatedMLP": 40},
    "glm-4.5-air": {"Attention": 46, "GatedMLP": 1, "MoE": 45},
    "glm-4.7-flash": {"LatentAttention": 47, "GatedMLP": 1, "MoE": 46},
    "glm-5.2": {"LatentAttention": 78, "GatedMLP": 3, "MoE": 75},
    "nemotron-nano-9b-v2": {"Mamba2": 27, "Attention": 4, "PlainMLP": 25},
    "nemotron-3-nano-30b-a3b": {"Mamba2": 23, "Attention": 6, "MoE": 23},
    "lfm2-1.2b": {"ShortConv": 10, "Attention": 6, "GatedMLP": 16},
    "lfm2.5-1.2b": {"ShortConv": 10, "Attention": 6, "GatedMLP": 16},
    "lfm2-8b-a1b": {"ShortConv": 18, "Attention": 6, "GatedMLP": 2, "MoE": 22},
    "gpt-oss-20b": {"Sliding": 12, "Attention": 12, "MoE": 24},
    "gemma-3-1b": {"Sliding": 22, "Attention": 4, "GatedMLP": 26},
    "gemma-3-4b": {"Sliding": 29, "Attention": 5, "GatedMLP": 34},
    "gemma-3-27b": {"Sliding": 52, "Attention": 10, "GatedMLP": 62},
}


def test_every_configuration_is_expected_to_be_something():
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(LAYERS)


@pytest.mark.parametrize("name", LAYERS)
def test_the_layers_of_released_models(name):
    assert layers(parse(read(name))) == LAYERS[name]


@pytest.mark.parametrize("name", LAYERS)
def test_a_field_that_nobody_knows_is_refused_by_name(name):
    for holder in ("", "text_config"):
        raw = read(name)
        if holder and holder not in raw:
            continue
        (raw[holder] if holder else raw)["unheard_of"] = 1
        with pytest.raises(ValueError, match=r"'unheard_of'.*not implemented"):
            parse(raw)


# name: heads, heads of keys, size of a head, the base of its turning, what turns
HEADS = {
    "llama-3.2-1b": (32, 8, 64, 5e5, 64),
    "smollm2-135m": (9, 3, 64, 1e5, 64),
    "qwen2.5-7b": (28, 4, 128, 1e6, 128),
    "qwen3-30b-a3b": (32, 4, 128, 1e6, 128),
    "qwen3-next-80b-a3b": (16, 2, 256, 1e7, 64),
    "qwen3.5-27b": (24, 4, 256, 1e7, 64),
    "glm-4-9b-0414": (32, 2, 128, 1e4, 64),
    "glm-4.5-air": (96, 8, 128, 1e6, 64),
    "lfm2-8b-a1b": (32, 8, 64, 1e6, 64),
    "gpt-oss-20b": (64, 8, 64, 150000, 64),
    "gemma-3-1b": (4, 1, 256, 1e6, 256),
    "gemma-3-4b": (8, 4, 256, 1e6, 256),
    "gemma-3-27b": (32, 16, 128, 1e6, 128),
}


@pytest.mark.parametrize("name", HEADS)
def test_the_heads_that_attend_to_all(name):
    mixers = [block.mixer for block in parse(read(name)).blocks]
    full = next(m for m in mixers if isinstance(m, AttentionConfig) and m.reach is None)
    assert full.rope is not None
    told = (full.num_heads, full.num_kv_heads, full.head_dim)
    assert (*told, full.rope.theta, full.rope.dims) == HEADS[name]


# name: experts, chosen, size of one, of the shared one, kind, normalised, scaled
EXPERTS = {
    "qwen3-30b-a3b": (128, 8, 768, None, "softmax", True, 1.0),
    "qwen3-next-80b-a3b": (512, 10, 512, 512, "softmax", True, 1.0),
    "qwen3.5-35b-a3b": (256, 8, 512, 512, "softmax", True, 1.0),
    "kimi-linear-48b-a3b": (256, 8, 1024, 1024, "sigmoid", True, 2.446),
    "deepseek-v3": (256, 8, 2048, 2048, "sigmoid", True, 2.5),
    "glm-4.5-air": (128, 8, 1408, 1408, "sigmoid", True, 1.0),
    "glm-4.7-flash": (64, 4, 1536, 1536, "sigmoid", True, 1.8),
    "glm-5.2": (256, 8, 2048, 2048, "sigmoid", True, 2.5),
    "nemotron-3-nano-30b-a3b": (128, 6, 1856, 3712, "sigmoid", True, 2.5),
    "lfm2-8b-a1b": (32, 4, 1792, None, "sigmoid", True, 1.0),
    "gpt-oss-20b": (32, 4, 2880, None, "chosen", False, 1.0),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_the_experts(name):
    bodies = [block.feedforward for block in parse(read(name)).blocks]
    mixture = next(b for b in bodies if isinstance(b, MoEConfig))
    router, shared = mixture.router, mixture.shared and mixture.shared.size
    told = (mixture.num_experts, router.top_k, mixture.size, shared)
    assert (*told, router.kind, router.normalize, router.scale) == EXPERTS[name]


def test_rope_scaling():
    def scaling(name: str):
        return parse(read(name)).blocks[-1].mixer.rope.scaling

    assert scaling("llama-3.2-1b") == Llama3Scaling(32.0, 1.0, 4.0, 8192)
    assert scaling("qwen3.5-27b") is None
    # cosines and sines stay, and the scores grow instead
    assert scaling("deepseek-v3") == YarnScaling(40.0, 4096, attention_factor=1.0)
    latent = parse(read("deepseek-v3")).blocks[0].mixer
    assert latent.scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)
    assert scaling("gpt-oss-20b") == YarnScaling(
        32.0, 4096, truncate=False, attention_factor=1.3465735902799727
    )
    near, full = (parse(read("gemma-3-4b")).blocks[i].mixer for i in (0, 5))
    assert (near.rope.theta, near.rope.scaling) == (1e4, None)
    assert (full.rope.theta, full.rope.scaling) == (1e6, LinearScaling(8.0))


def test_what_else_is_said():
    configs = {name: parse(read(name)) for name in LAYERS}
    tied = {name for name, config in configs.items() if config.tied}
    assert tied == {
        *("llama-3.2-1b", "smollm2-135m", "qwen3-4b"),
        *("lfm2-1.2b", "lfm2.5-1.2b", "lfm2-8b-a1b"),
        *("gemma-3-1b", "gemma-3-4b", "gemma-3-27b"),
    }
    ahead = {name for name, config in configs.items() if config.heads_ahead}
    assert ahead == {
        *("qwen3-next-80b-a3b", "qwen3.5-27b", "qwen3.5-35b-a3b", "deepseek-v3"),
        *("glm-4.5-air", "glm-4.7-flash", "glm-5.2"),
    }
    assert configs["lfm2-1.2b"].blocks[0].feedforward.size == 8192
    assert configs["gemma-3-27b"].blocks[0].mixer.scale == 168**-0.5
    assert configs["gemma-3-4b"].vocab_size == 262_208
    choosing = [block.mixer.indexer is not None for block in configs["glm-5.2"].blocks]
    assert [i for i, own in enumerate(choosing) if own] == [0, 1, 2, *range(6, 78, 4)]
