"""``specjax demo``: a real model, decoded with and without drafts, and compared."""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path

from rich.table import Table
from rich.text import Text

from specjax.acceptance import RULES, default_rule
from specjax.analysis.identity import Identity, compare, near_tie
from specjax.analysis.runs import Arm, Trial, break_in, interleaved, run, warm_up
from specjax.checkpoints import Checkpoint, prompt_ids
from specjax.cli import options as o
from specjax.cli.console import Step, stdout, steps
from specjax.cli.drafting import Workshop, spec_of
from specjax.cli.engines import make_arm, needs_tokenizer
from specjax.decoding.requests import Request
from specjax.prompts import KINDS, Prompt, bundled_prompts

FLOAT32, BFLOAT16 = "float32", "bfloat16"
TIMED_TOKENS, TIMED_RUNS = 8, 3

COLUMNS = """\
τ          tokens that a pass of the model commits; plain decoding: 1
α          share of the drafted tokens that were accepted
tokens/s   while decoding, without the reading of the prompt
speed-up   n-gram tokens/s over plain tokens/s
identical  in float32, all {tokens} tokens are those of plain decoding"""

COLUMN_BFLOAT16 = """\
bfloat16   the same in bfloat16, whose rounding may decide between two tokens that are
           equally good: "tie" says at which token, and how near (in logits)"""

NEXT = """\
Next:
  {program} generate --model {model} --drafter ngram --k {k} --prompt "def fib(n):"
  {program} bench --model {model} --drafters ngram --k 2 5 8 --per-kind 1"""


def program() -> str:
    """How to call the command line from here: an environment may not be on the path."""
    beside = Path(sys.executable).parent / "specjax"
    if shutil.which("specjax") or not beside.exists():
        return "specjax"
    here = Path.cwd()
    return str(beside.relative_to(here) if beside.is_relative_to(here) else beside)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What the runs in one dtype gave, prompt by prompt."""

    trials: list[Trial]
    identities: list[Identity]

    def holds(self, dtype: str) -> bool:
        """Whether no row differs; in low precision, beyond near-ties."""
        bound = 0.0 if dtype == FLOAT32 else near_tie(dtype)
        return all(identity.holds(bound) for identity in self.identities)


@dataclasses.dataclass(frozen=True)
class Demo:
    """Speculate on a small language model, and prove that the tokens are its own.

    Decodes one prompt of each kind plainly and with n-gram drafts, at temperature 0,
    and compares: how many tokens a pass, how fast, and whether all tokens are the
    same. Speed is shown in the faster of float32 and bfloat16; identity is decided in
    float32. Exit status 1: a row is not identical.

    Example: `specjax demo`
    """

    model: o.Model = "smollm2-135m"
    """A name of `specjax zoo`, a folder, a .gguf file or a hub id."""
    k: int = 8
    """Most draft tokens a round."""
    max_tokens: int = 64
    """Tokens to decode of each prompt; no id ends them earlier."""
    report: o.Debug = field(default_factory=o.Debug)

    def run(self, arguments: Sequence[str]) -> int:
        """Load, time, decode, compare."""
        o.at_least("--k", self.k, 1)
        o.at_least("--max-tokens", self.max_tokens, 1)
        prompts = bundled_prompts(KINDS, per_kind=1)
        loaded = {
            dtype: o.load_model("--model", self.model, dtype)
            for dtype in (FLOAT32, BFLOAT16)
        }
        requests = self._requests(loaded[FLOAT32], prompts)
        arms = {d: self._arms(c, requests) for d, c in loaded.items()}
        with steps(3 + 2 * len(prompts)) as step:
            rates = _plain_rates(step, arms, requests[0])
            fast = max(rates, key=lambda dtype: rates[dtype])
            used = tuple(dict.fromkeys((FLOAT32, fast)))
            step(f"compiling n-gram decoding in {' and '.join(used)}")
            break_in([arms[dtype][1].engine for dtype in used], requests[0])
            results = {
                dtype: _compare(step, dtype, arms[dtype], prompts, requests)
                for dtype in used
            }
        _say_dtype(loaded[fast].source, rates, fast)
        _print_table(prompts, results, fast)
        _print_legend(fast, self.max_tokens)
        failed = [dtype for dtype, r in results.items() if not r.holds(dtype)]
        for dtype in failed:
            text = f"Not identical in {dtype}: the rows in red. This is a bug."
            stdout().print(Text(text, style="bold red"))
        stdout().print(
            NEXT.format(program=program(), model=self.model, k=self.k), soft_wrap=True
        )
        return 1 if failed else 0

    def _requests(self, checkpoint: Checkpoint, prompts: list[Prompt]) -> list[Request]:
        tokenizer = needs_tokenizer(checkpoint, self.model)
        ids = [prompt_ids(prompt, tokenizer) for prompt in prompts]
        return [Request(prompt_ids=i, max_tokens=self.max_tokens) for i in ids]

    def _arms(self, checkpoint: Checkpoint, requests: list[Request]) -> list[Arm]:
        longest = max(len(request.prompt_ids) for request in requests)
        rule = RULES[default_rule(0.0)].build()
        workshop = Workshop(checkpoint, FLOAT32)
        return [
            make_arm(
                checkpoint,
                spec_of(name),
                k,
                rule,
                workshop,
                longest=longest,
                max_tokens=self.max_tokens,
            )
            for name, k in (("none", 0), ("ngram", self.k))
        ]


def _plain_rates(
    step: Step, arms: dict[str, list[Arm]], request: Request
) -> dict[str, float]:
    """Tokens a second of plain decoding, by dtype."""
    short = dataclasses.replace(request, max_tokens=TIMED_TOKENS)
    step(f"compiling plain decoding in {' and '.join(arms)}")
    warm_up([plain.engine for plain, _ in arms.values()], short)
    step("timing a few plain steps")
    rates: dict[str, list[float]] = {dtype: [] for dtype in arms}
    for _ in range(TIMED_RUNS):
        for dtype in arms:
            rate = run(arms[dtype][0].engine, short).tokens_per_second
            rates[dtype].append(rate)
    return {dtype: statistics.median(values) for dtype, values in rates.items()}


def _compare(
    step: Step,
    dtype: str,
    arms: list[Arm],
    prompts: list[Prompt],
    requests: list[Request],
) -> Comparison:
    trials: list[Trial] = []
    running = interleaved(arms, requests)
    for prompt in prompts:
        step(f"{prompt.kind}: plain, and with n-gram drafts, in {dtype}")
        trials.append(next(running))
    identities = [
        compare(
            arms[0].engine,
            request,
            trial.runs[0].completion.ids,
            trial.runs[1].completion.ids,
        )
        for request, trial in zip(requests, trials, strict=True)
    ]
    return Comparison(trials, identities)


def _say_dtype(source: str, rates: dict[str, float], fast: str) -> None:
    said = ", ".join(f"{dtype} {rate:.1f} tokens/s" for dtype, rate in rates.items())
    console = stdout()
    console.print(f"\n{source}", soft_wrap=True)
    console.print(f"Plain steps: {said}. Speed is shown in {fast}.\n", soft_wrap=True)


def _print_table(
    prompts: list[Prompt], results: dict[str, Comparison], fast: str
) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("kind")
    for name in ("τ", "α", "tokens/s plain", "n-gram", "speed-up"):
        table.add_column(name, justify="right")
    table.add_column("identical")
    if fast != FLOAT32:
        table.add_column(fast)
    for index, prompt in enumerate(prompts):
        plain, drafted = results[fast].trials[index].runs
        ratio = drafted.tokens_per_second / plain.tokens_per_second
        cells = [_verdict(r.identities[index], d) for d, r in results.items()]
        table.add_row(
            prompt.kind,
            f"{drafted.completion.tau:.2f}",
            f"{drafted.completion.alpha:.2f}",
            f"{plain.tokens_per_second:.1f}",
            f"{drafted.tokens_per_second:.1f}",
            f"{ratio:.2f}×",
            *cells,
        )
    stdout().print(table)


def _verdict(identity: Identity, dtype: str) -> Text:
    difference = identity.first_difference
    if difference is None:
        return Text("yes", style="green")
    margin = "" if difference.margin is None else f" ({difference.margin:.2g})"
    where = f"token {difference.position + 1}{margin}"
    if dtype != FLOAT32 and identity.holds(near_tie(dtype)):
        return Text(f"tie, {where}", style="yellow")
    return Text(f"NO, {where}", style="bold red")


def _print_legend(fast: str, tokens: int) -> None:
    console = stdout()
    console.print()
    console.print(COLUMNS.format(tokens=tokens), soft_wrap=True)
    if fast != FLOAT32:
        console.print(COLUMN_BFLOAT16, soft_wrap=True)
    console.print()
