"""The combinations that the project holds itself to: lists for parametrised tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from itertools import product

from specjax.acceptance import RULES as RULES_BY_NAME
from specjax.decoding.interfaces import Drafter
from specjax.decoding.trees import full
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.draft_tree import DraftTree, Siblings
from specjax.drafters.drawing import Pick
from specjax.drafters.ngram import NGram
from specjax.drafters.null import NullDrafter
from specjax.models.memory import with_codec
from specjax.models.mixers.codecs import CODECS
from specjax.models.pages import Paged
from specjax.models.recurrence import Replay, Ring, Snapshot
from specjax.testing.conformance.case import Case
from specjax.testing.conformance.suite import uneven_requests
from specjax.testing.forced import (
    Forced,
    accept_pattern,
    chains_of,
    plant,
    trees_of,
)
from specjax.testing.toy_mixers import toy_attentions, toy_recurrent, toy_softmax
from specjax.testing.toys import Toy, toy_hybrid, toy_llama

ROUNDS = 40
"""Rounds that a forced drafter's script lasts."""

TARGETS = ("llama", "hybrid")
REFERENCED = ("llama", "toy_hybrid")
"""Model types that the independent reference knows."""
DRAFTERS = ("null", "ngram", "draft-model", "chains", "trees")
RULES = ("greedy", "coupled")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One combination, by names."""

    target: str
    drafter: str
    rule: str
    batch: int = 3
    k: int = 8
    sampled: bool = False
    """Of a rule that keeps the law alone: with a temperature."""

    def __str__(self) -> str:
        return f"{self.target}-{self.drafter}{self.k}-{self.rule}-b{self.batch}"


EVERY_CELL = tuple(
    Cell(target, drafter, rule, batch, k)
    for target, drafter, rule, batch, k in product(
        TARGETS, DRAFTERS, RULES, (1, 3), (1, 4, 8)
    )
    if drafter != "null" or k == 1
)
SOME_CELLS = tuple(
    Cell(target, drafter, rule, k=k)
    for target in TARGETS
    for drafter, rule, k in (
        ("chains", "coupled", 8),
        ("trees", "coupled", 8),
        ("ngram", "greedy", 4),
        ("draft-model", "coupled", 4),
    )
)
"""Few programs: a chain is planted in the arrays of a tree."""
MORE_RUNS_CELLS = tuple(Cell(target, "trees", "coupled") for target in TARGETS)
"""For the checks that make many runs."""
MIXER_TARGETS = (
    "attentions",
    "attentions-paged",
    "recurrent-replay",
    "recurrent-snapshot",
    "recurrent-ring",
    "recurrent-ring-bfloat16",
)
"""Decoders with every mixer, with one stretch of cache a row and with pages, and with
every rollback strategy."""
MIXER_CELLS = tuple(Cell(target, "trees", "coupled") for target in MIXER_TARGETS)
EVERY_MIXER_CELL = tuple(
    Cell(target, drafter, rule, k=1 if drafter == "null" else 8)
    for target, drafter, rule in product(
        MIXER_TARGETS, ("null", "chains", "trees"), RULES
    )
)
NARROW_TARGETS = ("llama-int8", "llama-fp8", "softmax-int8", "softmax-fp8-paged")
"""Decoders whose caches have one byte a number: one stretch a row, rings, pages."""
SOME_NARROW_CELLS = (
    Cell("llama-int8", "draft-model", "coupled", k=4),
    Cell("llama-fp8", "ngram", "greedy", k=4),
    Cell("softmax-fp8-paged", "trees", "coupled"),
)
NARROW_CELLS = tuple(
    Cell(target, drafter, rule, k=k)
    for target, (drafter, k), rule in product(
        NARROW_TARGETS,
        (("ngram", 4), ("draft-model", 4), ("chains", 8), ("trees", 8)),
        RULES,
    )
)
LAW_CELLS = tuple(
    Cell("hybrid", drafter, rule, k=4)
    for drafter, rule in (
        ("drawn", "rejection"),
        ("drawn", "block"),
        ("drawn", "traversal"),
        ("iid-tree", "multi-round"),
        ("iid-tree", "traversal"),
        ("swor-tree", "without-replacement"),
        ("swor-tree", "traversal-without-replacement"),
        ("best-tree", "deterministic-children"),
        ("best-tree", "lossy-typical"),
        ("best-tree", "lossy-threshold"),
    )
)
"""Rules that keep the law and not the tokens, and lossy ones: at temperature 0 they
have plain decoding's tokens as well."""


@cache
def toy(target: str) -> Toy:
    """The toy target of this name, made once."""
    return TOYS[target]()


def _paged(toy: Toy) -> Toy:
    return dataclasses.replace(toy, decoder=toy.decoder.replace(paged=Paged(96, 16)))


def _narrow(toy: Toy, codec: str) -> Toy:
    """With a codec, which the independent reference is told."""
    config = toy.config | {"cache_dtype": codec}
    decoder = with_codec(toy.decoder, CODECS[codec])
    return dataclasses.replace(toy, decoder=decoder, config=config)


TOYS: dict[str, Callable[[], Toy]] = {
    "llama": toy_llama,
    "hybrid": toy_hybrid,
    "attentions": toy_attentions,
    "attentions-paged": lambda: _paged(toy_attentions()),
    "llama-int8": lambda: _narrow(toy_llama(), "int8"),
    "llama-fp8": lambda: _narrow(toy_llama(), "fp8"),
    "softmax-int8": lambda: _narrow(toy_softmax(), "int8"),
    "softmax-fp8-paged": lambda: _paged(_narrow(toy_softmax(), "fp8")),
    "recurrent-replay": lambda: toy_recurrent(Replay()),
    "recurrent-snapshot": lambda: toy_recurrent(Snapshot()),
    "recurrent-ring": lambda: toy_recurrent(Ring(slots=12)),
    "recurrent-ring-bfloat16": lambda: toy_recurrent(Ring(slots=16, dtype="bfloat16")),
}


@cache
def case_of(cell: Cell) -> Case:
    """The cell's case, made once: its checks share their runs."""
    target = toy(cell.target)
    fields = {
        "target": target.decoder,
        "rule": RULES_BY_NAME[cell.rule].build(),
        "requests": uneven_requests(
            target.decoder.vocab_size,
            sampled=cell.rule == "coupled" or cell.sampled,
            batch=cell.batch,
        ),
        "toy": target if target.config["model_type"] in REFERENCED else None,
    }
    if cell.target.endswith("bfloat16"):
        # its records are rounded once, and when depends on the rounds
        fields["rounding"] = 2e-2
    if cell.drafter in ("chains", "trees"):
        width = cell.k + 1
        planted = partial(
            planted_script,
            trees=cell.drafter == "trees",
            k=cell.k,
            vocab_size=target.decoder.vocab_size,
        )
        return Case.plant(planted, widths=(width,), **fields)
    return Case(drafter=_drafter(cell), **fields)


def planted_script(
    outputs: tuple[tuple[int, ...], ...], *, trees: bool, k: int, vocab_size: int
) -> Forced:
    """Forced proposals of at most ``k`` nodes, with every awkward accept count."""
    shapes = trees_of(k) if trees else chains_of(k)
    pattern = accept_pattern(ROUNDS, len(outputs), k)
    return plant(outputs, pattern, shapes, vocab_size, nodes=max(k, _nodes(shapes)))


def _nodes(shapes) -> int:
    return max(len(shape.parents) for shape in shapes)


def _drafter(cell: Cell) -> Drafter:
    if cell.drafter == "null":
        return NullDrafter()
    if cell.drafter == "ngram":
        return NGram(k=cell.k, min_n=1)
    # another seed agrees by chance alone; the other toy, as it is smaller or larger
    model = toy_llama(seed=5) if cell.target == "hybrid" else toy_hybrid(seed=5)
    if cell.drafter == "drawn":
        return DraftModel(model.decoder, k=cell.k, pick=Pick.DRAWN)
    if cell.drafter in TREES:
        return DraftTree(model.decoder, full((2, 1, 2)), TREES[cell.drafter])
    return DraftModel(model.decoder, k=cell.k)


TREES = {
    "iid-tree": Siblings.INDEPENDENT,
    "swor-tree": Siblings.WITHOUT_REPLACEMENT,
    "best-tree": Siblings.BEST,
}
