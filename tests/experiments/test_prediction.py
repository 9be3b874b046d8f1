"""The arithmetic of the prediction experiment, and a planted run of a toy."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from specjax.acceptance import Greedy
from specjax.analysis.costs.scripted import Scripted
from specjax.analysis.law import chain_tau
from specjax.decoding.engine import Engine
from specjax.decoding.generate import generate
from specjax.decoding.requests import Request
from specjax.drafters.null import NullDrafter
from specjax.testing.toys import toy_llama

FOLDER = Path(__file__).resolve().parents[2] / "experiments"


@pytest.fixture(scope="module")
def modules():
    sys.path.insert(0, str(FOLDER))
    try:
        from prediction import cases, planted, report

        spec = importlib.util.spec_from_file_location(
            "prediction_error", FOLDER / "prediction_error.py"
        )
        assert spec is not None and spec.loader is not None
        script = importlib.util.module_from_spec(spec)
        sys.modules["prediction_error"] = script
        spec.loader.exec_module(script)
        yield cases, planted, report, script
    finally:
        sys.path.remove(str(FOLDER))


def test_a_told_target_says_the_text_and_works_all_the_same(modules):
    _, planted, _, _ = modules
    target = toy_llama().decoder
    text = np.random.default_rng(0).integers(1, 60, 40).tolist()
    told = planted.Told(target, Scripted.of([text], 61))
    request = Request(prompt_ids=text[:10], max_tokens=30)
    plain = Engine(target, NullDrafter(), Greedy())
    assert generate(plain, [request])[0].ids != tuple(text[10:])
    engine = Engine(told, NullDrafter(), Greedy())
    assert generate(engine, [request])[0].ids == tuple(text[10:])


def test_what_is_planted_is_accepted(modules):
    _, planted, _, _ = modules
    target = toy_llama().decoder
    draw = np.random.default_rng(0)
    texts = draw.integers(1, 60, (2, 410)).tolist()
    cell = planted.Cell("float32", 2, 0.8, 2)
    runs = list(
        planted.measured(target, [cell], texts, 10, repeats=1, step=lambda _: None)
    )
    plain, drafted = (
        next(run for run in runs if run["name"] == name)
        for name in (planted.PLAIN, cell.name)
    )
    assert plain["tokens"] == 2 * plain["rounds"]
    # all rounds before any row ended: a few hundred coins
    assert drafted["tokens"] > 300 and drafted["seconds"] > 0
    tau = drafted["tokens"] / drafted["rounds"] / 2
    assert tau == pytest.approx(chain_tau(0.8, 2), abs=0.2)
    assert abs(tau - chain_tau(0.5, 2)) > 0.3


def run(name, repeat, tokens, rounds, seconds):
    return {
        "name": name,
        "repeat": repeat,
        "tokens": tokens,
        "rounds": rounds,
        "seconds": seconds,
        "group": "float32 B=1",
    }


def said(cell, speedup, tau):
    return {
        "dtype": cell.dtype,
        "batch": cell.batch,
        "cell_alpha": cell.alpha,
        "k": cell.k,
        "speedup": speedup,
        "low": speedup,
        "high": speedup,
        "tau": tau,
    }


def test_errors_are_worked_out(modules):
    _, planted, report, _ = modules
    cell = planted.Cell("float32", 1, 0.6, 3)
    runs = [
        run("plain", 0, 100, 100, 10.0),
        run("plain", 1, 100, 100, 20.0),
        run(cell.name, 0, 100, 50, 6.25),  # 1.6 times
        run(cell.name, 1, 100, 50, 12.5),
    ]
    (row,) = report.rows([said(cell, 1.76, 2.2)], runs)
    assert row.measured == pytest.approx(1.6)
    assert row.error == pytest.approx(0.1)
    # the coins gave 2.0 tokens a round and not 2.2: so the costs were right
    assert row.tau == 2.0 and row.cost_error == pytest.approx(0)
    text = report.planted_table([row])
    assert "+10.0%" in text and "Median error 10.0%" in text and "**missed**" in text
    (good,) = report.rows([said(cell, 1.62, 2.0)], runs)
    assert "worst 1.2%" in report.verdict([good]) and "met" in report.verdict([good])


@pytest.mark.parametrize(("speedup", "right"), [(1.3, "0 of 1"), (0.9, "1 of 1")])
def test_verdicts_are_held_to_the_sign(modules, speedup, right):
    _, _, report, _ = modules
    runs = [
        {
            "name": "m,float32,ngram,4",
            "repeat": 0,
            "plain": {"tokens": 10, "seconds": 1.0},
            "drafted": {"tokens": 10, "seconds": 1.25, "rounds": 5},
        }
    ]
    expected = {
        "name": "m,float32,ngram,4",
        "tau": 2.0,
        "speedup": speedup,
        "low": 0.5,
        "high": 1.5,
    }
    text = report.case_table([expected], runs)
    assert f"{right} verdicts are right." in text and "| 0.80 |" in text


@pytest.mark.parametrize(
    ("load", "busy"), [([6.6, 5.0, 3.4], True), ([1.9, 2.0, 2.0], False), (None, False)]
)
def test_a_busy_machine_is_told_of(modules, load, busy):
    assert modules[2].was_busy({"load": load, "cores": 2}) is busy


def test_cases_from_the_command_line(modules):
    cases, _, _, script = modules
    for text in script.CASES:
        assert cases.Case.of(text).name == text
    with pytest.raises(SystemExit, match="write MODEL,DTYPE,DRAFTER,K"):
        cases.Case.of("a,b,c")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"alphas": (1.5,)}, "--alphas 1.5: a probability"),
        ({"alphas": ()}, "--alphas is empty"),
        ({"ks": (0,)}, "--ks 0: at least 1"),
        ({"dtypes": ("float16",)}, "--dtypes float16: one of"),
        ({"cases": ("m,float32,foo,2",)}, "no such drafter"),
        ({"cases": ("m,float32,ngram,0",)}, "K is at least 1"),
        ({"cases": ("m,float8,ngram,1",)}, "no such dtype"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_timed(modules, change, told):
    script = modules[3]
    script.check(script.Options())
    with pytest.raises(SystemExit, match=told):
        script.check(script.Options(**change))


def test_missing_and_unlike_files_are_told(modules, tmp_path):
    script = modules[3]
    options = script.Options(out=tmp_path, cases=())
    with pytest.raises(SystemExit, match="--stage predict writes it"):
        script.compare(options)
    script.write(options, "predicted", planted=[], cases=[])
    with pytest.raises(SystemExit, match="--stage measure writes it"):
        script.compare(options)
    other = script.Options(out=tmp_path, cases=(), context=7)
    script.write(other, "measured", started="3000-01-01", planted=[], cases=[])
    with pytest.raises(SystemExit, match="the two files differ in their context"):
        script.compare(options)


def test_predictions_that_are_younger_are_refused(modules, tmp_path):
    script = modules[3]
    options = script.Options(out=tmp_path, cases=())
    for what, date in (("predicted", "2026-01-02"), ("measured", "2026-01-03")):
        # the run had begun before they were written
        text = f'{{"date": "{date}", "started": "2026-01-01"}}'
        script.file_of(options, what).write_text(text)
    with pytest.raises(SystemExit, match="younger than the measured run"):
        script.compare(options)
