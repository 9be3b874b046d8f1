"""Logical axis names of parameters and state, which sharding rules map to a mesh."""

from __future__ import annotations

Axes = tuple[str, ...]

EMBED = "embed"  # the residual stream
VOCAB = "vocab"
HEADS = "heads"  # query heads times their size
KV_HEADS = "kv_heads"
MLP = "mlp"
EXPERT = "expert"
LATENT = "latent"  # a projection that experts, or keys and values, stand on
BATCH = "batch"
TIME = "time"
HEAD_DIM = "head_dim"
