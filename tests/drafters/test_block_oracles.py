"""The block family against the outputs of its authors' code."""

from pathlib import Path

import pytest

from specjax.testing.drafter_parity.check import check_drafter_parity

DATA = Path(__file__).resolve().parents[1] / "data"
# sliding layers; heads and a draft vocabulary
ALWAYS = ("dflash_swa", "dspark_speculators")
FULL = ("dflash", "dflash2", "dspark", "dspark_gated", "dspark_rnn")


@pytest.mark.parametrize(
    "name", [*ALWAYS, *(pytest.param(n, marks=pytest.mark.full) for n in FULL)]
)
def test_both_rounds_are_what_the_authors_code_says(name):
    folder = DATA / "drafter_oracles" / name
    report = check_drafter_parity(folder, DATA / "oracles")
    compared = {check.array for check in report.checks}
    assert {"ctx1", "hidden1", "logits1", "draft1"} <= compared
    assert {"ctx2", "hidden2", "logits2", "draft2"} <= compared
    wrong = [check for check in report.checks if check.status != "pass"]
    assert not wrong, wrong
