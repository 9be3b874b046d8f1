"""``specjax calibrate`` on a tiny model."""

import json
import xml.etree.ElementTree as ET

import pytest

from specjax.analysis.costs.calibrated import read_calibrated
from specjax.analysis.law import chain_tau

SMALL = ("--widths", 1, 2, 4, "--context", 24, "--seconds", 0.2)


@pytest.fixture
def calibrate(run, model, tmp_path):
    prompts = tmp_path / "mine.jsonl"
    lines = [{"prompt": "abcabcabcabc"}, {"prompt": "xyz xyz xyw"}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept = tmp_path / "kept.json"

    def calibrate(*more):
        result = run(
            *("calibrate", "--model", model, "--prompts", prompts, "--json", kept),
            *("--tokens", 12, *SMALL, *more),
        )
        told = json.loads(kept.read_text()) if kept.exists() else None
        return result, told, kept

    return calibrate


@pytest.mark.timeout(600)
def test_what_is_timed_is_kept_and_follows_the_law(calibrate, run, tmp_path):
    plot = tmp_path / "curve.svg"
    result, told, kept = calibrate("--drafters", "ngram", "--k", 3, "--plot", plot)
    assert result.status == 0, result.err
    found = read_calibrated(kept)
    assert found.curve.widths == [1, 2, 4]
    turns = len(found.curve.rounds[1])
    assert turns >= 3
    for times in [*found.curve.rounds.values(), *found.curve.drafts.values()]:
        assert len(times) == turns and all(t > 0 for t in times)
    assert set(found.machine.matrix_flops) == {"float32", "bfloat16"}
    assert found.machine.bandwidth > 1e8
    assert found.about["command"].startswith("specjax calibrate --model ")
    (each,) = told["predictions"]
    assert each["speedup"] == pytest.approx(
        each["tau"] / (each["c_verify"] + each["c_draft"])
    )
    assert each["low"] <= each["high"] and each["go"] == (each["speedup"] > 1)
    assert 1 <= each["tau"] <= 4
    for part in ("T(W)/T(1)", "break-even α", "ngram", "held back by", "GB/s"):
        assert part in result.out
    assert ("no-go" in result.out) == (not each["go"])
    assert "\x1b[" not in result.out
    assert "compiling" in result.err and "timing, turn 1" in result.err
    ET.fromstring(plot.read_text("utf-8"))
    # and the game knows this machine
    played = run("simulate", "--k", 2, "--calibration", kept, "--json").json
    assert played["devices"][-1]["c_verify"] == pytest.approx(found.curve.c_round(3))
    other = run("simulate", "--k", 2, "--calibration", kept, "--batch", 4)
    assert other.status == 2
    assert "batches of 1 were timed, and not of 4: calibrate with" in other.err
    beyond = run("simulate", "--k", 9, "--calibration", kept)
    assert (
        beyond.status == 2 and "measured to 4 rows, and this game has 10" in beyond.err
    )


@pytest.mark.timeout(600)
def test_a_given_alpha_judges_free_drafts_too(calibrate):
    result, told, _ = calibrate(
        *("--drafters", "ngram", "--k", 3, "--alpha", 0.6, 0.25, "--batch", 1, 2)
    )
    assert result.status == 0, result.err
    assert "plain decoding of" not in result.err  # nothing was run
    rows = told["predictions"]
    assert {row["batch"] for row in rows} == {1, 2}
    chain = next(r for r in rows if r["drafter"] == "ngram")
    assert chain["tau"] == pytest.approx(chain_tau(0.6, 3))
    assert chain["alpha"] == pytest.approx(0.6)
    tree = next(r for r in rows if r["drafter"] == "free drafts, a tree")
    rival = next(
        r
        for r in rows
        if r["drafter"] == "free drafts, a chain" and r["nodes"] == tree["nodes"]
    )
    assert tree["tau"] > rival["tau"] and tree["k"] < tree["nodes"]
    assert tree["c_draft"] == 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--alpha", 1.5), "--alpha 1.5: these are probabilities"),
        (("--alpha", 0.7, 0.7), "each in 0 .. 1, 1 together at most"),
        (("--k", 0), "--k 0: it must be at least 1"),
        (("--k",), "--k is empty"),
        (("--widths", 0), "--widths 0: it must be at least 1"),
        (("--context", 1), "--context 1: it must be at least 2"),
        (("--context", 10**6), "--context 1000000 with room for rounds of"),
        (("--json", "/nowhere/a.json"), "there is no folder /nowhere, make it first"),
        (("--plot", "/"), "--plot /: it is a folder, name a file"),
        (("--seconds", 0), "--seconds 0.0: it must be above 0"),
        (("--drafters", "none"), "--drafters none drafts nothing"),
        (("--drafters", "ngrm"), "--drafters ngrm: it must be one of"),
        (("--drafters", "eagle3"), "--drafters eagle3 needs a draft head's checkpoint"),
        (("--dtype", "float16"), "--dtype float16: it must be one of"),
        (("--draft-pick", "drawn"), "--draft-pick does nothing with --drafters"),
    ],
)
def test_bad_input_is_named_before_anything_is_timed(calibrate, options, told):
    result, kept, _ = calibrate(*options)
    assert result.status == 2 and kept is None
    assert told in result.err and "timing" not in result.err


def test_more_prompts_than_there_are(run, model):
    result = run("calibrate", "--model", model, "--per-kind", 99)
    assert result.status == 2
    assert "--per-kind: per_kind is 99" in result.err
