"""How far off is a prediction that was written down before the run?

    python experiments/prediction_error.py
    python experiments/prediction_error.py --quick

Two processes, one after the other. The first calibrates, as `specjax calibrate` does,
and writes its predictions to a file; the second measures, and never reads them. They
share no prompt: the first takes those at the end of each bundled kind, the second those
at the start. The report, which a third step makes of the two files, gives their dates.

*Planted*: the simulated-acceptance drafter drafts a told text, right with probability
alpha, over a grid of alpha, k, dtype and batch. *Cases*: real drafters, whose alpha is
taken from the first process's prompts; the verdict (go or no-go) should be the sign of
the gain that is measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import tyro
from prediction import cases as real
from prediction import planted, report
from prediction.planted import Cell

from specjax.analysis.records import commit, device_name, versions
from specjax.checkpoints import load, prompt_ids
from specjax.cli.cache import turn_on_compilation_cache
from specjax.cli.console import steps
from specjax.models.build import WeightType
from specjax.prompts import KINDS, Prompt, bundled_prompts

RESULTS = Path(__file__).resolve().parent / "results/prediction_error"
CASES = (
    "smollm2-135m,float32,ngram,8",
    "smollm2-135m,bfloat16,ngram,8",
    "smollm2-135m,bfloat16,suffix,4",
    "smollm2-135m,float32,draft-model:smollm2-135m,2",
    "smollm2-135m,bfloat16,draft-model:smollm2-135m,4",
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Predict, then measure, then compare."""

    model: str = "smollm2-135m"
    alphas: tuple[float, ...] = (0.3, 0.6, 0.85)
    ks: tuple[int, ...] = (1, 3, 7)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    batches: tuple[int, ...] = (1, 4)
    context: int = 192
    """Tokens before a planted run begins."""
    tokens: int = 256
    """Of a planted run, a row."""
    repeats: int = 3
    """Of every run; each has coins of its own."""
    seconds: float = 30.0
    """Of timing, for each calibration."""
    cases: tuple[str, ...] = CASES
    """MODEL,DTYPE,DRAFTER,K of real drafters."""
    case_tokens: int = 64
    per_kind: int = 2
    """Prompts of each kind for the cases, on either side."""
    quick: bool = False
    """One cell, one case, few tokens: the last alpha, k 3, the last dtype, batch 1."""
    stage: Literal["all", "predict", "measure", "report"] = "all"
    """all runs the other three, the first two in processes of their own."""
    out: Path = RESULTS

    def shrunk(self) -> Options:
        """What ``--quick`` means."""
        return dataclasses.replace(
            self,
            alphas=self.alphas[-1:],
            ks=(3,),
            dtypes=self.dtypes[-1:],
            batches=(1,),
            context=64,
            tokens=64,
            repeats=1,
            seconds=min(self.seconds, 5.0),
            cases=self.cases[:1],
            case_tokens=16,
            per_kind=1,
        )

    @property
    def groups(self) -> list[list[Cell]]:
        """Cells by dtype and batch."""
        return [
            [Cell(dtype, batch, a, k) for a in self.alphas for k in self.ks]
            for dtype, batch in itertools.product(self.dtypes, self.batches)
        ]

    @property
    def stem(self) -> Path:
        """Of the files."""
        model = Path(self.model).name
        return self.out / (f"quick-{model}" if self.quick else model)


def file_of(options: Options, what: str) -> Path:
    """``predicted``, ``measured`` or the report."""
    return options.stem.with_name(f"{options.stem.name}-{what}.json")


def prompts(options: Options, *, end: bool) -> list[Prompt]:
    """From one end of each kind; the other process takes the other one."""
    found = []
    for kind in KINDS:
        all_of = bundled_prompts(kind)
        assert 2 * options.per_kind <= len(all_of), "the two ends would share a prompt"
        part = slice(-options.per_kind, None) if end else slice(options.per_kind)
        found += all_of[part]
    return found


def texts(options: Options, tokenizer: Any, *, end: bool, rows: int) -> list[list[int]]:
    """Long texts of one side's prompts, each row turned to another beginning."""
    ids = [t for p in prompts(options, end=end) for t in prompt_ids(p, tokenizer)]
    length = options.context + options.tokens
    found = []
    for row in range(rows):
        first = row * len(ids) // rows
        turned = [*ids[first:], *ids[:first]]
        found.append((turned * (1 + length // len(turned)))[:length])
    return found


def about() -> dict[str, Any]:
    """When, where, with what."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device_name(),
        "versions": versions(),
        "commit": commit(),
        "command": shlex.join(["python", *sys.argv]),
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "cores": os.cpu_count(),
    }


def check(options: Options) -> None:
    """Refuse what would fail only after minutes of timing."""
    for name in ("alphas", "ks", "dtypes", "batches"):
        if not getattr(options, name):
            raise SystemExit(f"--{name} is empty: give at least one")
    for alpha in options.alphas:
        if not 0 <= alpha <= 1:
            raise SystemExit(f"--alphas {alpha:g}: a probability lies in 0 .. 1")
    for name in ("ks", "batches"):
        for value in getattr(options, name):
            if value < 1:
                raise SystemExit(f"--{name} {value}: at least 1")
    for dtype in options.dtypes:
        known = [each.value for each in WeightType]
        if dtype not in known:
            raise SystemExit(f"--dtypes {dtype}: one of {', '.join(known)}")
    for text in options.cases:
        real.Case.of(text)


@contextlib.contextmanager
def telling(what: str) -> Iterator[Callable[[str], None]]:
    """Progress without a known end: lines."""
    with steps(1) as step:
        step(what)
        yield lambda text: print(f"  {text}", file=sys.stderr, flush=True)


def predict(options: Options) -> None:
    """The first process."""
    groups, found = [], []
    with telling("predicting") as step:
        for cells in options.groups:
            step(f"{cells[0].dtype}, batch {cells[0].batch}")
            loaded = load(options.model, WeightType(cells[0].dtype))
            (text,) = texts(options, loaded.tokenizer, end=True, rows=1)
            decoder = loaded.decoder
            kept, rows = planted.predictions(
                decoder,
                (decoder.blocks, decoder.head),
                cells,
                text,
                options.context + options.tokens // 2,
                options.seconds,
                step,
            )
            groups.append(kept)
            for cell, row in zip(cells, rows, strict=True):
                found.append(row | {"cell_alpha": cell.alpha, "name": cell.name})
        judged = [
            real.predicted(
                real.Case.of(case),
                prompts(options, end=True),
                options.case_tokens,
                options.context + options.case_tokens // 2,
                options.seconds,
                step,
            )
            for case in options.cases
        ]
    write(options, "predicted", calibrations=groups, planted=found, cases=judged)


def measure(options: Options) -> None:
    """The second process. What is measured is written group by group."""
    runs: list[dict[str, Any]] = []
    judged: list[dict[str, Any]] = []
    started = about()["date"]

    def keep() -> None:
        write(options, "measured", started=started, planted=runs, cases=judged)
        # dozens of compiled engines meet the system's limit on memory mappings
        jax.clear_caches()

    with telling("measuring") as step:
        for cells in options.groups:
            group = f"{cells[0].dtype} B={cells[0].batch}"
            step(group)
            loaded = load(options.model, WeightType(cells[0].dtype))
            rows = texts(options, loaded.tokenizer, end=False, rows=cells[0].batch)
            for run in planted.measured(
                loaded.decoder, cells, rows, options.context, options.repeats, step
            ):
                runs.append(run | {"group": group})
            keep()
        for text in options.cases:
            judged += real.measured(
                real.Case.of(text),
                prompts(options, end=False),
                options.case_tokens,
                options.repeats,
                step,
            )
            keep()


def write(options: Options, what: str, **kept: Any) -> None:
    """A file with all that a reader needs to make it again."""
    plain = {k: v for k, v in dataclasses.asdict(options).items() if k != "out"}
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(about() | {"options": plain} | kept, indent=1)
    file_of(options, what).write_text(text + "\n")


def read(path: Path) -> dict[str, Any]:
    """One of the files."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        stage = "predict" if "predicted" in path.name else "measure"
        raise SystemExit(f"there is no {path}: --stage {stage} writes it") from error
    except json.JSONDecodeError as error:
        raise SystemExit(f"{path} is not JSON ({error})") from error


def compare(options: Options) -> str:
    """The report, of both files."""
    said, done = (read(file_of(options, what)) for what in ("predicted", "measured"))
    # a run that was kept before it told its beginning tells its end
    if said["date"] > done.get("started", done["date"]):
        raise SystemExit("the predictions are younger than the measured run")
    ours = {"stage", "repeats"}
    other = {
        name
        for name, value in said["options"].items()
        if name not in ours and value != done["options"].get(name)
    }
    if other:
        raise SystemExit(f"the two files differ in their {', '.join(sorted(other))}")
    parts = [
        "# Predicted before, measured after\n",
        f"{options.model}; predictions written {said['date']}, measured run ended "
        f"{done['date']}; {done['device']}, JAX {done['versions']['jax']}, load "
        f"average {done['load']}; `{done['command']}`.\n",
        "## Planted acceptance\n",
        report.planted_table(report.rows(said["planted"], done["planted"])),
    ]
    if any(map(report.was_busy, (said, done))):
        parts.insert(2, f"{report.BUSY}\n")
    if said["cases"]:
        parts += [
            "\n## Real drafters\n",
            report.case_table(said["cases"], done["cases"]),
        ]
    text = "\n".join(parts) + "\n"
    options.stem.with_name(f"{options.stem.name}.md").write_text(text)
    return text


def main(options: Options) -> None:
    """One stage, or all."""
    work = options.shrunk() if options.quick else options
    check(work)
    turn_on_compilation_cache()
    if options.stage == "predict":
        predict(work)
    elif options.stage == "measure":
        measure(work)
    elif options.stage == "report":
        print(compare(work))
    else:
        for stage in ("predict", "measure"):
            # the last --stage counts
            command = [sys.executable, *sys.argv, "--stage", stage]
            if status := subprocess.run(command, check=False).returncode:
                raise SystemExit(status)
        print(compare(work))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
