"""Drafters by name: what a command line can say, and what each is made from."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

from specjax.decoding.interfaces import Drafter, Target
from specjax.drafters.draft_tree import Siblings
from specjax.drafters.drawing import Pick


@dataclasses.dataclass(frozen=True)
class DrafterOptions:
    """What a command line can say about a drafter; each takes what it needs."""

    k: int = 5
    """Most draft tokens a round."""
    min_n: int = 2
    """Shortest match of an n-gram drafter."""
    max_n: int = 3
    """Longest match of an n-gram drafter."""
    model: Target | None = None
    """The loaded draft model."""
    part: Any = None
    """A learned drafter's loaded network (``checkpoints.drafters``)."""
    pick: Pick = Pick.COUPLED
    """How a draft model or head picks its tokens."""
    branching: tuple[int, ...] = (2, 2)
    """Children of a node at each depth of a draft tree."""
    siblings: Siblings = Siblings.BEST
    """How a draft tree picks the children of a node."""
    top_k: int = 10
    """Of dynamic trees: children of a node, and nodes of a level that go on."""
    nodes: int = 59
    """Of dynamic trees: draft nodes that are verified."""
    least: float = 0.0
    """A draft model's drafts end where their probability would fall below this."""


class Source(enum.Enum):
    """What a drafter is made from, beside the options."""

    NOTHING = "nothing"
    MODEL = "a draft model"
    PART = "a draft head's checkpoint"
    TARGET = "the target's own checkpoint"


@dataclasses.dataclass(frozen=True)
class DrafterEntry:
    """A drafter by name."""

    build: Callable[[DrafterOptions], Drafter]
    summary: str
    drafts: bool = True
    """Whether it proposes anything, so that ``k`` means something."""
    takes_k: bool = True
    """Whether ``k`` decides how much; a tree of given shape has its own depth."""
    source: Source = Source.NOTHING
    """What must be loaded before it can be built."""
    parts: tuple[str, ...] = ()
    """Methods of the layouts that it runs; empty: the one of its own name."""
    uses: frozenset[str] = frozenset()
    """Which of ``DrafterOptions``, beside ``k``, change what it does."""
    q: str = "one-hot"
    """The law of its drafts: "one-hot" where they are chosen, "drawn" where they may be
    drawn (from a stored law), and of what kind the siblings are."""
    reference: str = ""
    """The paper or the project that it comes from."""

    @property
    def needs_model(self) -> bool:
        """Whether ``DrafterOptions.model`` must be given."""
        return self.source is Source.MODEL

    @property
    def trained(self) -> bool:
        """Whether it has weights that somebody trained to draft for one target."""
        return self.source in (Source.PART, Source.TARGET)


def needed(what: Any, source: Source, kind: type | tuple[type, ...] = object) -> Any:
    """The model or part; an error if there is none, or if it is of another kind."""
    if what is None:
        raise ValueError(f"{source.value} is needed: load it and give it as an option")
    if not isinstance(what, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        wanted = " or ".join(each.__name__ for each in kinds)
        raise ValueError(
            f"{source.value} is needed that holds a {wanted}, and this is a "
            f"{type(what).__name__} (of what load_part returns, give the part)"
        )
    return what
