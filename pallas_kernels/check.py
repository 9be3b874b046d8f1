"""``python -m pallas_kernels.check``: are the kernels right here, and how fast?

Every check runs a kernel and the reference on the same random inputs. On an accelerator
both are then timed, and a library's kernel where one does the same. Checks that tell
the most come first, and none is begun after ``--seconds``. A line of JSON a check goes
to ``--out``, and a plot of them all beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import platform
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_kernels import check_plot, measure
from pallas_kernels.platforms import Implementation, NoKernelError

OPERATIONS = ("window_attention", "delta_window", "skinny_matmul")
"""Folders of ``pallas_kernels`` with a module ``checks``, and in it ``make_checks``,
which yields ``Planned``."""

ROW = "{:<44} {:>9} {:>6} {:>9} {:>9} {:>9} {:>6} {:>9}"
HEADS = ("", "error", "", "kernel", "plain", "library", "floor", "T(W)/T(1)")


@dataclasses.dataclass(frozen=True)
class Check:
    """One call with its inputs."""

    operation: str
    name: str
    run: Callable[..., Any]
    """Of an implementation and the arguments: an array, or a tree of them."""
    arguments: tuple[Any, ...]
    """The first is a small floating array, or ``carried``."""
    tolerance: float
    """On the largest difference from the reference."""
    bytes: int
    """That must be read, at least."""
    family: str
    """What differs from this one in the window's width only has the same."""
    width: int
    carried: Callable[[Any], jax.Array] | None = None
    """The output that the next call takes for its first argument, where a call writes
    that in place; ``None``: the first argument is small, and read only."""
    library: Library | None = None


class Library(NamedTuple):
    """Another one's kernel for the same work."""

    name: str
    run: Callable[..., Any]
    make: Callable[[], tuple[Any, ...]]
    """Its arguments, which are large; the first is small."""


class Planned(NamedTuple):
    """A check whose arrays, which may be large, are not made before its turn."""

    name: str
    make: Callable[[], Check]
    later: bool = False
    """Whether it can wait until all others have run."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What a line of JSON holds."""

    operation: str
    name: str
    device: str
    jax: str
    seed: int
    error: float
    tolerance: float
    passed: bool
    bytes: int
    family: str
    width: int
    kernel_seconds: float | None = None
    reference_seconds: float | None = None
    library: str | None = None
    library_seconds: float | None = None
    over_floor: float | None = None
    """Time over what reading ``bytes`` takes at the measured bandwidth."""
    over_one_row: float | None = None
    """T(W) / T(1)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; 1 if a kernel is wrong, 2 if there is no device for kernels."""
    parser = _parser()
    options = parser.parse_args(arguments)
    here = jax.default_backend()
    if here == "cpu" and not options.interpret:
        print("no accelerator here: --interpret emulates the kernels on CPU, slowly")
        return 2
    seed = secrets.randbits(31) if options.seed is None else options.seed
    planned = _planned(options, seed)
    if not planned:
        parser.error(f"no check has {options.only!r} in its name")
    device = platform.machine() if here == "cpu" else jax.devices()[0].device_kind
    print(f"{len(planned)} checks on {device}, JAX {jax.__version__}, seed {seed}")
    print(ROW.format(*HEADS))
    speed = None if options.interpret else measure.bandwidth()
    single: dict[str, float] = {}
    results: list[Result] = []
    without = 0
    start = time.monotonic()
    for plan in planned:
        late = 0 < options.seconds < time.monotonic() - start
        if late and results:
            break
        check = plan.make()
        try:
            result = _run(check, options.interpret, seed, device, speed, single)
        except NoKernelError as error:
            print(f"{check.operation}/{check.name}: {error}", flush=True)
            without += 1
            continue
        results.append(result)
        _show(result)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(result)) + "\n")
    if options.out is not None and not options.interpret:
        _plot(results, options.out.with_suffix(".png"))
    return _concluded(results, without, len(planned))


def _concluded(results: Sequence[Result], without: int, planned: int) -> int:
    """Say what came of it; the exit status."""
    left = planned - without - len(results)
    if not results:
        print("no check has a kernel here: nothing was shown")
        return 2
    wrong = sum(not result.passed for result in results)
    told = [f"{wrong} wrong" if wrong else "all that ran agree with the reference"]
    if without:
        told.append(f"{without} have no kernel here")
    if left:
        told.append(f"{left} were left for lack of time (--seconds 0: no limit)")
    print("; ".join(told))
    return int(wrong > 0)


def _plot(results: Sequence[Result], path: Path) -> None:
    fault = check_plot.plot([dataclasses.asdict(result) for result in results], path)
    print(f"plotted to {path}" if fault is None else f"no plot: {fault}")


def _planned(options: argparse.Namespace, seed: int) -> list[Planned]:
    """All that are asked for, operations in turn."""
    quick = options.quick or options.interpret
    found: list[tuple[bool, int, Planned]] = []
    for operation in OPERATIONS:
        module = importlib.import_module(f"pallas_kernels.{operation}.checks")
        mine = [
            plan
            for plan in module.make_checks(quick=quick, seed=seed)
            if options.only in f"{operation}/{plan.name}"
        ]
        mine.sort(key=lambda plan: plan.later)
        found += [(plan.later, turn, plan) for turn, plan in enumerate(mine)]
    return [plan for *_, plan in sorted(found, key=lambda each: each[:2])]


def _run(
    check: Check,
    interpret: bool,
    seed: int,
    device: str,
    speed: float | None,
    single: dict[str, float],
) -> Result:
    """``single`` keeps the times of windows of one row."""
    implementation: Implementation = "interpret" if interpret else "require"

    def by(name: Implementation) -> Callable[..., Any]:
        return lambda *x: check.run(name, *x)

    error = largest_difference(
        jax.jit(by(implementation))(*check.arguments),
        jax.jit(by("reference"))(*check.arguments),
    )
    result = Result(
        operation=check.operation,
        name=check.name,
        device=device,
        jax=jax.__version__,
        seed=seed,
        error=error,
        tolerance=check.tolerance,
        passed=bool(error <= check.tolerance),
        bytes=check.bytes,
        family=check.family,
        width=check.width,
    )
    if speed is None:
        return result
    kernel = measure.seconds_of(
        by(implementation), check.arguments, carried=check.carried
    )
    if check.width == 1:
        single[check.family] = kernel
    one = single.get(check.family)
    library = check.library
    return dataclasses.replace(
        result,
        library=None if library is None else library.name,
        library_seconds=None
        if library is None
        else measure.seconds_of(library.run, library.make()),
        kernel_seconds=kernel,
        reference_seconds=measure.seconds_of(
            by("reference"), check.arguments, carried=check.carried
        ),
        over_floor=kernel * speed / check.bytes,
        over_one_row=None if one is None else kernel / one,
    )


def largest_difference(got: Any, wanted: Any) -> float:
    """Of two trees of arrays; NaN where one holds it."""

    def between(x: jax.Array, y: jax.Array) -> np.floating:
        # by numpy: on CPU the largest of jax.numpy may leave NaN out
        return np.max(np.abs(np.asarray(x, np.float32) - np.asarray(y, np.float32)))

    return float(np.max(jax.tree.leaves(jax.tree.map(between, got, wanted))))


def _show(result: Result) -> None:
    def micro(seconds: float | None) -> str:
        return "" if seconds is None else f"{seconds * 1e6:.1f}us"

    def ratio(x: float | None) -> str:
        return "" if x is None else f"{x:.2f}"

    print(
        ROW.format(
            f"{result.operation}/{result.name}",
            f"{result.error:.1e}",
            "ok" if result.passed else "WRONG",
            micro(result.kernel_seconds),
            micro(result.reference_seconds),
            micro(result.library_seconds),
            ratio(result.over_floor),
            ratio(result.over_one_row),
        ),
        flush=True,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.check",
        description="Hold every kernel to the reference on fresh random inputs, and on "
        "an accelerator time both at the shapes of real models. 'floor' is time over "
        "what reading the cache or the weights takes at the bandwidth measured here; "
        "'library' is jax.nn's attention, or tokamax' where that is installed.",
    )
    parser.add_argument(
        "--interpret", action="store_true", help="emulate a TPU's kernels on CPU"
    )
    parser.add_argument("--quick", action="store_true", help="a few small shapes only")
    parser.add_argument("--only", default="", help="a part of a check's name")
    parser.add_argument("--seed", type=int, help="of the inputs (default: a new one)")
    parser.add_argument(
        "--out",
        type=Path,
        help="a file to which a line of JSON a check is added; a plot goes beside it",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=540.0,
        help="begin no check after as many, those that tell most come first "
        "(0: no limit; default: 540)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
