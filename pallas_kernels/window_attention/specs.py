"""Attention of real models, as their published configurations have it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One layer's heads and options."""

    q_heads: int
    kv_heads: int
    dim: int
    reach: int | None = None
    """Of a sliding window, whose cache is a ring of as many slots."""
    sinks: bool = False
    softcap: float | None = None
    latent: bool = False
    """Keys are the values too: multi-head latent attention, absorbed."""


MODELS = {
    "llama-3-8b": AttentionSpec(q_heads=32, kv_heads=8, dim=128),
    "llama-3.2-1b": AttentionSpec(q_heads=32, kv_heads=8, dim=64),
    "qwen3-4b": AttentionSpec(q_heads=32, kv_heads=8, dim=128),
    "qwen3.5-27b": AttentionSpec(q_heads=24, kv_heads=4, dim=256),
    "phi-2": AttentionSpec(q_heads=32, kv_heads=32, dim=80),
    "phi-3-mini": AttentionSpec(q_heads=32, kv_heads=32, dim=96),
    "gemma-2-2b": AttentionSpec(q_heads=8, kv_heads=4, dim=256, softcap=50.0),
    "gpt-oss-20b": AttentionSpec(q_heads=64, kv_heads=8, dim=64, sinks=True),
    "gpt-oss-20b-local": AttentionSpec(
        q_heads=64, kv_heads=8, dim=64, sinks=True, reach=128
    ),
    "falcon-7b": AttentionSpec(q_heads=71, kv_heads=1, dim=64),
    "deepseek-v3": AttentionSpec(q_heads=128, kv_heads=1, dim=576, latent=True),
}
