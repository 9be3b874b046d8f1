"""How accepted inputs reach a matrix state: what every strategy is, and is handed."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from specjax.decoding.types import Acceptance


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixShape:
    """The sizes of one layer's recurrent state, a matrix ``[dk, dv]`` a head."""

    heads: int
    """``H``: of values, and of the state."""
    key_heads: int
    """``G``, a divisor of ``H``: head ``h`` reads and writes by the query and the key
    of head ``h // (H // G)``."""
    key_dim: int
    value_dim: int
    channel_decay: bool = False
    """One decay a key channel instead of one a head."""

    @property
    def decays(self) -> tuple[int, ...]:
        """Of one row: ``[H]`` or ``[H, dk]``."""
        return (self.heads, *([self.key_dim] if self.channel_decay else []))

    def record_bytes(
        self, stored: jax.typing.DTypeLike, dtype: jax.typing.DTypeLike
    ) -> int:
        """Of what one row writes: key and update in ``stored``, decay in ``dtype``."""
        vectors = self.key_heads * self.key_dim + self.heads * self.value_dim
        decays = math.prod(self.decays)
        return vectors * jnp.dtype(stored).itemsize + decays * jnp.dtype(dtype).itemsize

    @property
    def matrix(self) -> int:
        """Numbers in the state."""
        return self.heads * self.key_dim * self.value_dim


@runtime_checkable
class Recurrence(Protocol):
    """A strategy. It is static: frozen, hashable, and without arrays of its own.

    The committed state decays, and takes one update a row: see
    ``pallas_kernels.delta_window``, whose letters these are. ``read`` looks at the
    committed state and writes nothing; what the window would add is ``pending``, whose
    every leaf has the window rows on axis 1. Rows that are padding, or not finite,
    arrive with zeros everywhere.
    """

    def init(self, batch: int, shape: MatrixShape, dtype: jax.typing.DTypeLike) -> Any:
        """The state before the first token, in ``dtype``: float32 or wider."""
        ...

    def read(
        self,
        state: Any,
        q: jax.Array,  # [B, W, G, dk]
        k: jax.Array,  # [B, W, G, dk]
        v: jax.Array,  # [B, W, H, dv]
        log_decay: jax.Array,  # [B, W, H] or [B, W, H, dk]
        beta: jax.Array | None,  # [B, W, H]; None: updates are the values (no delta)
        ancestors: jax.Array,  # [B, W, W]
    ) -> tuple[jax.Array, Any]:
        """Outputs ``[B, W, H, dv]`` of all rows, and ``pending``."""
        ...

    def commit(self, state: Any, pending: Any, acceptance: Acceptance) -> Any:
        """The state after the accepted path; a row that accepts nothing keeps its own
        to the last bit.
        """
        ...

    def canonical(self, state: Any) -> jax.Array:
        """The matrices ``[B, H, dk, dv]``, everything folded in."""
        ...

    def scratch_bytes(
        self, shape: MatrixShape, window: int, dtype: jax.typing.DTypeLike
    ) -> int:
        """Bytes a batch row beyond the one matrix: ``pending`` of ``window`` rows, and
        what the state holds besides.
        """
        ...
