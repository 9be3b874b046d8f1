"""Latent attention and its indexer, in the layout that several families share."""

from __future__ import annotations

from typing import Any

import numpy as np

from specjax.models.axes import EMBED, HEADS
from specjax.models.build import Builder
from specjax.models.config import LatentAttentionConfig
from specjax.models.families.parts import reordered
from specjax.models.families.ropes import interleaved_rows
from specjax.models.mixers.indexer import Indexer
from specjax.models.mixers.latent_attention import LatentAttention, QueryLatent
from specjax.models.norms import LayerNorm


def latent_attention(
    name: str,
    hidden: int,
    config: LatentAttentionConfig,
    make: Builder,
) -> LatentAttention:
    """DeepSeek's names."""
    heads, latent, turning = config.num_heads, config.latent_dim, config.rotary_dim
    size = config.content_dim + turning
    rank = config.query_rank

    def rows(count: int, width: int, start: int) -> list[int]:
        if not config.rotary_pairs:
            return list(range(count * width))
        return interleaved_rows(count, width, start, turning)

    query = None
    if rank is not None:
        query = QueryLatent(
            down=make.linear(
                f"{name}.q_a_proj", rank, hidden, bias=config.bias, axes=("rank", EMBED)
            ),
            norm=make.norm(f"{name}.q_a_layernorm", rank, config.latent_eps),
        )
    both = config.content_dim + config.value_dim
    kv = make.read(f"{name}.kv_b_proj.weight", heads * both, latent)
    kv = np.asarray(kv).reshape(heads, both, latent)
    return LatentAttention(
        config=config,
        query_latent=query,
        q=reordered(
            make,
            f"{name}.q_proj" if rank is None else f"{name}.q_b_proj",
            heads * size,
            hidden if rank is None else rank,
            rows(heads, size, config.content_dim),
            bias=False,
            axes=(HEADS, EMBED if rank is None else "rank"),
        ),
        latent=reordered(
            make,
            f"{name}.kv_a_proj_with_mqa",
            latent + turning,
            hidden,
            rows(1, latent + turning, latent),
            bias=config.bias,
            axes=("latent", EMBED),
        ),
        latent_norm=make.norm(f"{name}.kv_a_layernorm", latent, config.latent_eps),
        key_weight=make.dense(kv[:, : config.content_dim].transpose(0, 2, 1)),
        value_weight=make.dense(kv[:, config.content_dim :]),
        out=make.linear(
            f"{name}.o_proj",
            hidden,
            heads * config.value_dim,
            bias=config.bias,
            axes=(EMBED, HEADS),
        ),
        indexer=_indexer(f"{name}.indexer", hidden, config, make),
    )


def _indexer(
    name: str,
    hidden: int,
    config: LatentAttentionConfig,
    make: Builder,
) -> Indexer | None:
    index, rank = config.indexer, config.query_rank
    if index is None:
        return None
    assert rank is not None
    size = index.head_dim

    def rows(heads: int) -> np.ndarray:
        if not config.rotary_pairs:
            return np.arange(heads * size)
        return np.asarray(interleaved_rows(heads, size, 0, config.rotary_dim))

    def part(kind: str) -> Any:
        return make.vector(f"{name}.k_norm.{kind}", size)[rows(1)]

    return Indexer(
        config=index,
        q=reordered(
            make,
            f"{name}.wq_b",
            index.num_heads * size,
            rank,
            rows(index.num_heads),
            bias=False,
            axes=(HEADS, "rank"),
        ),
        k=reordered(
            make, f"{name}.wk", size, hidden, rows(1), bias=False, axes=("index", EMBED)
        ),
        k_norm=LayerNorm(weight=part("weight"), bias=part("bias"), eps=1e-6),
        weights=make.linear(
            f"{name}.weights_proj",
            index.num_heads,
            hidden,
            bias=False,
            axes=(HEADS, EMBED),
        ),
    )
