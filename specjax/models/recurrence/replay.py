"""Replay: keep what each row would write, and fold the accepted rows at commit."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.delta_window.api import Records, delta_commit, delta_window
from pallas_kernels.mesh import Spread
from specjax.decoding.types import Acceptance
from specjax.models.recurrence.base import MatrixShape


@dataclasses.dataclass(frozen=True)
class Replay:
    """The state is the matrix; a window's row costs its key, update and decay."""

    spread: Spread | None = None
    """How batch rows lie on a mesh; ``sharding.shard_decoder`` sets it."""

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
    ) -> tuple[Float[Array, "B W H dv"], Records]:
        """The window in matrix form."""
        out, updates = delta_window(
            q, k, v, log_decay, beta, state, ancestors, spread=self.spread
        )
        return out, Records(k=k, updates=updates, log_decay=log_decay)

    def commit(
        self,
        state: Float[Array, "B H dk dv"],
        pending: Records,
        acceptance: Acceptance,
    ) -> Float[Array, "B H dk dv"]:
        """One product: the path's keys by its updates."""
        path, num = acceptance.path, acceptance.num_tokens
        return delta_commit(state, pending, path, num, spread=self.spread)

    def canonical(self, state: Float[Array, "B H dk dv"]) -> Float[Array, "B H dk dv"]:
        """The state itself."""
        return state

    def scratch_bytes(
        self, shape: MatrixShape, window: int, dtype: jax.typing.DTypeLike
    ) -> int:
        """A record a window row."""
        return window * shape.record_bytes(dtype, dtype)


def zero_matrices(
    batch: int, shape: MatrixShape, dtype: jax.typing.DTypeLike
) -> Float[Array, "B H dk dv"]:
    """A layer's matrices before the first token."""
    return jnp.zeros((batch, shape.heads, shape.key_dim, shape.value_dim), dtype)
