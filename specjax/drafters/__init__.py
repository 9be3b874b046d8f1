"""Drafters, one a file, and the registry that names them.

A new drafter is one file here and one line in ``DRAFTERS``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from specjax.decoding.interfaces import Drafter, Target
from specjax.decoding.trees import full
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.draft_tree import DraftTree, Siblings
from specjax.drafters.drawing import Pick
from specjax.drafters.length import Confidence
from specjax.drafters.ngram import NGram
from specjax.drafters.null import NullDrafter

__all__ = [
    "DRAFTERS",
    "DraftModel",
    "DraftTree",
    "DrafterEntry",
    "DrafterOptions",
    "NGram",
]
__all__ += ["NullDrafter"]


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
    pick: Pick = Pick.COUPLED
    """How a draft model picks its tokens."""
    branching: tuple[int, ...] = (2, 2)
    """Children of a node at each depth of a draft tree."""
    siblings: Siblings = Siblings.BEST
    """How a draft tree picks the children of a node."""
    least: float = 0.0
    """A draft model's drafts end where their probability would fall below this."""


@dataclasses.dataclass(frozen=True)
class DrafterEntry:
    """A drafter by name."""

    build: Callable[[DrafterOptions], Drafter]
    summary: str
    drafts: bool = True
    """Whether it proposes anything, so that ``k`` means something."""
    takes_k: bool = True
    """Whether ``k`` decides how much; a tree of given shape has its own depth."""
    needs_model: bool = False
    """Whether ``DrafterOptions.model`` must be given."""


def _draft_model(options: DrafterOptions) -> Drafter:
    if options.model is None:
        raise ValueError("a draft model is needed: load one and give it as model")
    length = Confidence(options.least) if options.least > 0 else None
    return DraftModel(options.model, options.k, pick=options.pick, length=length)


def _draft_tree(options: DrafterOptions) -> Drafter:
    if options.model is None:
        raise ValueError("a draft model is needed: load one and give it as model")
    return DraftTree(options.model, full(options.branching), options.siblings)


DRAFTERS: dict[str, DrafterEntry] = {
    "none": DrafterEntry(
        lambda o: NullDrafter(), "nothing: plain decoding", drafts=False
    ),
    "ngram": DrafterEntry(
        lambda o: NGram(o.k, o.min_n, o.max_n), "what followed the same words before"
    ),
    "draft-model": DrafterEntry(
        _draft_model, "a smaller model with the same tokenizer", needs_model=True
    ),
    "draft-tree": DrafterEntry(
        _draft_tree,
        "a tree of fixed shape from a smaller model",
        takes_k=False,
        needs_model=True,
    ),
}
"""By name."""
