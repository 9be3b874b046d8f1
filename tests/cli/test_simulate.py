"""``specjax simulate``."""

import json
import xml.etree.ElementTree as ET

import pytest

LECTURE = ("--alpha", 0.85, "--k", 4, "--c-draft", 0.1, "--rounds", 50)


def test_the_lectures_game(run):
    result = run("simulate", *LECTURE)
    assert result.status == 0, result.err
    bars = [
        line for line in result.out.splitlines() if "★" in line and "■ a" not in line
    ]
    joined = " ".join(bars)
    assert joined.count("★") == 50
    # every round has its four drafts, accepted or not
    assert joined.count("■") + joined.count("✗") == 200
    assert "50 " in joined
    rows = {line[:9]: line.split() for line in result.out.splitlines()}
    assert rows["τ, tokens"][-1] == "3.71"
    assert rows["speed-up "][-1] == "3.37×"
    for name in ("H100", "H200", "B200", "TPU v5e", "TPU v6e"):
        assert name in result.out
    assert "\x1b[" not in result.out


def test_colours_on_a_terminal(run, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = run("simulate", *LECTURE).out
    for code in ("\x1b[32m", "\x1b[33m", "\x1b[31m"):
        assert code in out


def test_json_agrees_with_itself_and_with_the_seed(run):
    told = run("simulate", *LECTURE, "--json", "--seed", 5).json
    assert told == run("simulate", *LECTURE, "--json", "--seed", 5).json
    assert told["paths"] != run("simulate", *LECTURE, "--json").json["paths"]
    tokens = sum(len(path) + 1 for path in told["paths"])
    assert told["tau"] == pytest.approx(tokens / 50)
    assert told["law_tau"] == pytest.approx(3.70863, abs=1e-5)
    assert told["law_speedup"] == pytest.approx(3.70863 / 1.1, abs=1e-5)
    assert next(row["device"] for row in told["devices"]) == "H100"


def test_trees(run):
    tree = run(
        "simulate", "--alpha", 0.55, 0.35, "--branching", 2, 1, "--json", "--rounds", 9
    ).json
    assert tree["parents"] == [-1, -1, 0, 1]
    # the second node of a branch has rank 0: 1 + 0.55 + 0.35 + 0.9 x 0.55
    assert tree["law_tau"] == pytest.approx(2.395)
    best = run("simulate", "--alpha", 0.55, 0.35, "--nodes", 4, "--json").json
    assert best["law_tau"] >= tree["law_tau"] and len(best["parents"]) == 4


def test_drafts_by_the_token(run):
    options = ("--alpha", 0.8, "--k", 3, "--c-draft", 0, "--c-token", 0.2, "--json")
    assert run("simulate", *options).json["cost"] == pytest.approx(1.6)


def test_the_drawing(run, tmp_path):
    file = tmp_path / "rounds.svg"
    assert run("simulate", *LECTURE, "--svg", file).status == 0
    root = ET.fromstring(file.read_text("utf-8"))
    assert len(list(root.iter("{http://www.w3.org/2000/svg}g"))) == 50


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--alpha", 1.2), "--alpha 1.2: a probability lies in 0 .. 1"),
        (("--alpha", 0.6, 0.2), "--alpha has 2 ranks, and a chain uses one"),
        (("--alpha",), "--alpha is empty"),
        (("--k", 0), "--k 0: it must be at least 1"),
        (("--rounds", 0), "--rounds 0: it must be at least 1"),
        (("--branching", 2, "--nodes", 3), "--branching and --nodes both say"),
        (("--alpha", 0.7, 0.7, "--branching", 2), "add up to 1.4"),
        (
            ("--alpha", 0.7, "--branching", 2),
            "--branching 2 has 2 siblings, and --alpha 1 ranks: give 2",
        ),
        (("--c-draft", "inf"), "--c-draft inf: a cost is 0 or more, and finite"),
        (("--c-token", -0.1), "--c-token -0.1: a cost is 0 or more"),
        (("--c-verify", 0), "--c-verify 0: it must be above 0"),
        (("--svg", "/nowhere/a.svg"), "there is no folder /nowhere, make it"),
        (("--mfu", 0), "--mfu 0.0: a share lies in 0 .. 1"),
        (("--target", "llama"), "--target llama: it must be one of llama-3.1-8b"),
        (("--calibration", "/nowhere.json"), "nowhere.json"),
    ],
)
def test_bad_input_is_named(run, options, told):
    result = run("simulate", *options)
    assert result.status == 2
    assert told in result.err


def test_a_file_that_is_no_calibration(run, tmp_path):
    file = tmp_path / "x.json"
    for text in ("{", "[]", json.dumps({"format": "other"})):
        file.write_text(text)
        result = run("simulate", "--calibration", file)
        assert result.status == 2 and f"--calibration {file}: it " in result.err
