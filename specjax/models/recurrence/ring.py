"""Ring: a checkpoint and the records of the rows committed since (ReplaySSM)."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.delta_window.api import (
    Records,
    delta_commit,
    delta_fold,
    delta_window,
    take_rows,
)
from pallas_kernels.mesh import Spread
from specjax.decoding.types import Acceptance
from specjax.models.recurrence.base import MatrixShape
from specjax.models.recurrence.replay import zero_matrices


class RingState(struct.PyTreeNode):
    """The state is the checkpoint advanced by the first ``count`` records."""

    matrix: jax.Array  # [B, H, dk, dv]
    records: Records  # [B, slots, ...]; from ``count`` on anything may stand in them
    count: jax.Array  # [B] int32


@dataclasses.dataclass(frozen=True)
class Ring:
    """A commit writes a few records and leaves the matrix as it is; the matrix is
    written once every ``slots`` tokens or so, when the next path finds no room.

    After the ReplaySSM of the field's engines. What is recorded is the update *after*
    the delta, so that neither reading nor folding solves anything. A path that is
    longer than the ring (prefill) is folded at once and goes by no record.

    With heads of 128 by 128 in float32 and one decay a head, a record is 1028 bytes a
    head where every head has a key of its own. A window of eight drafts and the anchor
    then takes 15.1 KiB with six slots, and with sixteen slots in bfloat16 12.6 KiB,
    where snapshots take 576 KiB.
    """

    slots: int = 16
    """Longer paths are not recorded: with few slots, full accepts write the matrix."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of recorded keys and updates; ``None``: the state's. Decays keep the state's.
    A key is rounded before the window is computed and an update after it, and what is
    read is what was rounded: reading and folding agree whatever the dtype."""
    spread: Spread | None = None
    """How batch rows lie on a mesh; ``sharding.shard_decoder`` sets it."""

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"Ring(slots={self.slots}): at least 1")

    def init(
        self, batch: int, shape: MatrixShape, dtype: jax.typing.DTypeLike
    ) -> RingState:
        """A checkpoint of zeros, and no record."""
        stored, lead = self._stored(dtype), (batch, self.slots)
        return RingState(
            matrix=zero_matrices(batch, shape, dtype),
            records=Records(
                k=jnp.zeros((*lead, shape.key_heads, shape.key_dim), stored),
                updates=jnp.zeros((*lead, shape.heads, shape.value_dim), stored),
                log_decay=jnp.zeros((*lead, *shape.decays), dtype),
            ),
            count=jnp.zeros((batch,), jnp.int32),
        )

    def read(
        self,
        state: RingState,
        q: Float[Array, "B W G dk"],
        k: Float[Array, "B W G dk"],
        v: Float[Array, "B W H dv"],
        log_decay: Float[Array, "B W H *dk"],
        beta: Float[Array, "B W H"] | None,
        ancestors: Bool[Array, "B W W"],
    ) -> tuple[Float[Array, "B W H dv"], Records]:
        """From the checkpoint and the records: the matrix they make is never made."""
        wide = state.matrix.dtype
        stored = self._stored(wide)
        k = k.astype(stored)
        out, updates = delta_window(
            q,
            k.astype(wide),
            v,
            log_decay,
            beta,
            state.matrix,
            ancestors,
            past=state.records,
            num_past=state.count,
            spread=self.spread,
        )
        return out, Records(k=k, updates=updates.astype(stored), log_decay=log_decay)

    def commit(
        self, state: RingState, pending: Records, acceptance: Acceptance
    ) -> RingState:
        """Append the path's records; fold first where there is not enough room."""
        path, num = acceptance.path, acceptance.num_tokens
        full = state.count + num > self.slots
        too_long = num > self.slots

        def make_room() -> jax.Array:
            matrix = self._folded(state, full)
            if path.shape[1] <= self.slots:
                return matrix
            rows = _widen(pending, state)
            folded = jnp.where(too_long, num, 0)
            return delta_commit(matrix, rows, path, folded, spread=self.spread)

        # which rows are folded depends on themselves; whether anything is, on all
        matrix = jax.lax.cond(jnp.any(full), make_room, lambda: state.matrix)
        start = jnp.where(full, 0, state.count)
        added = jnp.where(too_long, 0, num)
        records = _append(state.records, take_rows(pending, path, added), start, added)
        return RingState(matrix=matrix, records=records, count=start + added)

    def canonical(self, state: RingState) -> Float[Array, "B H dk dv"]:
        """The checkpoint with all records folded in."""
        return self._folded(state, state.count > 0)

    def blank(self, state: RingState, value: float | jax.Array) -> RingState:
        """The state with ``value`` in every slot that holds no record: for tests."""
        slots = jnp.arange(self.slots, dtype=jnp.int32)
        held = slots < state.count[:, None]

        def fill(x: jax.Array) -> jax.Array:
            mask = held[(..., *[None] * (x.ndim - 2))]
            return jnp.where(mask, x, jnp.asarray(value, x.dtype))

        return state.replace(records=jax.tree.map(fill, state.records))

    def scratch_bytes(
        self, shape: MatrixShape, window: int, dtype: jax.typing.DTypeLike
    ) -> int:
        """A record a window row and a slot, and the count."""
        record = shape.record_bytes(self._stored(dtype), dtype)
        return (window + self.slots) * record + jnp.dtype(jnp.int32).itemsize

    def _folded(
        self, state: RingState, rows: Bool[Array, " B"]
    ) -> Float[Array, "B H dk dv"]:
        """The matrices with all records folded in, in these rows of the batch."""
        num = jnp.where(rows, state.count, 0)
        return delta_fold(state.matrix, state.records, num, spread=self.spread)

    def _stored(self, dtype: jax.typing.DTypeLike) -> jnp.dtype:
        return jnp.dtype(dtype if self.dtype is None else self.dtype)


def _widen(records: Records, state: RingState) -> Records:
    return jax.tree.map(lambda x: x.astype(state.matrix.dtype), records)


def _append(
    records: Records, new: Records, start: Int[Array, " B"], num: Int[Array, " B"]
) -> Records:
    """The first ``num`` new rows, in the slots from ``start`` on."""
    slots = jnp.arange(records.k.shape[1], dtype=jnp.int32)
    entry = slots - start[:, None]
    fresh = (entry >= 0) & (entry < num[:, None])

    def write(old: jax.Array, rows: jax.Array) -> jax.Array:
        lead = (..., *[None] * (old.ndim - 2))
        picked = jnp.take_along_axis(rows, entry[lead], axis=1, mode="clip")
        return jnp.where(fresh[lead], picked, old)

    return jax.tree.map(write, records, new)
