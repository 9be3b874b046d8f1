"""``python -m pallas_kernels.aot``: compile every kernel for devices not here."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence

import jax

from pallas_kernels.aot import cuda, registers, tpu
from pallas_kernels.aot.case import Case, all_cases
from pallas_kernels.aot.program import examine

ROW = "{:<38} {:<5} {:>5} {:>8} {:>10} {:>9} {:>7} {:>8}  {}"
HEADS = ("calls", "in place", "temporary", "registers", "shared", "seconds", "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; the number of programs that fail, at most 99."""
    options = _options(arguments)
    if options.list:
        print("\n".join(_names(options)))
        return 0
    tpus = options.device or list(tpu.TOPOLOGIES)
    gpus = options.device or list(cuda.TARGETS)
    tpus = [name for name in tpus if name in tpu.TOPOLOGIES]
    gpus = [name for name in gpus if name in cuda.TARGETS]
    # what is asked for by a part of its name may be for one platform alone
    tpus = tpus if all_cases("tpu", options.only) else []
    gpus = gpus if all_cases("cuda", options.only) else []
    # programs for devices that are not here are compiled to be looked at, not kept
    jax.config.update("jax_enable_compilation_cache", False)
    failed = _all("tpu", tpus, options) if tpus else 0
    if not tpus and len(gpus) == 1:
        failed = _all("cuda", gpus, options)
    elif gpus:
        for name in gpus:
            failed += _in_a_process(name, options)
    print(f"{failed} failed" if failed else "all that was compiled is as it should be")
    return min(failed, 99)


def _in_a_process(gpu: str, options: argparse.Namespace) -> int:
    """A process has one kind of GPU."""
    command = [sys.executable, "-m", "pallas_kernels.aot", "--device", gpu]
    command += ["--only", options.only, *(["--write"] if options.write else [])]
    return subprocess.run(command, check=False).returncode


def _all(platform: str, names: Sequence[str], options: argparse.Namespace) -> int:
    """How many programs for these devices fail."""
    compiler = {"tpu": tpu, "cuda": cuda}[platform]
    absent = compiler.missing()
    if absent is not None:
        print(f"skipped: {absent}", flush=True)
        return 0
    print(ROW.format("kernel", "for", *HEADS))
    found: dict[str, cuda.Resources] = {}
    failed = 0
    for name in names:
        target = compiler.device(name)
        for case in all_cases(platform, options.only):
            failed += not _try(case, platform, name, target, found, options.write)
    if found and not options.write and not registers.holds():
        print(
            f"registers are not compared: {registers.KEPT.file.name} is of JAX "
            f"{registers.KEPT.made_by()}",
            flush=True,
        )
    if found and options.write:
        try:
            registers.write(found, whole=not (options.only or failed))
        except ValueError as error:
            print(error, flush=True)
            failed += 1
    return failed


def _try(
    case: Case,
    platform: str,
    device: str,
    target: object,
    found: dict[str, cuda.Resources],
    write: bool,
) -> bool:
    """Whether a program is as it should be; what its kernels take goes to ``found``."""
    name = f"{case.operation}/{case.name}"
    if device in case.unfit:
        print(f"{name:<38} {device:<5} not for it: {case.unfit[device]}")
        return True
    compiler = {"tpu": tpu, "cuda": cuda}[platform]
    start = time.perf_counter()
    try:
        program = compiler.compile_case(case, target)
        report = examine(case, program, platform)
        taken = cuda.resources(program.as_text()) if platform == "cuda" else None
    except Exception as error:
        text = " ".join(str(error).split())[:400]
        print(f"{name:<38} {device:<5} does not compile: {text}", flush=True)
        return False
    seconds = time.perf_counter() - start
    faults = list(report.faults)
    if taken is not None:
        found[name] = taken
        faults += [*taken.faults(), *cuda.unfenced()]
        faults += [] if write else registers.grown(name, taken)
    row = (
        report.calls,
        _size(report.aliased),
        _size(report.temporary),
        "" if taken is None else taken.registers,
        "" if taken is None or taken.shared is None else _size(taken.shared),
        f"{seconds:.1f}",
        "; ".join(faults) or "ok",
    )
    print(ROW.format(name, device, *row), flush=True)
    return not faults


def _size(n: int) -> str:
    return f"{n / 2**20:.1f}M" if n >= 2**20 else f"{n / 2**10:.0f}K"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.aot",
        description="Compile every kernel at the shapes of real models for devices "
        "that are not here, and hold the programs to what they must show: the kernel "
        "is called, donated arrays are updated in place, no cache is copied, and on a "
        "GPU no register is spilled. A device whose compiler is not installed is "
        "skipped, and said so.",
    )
    parser.add_argument(
        "--device",
        action="append",
        choices=[*tpu.TOPOLOGIES, *cuda.TARGETS],
        help="a generation of TPU, or a GPU; may be repeated (default: all)",
    )
    parser.add_argument(
        "--only", default="", help="a part of the name, such as window_attention/mla"
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="keep what the GPU's kernels take, instead of comparing with what is kept",
    )
    parser.add_argument(
        "--list", action="store_true", help="print the names, and compile nothing"
    )
    options = parser.parse_args(arguments)
    if not _names(options):
        parser.error(
            f"no program for {', '.join(options.device or ['any device'])} has "
            f"{options.only!r} in its name: --list prints them all"
        )
    return options


def _names(options: argparse.Namespace) -> list[str]:
    """Of the programs that are asked for, each once."""
    devices = options.device or [*tpu.TOPOLOGIES, *cuda.TARGETS]
    platforms = {"tpu" if name in tpu.TOPOLOGIES else "cuda" for name in devices}
    cases = [case for at in sorted(platforms) for case in all_cases(at, options.only)]
    return sorted({f"{case.operation}/{case.name}" for case in cases})


if __name__ == "__main__":
    sys.exit(main())
