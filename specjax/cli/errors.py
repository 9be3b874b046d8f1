"""What may go wrong by the user's hand: shown as one line, without a traceback."""

from __future__ import annotations

from specjax.checkpoints import CheckpointError
from specjax.decoding.engine import PairError
from specjax.decoding.requests import RequestError
from specjax.models.families.fields import ConfigError
from specjax.models.pages import PoolError


class UsageError(ValueError):
    """An argument that cannot be meant; the message names the option and the fix."""


USER_ERRORS: tuple[type[Exception], ...] = (
    UsageError,
    CheckpointError,
    RequestError,
    PairError,
    ConfigError,
    PoolError,
    OSError,
)
"""Errors whose message is all that a user needs. Any other one is a bug of ours."""
