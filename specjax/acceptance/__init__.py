"""Acceptance rules, one a file, and the registry that names them.

A new rule is one file here and one line in ``RULES``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from specjax.acceptance.coupled import Coupled
from specjax.acceptance.greedy import Greedy
from specjax.decoding.interfaces import AcceptanceRule

__all__ = ["RULES", "Coupled", "Greedy", "RuleEntry", "default_rule"]


@dataclasses.dataclass(frozen=True)
class RuleEntry:
    """A rule by name."""

    build: Callable[[], AcceptanceRule]
    summary: str
    samples: bool
    """Whether it follows a temperature above 0."""


RULES: dict[str, RuleEntry] = {
    "greedy": RuleEntry(Greedy, "keeps the most probable token", samples=False),
    "coupled": RuleEntry(
        Coupled, "samples first, keeps a draft that is the sample", samples=True
    ),
}
"""By name."""


def default_rule(temperature: float) -> str:
    """``greedy`` at temperature 0, else ``coupled``."""
    return "coupled" if temperature > 0 else "greedy"
