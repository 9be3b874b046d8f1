"""How a gated delta window is cut into a kernel's steps, and what cannot be."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from pallas_kernels.delta_window.calls import Sizes, Window, sizes_of
from pallas_kernels.delta_window.reference import Records

LANES, SUBLANES = 128, 8

FEWEST_LANES = 64
"""The narrowest head."""

STATE_BYTES = 1 << 20
"""Of the state in one step, about: enough to hide what a step costs by itself."""

_UNROLLED = 128
"""Heads times rows that one step may unroll, where it has a choice."""

_VMEM_BYTES = 12 << 20
"""What all blocks of one step, of which there are two each, may take: v4 has 16 MiB."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Sizes):
    """One call of the kernel."""

    @property
    def flipped(self) -> bool:
        """Whether states are taken as ``[dv, dk]``. XLA puts the longer of two axes
        into the lanes if the other does not fill them, and would copy the state to have
        it otherwise; as it is, to turn it moves nothing."""
        return self.value_dim % LANES != 0 and self.key_dim % LANES == 0

    @property
    def matrix(self) -> tuple[int, int]:
        """Of a head, as the kernel takes it."""
        keys, values = self.key_dim, self.value_dim
        return (values, keys) if self.flipped else (keys, values)

    @property
    def keeps(self) -> bool:
        """Whether the state is advanced for the window alone."""
        return self.past > 0 and self.rows > 0 and not self.writes

    @property
    def words(self) -> int:
        """Of 32 bits, that say which of the past rows count."""
        return -(-self.past // 32)

    @property
    def key_heads_per_step(self) -> int:
        """The largest that fits, or 0: none does."""
        fitting = [n for n in self._splits() if self._fits(n)]
        good = [n for n in fitting if self._is_small(n)]
        return max(good) if good else min(fitting, default=0)

    @property
    def heads_per_step(self) -> int:
        """Of the state."""
        return self.key_heads_per_step * self.share

    @property
    def steps(self) -> int:
        """Along the heads."""
        return self.key_heads // self.key_heads_per_step

    def refusal(self) -> str | None:
        """Why there is no kernel for this call, or ``None``."""
        told = self.too_many_rows()
        if told is not None:
            return told
        size = f"heads of {self.key_dim} by {self.value_dim}"
        if self.key_dim % SUBLANES or self.value_dim % SUBLANES:
            return f"{size}: not multiples of {SUBLANES}"
        if min(self.key_dim, self.value_dim) < FEWEST_LANES:
            return f"{size}: below {FEWEST_LANES}, vectors are mostly empty"
        if self.key_dim % LANES and self.value_dim % LANES:
            return f"{size}: neither fills the lanes, so XLA would copy the state"
        if self.key_dim > 2 * LANES or self.value_dim > 2 * LANES:
            return f"{size}: beyond {2 * LANES}"
        if self.key_heads_per_step == 0:
            return (
                f"{self.heads} {size}, {self.key_heads} key heads: no part of them "
                "makes whole vectors and fits the memory of a core"
            )
        return None

    def _splits(self) -> list[int]:
        """Key heads in one step, such that every block's lanes are whole vectors."""

        def whole(count: int) -> bool:
            keys, values = count * self.key_dim, count * self.share * self.value_dim
            return keys % LANES == 0 and values % LANES == 0

        every = self.key_heads
        counts = [n for n in range(1, every + 1) if every % n == 0]
        return [n for n in counts if n == every or whole(n)]

    def _state_bytes(self, key_heads: int) -> int:
        tall, wide = self.matrix
        return 4 * key_heads * self.share * tall * math.ceil(wide / LANES) * LANES

    def _fits(self, key_heads: int) -> bool:
        rows = SUBLANES * (
            math.ceil(self.rows / SUBLANES) + math.ceil(self.past / SUBLANES)
        )
        keys, heads = key_heads * self.key_dim, key_heads * self.share
        decays = heads * self.key_dim if self.channel_decay else LANES
        window = 4 * rows * (2 * keys + 3 * heads * self.value_dim + 2 * decays)
        state = self._state_bytes(key_heads)
        twice = state * (1 + self.writes) + window
        return 2 * twice + state * self.keeps <= _VMEM_BYTES

    def _is_small(self, key_heads: int) -> bool:
        heads = key_heads * self.share
        unrolled = heads * max(self.rows, self.past, 1)
        return self._state_bytes(key_heads) <= STATE_BYTES and unrolled <= _UNROLLED


def plan_of(
    state: Any,
    window: Window | None = None,
    past: Records | None = None,
    *,
    writes: bool = False,
) -> Plan:
    """Of a call with these arrays."""
    return Plan(**sizes_of(state, window, past), writes=writes)
