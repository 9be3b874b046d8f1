"""Weights of real models, for tests and benchmarks: outputs and inputs."""

from __future__ import annotations

MODELS = {
    "llama-3-8b-qkv": (6144, 4096),
    "llama-3-8b-up": (14336, 4096),
    "llama-3-8b-down": (4096, 14336),
    "qwen3-4b-up": (9728, 2560),
    "qwen3-4b-down": (2560, 9728),
    "qwen3.5-27b-up": (17408, 5120),
}
