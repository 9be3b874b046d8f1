"""The commands, the code and the table of docs/measure-before-you-build.md."""

import dataclasses
import importlib.util
import itertools
import json
import re
import shlex
import statistics
import sys
from pathlib import Path

import pytest
import tyro

from specjax.analysis.costs.calibrated import read_calibrated
from specjax.analysis.law import break_even_alpha
from specjax.cli.main import parse

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs/measure-before-you-build.md").read_text("utf-8")
LINES = [
    line
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]
COMMANDS = [shlex.split(line)[1:] for line in LINES if line.startswith("specjax ")]


def test_the_page_has_commands_of_each_kind():
    assert {"simulate", "calibrate"} == {command[0] for command in COMMANDS}
    assert len(COMMANDS) + 1 == len(LINES)


@pytest.mark.parametrize(
    "command",
    [c for c in COMMANDS if c[0] == "simulate" and "--calibration" not in c],
    ids=" ".join,
)
def test_games_run(run, monkeypatch, tmp_path, command):
    monkeypatch.chdir(tmp_path)
    result = run(*command)
    assert result.status == 0, result.err
    assert "★" in result.out and "law" in result.out
    if "--svg" in command:
        assert (tmp_path / "rounds.svg").read_text("utf-8").startswith("<svg")


SMALL = {"widths": (1, 2), "context": (24,), "seconds": 0.1, "tokens": 6, "k": (1,)}


@pytest.mark.timeout(600)
def test_calibrations_run_and_are_read_again(run, monkeypatch, tmp_path, model):
    """On a tiny model, with fewer widths and one drafter; else as they stand."""
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text(json.dumps({"prompt": "abcabcabc"}) + "\n")
    small = SMALL | {"model": str(model), "drafters": ("ngram",), "prompts": "p.jsonl"}
    for command in [c for c in COMMANDS if c[0] == "calibrate"]:
        parsed = parse(command)
        assert parsed.model == "smollm2-135m"
        if "bfloat16" in command or "--alpha" in command:
            assert dataclasses.replace(parsed, **small).run(command) == 0
    assert Path("here.svg").read_text("utf-8").startswith("<svg")
    (reader,) = [c for c in COMMANDS if "--calibration" in c]
    short = [*reader[:-2], "--k", "1", *reader[-2:]]
    result = run(*short)
    assert result.status == 0, result.err
    assert "bfloat16, B = 1" in result.out


def test_the_experiment_takes_its_options(monkeypatch):
    (line,) = [line for line in LINES if line.startswith("python ")]
    _, script, *arguments = shlex.split(line)
    monkeypatch.syspath_prepend(str(REPOSITORY / "experiments"))
    spec = importlib.util.spec_from_file_location("experiment", REPOSITORY / script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "experiment", module)
    spec.loader.exec_module(module)
    options = tyro.cli(module.Options, args=arguments)
    assert options.quick and options.shrunk().repeats == 1
    # the two processes share no prompt
    ends = [module.prompts(options, end=end) for end in (True, False)]
    assert not {p.id for p in ends[0]} & {p.id for p in ends[1]}


def test_the_code_runs():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "the page", "exec"), {})


def test_the_table_follows_from_the_law():
    rows = [
        [float(cell) for cell in line.strip("|").split("|")]
        for line in PAGE.splitlines()
        if re.match(r"\| \d", line)
    ]
    assert len(rows) == 5
    for width, drafts, float32, alpha32, bfloat16, alpha16 in rows:
        assert drafts == width - 1
        for cost, alpha in ((float32, alpha32), (bfloat16, alpha16)):
            known = break_even_alpha(int(drafts), cost)
            # the costs are rounded here; the page's alphas are not made from that
            assert known is not None and abs(known - alpha) < 0.01


def test_its_curve_is_the_one_that_was_measured():
    folder = REPOSITORY / "experiments/results/calibrate"
    for dtype, column in (("float32", 2), ("bfloat16", 4)):
        found = read_calibrated(folder / f"smollm2-135m-{dtype}.json")
        for line in PAGE.splitlines():
            if re.match(r"\| \d", line):
                cells = [cell.strip() for cell in line.strip("|").split("|")]
                assert f"{found.curve.c_round(int(cells[0])):.2f}" == cells[column]


def test_its_errors_are_those_of_the_predictions():
    report = REPOSITORY / "experiments/results/prediction_error/smollm2-135m.md"
    errors: dict[str, list[float]] = {}
    for line in report.read_text("utf-8").splitlines():
        if re.match(r"\| (float32|bfloat16) \|", line):
            dtype, batch, *_, error, _, _, _ = (
                line.strip("|").replace(" ", "").split("|")
            )
            group = f"{dtype}, batch {batch}"
            errors.setdefault(group, []).append(abs(float(error.rstrip("%"))))
    assert sum(map(len, errors.values())) == 36
    for group, found in errors.items():
        middle, worst = statistics.median(found), max(found)
        assert f"| {group} | {middle:.1f} % | {worst:.1f} % |" in PAGE
    every = list(itertools.chain(*errors.values()))
    assert f"median error was {statistics.median(every):.1f} %" in PAGE
    assert f"the worst {max(every):.1f} %" in PAGE
