"""``specjax calibrate``: what speculation would give here, before anything is built."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

from tyro import conf

from specjax.analysis.costs.calibrated import Calibrated
from specjax.analysis.costs.chart_svg import curve_svg
from specjax.analysis.costs.judge import judge
from specjax.analysis.costs.oddities import oddities
from specjax.analysis.costs.predict import Prediction
from specjax.analysis.costs.sample import Sample, Texts, sample, write_texts
from specjax.analysis.costs.session import Candidate, Session
from specjax.analysis.records import commit, versions
from specjax.checkpoints import Checkpoint, prompt_ids
from specjax.checkpoints.errors import CheckpointError
from specjax.cli import drafting
from specjax.cli import options as o
from specjax.cli.calibration_tables import show
from specjax.cli.console import Step, stderr, stdout, steps
from specjax.cli.engines import needs_tokenizer
from specjax.cli.errors import UsageError
from specjax.cli.memory import MemoryOptions
from specjax.decoding.engine import default_widths
from specjax.drafters import DRAFTERS, Source
from specjax.prompts import KINDS, Prompt, bundled_prompts, read_jsonl

MODELLESS = tuple(
    name
    for name, entry in DRAFTERS.items()
    if entry.drafts and entry.source is Source.NOTHING
)


@dataclasses.dataclass(frozen=True)
class Calibrate:
    """Time the parts of a round on this device, and say which drafts would pay.

    Times rounds by the rows of their windows, and every drafter, in turn; lets a short
    plain run say how often drafts are accepted (or takes --alpha); and puts both into
    the law: speed-up = tau / (c_verify + c_draft). Nothing speculative is run with the
    model. About three minutes on two cores; compiled programs are kept, so a second run
    is faster. docs/measure-before-you-build.md tells the rest.

    Example: `specjax calibrate --model smollm2-135m --json here.json`
    """

    model: o.Model = "smollm2-135m"
    """The target: a name of `specjax zoo`, a folder, a .gguf file or a hub id."""
    dtype: o.DType = "float32"
    """What the weights are stored as."""
    drafters: Annotated[
        tuple[str, ...],
        conf.arg(
            metavar="NAME ...",
            help_behavior_hint="(default: all that need no model or checkpoint of "
            "their own, and the target's MTP layers)",
        ),
    ] = ()
    """Drafters to judge: names of `specjax drafters`, with :WHERE as in `bench`."""
    k: o.Numbers = (2, 4, 8)
    """Longest drafts to judge."""
    ngram: o.NGramOptions = field(default_factory=o.NGramOptions)
    draft: o.DraftModelOptions = field(default_factory=o.DraftModelOptions)
    alpha: Annotated[
        tuple[float, ...], conf.arg(metavar="A ...", help_behavior_hint="")
    ] = ()
    """Probability that a draft is accepted if those above it were, in place of a run;
    of trees, by rank among siblings. Free drafts of every length are judged as well."""
    widths: o.Numbers = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16)
    """Rows of the windows to time; what the drafters need is added."""
    batch: o.Numbers = (1,)
    """Requests at a time."""
    context: o.Numbers = (256,)
    """Tokens that are in the cache."""
    prompts: o.PromptsFile = None
    """JSON lines: {"prompt": "..."} or {"turns": ["..."]}."""
    per_kind: int = 1
    """Bundled prompts of each kind, from the end: `bench` takes them from the start."""
    tokens: int = 48
    """Tokens of the plain run, for each prompt."""
    seconds: float = 40.0
    """To spend on timing, compilation apart."""
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    json: o.OptionalFile = None
    """Write all that was timed and predicted into this file."""
    plot: o.OptionalFile = None
    """Draw the curve into this file, as SVG."""
    report: o.Debug = field(default_factory=o.Debug)

    def run(self, arguments: Sequence[str]) -> int:
        """Load, time, replay, predict, show."""
        busy = load_per_core()
        self._check()
        prompts = self._prompts()
        checkpoint = o.load_model("--model", self.model, self.dtype)
        candidates = self._candidates(checkpoint)
        widest = max(each.drafter.max_nodes for each in candidates)
        checkpoint = self.memory.applied(checkpoint, widest)
        session = self._session(checkpoint, candidates, prompts)
        measured = not self.alpha
        with steps(session.steps + measured * (1 + len(candidates))) as step:
            samples: list[Sample] = []
            if measured:
                samples = self._samples(checkpoint, candidates, prompts, step)
            about = {
                "date": datetime.datetime.now(datetime.UTC).isoformat(
                    timespec="seconds"
                ),
                "versions": versions(),
                "commit": commit(),
                "load_per_core": busy,
                "command": shlex.join(["specjax", *arguments]),
            }
            found = session.run(
                step, model=checkpoint.source, dtype=self.dtype, about=about
            )
        predictions = judge(found, candidates, samples, self.alpha)
        show(stdout(), found, predictions, oddities(found))
        self._write(found, predictions)
        return 0

    def _check(self) -> None:
        """What can be said before anything is loaded."""
        o.one_of("--dtype", self.dtype, o.DTYPES)
        self.memory.check()
        o.writable("--json", self.json)
        o.writable("--plot", self.plot)
        for option, values in (
            ("--k", self.k),
            ("--widths", self.widths),
            ("--batch", self.batch),
            ("--context", self.context),
        ):
            if not values:
                raise UsageError(f"{option} is empty: give at least one")
            for value in values:
                o.at_least(option, value, 2 if option == "--context" else 1)
        o.at_least("--tokens", self.tokens, 1)
        o.at_least("--per-kind", self.per_kind, 1)
        if not self.seconds > 0:
            raise UsageError(f"--seconds {self.seconds}: it must be above 0")
        for spec in self._specs():
            if not spec.entry.drafts:
                raise UsageError(
                    f"--drafters {spec.text} drafts nothing: plain steps are timed "
                    "anyhow, leave it out"
                )
            for k in self.k:
                drafting.check(spec, k, self.ngram, self.draft, "--drafters")
        drafting.check_used(self.draft, self._specs(), option="--drafters")
        if any(not 0 <= each <= 1 for each in self.alpha) or sum(self.alpha) > 1 + 1e-9:
            raise UsageError(
                f"--alpha {' '.join(map(str, self.alpha))}: these are probabilities "
                "of which one at most comes true: each in 0 .. 1, 1 together at most"
            )

    def _specs(self) -> list[drafting.Spec]:
        names = self.drafters or MODELLESS
        return [drafting.spec_of(text, "--drafters") for text in names]

    def _prompts(self) -> list[Prompt]:
        try:
            if self.prompts is not None:
                return read_jsonl(self.prompts)
            of = {kind: bundled_prompts(kind) for kind in KINDS}
            bundled_prompts(KINDS, self.per_kind)  # refuses too many
            return [each for kind in KINDS for each in of[kind][-self.per_kind :]]
        except ValueError as error:
            option = "--per-kind" if self.prompts is None else "--prompts"
            raise UsageError(f"{option}: {error}") from error

    def _candidates(self, checkpoint: Checkpoint) -> list[Candidate]:
        """Every drafter at every k, once where k decides nothing."""
        workshop = drafting.Workshop(checkpoint, self.dtype, self.ngram, self.draft)
        specs = self._specs()
        if not self.drafters and checkpoint.config.heads_ahead:
            specs.append(drafting.spec_of("mtp", "--drafters"))
        found: dict[tuple[str, int], Candidate] = {}
        for spec in specs:
            for k in self.k:
                try:
                    made = workshop.make(spec, k)
                except (UsageError, CheckpointError) as error:
                    if self.drafters:
                        raise
                    stderr().print(f"{spec.text} is left out: {error}", soft_wrap=True)
                    break
                depth = made.max_depth
                found.setdefault((spec.text, depth), Candidate(spec.text, depth, made))
        if not found:
            raise UsageError("--drafters: none of them could be built")
        return list(found.values())

    def _ids(self, checkpoint: Checkpoint, prompts: list[Prompt]) -> list[list[int]]:
        tokenizer = needs_tokenizer(checkpoint, self.model)
        try:
            return [prompt_ids(prompt, tokenizer) for prompt in prompts]
        except ValueError as error:
            way_out = "" if self.prompts else ': give --prompts FILE with {"prompt": …}'
            raise UsageError(f"{error}{way_out}") from error

    def _session(
        self,
        checkpoint: Checkpoint,
        candidates: list[Candidate],
        prompts: list[Prompt],
    ) -> Session:
        decoder = checkpoint.decoder
        needed = {
            width
            for each in candidates
            for width in default_widths(each.drafter.max_nodes)
        }
        settings = [(batch, length) for batch in self.batch for length in self.context]
        widths = sorted({1, *self.widths, *needed})
        for _, length in settings:
            room = length + 9 * widths[-1]
            what = f"--context {length} with room for rounds of {widths[-1]} rows"
            o.check_prompt(f"{what} (--widths, --k)", room, None, checkpoint)
        return Session(
            target=decoder,
            weights=(decoder.blocks, decoder.head),
            candidates=candidates,
            widths=widths,
            settings=settings,
            text=[token for ids in self._ids(checkpoint, prompts) for token in ids],
            seconds=self.seconds,
        )

    def _samples(
        self,
        checkpoint: Checkpoint,
        candidates: list[Candidate],
        prompts: list[Prompt],
        step: Step,
    ) -> list[Sample]:
        """How each drafter fares on a short run."""
        step(f"plain decoding of {len(prompts)} prompts")
        ids = self._ids(checkpoint, prompts)
        for prompt, tokens in zip(prompts, ids, strict=True):
            o.check_prompt(f"prompt {prompt.id}", len(tokens), None, checkpoint)
        eos = checkpoint.eos_ids
        texts: Texts = write_texts(checkpoint.decoder, ids, self.tokens, eos)
        found = []
        for each in candidates:
            step(f"{each.name}, k = {each.k}, on what was written")
            found.append(sample(checkpoint.decoder, each.drafter, texts, eos))
        return found

    def _write(self, found: Calibrated, predictions: list[Prediction]) -> None:
        if self.json is not None:
            self._write_json(self.json, found, predictions)
        if self.plot is not None:
            Path(self.plot).write_text(curve_svg(found), "utf-8")

    def _write_json(
        self, path: str, found: Calibrated, predictions: list[Prediction]
    ) -> None:
        kept: dict[str, Any] = {
            "calibration": found.as_dict(),
            "predictions": [
                dataclasses.asdict(each) | {"go": each.go, "sure": each.sure}
                for each in predictions
            ],
            "oddities": [dataclasses.asdict(each) for each in oddities(found)],
        }
        Path(path).write_text(json.dumps(kept, indent=1) + "\n", "utf-8")


def load_per_core() -> float | None:
    """Programs that wanted a core in the last minute; ``None`` where it is not told."""
    if not hasattr(os, "getloadavg"):
        return None
    return os.getloadavg()[0] / (os.cpu_count() or 1)
