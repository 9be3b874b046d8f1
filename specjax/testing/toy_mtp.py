"""Tiny random MTP modules for the toys."""

from __future__ import annotations

from specjax.drafters.mtp import MTPHead
from specjax.models.build import Builder, WeightType
from specjax.models.families.ahead import mtp_module
from specjax.models.families.llama import build_block
from specjax.testing.toys import RandomReader, Toy


def toy_mtp(toy: Toy, modules: int = 1, *, seed: int = 1) -> tuple[MTPHead, ...]:
    """Heads of one Llama block each, between the toy's own two ends."""
    config, ends = toy.decoder.config, toy.decoder.ends
    make = Builder(RandomReader(seed), WeightType.FLOAT32)
    # of a hybrid toy, the attention that it has somewhere
    (block,) = {b for b in config.blocks if hasattr(b.mixer, "num_kv_heads")}

    def head(name: str) -> MTPHead:
        module = mtp_module(
            config,
            (build_block(config, name, block, make),),
            make,
            norms=(f"{name}.enorm", f"{name}.hnorm", f"{name}.shared_head.norm"),
            join=f"{name}.eh_proj",
        )
        return MTPHead(ends=ends, module=module)

    return tuple(head(f"mtp.{i}") for i in range(modules))
