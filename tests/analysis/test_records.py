"""Figures of records and summaries, against hand-made cases."""

import dataclasses
import json

import jax.numpy as jnp
import pytest

from specjax.analysis.identity import Difference
from specjax.analysis.records import Record, commit, parameter_bytes, repetition
from specjax.analysis.summary import by_kind, summarise


def test_repetition_counts_places_that_end_a_gram_seen_before():
    assert repetition([]) == 0
    assert repetition(range(30)) == 0
    # 8 equal tokens are the first gram; the 4 after them each end the same one
    assert repetition([7] * 12) == pytest.approx(4 / 12)
    # a period of 10: the second period's last 3 places and the third's all
    ids = list(range(10)) * 3
    assert repetition(ids) == pytest.approx((3 + 10) / 30)
    assert repetition([1, 2, 1, 2, 1], n=2) == pytest.approx(2 / 5)


def test_shared_arrays_count_once():
    x = jnp.zeros((4, 2), jnp.float32)
    assert parameter_bytes({"embedding": x, "head": x, "other": x + 1}) == 64
    assert parameter_bytes(None) == 0


def test_the_commit_is_a_hash_or_nothing():
    found = commit()
    assert found is None or len(found.rstrip("+")) == 40


def record(**changes) -> Record:
    values = {
        "model": "m",
        "dtype": "float32",
        "drafter": "ngram",
        "k": 2,
        "rule": "greedy",
        "temperature": 0.0,
        "batch": 1,
        "kind": "code",
        "prompt_id": "p",
        "repeat": 0,
        "tokens": 10,
        "rounds": 5,
        "drafted": 8,
        "accepted": 5,
        "accepted_by_position": [3, 2],
        "tau": 2.0,
        "alpha": 0.625,
        "c_draft": 0.1,
        "c_verify": 1.1,
        "draft_bytes": 0,
        "repetition": 0.0,
        "prefill_seconds": 1.0,
        "seconds": 1.0,
        "tokens_per_second": 10.0,
        "speedup": 1.0,
        "identical": True,
        "first_difference": None,
        "ignore_eos": False,
        "memory": {},
        "device": "d",
        "versions": {},
        "commit": None,
        "command": "c",
        "date": "now",
    }
    return Record(**(values | changes))


def test_a_record_is_one_line_of_json():
    line = record(first_difference=Difference(3, None), identical=False).as_line()
    assert "\n" not in line
    assert json.loads(line)["first_difference"] == {"position": 3, "margin": None}
    with pytest.raises(ValueError):
        record(speedup=float("nan")).as_line()


def test_a_summary_takes_ratios_of_sums_and_medians():
    records = [
        record(tokens=10, rounds=10, drafted=0, accepted=0, alpha=0.0, speedup=0.9),
        record(tokens=90, rounds=10, drafted=100, accepted=80, speedup=3.0),
        record(speedup=1.0, tokens_per_second=30.0, identical=False),
    ]
    row = summarise(records, "code")
    assert row.tau == pytest.approx(110 / 25)  # not the mean of 1, 9 and 2
    assert row.alpha == pytest.approx(85 / 108)
    assert row.speedup == 1.0
    assert row.spread == pytest.approx((0.95, 2.0))
    assert row.tokens_per_second == 10.0
    assert (row.identical, row.records) == (2, 3)


def test_a_rule_that_keeps_the_law_has_no_count_of_identical_runs():
    several = [record(identical=None), record(identical=None)]
    assert summarise(several, "code").identical is None
    assert json.loads(several[0].as_line())["identical"] is None
    # none of them is not the same as not compared
    assert summarise([record(identical=False)], "code").identical == 0


def test_each_rule_has_its_row():
    rules = ("coupled", "rejection", "coupled", "rejection")
    rows = by_kind([record(rule=rule) for rule in rules])
    assert [(r.rule, r.records) for r in rows] == [("coupled", 2), ("rejection", 2)]


def test_rows_by_kind_and_arm_and_then_over_all():
    records = [
        record(kind=kind, drafter=drafter, k=k)
        for kind in ("code", "chat")
        for drafter, k in (("none", 0), ("ngram", 2))
    ]
    rows = [(r.kind, r.drafter, r.records) for r in by_kind(records)]
    assert rows == [
        ("code", "none", 1),
        ("code", "ngram", 1),
        ("chat", "none", 1),
        ("chat", "ngram", 1),
        ("all", "none", 2),
        ("all", "ngram", 2),
    ]
    one = [dataclasses.replace(r, kind="code") for r in records]
    assert len(by_kind(one)) == 2
