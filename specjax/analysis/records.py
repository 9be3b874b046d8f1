"""One line a run: what a benchmark writes, and the arithmetic behind each figure."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import specjax
from specjax.analysis.calibration import Costs
from specjax.analysis.identity import Difference, Identity
from specjax.analysis.runs import Arm, Run

NGRAM = 8
"""The length of what counts as repeated text."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is the same for all records of a benchmark."""

    model: str
    dtype: str
    temperature: float
    ignore_eos: bool
    command: str
    batch: int = 1
    memory: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    device: str = dataclasses.field(default_factory=lambda: device_name())
    versions: dict[str, str] = dataclasses.field(default_factory=lambda: versions())
    commit: str | None = dataclasses.field(default_factory=lambda: commit())


@dataclasses.dataclass(frozen=True)
class Record:
    """One prompt, decoded by one arm, once.

    ``tau`` is tokens / rounds, ``alpha`` accepted / drafted, ``tokens_per_second``
    tokens / seconds, where ``seconds`` leaves out the prefill, and ``speedup`` is
    ``tokens_per_second`` over that of plain decoding in the same trial.

    ``c_draft`` and ``c_verify`` come from a calibration before the runs: the seconds
    of one proposal, and of verifying and accepting a window of the arm's full width,
    each compiled by itself and divided by those of a window of one token. They are
    medians at one context length, and say nothing of narrower windows.
    """

    model: str
    dtype: str
    drafter: str
    k: int
    rule: str
    """That judged the drafts; of plain decoding the default of the temperature."""
    temperature: float
    batch: int
    kind: str
    prompt_id: str
    repeat: int
    tokens: int
    rounds: int
    """Passes of the target after the prefill."""
    drafted: int
    accepted: int
    accepted_by_position: list[int]
    """Rounds that accepted a draft at depth 1, 2, ... k."""
    tau: float
    alpha: float
    c_draft: float
    c_verify: float
    draft_bytes: int
    """Bytes of the drafter's parameters."""
    repetition: float
    """Share of output tokens that complete 8 tokens which stood in the output before.
    Text that repeats itself is easily drafted, and seldom what anybody wants."""
    prefill_seconds: float
    seconds: float
    tokens_per_second: float
    speedup: float
    identical: bool | None
    """The ids are those of plain decoding. ``None``: they were not compared, because
    the rule keeps the law and not the tokens, or is lossy and keeps neither."""
    first_difference: Difference | None
    """Where not, and how near the tokens were to each other."""
    ignore_eos: bool
    memory: Mapping[str, Any]
    """How the target kept what it had read (rollback, pages), and if it was invariant;
    empty: its defaults."""
    device: str
    versions: dict[str, str]
    commit: str | None
    command: str
    date: str
    """When the run ended, in UTC."""

    def as_line(self) -> str:
        """The record as a line of JSON."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False)


def record(
    setting: Setting,
    arm: Arm,
    run: Run,
    plain: Run,
    *,
    kind: str,
    prompt_id: str,
    repeat: int,
    costs: Costs,
    identity: Identity | None,
) -> Record:
    """Put a record together; no ``identity``: the rule does not promise the tokens."""
    completion = run.completion
    base = plain.tokens_per_second
    return Record(
        drafter=arm.drafter,
        k=arm.k,
        rule=arm.rule,
        kind=kind,
        prompt_id=prompt_id,
        repeat=repeat,
        tokens=run.tokens,
        rounds=len(completion.rounds),
        drafted=completion.drafted,
        accepted=completion.accepted,
        accepted_by_position=completion.accepted_by_position(
            arm.engine.drafter.max_depth
        ),
        tau=completion.tau,
        alpha=completion.alpha,
        c_draft=costs.c_draft,
        c_verify=costs.c_verify,
        draft_bytes=parameter_bytes(arm.engine.drafter),
        repetition=repetition(completion.ids),
        prefill_seconds=run.prefill_seconds,
        seconds=run.seconds,
        tokens_per_second=run.tokens_per_second,
        speedup=run.tokens_per_second / base if base else 0.0,
        identical=None if identity is None else identity.identical,
        first_difference=None if identity is None else identity.first_difference,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **dataclasses.asdict(setting),
    )


def repetition(ids: Sequence[int], n: int = NGRAM) -> float:
    """Share of places whose last ``n`` tokens stood in the output before."""
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    for end in range(n, len(ids) + 1):
        gram = tuple(ids[end - n : end])
        repeated += gram in seen
        seen.add(gram)
    return repeated / len(ids) if ids else 0.0


def parameter_bytes(part: Any) -> int:
    """Bytes of all arrays of a pytree; one that is shared (a tied head) counts once."""
    arrays = {id(leaf): leaf for leaf in jax.tree.leaves(part)}
    return sum(leaf.nbytes for leaf in arrays.values() if isinstance(leaf, jax.Array))


def device_name() -> str:
    """The device that runs, with the processor's name where it is the CPU."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return f"{device.platform}: {device.device_kind}"
    return f"cpu: {_processor()}"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Of what decides speed and rounding."""
    packages = {name: metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
    return {
        "specjax": specjax.__version__,
        "python": platform.python_version(),
        **packages,
    }


def commit() -> str | None:
    """The commit that specjax runs from, with a + if files were changed since."""
    folder = Path(specjax.__file__).resolve().parent
    try:
        found = _git(folder, "rev-parse", "HEAD")
        top = Path(_git(folder, "rev-parse", "--show-toplevel"))
        if top != folder.parent:
            return None  # installed inside somebody else's repository
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return found + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=10
    )
    return done.stdout.strip()
