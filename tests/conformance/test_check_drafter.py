"""The page that shows how to check a drafter, and the report."""

import re
from pathlib import Path

import pytest

from specjax.acceptance.greedy import Greedy
from specjax.drafters.ngram import NGram
from specjax.testing.conformance import CHECKS, Report, check_drafter
from specjax.testing.conformance.controls import sound
from specjax.testing.conformance.suite import find
from specjax.testing.toys import toy_llama

PAGE = Path(__file__).resolve().parents[2] / "docs" / "check-your-drafter.md"


@pytest.mark.full
def test_the_example_of_the_page_runs(capsys):
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    namespace = {"__name__": "example"}
    exec(compile(code, str(PAGE), "exec"), namespace)
    report = namespace["report"]
    assert report.ok
    verdicts = {(f.contract, f.verdict) for f in report.findings}
    assert {(f"C{n}", "ok") for n in range(1, 10)} <= verdicts
    assert "rejected tokens leave no trace" in capsys.readouterr().out


def test_the_page_lists_every_contract():
    page = PAGE.read_text("utf-8")
    for check in CHECKS:
        assert f"`{check.__module__.rsplit('.', 1)[-1]}.py`" in page


def test_a_failure_is_reported_and_raised():
    def c0_never(case):
        raise AssertionError("C0: row 1, round 2: 3 is not 4")

    report = Report((find(c0_never, sound("llama", False), "greedy"),))
    assert not report.ok and "FAILED" in str(report)
    with pytest.raises(AssertionError, match="greedy: C0: row 1, round 2: 3 is not 4"):
        report.assert_ok()


def test_nothing_checked_is_not_ok():
    with pytest.raises(AssertionError, match="nothing could be checked"):
        Report(()).assert_ok()


@pytest.mark.full
def test_a_drafter_without_a_reference():
    """A bare target, one rule: the checks that need a reference are not made."""
    report = check_drafter(NGram(k=3), toy_llama().decoder, Greedy()).assert_ok()
    assert [f.check for f in report.findings if f.verdict == "not made"] == [
        "tokens_are_the_references",
        "draft_model_is_a_replay",
    ]
