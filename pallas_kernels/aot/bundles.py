"""Static figures of the TPU's kernels: instruction bundles and spills, kept in a file.

    python -m pallas_kernels.aot.bundles            # compare with baseline.json
    python -m pallas_kernels.aot.bundles --write    # keep what this compiler makes

A bundle is what a TPU's core starts in one cycle, so a kernel's count is about the
cycles of one step of its grid, with the body of a loop counted once, where memory is no
hindrance. It is the first to show that a change has made a kernel slower.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pallas_kernels.aot import kept

DEVICES = ("v5e", "v6e")
TOLERANCE = 0.1
"""Of bundles: so much more is slower, so much less calls for a new baseline."""
KERNEL = 'custom_call_target="tpu_custom_call"'
_SCHEDULE = "schedule-analysis_final_bundles.txt"
_USE = "final_hlo-static-per-bundle-utilization.txt"
_COUNT = re.compile(r"non empty scheduled bundles: (\d+)")


class Figures(NamedTuple):
    """Of all kernels in one program."""

    kernels: int
    bundles: int
    spills: int
    """Bundles that put a vector register aside in memory."""


def read_figures(folder: Path) -> Figures:
    """From what the compiler has written about one program.

    Raises ``ValueError`` if a file is not as it is expected to be.
    """
    found = Figures(0, 0, 0)
    for schedule in sorted(folder.glob(f"*{_SCHEDULE}")):
        text = schedule.read_text()
        if KERNEL not in text or "-TLP-" in schedule.name:  # the program as a whole
            continue
        count = _COUNT.search(text)
        if count is None:
            raise ValueError(f"{schedule.name} counts no bundles")
        # files of one computation differ in a number of their own before their kind
        stem = re.sub(rf"\d+-{_SCHEDULE}$", "", schedule.name)
        (use,) = (
            path
            for path in folder.glob(f"*{_USE}")
            if re.fullmatch(re.escape(stem) + rf"\d+-{_USE}", path.name)
        )
        found = Figures(
            found.kernels + 1,
            found.bundles + int(count[1]),
            found.spills + _spills(use),
        )
    if not found.kernels:
        raise ValueError(f"the compiler wrote of no kernel into {folder}")
    return found


def _spills(file: Path) -> int:
    """Bundles with a spill, of a table with one line a bundle and named columns."""
    lines = file.read_text().splitlines()
    names = [name.strip() for name in lines[1].split(",")]
    column = names.index("VSTORE:SPILL")
    start = lines.index("== UTILIZATION:") + 1
    return sum(int(line.split()[column]) > 0 for line in lines[start:] if line.strip())


def _bounds(old: kept.Figures) -> list[tuple[int, int]]:
    kernels, bundles, spills = old
    slack = int(TOLERANCE * bundles)
    return [(kernels, kernels), (bundles - slack, bundles + slack), (0, spills + slack)]


KEPT = kept.Kept(
    Path(__file__).with_name("baseline.json"), "libtpu", Figures._fields, _bounds
)


def compile_all(devices: Sequence[str], only: str) -> Iterator[tuple[str, Figures]]:
    """Every case for every device, in a process that has not loaded libtpu yet."""
    folder = Path(tempfile.mkdtemp(prefix="bundles-"))
    dump = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {dump}"
    try:
        yield from _compile_all(devices, only, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _compile_all(
    devices: Sequence[str], only: str, folder: Path
) -> Iterator[tuple[str, Figures]]:
    import jax

    from pallas_kernels.aot import tpu
    from pallas_kernels.aot.case import all_cases

    jax.config.update("jax_enable_compilation_cache", False)
    for name in devices:
        target = tpu.device(name)
        for case in all_cases("tpu", only):
            if name in case.unfit:
                continue
            tpu.compile_case(case, target)
            yield f"{name} {case.operation}/{case.name}", read_figures(folder)
            for file in folder.iterdir():
                file.unlink()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; 1 if something is not as the baseline says."""
    options = _parser().parse_args(arguments)
    from pallas_kernels.aot import tpu

    if (absent := tpu.missing()) is not None:
        print(f"skipped: {absent}")
        return 0
    version = importlib.metadata.version("libtpu")
    print(f"{'kernel':<48} {'kernels':>7} {'bundles':>8} {'spills':>7}")
    found: dict[str, Figures] = {}
    for name, figures in compile_all(options.device or DEVICES, options.only):
        found[name] = figures
        row = f"{figures.kernels:>7} {figures.bundles:>8} {figures.spills:>7}"
        print(f"{name:<48} {row}", flush=True)
    whole = not (options.only or options.device)
    if options.write:
        try:
            KEPT.write(version, found, whole=whole)
        except ValueError as error:
            print(error, flush=True)
            return 2
        print(f"written to {KEPT.file}")
        return 0
    made_by = KEPT.made_by()
    if made_by != version:
        print(f"not compared: the baseline is of libtpu {made_by}, this is {version}")
        return 0
    told = KEPT.changes(found, whole=whole)
    print("\n".join(told) if told else "all as the baseline says")
    return int(bool(told))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.aot.bundles",
        description="Compile every kernel for TPUs that are not here, count the "
        "instruction bundles and register spills of one step, and hold them to "
        f"{KEPT.file.name}.",
    )
    parser.add_argument(
        "--device", action="append", choices=DEVICES, help="may be repeated"
    )
    parser.add_argument("--only", default="", help="a part of a kernel's name")
    parser.add_argument(
        "--write", action="store_true", help="keep the figures in the baseline"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
