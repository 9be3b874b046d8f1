"""How a call of a gated delta window is cut for a Hopper GPU, and which it takes.

A block of threads has 64 value channels of one head: a part of its matrix that nothing
but these channels of updates and outputs has to do with. All of it stays in registers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from pallas_kernels import hopper
from pallas_kernels.delta_window.calls import Sizes, Window, refused_dtypes, sizes_of
from pallas_kernels.delta_window.reference import Records

TILE = 64
"""Value channels of a block of threads."""

DIMS = (64, 128)
"""Sizes of a head, of keys and of values."""

GROUP = 8
"""Window rows as columns of registers are made up to a multiple of these."""

LINE = 32
"""Numbers of 4 bytes in 128 bytes: a copy is a multiple of these."""


ALIGNED = 1024
"""Bytes of shared memory: an array begins at a multiple of these."""

RESERVED = 2048
"""Bytes of shared memory for barriers and for sums over threads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Sizes):
    """One call of the kernel. The grid is tiles of heads of batch rows."""

    record_bytes: int = 4
    """Of a past row's number."""

    @property
    def tiles(self) -> int:
        """Of one head."""
        return self.value_dim // TILE

    @property
    def blocks(self) -> int:
        """Of threads."""
        return self.batch * self.heads * self.tiles

    @property
    def columns(self) -> int:
        """The window's rows, made up to whole groups."""
        return -(-self.rows // GROUP) * GROUP

    @property
    def power_row(self) -> int:
        """Of ``weights``: behind what is taken of updates, by updates and outputs."""
        return (1 + self.delta) * self.columns

    @property
    def weights(self) -> tuple[int, int]:
        """Of a head: see ``gpu_body.Inputs``."""
        return self.power_row + GROUP, self.columns

    @property
    def slots(self) -> int:
        """Past rows, made up to a whole copy."""
        return -(-self.past // LINE) * LINE

    @property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """Sizes of the arrays in shared memory, as ``gpu_body.Scratch`` names them."""
        found: dict[str, tuple[int, ...]] = {}
        if self.past:
            keys = (self.past, self.key_dim)
            found["order"] = (self.slots,)
            found["past_power"] = keys if self.channel_decay else (self.slots,)
            found["past_k"], found["past_u"] = keys, (self.past, TILE)
        if self.rows:
            keys = (self.rows, self.key_dim)
            found["q"], found["v"] = keys, (self.rows, TILE)
            found["weights"] = self.weights
            if self.delta:
                found["k"] = keys
            if self.channel_decay:
                found["power"] = keys
        return found

    @property
    def shared_bytes(self) -> int:
        """Of shared memory, with what is left between arrays."""
        narrow = {"past_k": self.record_bytes, "past_u": self.record_bytes}
        sizes = [
            narrow.get(name, 4) * math.prod(shape)
            for name, shape in self.shared.items()
        ]
        return sum(-(-size // ALIGNED) * ALIGNED for size in sizes) + RESERVED

    def refusal(self) -> str | None:
        """Why there is no kernel for this call, or ``None``."""
        told = self.too_many_rows()
        if told is not None:
            return told
        if self.key_dim not in DIMS or self.value_dim not in DIMS:
            known = " and ".join(map(str, DIMS))
            return (
                f"heads of {self.key_dim} by {self.value_dim}: sizes of {known} are "
                "known"
            )
        if self.shared_bytes > hopper.SHARED_BYTES:
            return (
                f"{self.rows} rows behind {self.past}: {self.shared_bytes} bytes of "
                f"shared memory, of {hopper.SHARED_BYTES}"
            )
        return None


def plan_of(
    state: Any, window: Window | None, past: Records | None, *, writes: bool = False
) -> Plan:
    """Of a call with these arrays."""
    width = 4 if past is None else past.k.dtype.itemsize
    sizes = sizes_of(state, window, past)
    return Plan(**sizes, writes=writes, record_bytes=width)


def refusal(
    state: Any, window: Window | None, past: Records | None, *, writes: bool = False
) -> str | None:
    """Why the kernel for Hopper does not take these arrays; ``None``: it does."""
    elsewhere = hopper.absent()
    if elsewhere is not None:
        return elsewhere
    if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        return "64-bit types are enabled"
    told = refused_dtypes(state, window, past)
    return told or plan_of(state, window, past, writes=writes).refusal()
