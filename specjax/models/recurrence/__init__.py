"""How accepted inputs reach a recurrent state: one interface, one strategy a file."""

from __future__ import annotations

from specjax.models.recurrence.base import MatrixShape, Recurrence
from specjax.models.recurrence.replay import Replay
from specjax.models.recurrence.ring import Ring
from specjax.models.recurrence.snapshot import Snapshot

Strategy = Replay | Snapshot | Ring

REPLAY = Replay()
"""The default."""

__all__ = [
    "REPLAY",
    "MatrixShape",
    "Recurrence",
    "Replay",
    "Ring",
    "Snapshot",
    "Strategy",
]
