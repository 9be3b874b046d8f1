"""Contracts C1-C9 over targets, drafters, rules, batches and numbers of drafts."""

import dataclasses

import pytest

from specjax.testing.conformance import (
    OF_ANY_TOKENS,
    OF_MORE_RUNS,
    OF_ONE_RUN,
    Case,
    Unsuitable,
    contract,
)
from specjax.testing.conformance.matrix import (
    EVERY_CELL,
    EVERY_MIXER_CELL,
    LAW_CELLS,
    MIXER_CELLS,
    MORE_RUNS_CELLS,
    SOME_CELLS,
    Cell,
    case_of,
)


def name(check) -> str:
    return f"{contract(check)}-{check.__name__}"


def holds(check, case: Case) -> None:
    try:
        print(check(case))
    except Unsuitable as reason:
        pytest.skip(str(reason))


def made(check, cell: Cell) -> bool:
    """Leave out what cannot be made, rather than skip it by the hundred."""
    if check.__name__ == "draft_model_is_a_replay":
        return cell.drafter not in ("null", "ngram", "chains", "trees")
    if check.__name__ == "proposals_are_well_formed":
        return cell.drafter not in ("null", "chains", "trees")
    if check.__name__ == "some_drafts_are_accepted":
        return cell.drafter != "null"
    return cell.batch > 1 or contract(check) != "C4"


def costly(check, cell: Cell) -> bool:
    """Programs for every row alone, and for every round of a draft model."""
    if check.__name__ == "proposals_are_well_formed":
        return cell.drafter == "draft-model" and cell.target == "hybrid"
    return check.__name__ == "rows_alone_emit_the_same"


def pairs(cells, checks):
    return [
        pytest.param(check, cell, id=f"{cell}-{name(check)}")
        for cell in cells
        for check in checks
        if made(check, cell)
    ]


@pytest.mark.parametrize(
    ("check", "cell"),
    [pair for pair in pairs(SOME_CELLS, OF_ONE_RUN) if not costly(*pair.values)],
)
def test_one_run(check, cell):
    holds(check, case_of(cell))


@pytest.mark.parametrize(
    ("check", "cell"),
    [pair for pair in pairs(MORE_RUNS_CELLS, OF_MORE_RUNS) if not costly(*pair.values)],
)
def test_more_runs(check, cell):
    holds(check, case_of(cell))


QUICK_MIXERS = [c for c in MIXER_CELLS if c.target == "recurrent-ring"]


@pytest.mark.parametrize(("check", "cell"), pairs(QUICK_MIXERS, OF_ONE_RUN))
def test_every_recurrent_mixer_with_a_ring(check, cell):
    holds(check, case_of(cell))


# A check of more runs compiles a dozen programs, for minutes on a busy machine.
LONG = pytest.mark.timeout(1800)


@pytest.mark.full
@LONG
@pytest.mark.parametrize(("check", "cell"), pairs(EVERY_MIXER_CELL, OF_ONE_RUN))
def test_every_mixer_cell(check, cell):
    holds(check, case_of(cell))


@pytest.mark.full
@LONG
@pytest.mark.parametrize(("check", "cell"), pairs(MIXER_CELLS, OF_MORE_RUNS))
def test_more_runs_of_mixer_cells(check, cell):
    holds(check, case_of(cell))


SAMPLED = [dataclasses.replace(cell, sampled=True) for cell in LAW_CELLS]


@pytest.mark.full
@LONG
@pytest.mark.parametrize(("check", "cell"), pairs(LAW_CELLS, OF_ONE_RUN))
def test_every_rule_that_keeps_the_law_is_greedy_at_temperature_0(check, cell):
    holds(check, case_of(cell))


@pytest.mark.full
@LONG
@pytest.mark.parametrize(("check", "cell"), pairs(SAMPLED, OF_ANY_TOKENS))
def test_sampled_runs_of_rules_that_keep_the_law(check, cell):
    holds(check, case_of(cell))


@pytest.mark.full
@LONG
@pytest.mark.parametrize(("check", "cell"), pairs(EVERY_CELL, OF_ONE_RUN))
def test_one_run_of_every_cell(check, cell):
    holds(check, case_of(cell))


@pytest.mark.full
@LONG
@pytest.mark.parametrize(
    ("check", "cell"),
    pairs([c for c in EVERY_CELL if (c.batch, c.k) == (3, 4)], OF_MORE_RUNS),
)
def test_more_runs_of_cells(check, cell):
    holds(check, case_of(cell))
