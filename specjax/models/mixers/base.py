"""What every mixer is, and the values it is handed."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax
from flax import struct

from specjax.decoding.types import Acceptance, Window


class RotaryTables(struct.PyTreeNode):
    """Cosines and sines of a window's positions, shared by blocks that turn alike."""

    cos: jax.Array  # [B, W, half]
    sin: jax.Array  # [B, W, half]


class Chosen(struct.PyTreeNode):
    """The keys that an indexer lets a window's rows attend to."""

    committed: jax.Array  # [B, W, T] bool
    window: jax.Array  # [B, W, W] bool


class Aids(struct.PyTreeNode):
    """What a mixer is handed beside its input and its state."""

    rotary: RotaryTables | None = None
    chosen: Chosen | None = None
    """By the nearest indexer above."""


@runtime_checkable
class Mixer(Protocol):
    """The part of a block that looks at other positions.

    ``mix`` reads the committed state and returns, beside its output, what the window
    would add to it (every leaf with the window rows on axis 1). ``commit`` folds in
    the accepted path. Neither changes anything in place.
    """

    def init_state(self, batch: int, capacity: int) -> Any:
        """The state before the first token."""
        ...

    def mix(
        self,
        x: jax.Array,
        window: Window,
        state: Any,
        lengths: jax.Array,
        aids: Aids,
    ) -> tuple[jax.Array, Any]:
        """``x [B, W, D]``, normed -> ``(y [B, W, D], pending)``."""
        ...

    def commit(
        self, state: Any, pending: Any, acceptance: Acceptance, lengths: jax.Array
    ) -> Any:
        """The state after the accepted path, from ``lengths`` committed tokens on."""
        ...

    def canonical(self, state: Any, lengths: jax.Array) -> Any:
        """The comparable form: equal whenever the committed tokens are equal."""
        ...
