"""The one error that reading a checkpoint raises."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CheckpointError(ValueError):
    """A checkpoint cannot be read as asked.

    The message names the file, the tensor or field where there is one, and what to do.
    """


def close_names(name: str, known: Iterable[str]) -> str:
    """``"; did you mean ..."`` for a name that looks like a known one, else nothing."""
    matches = difflib.get_close_matches(name, list(known), n=3, cutoff=0.75)
    return f"; did you mean {', '.join(map(repr, matches))}?" if matches else ""
