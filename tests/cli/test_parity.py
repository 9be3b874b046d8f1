"""``specjax parity``."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from specjax.cli import parity
from specjax.testing.parity_arrays import ARRAYS
from specjax.testing.reference import continue_greedy, logits


@pytest.fixture(scope="module")
def own(model) -> dict[str, np.ndarray]:
    """Arrays that a user might make, of the session's tiny model."""
    tensors = load_file(model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    ids = np.random.default_rng(0).integers(0, 256, (2, 9))
    greedy = [continue_greedy(tensors, config, row, 6) for row in ids]
    return {
        "input_ids": ids,
        "logits": np.stack([logits(tensors, config, row) for row in ids]),
        "greedy_ids": np.array(greedy),
    }


@pytest.fixture
def folder(model, tmp_path):
    """``folder(name, arrays)``: the tiny model with an oracle of these."""

    def folder(name, arrays):
        path = tmp_path / name
        path.mkdir()
        for file in ("model.safetensors", "config.json"):
            (path / file).symlink_to(model / file)
        np.savez(path / "oracle.npz", **arrays)
        return path

    return folder


def rows(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split() for line in text.splitlines() if line}


def test_an_oracle_of_ones_own(run, folder, own):
    path = folder("mine", {**own, "notes": np.arange(3)})
    result = run("parity", path)
    assert result.status == 0, result.out + result.err
    told = rows(result.out)
    assert told["logits"][1:6] == ["2", "×", "9", "×", "256"]
    assert told["logits"][-1] == told["greedy_ids"][-1] == "pass"
    assert told["greedy_ids"][-4:-1] == ["0", "0", "0"]
    assert told["greedy_logits"][-1] == told["long_argmax"][-1] == "absent"
    assert told["notes"][-1] == "unknown"
    assert "drafts:" in result.out and " 0 accepted" not in result.out
    assert result.out.splitlines()[-1].split()[-1] == "pass"
    assert "\x1b" not in result.out
    assert result.err.splitlines() == [f"[1/1] {path}"]


def test_what_fails_does_not_keep_the_others_from_running(run, folder, own, tmp_path):
    good = folder("good", own)
    wrong = folder("wrong", {**own, "logits": own["logits"] + 1e-3})
    broken = folder("broken", {**own, "logits": own["logits"][:, :5]})
    empty = folder("empty", {"input_ids": own["input_ids"]})
    paths = [wrong, broken, tmp_path / "nowhere", empty, good]
    result = run("parity", *paths)
    assert result.status == 1
    last = result.out.splitlines()[-5:]
    assert [line.split()[-1] for line in last] == ["FAIL"] * 4 + ["pass"]
    for line, path in zip(last, paths, strict=True):
        assert line.startswith(str(path))
    assert "logits" in last[0] and "1.0e-03" in last[0]
    assert ["does not load" in line for line in last] == [False, *[True] * 3, False]
    errors = [line for line in result.err.splitlines() if "error" in line]
    assert len(errors) == 3
    for path, error, said in zip(
        paths[1:],
        errors,
        ("S = 5", "is no directory", "nothing to compare"),
        strict=False,
    ):
        assert str(path) in error and said in error


def test_json(run, folder, own, tmp_path):
    paths = [folder("good", own), tmp_path / "nowhere"]
    result = run("parity", *paths, "--json")
    assert result.status == 1
    (line,) = result.out.splitlines()
    told = json.loads(line)
    assert told["passed"] is False
    good, bad = told["directories"]
    assert (good["passed"], bad["passed"]) == (True, False)
    assert "is no directory" in bad["error"]
    checks = {check["array"]: check for check in good["checks"]}
    assert checks["logits"]["status"] == "pass"
    assert checks["logits"]["shape"] == [2, 9, 256]
    assert 0 < checks["logits"]["plain"] < checks["logits"]["tolerance"] == 5e-4
    assert checks["hidden_states"]["status"] == "absent"


def test_a_bug_in_one_directory_is_told_and_the_others_still_run(run, monkeypatch):
    def bug(path):
        raise RuntimeError("index 7 is out of bounds")

    monkeypatch.setattr(parity, "check_parity", bug)
    result = run("parity", "a", "b")
    assert result.status == 1
    errors = [line for line in result.err.splitlines() if "error" in line]
    assert errors == [
        f"specjax: error: {name}: RuntimeError: index 7 is out of bounds"
        for name in "ab"
    ]


def test_results_are_coloured_on_a_terminal(run, folder, own, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    paths = [folder("a", own), folder("b", {**own, "logits": own["logits"] + 1e-3})]
    result = run("parity", *paths)
    assert result.status == 1
    assert "\x1b[32mpass" in result.out and "\x1b[1;31mFAIL" in result.out


def test_no_directory(run):
    result = run("parity")
    assert result.status == 2
    assert "no directory is given" in result.err and "parity DIR" in result.err


def test_help_says_what_the_arrays_are(run):
    text = run("parity", "--help").out
    for name in ARRAYS:
        assert f"`{name}`" in text
    assert "DIR ..." in text and "--json" in text


def test_files_among_the_directories_are_left_out(run, tmp_path):
    note = tmp_path / "README.md"
    note.write_text("which model is where")
    alone = run("parity", note)
    assert alone.status == 2 and "README.md is a file: give directories" in alone.err
    beside = run("parity", note, tmp_path / "absent")
    assert "left out, no directories" in beside.err and beside.status == 1
    assert "absent is no directory" in beside.err
