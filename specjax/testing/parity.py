"""A checkpoint against the outputs of another implementation, through the real round.

Two runs see everything: *plain* reads the prompts in one window and decodes token by
token; *drafts* reads them a few rows at a time and decodes with trees of drafts of
which a planned number is accepted. Both go through ``Engine``, so what is compared is
what anybody gets: committed states are read and written, windows are padded, drafts
are rejected. The arrays that it is held to are described in ``parity_arrays``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from specjax.acceptance.greedy import Greedy
from specjax.checkpoints import Checkpoint, load
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.generate import Completion, Generation
from specjax.decoding.interfaces import FINAL, Drafter
from specjax.decoding.requests import Request
from specjax.drafters.null import NullDrafter
from specjax.models.build import WeightType
from specjax.models.config import DecoderConfig, GatedDeltaConfig
from specjax.models.decoder import Decoder
from specjax.testing.forced import accept_pattern, chain, plant, trees_of
from specjax.testing.parity_arrays import (
    MTP_OUTPUTS,
    OUTPUTS,
    Oracle,
    OracleError,
    read_oracle,
)
from specjax.testing.parity_mtp import MTPRun, errors, mtp_runs
from specjax.testing.parity_record import Recorded, Recorder

__all__ = ["Check", "OracleError", "Report", "Run", "check_parity", "compare", "run"]

ATOL, ATOL_DELTA = 5e-4, 1e-3
"""Of logits and hidden states in float32; models with a delta rule round more."""

WIDEST, FEW, NODES = 128, 7, 8
"""Rows of a window: the most that "in one" may take, "a few", and drafts of a round."""

Status = Literal["pass", "FAIL", "absent", "not built", "unknown"]


@dataclasses.dataclass(frozen=True)
class Check:
    """One array: how far each of the two runs is off."""

    array: str
    shape: tuple[int, ...] | None
    plain: float | None
    """The largest absolute error. Of ids: how many differ. Of ``long_argmax``: how far
    the id lies below the best one. NaN where nothing finite was said."""
    drafts: float | None
    tolerance: float | None
    status: Status

    @property
    def error(self) -> float | None:
        """The larger one of the two runs; NaN if one of them is."""
        if self.plain is None or self.drafts is None:
            return None
        return float(np.maximum(self.plain, self.drafts))

    @property
    def strain(self) -> float:
        """The error as a share of the tolerance; infinite for a NaN, 0 if skipped."""
        error = self.error
        if error is None or self.tolerance is None or error == 0:
            return 0.0
        beyond = math.isnan(error) or self.tolerance == 0
        return math.inf if beyond else error / self.tolerance

    def as_dict(self) -> dict[str, Any]:
        """Plain values; an error that is not finite is ``None``, and fails."""
        fields = dataclasses.asdict(self)
        for name in ("plain", "drafts"):
            value = fields[name]
            fields[name] = value if value is None or math.isfinite(value) else None
        return fields


@dataclasses.dataclass(frozen=True)
class Report:
    """What one directory's comparison gave."""

    path: str
    family: str
    source: str
    checks: tuple[Check, ...]
    drafted: int
    """Draft nodes of the run with drafts."""
    accepted: int
    note: str = ""
    """Where the first wrong token stands, if one is wrong."""
    runs: tuple[str, str] = ("plain", "drafts")
    """What the two runs of a check are called."""

    @property
    def passed(self) -> bool:
        """Whether nothing that was compared is past its tolerance."""
        return all(check.status != "FAIL" for check in self.checks)

    @property
    def worst(self) -> Check:
        """The array that comes nearest to its tolerance, or farthest beyond."""
        return max(self.checks, key=lambda check: check.strain)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["checks"] = [check.as_dict() for check in self.checks]
        return fields | {"passed": self.passed}


@dataclasses.dataclass(frozen=True)
class Run:
    """What the model said at every position, and what it decoded; rows as prompts."""

    logits: np.ndarray  # [rows, T, V]
    features: dict[int, np.ndarray]  # tap -> [T, D] of row 0
    completions: tuple[Completion, ...]

    @property
    def ids(self) -> list[tuple[int, ...]]:
        """What was decoded after each prompt."""
        return [completion.ids for completion in self.completions]


def check_parity(folder: str | Path) -> Report:
    """Load a checkpoint directory in float32 and compare it with its ``oracle.npz``.

    Raises ``CheckpointError`` if it does not load, and ``OracleError`` for arrays that
    are missing, malformed or of another model.
    """
    path = Path(folder)
    if not path.is_dir():
        raise OracleError(f"{path} is no directory with a checkpoint and oracle.npz")
    checkpoint = load(path, WeightType.FLOAT32, tokenizer=False)
    oracle = read_oracle(path, checkpoint.config)
    with jax.default_matmul_precision("highest"):
        plain = run(checkpoint.decoder, oracle, NullDrafter(), width=WIDEST)
        planned = planned_drafts(oracle, checkpoint.decoder.vocab_size)
        drafts = run(checkpoint.decoder, oracle, planned, width=FEW)
        mtp = None
        if any(name in oracle for name in MTP_OUTPUTS):
            mtp = mtp_runs(checkpoint, oracle, width=WIDEST, few=FEW)
    return compare(oracle, plain, drafts, checkpoint, mtp)


def planned_drafts(oracle: Oracle, vocab_size: int) -> Drafter:
    """Chains and trees of which no draft, some or all are right, in awkward order.

    What is right is taken from ``greedy_ids``; where these are absent, nothing is.
    """
    rows = len(oracle.prompts)
    ids = oracle["greedy_ids"].tolist() if "greedy_ids" in oracle else []
    continuations = ids + [[0]] * (rows - len(ids))
    accepts = accept_pattern(max(oracle.decoded, 1), rows, NODES // 2)
    shapes = (chain(NODES), *trees_of(NODES))
    return plant(continuations, accepts, shapes, vocab_size, nodes=NODES)


def run(decoder: Decoder, oracle: Oracle, drafter: Drafter, *, width: int) -> Run:
    """Read all prompts in windows of at most ``width`` rows, and decode."""
    prompts = oracle.prompts
    short = len(oracle["input_ids"]) if "input_ids" in oracle else 0
    # a prompt's last token is read by a round, so there is one in any case
    budgets = [max(oracle.decoded if i < short else 1, 1) for i in range(len(prompts))]
    requests = [
        Request(prompt_ids=ids, max_tokens=budget)
        for ids, budget in zip(prompts, budgets, strict=True)
    ]
    longest = max(len(ids) for ids in prompts)
    options = EngineOptions(
        prefill_width=max(min(width, longest - 1), 1),
        widths=(drafter.max_nodes + 1,),  # one program: narrow windows are padded
        rounds_per_call=max(budgets),
    )
    engine = Engine(Recorder(decoder, _taps(oracle)), drafter, Greedy(), options)
    generation = Generation(engine, requests)
    for _ in generation:
        pass
    said: Recorded = generation.final_state.target
    return Run(
        logits=np.asarray(said.logits),
        features={tap: np.asarray(rows[0]) for tap, rows in said.features.items()},
        completions=tuple(generation.completions),
    )


def _taps(oracle: Oracle) -> tuple[int, ...]:
    """Where the entries of ``hidden_states`` are found."""
    if "hidden_states" not in oracle:
        return ()
    return (*range(len(oracle["hidden_states"]) - 1), FINAL)


def tolerance_of(config: DecoderConfig) -> float:
    """Of logits and hidden states: by the mixers that the decoder has."""
    delta = any(isinstance(block.mixer, GatedDeltaConfig) for block in config.blocks)
    return ATOL_DELTA if delta else ATOL


def compare(
    oracle: Oracle,
    plain: Run,
    drafts: Run,
    checkpoint: Checkpoint,
    mtp: tuple[MTPRun, MTPRun] | None = None,
) -> Report:
    """Every array of the file against both runs; without ``mtp`` not the head's."""
    atol = tolerance_of(checkpoint.config)
    tolerances = {"greedy_ids": 0.0, "mtp_draft_ids": 0.0, "long_argmax": 2 * atol}

    def check(name: str, plain: float, drafts: float) -> Check:
        allowed = tolerances.get(name, atol)
        # a NaN is within no tolerance
        status = "pass" if plain <= allowed and drafts <= allowed else "FAIL"
        return Check(name, oracle[name].shape, plain, drafts, allowed, status)

    def skip(name: str, status: Status) -> Check:
        return Check(name, None, None, None, None, status)

    checks = []
    for name in OUTPUTS:
        if name in oracle:
            off = [_error(name, oracle, each) for each in (plain, drafts)]
            checks.append(check(name, *off))
        else:
            checks.append(skip(name, "absent"))
    for name in (name for name in MTP_OUTPUTS if name in oracle):
        if mtp is None:
            checks.append(skip(name, "not built"))
        else:
            checks.append(check(name, *(errors(each, oracle, name) for each in mtp)))
    checks += [skip(name, "unknown") for name in oracle.others]
    short = drafts.completions
    return Report(
        path=str(checkpoint.path),
        family=checkpoint.config.family,
        source=checkpoint.source,
        checks=tuple(checks),
        drafted=sum(c.drafted for c in short),
        accepted=sum(c.accepted for c in short),
        note=_first_wrong(oracle, plain, drafts),
    )


def _error(name: str, oracle: Oracle, run: Run) -> float:
    """How far a run is off in one array: see ``Check``."""
    wanted = oracle[name]
    if name == "greedy_ids":
        return float(sum(len(ids) - same for ids, same in _agreed(oracle, run)))
    if name == "hidden_states":
        said = np.stack([run.features[tap] for tap in _taps(oracle)])
        pairs = [(said[:, : wanted.shape[1]], wanted)]
    elif name == "logits":
        pairs = [(run.logits[: len(wanted), : wanted.shape[1]], wanted)]
    elif name == "greedy_logits":
        pairs = _greedy_pairs(oracle, run)
    else:
        rows = run.logits[-len(wanted) :, : oracle["long_input_ids"].shape[1]]
        if name == "long_argmax":
            chosen = np.take_along_axis(rows, wanted[..., None], axis=-1)[..., 0]
            pairs = [(rows.max(axis=-1), chosen)]
        else:
            pairs = [(rows[:, -wanted.shape[1] :], wanted)]
    return max(_largest(got, want) for got, want in pairs)


def _agreed(oracle: Oracle, run: Run) -> list[tuple[np.ndarray, int]]:
    """Each row of ``greedy_ids``, and how many of its ids the run has in common."""
    agreed = []
    for wanted, ids in zip(oracle["greedy_ids"], run.ids, strict=False):
        got = np.full(len(wanted), -1)
        got[: len(ids)] = ids
        agreed.append((wanted, int((got == wanted).sum())))
    return agreed


def _greedy_pairs(oracle: Oracle, run: Run) -> list[tuple[np.ndarray, np.ndarray]]:
    """Up to the first wrong id: what follows it continues another text."""
    start = oracle["input_ids"].shape[1] - 1
    pairs = []
    for row, (ids, wanted) in enumerate(
        zip(oracle["greedy_ids"], oracle["greedy_logits"], strict=True)
    ):
        wrong = _first_difference(ids, run.ids[row])
        steps = len(ids) if wrong is None else wrong + 1
        pairs.append((run.logits[row, start : start + steps], wanted[:steps]))
    return pairs


def _first_difference(wanted: np.ndarray, ids: Sequence[int]) -> int | None:
    pairs = enumerate(zip(wanted.tolist(), [*ids, *[-1] * len(wanted)], strict=False))
    return next((i for i, (want, got) in pairs if want != got), None)


def _first_wrong(oracle: Oracle, plain: Run, drafts: Run) -> str:
    """The first wrong id of a run, and how much better it was than the right one."""
    if "greedy_ids" not in oracle:
        return ""
    for name, each in (("plain", plain), ("drafts", drafts)):
        for row, wanted in enumerate(oracle["greedy_ids"]):
            at = _first_difference(wanted, each.ids[row])
            if at is None:
                continue
            said = each.logits[row, oracle["input_ids"].shape[1] - 1 + at]
            gap = float(said.max() - said[wanted[at]])
            return (
                f"{name}: prompt {row} differs from token {at + 1} on, where the right "
                f"id is {gap:.3g} below the best"
            )
    return ""


def _largest(got: np.ndarray, wanted: np.ndarray) -> float:
    """The largest absolute difference; NaN if anything is."""
    return float(np.max(np.abs(got.astype(np.float64) - wanted)))
