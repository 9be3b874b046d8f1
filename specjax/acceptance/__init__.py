"""Acceptance rules, one a file, and the registry that names them.

A new rule is one file here and one line in ``RULES``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from specjax.acceptance.block import Block
from specjax.acceptance.coupled import Coupled
from specjax.acceptance.greedy import Greedy
from specjax.acceptance.lossy import Threshold, Typical
from specjax.acceptance.top_down import (
    TopDown,
    deterministic_children,
    multi_round,
    rejection,
    without_replacement,
)
from specjax.acceptance.traversal import Traversal
from specjax.decoding.interfaces import AcceptanceRule

__all__ = ["RULES", "Block", "Coupled", "Greedy", "RuleEntry", "Threshold", "TopDown"]
__all__ += ["Traversal", "Typical", "default_rule", "deterministic_children"]
__all__ += ["is_lossy", "multi_round", "rejection", "without_replacement"]


@dataclasses.dataclass(frozen=True)
class RuleEntry:
    """A rule by name."""

    build: Callable[[], AcceptanceRule]
    summary: str


RULES: dict[str, RuleEntry] = {
    "greedy": RuleEntry(Greedy, "keeps the most probable token"),
    "coupled": RuleEntry(Coupled, "samples first, keeps a draft that is the sample"),
    "rejection": RuleEntry(rejection, "keeps a draft with probability min(1, p/q)"),
    "block": RuleEntry(Block, "tests prefixes of a chain as a whole"),
    "deterministic-children": RuleEntry(
        deterministic_children, "trees whose nodes were chosen, not drawn"
    ),
    "multi-round": RuleEntry(multi_round, "trees with siblings drawn independently"),
    "without-replacement": RuleEntry(
        without_replacement, "trees with siblings drawn without replacement"
    ),
    "traversal": RuleEntry(Traversal, "trees of independent draws, from the leaves up"),
    "traversal-without-replacement": RuleEntry(
        lambda: Traversal(replaced=False),
        "trees drawn without replacement, from the leaves up",
    ),
    "lossy-typical": RuleEntry(Typical, "LOSSY: keeps what is typical of the target"),
    "lossy-threshold": RuleEntry(Threshold, "LOSSY: keeps what passes a threshold"),
}
"""By name."""


def default_rule(temperature: float) -> str:
    """``greedy`` at temperature 0, else ``coupled``."""
    return "coupled" if temperature > 0 else "greedy"


def is_lossy(rule: str) -> bool:
    """Whether the rule of this name changes what is decoded: such names say so."""
    return rule.startswith("lossy")
