"""Layers that predict further tokens: what their layouts have in common."""

from __future__ import annotations

from collections.abc import Callable

from specjax.models.axes import EMBED
from specjax.models.build import Builder
from specjax.models.config import AheadConfig, BlockConfig, DecoderConfig
from specjax.models.mtp import MTPModule
from specjax.models.stack import Block

BuildBlock = Callable[[DecoderConfig, str, BlockConfig, Builder], Block]


def ahead_of(config: DecoderConfig) -> AheadConfig:
    """What each of these layers is made of."""
    assert config.ahead is not None, f"{config.family} predicts one token"
    return config.ahead


def mtp_module(
    config: DecoderConfig,
    blocks: tuple[Block, ...],
    make: Builder,
    *,
    norms: tuple[str, str, str],
    join: str,
    centred: float = 0.0,
) -> MTPModule:
    """A layer from its blocks and the names of what stands around them.

    ``norms`` are those of the embedding, of the hidden state and of the output.
    """
    hidden = config.hidden_size
    embed_norm, hidden_norm, norm = (
        make.norm(name, hidden, config.norm_eps, centred=centred) for name in norms
    )
    return MTPModule(
        embed_norm=embed_norm,
        hidden_norm=hidden_norm,
        join=make.linear(join, hidden, 2 * hidden, bias=False, axes=(EMBED, "joined")),
        blocks=blocks,
        norm=norm,
    )


def numbered_modules(
    config: DecoderConfig, make: Builder, build_block: BuildBlock
) -> tuple[MTPModule, ...]:
    """DeepSeek's names: the layers are numbered on behind the decoder's own.

    They store copies of its embedding and head as well, which nobody reads.
    """
    ahead, first = ahead_of(config), len(config.blocks)
    modules = []
    for i in range(first, first + config.heads_ahead):
        name = f"model.layers.{i}"
        modules.append(
            mtp_module(
                config,
                (build_block(config, name, ahead.blocks[0], make),),
                make,
                norms=(f"{name}.enorm", f"{name}.hnorm", f"{name}.shared_head.norm"),
                join=f"{name}.eh_proj",
            )
        )
    return tuple(modules)
