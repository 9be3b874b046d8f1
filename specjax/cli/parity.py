"""``specjax parity``: checkpoints against the outputs of another implementation."""

from __future__ import annotations

import dataclasses
import json
import math
import time
import traceback
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table
from rich.text import Text

from specjax.cli.console import print_error, stderr, stdout, steps
from specjax.cli.errors import USER_ERRORS, UsageError
from specjax.cli.options import Debug
from specjax.testing.drafter_parity.check import check_drafter_parity, is_drafter
from specjax.testing.parity import Check, OracleError, Report, check_parity

LEGEND = """\
plain   largest absolute error, prompts read in one window and decoded token by token;
        of ids: how many are wrong; of long_argmax: how far an id lies below the best
drafts  the same, prompts read 7 rows at a time and decoded with planned drafts: chains
        and trees of which no node, some or all are right
stored  of draft heads: fed with the hidden states in oracle.npz (of ids and masks: how
        many are wrong)
own     of draft heads: fed with those of our own target
mtp_*   plain as above, and drafts from the checkpoint's MTP head; drafts: the same once
        a round of its drafts has been rejected
result  absent: not in oracle.npz. not built: of several MTP modules, which are not
        compared. unknown: no array that anything is compared with"""

STYLES = {"pass": "green", "FAIL": "bold red", "not built": "yellow"}


@dataclasses.dataclass(frozen=True)
class Failure:
    """A directory that could not be compared."""

    path: str
    error: str
    passed = False

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"path": self.path, "error": self.error, "passed": False}


@dataclasses.dataclass(frozen=True)
class Parity:
    """Compare checkpoints with what another implementation says of them.

    Each directory holds a checkpoint and `oracle.npz`: prompts, and what, say,
    transformers makes of them in float32. The checkpoint is loaded in float32 and
    decodes through the rounds that everything else uses: once plain, prompts in one
    window and then token by token, and once with prompts in small windows and drafts
    that are accepted and rejected. Exit status 1: an array is past its tolerance, or a
    directory does not load (the others still run).

    To make an oracle.npz of your own, give `numpy.savez` these arrays, for B prompts of
    S tokens, vocabulary V, L blocks and hidden size D: `input_ids` [B, S] and, all
    optional, `logits` [B, S, V], `hidden_states` [L+1, S, D] of the first prompt (what
    transformers calls so: embeddings, after each block but the last, after the final
    norm), `greedy_ids` [B, G] and `greedy_logits` [B, G, V] of G tokens decoded without
    end tokens. For prompts of another length: `long_input_ids` [R, Q] with
    `long_logits_last8` [R, 8, V] and `long_argmax` [R, Q]. Of a checkpoint's MTP head:
    `mtp_hidden` [M, S-1, D] and `mtp_logits` [M, S-1, V] of the first prompts, from
    hidden states behind the final norm and the tokens that follow them;
    `mtp_logits_vllm_pos0mask` [M, F, V], the latter where the first pair has no
    embedding; `mtp_draft_ids` [B, K] and `mtp_draft_logits` [B, K, V] of drafts behind
    `greedy_ids[:, 0]`. What is absent is skipped, and said to be. Decode prompts whose
    best and second best tokens are well apart, or rounding decides between them.

    A draft head's directory (its oracle.npz has `first_token`) needs its target: its
    `meta.json` says {"target": NAME}, and --targets where NAME is. Two rounds are
    replayed, with the hidden states that the file holds and with our own target's.

    Example: `specjax parity tests/data/oracles/*`

    Example: `specjax parity tests/data/drafter_oracles/* --targets tests/data/oracles`
    """

    directories: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(metavar="DIR ...", help_behavior_hint=""),
    ] = ()
    """Checkpoint directories with an oracle.npz in each."""
    targets: Annotated[
        str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")
    ] = None
    """The directory that holds draft heads' targets, each in a folder of its own."""
    json: bool = False
    """Print one JSON object instead of tables."""
    report: Debug = field(default_factory=Debug)

    def run(self, arguments: Sequence[str]) -> int:
        """Compare all, then say how it went."""
        if not self.directories:
            raise UsageError(
                "no directory is given: specjax parity DIR ..., each with a "
                "checkpoint and its oracle.npz"
            )
        # what a shell's * finds beside the directories: a README, say
        files = [path for path in self.directories if Path(path).is_file()]
        directories = [path for path in self.directories if path not in files]
        if not directories:
            raise UsageError(f"{files[0]} is a file: give directories")
        if files:
            told = f"left out, no directories: {', '.join(files)}"
            stderr().print(told, style="dim", soft_wrap=True)
        results: list[tuple[Report | Failure, float]] = []
        with steps(len(directories)) as step:
            for path in directories:
                step(path)
                start = time.perf_counter()
                result = self._compare(path)
                results.append((result, time.perf_counter() - start))
        passed = all(result.passed for result, _ in results)
        if self.json:
            each = [{**r.as_dict(), "seconds": s} for r, s in results]
            print(json.dumps({"directories": each, "passed": passed}))
        else:
            _print_tables(results)
        # last, where it is seen
        for result, _ in results:
            if isinstance(result, Failure):
                print_error(f"{result.path}: {result.error}")
        return 0 if passed else 1

    def _compare(self, path: str) -> Report | Failure:
        """One directory; whatever goes wrong with it, the others still run."""
        try:
            if is_drafter(path):
                return check_drafter_parity(path, self.targets)
            return check_parity(path)
        except (OracleError, *USER_ERRORS) as error:
            failure = Failure(path, str(error))
        except Exception as error:  # a bug of ours, which --debug shows
            failure = Failure(path, f"{type(error).__name__}: {error}")
        if self.report.debug:
            traceback.print_exc()
        return failure


def _print_tables(results: Sequence[tuple[Report | Failure, float]]) -> None:
    console = stdout()
    for report, _ in results:
        if isinstance(report, Failure):
            continue
        title = f"  {report.source} ({report.family})"
        console.print(Text.assemble((report.path, "bold"), title), soft_wrap=True)
        console.print(report_table(report))
        if report.note:
            console.print(Text(report.note, style="red"), soft_wrap=True)
        if report.drafted:
            drafts = f"drafts: {report.drafted} nodes, {report.accepted} accepted"
            console.print(Text(drafts, style="dim"))
        console.print()
    console.print(LEGEND, soft_wrap=True)
    console.print()
    console.print(summary_table(results))


def report_table(report: Report) -> Table:
    """One line an array."""
    table = Table(box=None, pad_edge=False)
    table.add_column("array")
    table.add_column("shape")
    for name in (*report.runs, "tolerance"):
        table.add_column(name, justify="right")
    table.add_column("result")
    for check in report.checks:
        table.add_row(
            check.array,
            " × ".join(map(str, check.shape or ())),
            _number(check, check.plain),
            _number(check, check.drafts),
            _number(check, check.tolerance),
            Text(check.status, style=STYLES.get(check.status, "dim")),
        )
    return table


def summary_table(results: Sequence[tuple[Report | Failure, float]]) -> Table:
    """One line a directory, with the array that comes nearest to its tolerance."""
    table = Table(box=None, pad_edge=False)
    table.add_column("directory", overflow="fold")
    table.add_column("family")
    table.add_column("worst array")
    for name in ("error", "tolerance", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("result")
    for result, seconds in results:
        if isinstance(result, Failure):
            cells = ["", "does not load", "", ""]
        else:
            worst = result.worst
            numbers = (_number(worst, x) for x in (worst.error, worst.tolerance))
            cells = [result.family, worst.array, *numbers]
        status = "pass" if result.passed else "FAIL"
        table.add_row(
            result.path, *cells, f"{seconds:.1f}", Text(status, style=STYLES[status])
        )
    return table


def _number(check: Check, value: float | None) -> str:
    if value is None:
        return ""
    if check.array in ("greedy_ids", "mtp_draft_ids") and math.isfinite(value):
        return f"{value:.0f}"
    return f"{value:.1e}"
