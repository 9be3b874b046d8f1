"""``python -m pallas_kernels.aot``: compile every kernel for devices not here."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import jax

from pallas_kernels.aot import tpu
from pallas_kernels.aot.case import Case, all_cases
from pallas_kernels.aot.program import examine

ROW = "{:<38} {:<5} {:>5} {:>8} {:>10} {:>8}  {}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; the number of programs that fail, at most 99."""
    options = _options(arguments)
    absent = tpu.missing()
    if absent is not None:
        print(f"skipped: {absent}")
        return 0
    # programs for devices that are not here are compiled to be looked at, not kept
    jax.config.update("jax_enable_compilation_cache", False)
    generations = options.device or list(tpu.TOPOLOGIES)
    print(ROW.format("kernel", "for", "calls", "in place", "temporary", "seconds", ""))
    failed = 0
    for generation in generations:
        target = tpu.device(generation)
        for case in all_cases("tpu", options.only):
            failed += not _try(case, generation, target)
    print(f"{failed} failed" if failed else "all compiled as they should")
    return min(failed, 99)


def _try(case: Case, generation: str, target: object) -> bool:
    name = f"{case.operation}/{case.name}"
    if generation in case.unfit:
        print(f"{name:<38} {generation:<5} not for it: {case.unfit[generation]}")
        return True
    start = time.perf_counter()
    try:
        report = examine(case, tpu.compile_case(case, target), "tpu")
    except Exception as error:
        text = " ".join(str(error).split())[:400]
        print(f"{name:<38} {generation:<5} does not compile: {text}", flush=True)
        return False
    seconds = time.perf_counter() - start
    verdict = "; ".join(report.faults) or "ok"
    print(
        ROW.format(
            name,
            generation,
            report.calls,
            _size(report.aliased),
            _size(report.temporary),
            f"{seconds:.1f}",
            verdict,
        ),
        flush=True,
    )
    return not report.faults


def _size(n: int) -> str:
    return f"{n / 2**20:.1f}M" if n >= 2**20 else f"{n / 2**10:.0f}K"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.aot",
        description="Compile every kernel at the shapes of real models for devices "
        "that are not here, and hold the programs to what they must show: the kernel "
        "is called, donated arrays are updated in place, and no cache is copied.",
    )
    parser.add_argument(
        "--device",
        action="append",
        choices=list(tpu.TOPOLOGIES),
        help="a generation of TPU; may be repeated (default: all)",
    )
    parser.add_argument(
        "--only", default="", help="a part of the name, such as window_attention/mla"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
