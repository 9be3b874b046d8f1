"""``specjax bench``: plain decoding beside every drafter, k and rule."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import field
from pathlib import Path
from typing import TextIO

from rich.text import Text

from specjax.analysis.bench import Session
from specjax.analysis.identity import Difference, Identity, near_tie
from specjax.analysis.records import Record, Setting
from specjax.analysis.runs import Arm
from specjax.analysis.summary import by_kind
from specjax.checkpoints import Checkpoint, prompt_ids
from specjax.cli import drafting
from specjax.cli import options as o
from specjax.cli.console import stdout, steps
from specjax.cli.engines import make_arm, needs_tokenizer
from specjax.cli.errors import UsageError
from specjax.cli.memory import MemoryOptions
from specjax.cli.tables import LEGEND, summary_table
from specjax.decoding.requests import Request
from specjax.prompts import KINDS, Prompt, bundled_prompts, read_jsonl


@dataclasses.dataclass(frozen=True)
class Bench:
    """Compare plain decoding with every drafter, k and rule, prompt by prompt.

    All arms run on a prompt before the next one, in turning order, at batch 1; every
    arm is compiled before anything is timed. At the end: a table for each kind of
    prompt and over all. Exit status 1: ids that should be plain decoding's are not.
    Rules that keep only the law (above temperature 0), and lossy rules, are not held to
    them: their table says so, and their records have "identical": null.

    Example: `specjax bench --drafters ngram --k 2 5 8 --per-kind 2 --json out.jsonl`
    """

    model: o.Model = "smollm2-135m"
    """The target: a name of `specjax zoo`, a folder, a .gguf file or a hub id."""
    dtype: o.DType = "float32"
    """What the weights are stored as."""
    drafters: o.Names = ("ngram",)
    """Drafters to compare with plain decoding: names of `specjax drafters`, with :WHERE
    behind those that are made from something: draft:NAME|PATH, eagle3:PATH."""
    k: o.Numbers = (5,)
    """Most draft tokens a round; each drafter runs with each."""
    ngram: o.NGramOptions = field(default_factory=o.NGramOptions)
    draft: o.DraftModelOptions = field(default_factory=o.DraftModelOptions)
    rule: o.RuleNames = None
    """How drafts are judged, by each rule in turn: see `specjax generate --help`."""
    temperature: float = 0.0
    """0: greedy. Above 0: sampled; by --rule coupled still plain sampling's tokens."""
    seed: int = 0
    """Of the sampling."""
    prompts: o.PromptsFile = None
    """JSON lines: {"prompt": "..."} or {"turns": ["..."]}, and if you like "kind"."""
    kinds: o.Names = KINDS
    """Kinds of bundled prompts to use."""
    per_kind: o.PerKind = None
    """Bundled prompts of each kind."""
    max_tokens: int = 128
    """Tokens to decode of each prompt."""
    ignore_eos: bool = False
    """Decode all of them, whatever ids come."""
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    repeats: int = 1
    """Times that every prompt is decoded by every arm."""
    json: o.OptionalFile = None
    """Append one line of JSON for each run to this file."""
    report: o.Debug = field(default_factory=o.Debug)

    def run(self, arguments: Sequence[str]) -> int:
        """Check, load, compile, calibrate, run, summarise."""
        self._check()
        prompts = self._prompts()
        with _appending(self.json) as out:
            checkpoint = o.load_model("--model", self.model, self.dtype)
            checkpoint = self.memory.applied(checkpoint, max(self.k))
            requests = self._requests(checkpoint, prompts)
            arms = self._arms(checkpoint, requests)
            session = Session(self._setting(checkpoint, arguments), arms, requests)
            total = 1 + len(arms) + len(requests) * self.repeats
            records: list[Record] = []
            with steps(total) as step:
                for entry in session.run(step, prompts, self.repeats):
                    records.append(entry)
                    if out is not None:
                        print(entry.as_line(), file=out, flush=True)
        cache = self.memory.cache_dtype
        return report(records, near_tie(self.dtype, self.temperature, cache))

    def _check(self) -> None:
        """What can be said before anything is loaded."""
        o.one_of("--dtype", self.dtype, o.DTYPES)
        self.memory.check()
        self._named(self.drafters, "--drafters")
        for spec in self._specs():
            for k in self._named(self.k, "--k"):
                drafting.check(spec, k, self.ngram, self.draft, "--drafters")
        drafting.check_used(self.draft, self._specs(), option="--drafters")
        sampling = o.SamplingOptions(temperature=self.temperature, seed=self.seed)
        o.build_request([0], sampling, self.max_tokens)
        for rule in self._rules():
            o.choose_rule(rule, self.temperature)
        o.at_least("--max-tokens", self.max_tokens, 1)
        o.at_least("--repeats", self.repeats, 1)
        if self.prompts is not None and self.per_kind is not None:
            raise UsageError("--per-kind counts bundled prompts: leave out --prompts")

    def _specs(self) -> list[drafting.Spec]:
        return [drafting.spec_of(text, "--drafters") for text in self.drafters]

    def _rules(self) -> tuple[str | None, ...]:
        """Those asked for, or ``None``: the one that suits the temperature."""
        return (None,) if self.rule is None else self._named(self.rule, "--rule")

    @staticmethod
    def _named(values: tuple, option: str) -> tuple:
        if not values:
            raise UsageError(f"{option} is empty: give at least one")
        return values

    def _prompts(self) -> list[Prompt]:
        try:
            if self.prompts is not None:
                return read_jsonl(self.prompts)
            for kind in self._named(self.kinds, "--kinds"):
                o.one_of("--kinds", kind, KINDS)
            return bundled_prompts(self.kinds, self.per_kind)
        except UsageError:
            raise
        except ValueError as error:
            option = "--per-kind" if self.prompts is None else "--prompts"
            raise UsageError(f"{option}: {error}") from error

    def _requests(self, checkpoint: Checkpoint, prompts: list[Prompt]) -> list[Request]:
        tokenizer = needs_tokenizer(checkpoint, self.model)
        sampling = o.SamplingOptions(temperature=self.temperature, seed=self.seed)
        requests = []
        for prompt in prompts:
            ids = prompt_ids(prompt, tokenizer)
            o.check_prompt(f"prompt {prompt.id}", len(ids), None, checkpoint)
            requests.append(o.build_request(ids, sampling, self.max_tokens))
        return requests

    def _arms(self, checkpoint: Checkpoint, requests: list[Request]) -> list[Arm]:
        """Plain decoding first."""
        workshop = drafting.Workshop(checkpoint, self.dtype, self.ngram, self.draft)
        plain = drafting.spec_of("none")
        parts: list[tuple[drafting.Spec, int, str | None]] = [(plain, 0, None)]
        for spec in self._specs():
            if spec.entry.drafts:
                depths = [spec.depth(k, self.draft) for k in self.k]
                parts += [(spec, k, rule) for k in depths for rule in self._rules()]
        longest = max(len(request.prompt_ids) for request in requests)
        return [
            make_arm(
                checkpoint,
                spec,
                k,
                o.choose_rule(rule, self.temperature),
                workshop,
                longest=longest,
                max_tokens=self.max_tokens,
                eos_ids=() if self.ignore_eos else checkpoint.eos_ids,
            )
            for spec, k, rule in dict.fromkeys(parts)
        ]

    def _setting(self, checkpoint: Checkpoint, arguments: Sequence[str]) -> Setting:
        return Setting(
            model=checkpoint.source,
            dtype=self.dtype,
            temperature=self.temperature,
            ignore_eos=self.ignore_eos,
            command=shlex.join(["specjax", *arguments]),
            memory=dataclasses.asdict(self.memory),
        )


@contextlib.contextmanager
def _appending(path: str | None) -> Iterator[TextIO | None]:
    """The file to write to, opened before hours are spent on what goes into it."""
    if path is None:
        yield None
        return
    with Path(path).open("a", encoding="utf-8") as file:
        yield file


def report(records: list[Record], bound: float) -> int:
    """Print the table and what differs; the exit status."""
    console = stdout()
    console.print(summary_table(by_kind(records)))
    console.print()
    console.print(LEGEND, soft_wrap=True)
    broken = 0
    for entry in records:
        difference = entry.first_difference
        if difference is None:
            continue
        tie = Identity(difference).holds(bound)
        broken += not tie
        console.print(_sentence(entry, difference, tie), soft_wrap=True)
    return 1 if broken else 0


def _sentence(entry: Record, difference: Difference, tie: bool) -> Text:
    margin = difference.margin
    by = "a missing or impossible token" if margin is None else f"margin {margin:.3g}"
    why = "a near-tie, which rounding decides" if tie else "NOT plain decoding's tokens"
    text = (
        f"{entry.prompt_id}, {entry.drafter} k={entry.k} {entry.rule}: differs from "
        f"token {difference.position + 1} on ({by}): {why}"
    )
    return Text(text, style="yellow" if tie else "bold red")
