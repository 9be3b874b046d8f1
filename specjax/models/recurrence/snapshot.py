"""Snapshot: a state for every row of the window, of which commit picks one."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from pallas_kernels.delta_window.api import Records, delta_step
from specjax.decoding.types import Acceptance
from specjax.models.mixers.convolution import parent_rows
from specjax.models.recurrence.base import MatrixShape
from specjax.models.recurrence.replay import Replay, zero_matrices


class RowStates(struct.PyTreeNode):
    """The state after each row's path."""

    states: jax.Array  # [B, W, H, dk, dv]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Rows advance one after another, each from its parent's state.

    What serving engines do, and the plainest form: a row's numbers depend on its path
    alone, not on the window it stands in. It costs a whole state a row. Windows of more
    than ``rows`` rows, which is to say prefill, are taken as ``Replay`` takes them.
    """

    rows: int = 32
    """At least the widest window with drafts: all of these must be taken alike."""

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"Snapshot(rows={self.rows}): at least 1")

    def init(
        self, batch: int, shape: MatrixShape, dtype: jax.typing.DTypeLike
    ) -> Float[Array, "B H dk dv"]:
        """Zeros."""
        return zero_matrices(batch, shape, dtype)

    def read(
        self,
        state: Float[Array, "B H dk dv"],
        q: Float[Array, "B W G dk"],
        k: Float[Array, "B W G dk"],
        v: Float[Array, "B W H dv"],
        log_decay: Float[Array, "B W H *dk"],
        beta: Float[Array, "B W H"] | None,
        ancestors: Bool[Array, "B W W"],
    ) -> tuple[Float[Array, "B W H dv"], RowStates | Records]:
        """The recurrence itself, row by row."""
        if q.shape[1] > self.rows:
            return Replay().read(state, q, k, v, log_decay, beta, ancestors)
        width = q.shape[1]
        # padding has no parent; it goes on from row 0, and nobody looks at it
        parents = jnp.maximum(parent_rows(ancestors), 0)

        def advance(
            row: jax.Array, done: tuple[jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            out, states, above = done
            o, after = delta_step(
                _row(q, row),
                _row(k, row),
                _row(v, row),
                _row(log_decay, row),
                None if beta is None else _row(beta, row),
                above,
            )
            out = jax.lax.dynamic_update_slice_in_dim(out, o[:, None], row, axis=1)
            states = jax.lax.dynamic_update_slice_in_dim(
                states, after[:, None], row, axis=1
            )
            # picked behind the write: in front of it, XLA was seen to copy all states
            parent = _row(parents, jnp.minimum(row + 1, width - 1))
            return out, states, _pick(states, parent)

        states = jnp.zeros((q.shape[0], width, *state.shape[1:]), state.dtype)
        out, states, _ = jax.lax.fori_loop(
            jnp.int32(0), jnp.int32(width), advance, (jnp.zeros_like(v), states, state)
        )
        return out, RowStates(states)

    def commit(
        self,
        state: Float[Array, "B H dk dv"],
        pending: RowStates | Records,
        acceptance: Acceptance,
    ) -> Float[Array, "B H dk dv"]:
        """The state of the path's last row."""
        if isinstance(pending, Records):
            return Replay().commit(state, pending, acceptance)
        num = acceptance.num_tokens
        last = jnp.take_along_axis(
            acceptance.path, jnp.maximum(num - 1, 0)[:, None], axis=1, mode="clip"
        )
        picked = _pick(pending.states, last[:, 0])
        return jnp.where((num > 0)[:, None, None, None], picked, state)

    def canonical(self, state: Float[Array, "B H dk dv"]) -> Float[Array, "B H dk dv"]:
        """The state itself."""
        return state

    def scratch_bytes(
        self, shape: MatrixShape, window: int, dtype: jax.typing.DTypeLike
    ) -> int:
        """A matrix a window row."""
        if window > self.rows:
            return Replay().scratch_bytes(shape, window, dtype)
        return window * shape.matrix * jnp.dtype(dtype).itemsize


def _row(x: jax.Array, row: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, row, 1, keepdims=False)


def _pick(
    states: Float[Array, "B W H dk dv"], row: jax.Array
) -> Float[Array, "B H dk dv"]:
    """One row's state for each row of the batch."""
    at = row[:, None, None, None, None]
    return jnp.take_along_axis(states, at, axis=1, mode="clip")[:, 0]
