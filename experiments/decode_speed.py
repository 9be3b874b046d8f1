"""How fast SmolLM2-135M decodes on CPU: specjax beside other decoders and the memory.

    python experiments/decode_speed.py --threads 1
    python experiments/decode_speed.py --peers-python PEERS/bin/python --peers-models M
    python experiments/decode_speed.py --report experiments/results/decode_speed/X.json

Four sections, in one session on cores of its own: plain decoding (A) and n-gram drafts
(B), all arms on every prompt in turn; a pass of W rows and the round around it (C); the
start of the command line (D). Every time is kept in a JSON file; a report with plots is
made from that file alone. `experiments/peers/README.md` says how to get the peers.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import arg

sys.path.insert(0, str(Path(__file__).resolve().parent))
from speed import machine

RESULTS = Path(__file__).resolve().parent / "results" / "decode_speed"
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)
QUICK_WIDTHS = (1, 8)
DTYPES = ("float32", "bfloat16", "int8")
SECTIONS = ("decode", "passes", "start")


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure decoding on CPU, or make the report of a measurement anew."""

    threads: int = 1
    """Cores to use, for us and for the peers."""
    model: str = "smollm2-135m"
    """A name of `specjax zoo`, a folder, a .gguf file or a hub id."""
    peers_python: Path | None = None
    """The Python of the peers' environment; without it only specjax is measured."""
    peers_models: Path | None = None
    """The folder that `experiments/peers/prepare.py` wrote."""
    dtypes: tuple[Literal["float32", "bfloat16", "int8"], ...] = DTYPES
    """Weight types of specjax's arms."""
    sections: tuple[str, ...] = SECTIONS
    """What to measure: decode (A and B), passes (C), start (D)."""
    per_kind: int = 3
    """Prompts of each of the five kinds."""
    tokens: int = 128
    """Tokens to decode of each prompt; no id ends them earlier."""
    repeats: int = 2
    """Times that every arm decodes every prompt."""
    ks: tuple[int, ...] = (4, 8, 15)
    """Most n-gram drafts a round."""
    rounds_per_call: int = 32
    """Rounds on the device between two looks of the host."""
    settle: float = 0.3
    """Seconds of rest before each run, for threads that still spin."""
    all_widths: bool = False
    """Time passes of every width to 16, not of some."""
    context: int = 256
    """Committed tokens below the timed passes."""
    pass_repeats: int = 9
    """Times that each pass and round is timed."""
    passes: int = 16
    """Passes, or rounds, in one timing."""
    warm_starts: int = 3
    """Starts of the command line with a warm compilation cache, for each dtype."""
    quick: bool = False
    """A smoke run: one prompt a kind, 32 tokens, one k, two widths, few repeats."""
    out: Path = RESULTS
    """The folder for the results."""
    report: Annotated[Path | None, arg(metavar="FILE.json")] = None
    """Make the report of this file anew, and measure nothing."""


def quick(options: Options) -> Options:
    """The smoke run's sizes."""
    return dataclasses.replace(
        options,
        per_kind=1,
        tokens=32,
        repeats=1,
        ks=(8,),
        pass_repeats=2,
        passes=8,
        warm_starts=1,
    )


def widths_of(options: Options) -> tuple[int, ...]:
    """The rows of the passes that are timed."""
    if options.all_widths:
        return tuple(range(1, 17))
    return QUICK_WIDTHS if options.quick else WIDTHS


def check(options: Options) -> None:
    """What can be said before anything is measured."""
    if (options.peers_python is None) != (options.peers_models is None):
        raise SystemExit("give both --peers-python and --peers-models, or neither")
    for section in options.sections:
        if section not in SECTIONS:
            raise SystemExit(f"--sections {section}: choose from {', '.join(SECTIONS)}")


def command(options: Options) -> str:
    """The command line, with names in place of the paths of this machine."""
    words = ["python", "experiments/decode_speed.py"]
    names = {"peers_python": "PEERS/bin/python", "peers_models": "MODELS"}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value == field.default or field.name == "out":
            continue
        words.append("--" + field.name.replace("_", "-"))
        if field.name in names:
            words.append(names[field.name])
        elif isinstance(value, tuple):
            words += [str(item) for item in value]
        elif not isinstance(value, bool):
            words.append(Path(value).name if field.name == "model" else str(value))
    return " ".join(words)


def save(data: dict[str, Any], path: Path) -> None:
    """Write the file whole: a run that is stopped leaves what it had measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
    os.replace(part, path)


def new_path(data: dict[str, Any], options: Options) -> Path:
    """Named by machine, day and threads; a number keeps an older file safe."""
    stem = f"{machine.slug(data['machine'])}-{data['date'][:10]}-t{options.threads}"
    if options.quick:
        stem += "-quick"
    path, number = options.out / f"{stem}.json", 1
    while path.exists():
        number += 1
        path = options.out / f"{stem}-{number}.json"
    return path


def main() -> None:
    """Measure and report, or report alone."""
    options = tyro.cli(Options, description=__doc__)
    if options.report is None:
        check(options)
        cores = machine.pin(options.threads)
        said = command(options)
        if options.quick:
            options = quick(options)
        # JAX is imported here, when the cores are chosen
        from speed import session

        data: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": said,
            "machine": machine.describe(),
            "threads": options.threads,
            "cores_used": cores,
        }
        path = new_path(data, options)
        session.measure(options, data, widths_of(options), lambda: save(data, path))
    else:
        path = options.report
        data = json.loads(path.read_text())
    from speed import report

    print(report.write(data, path))


if __name__ == "__main__":
    main()
