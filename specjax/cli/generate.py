"""``specjax generate``: one prompt, continued and shown as it comes."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specjax.acceptance import default_rule
from specjax.analysis.runs import warm_up
from specjax.checkpoints import Checkpoint, Tokenizer
from specjax.cli import drafting
from specjax.cli import options as o
from specjax.cli.console import has_colour, print_error, stderr, stdout
from specjax.cli.engines import detokenizer, needs_tokenizer
from specjax.cli.errors import UsageError
from specjax.cli.memory import MemoryOptions
from specjax.cli.saving import (
    SavingOptions,
    kept_run,
    options_of,
    restored,
    resumed,
)
from specjax.cli.stream import IdStream, TextStream, logprob_table
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.generate import Completion, Generation, Times
from specjax.decoding.requests import Request
from specjax.decoding.types import FinishReason

if TYPE_CHECKING:
    from specjax.checkpoints.orbax import SavedRun


@dataclasses.dataclass(frozen=True)
class Generate:
    """Continue a prompt; the tokens are the model's own, whatever drafts them.

    The text streams to standard output, accepted drafts in green on a terminal. The
    last line, on standard error, gives tau (tokens a target pass), alpha (accepted
    over drafted), rounds (target passes), tokens a second and seconds of prefill.

    Example: `specjax generate --prompt "def fib(n):" --drafter ngram --k 8`

    A long run can be kept while it decodes and taken up again after a crash:
    `specjax generate --prompt-file book.txt --max-tokens 20000 --checkpoint run`, then
    `specjax generate --checkpoint run --resume`
    """

    prompt: o.OptionalText = None
    """The text to continue, as it stands."""
    prompt_file: o.OptionalFile = None
    """A UTF-8 file that holds it; - reads standard input."""
    prompt_ids: o.PromptIds = ()
    """Its tokens, in the place of text; a model without a tokenizer answers in ids."""
    chat: bool = False
    """Put the prompt as a user's message, in the checkpoint's chat template."""
    model: o.Model = "smollm2-135m"
    """The target: a name of `specjax zoo`, a folder, a .gguf file or a hub id."""
    dtype: o.DType = "float32"
    """What the weights are stored as."""
    drafter: o.DrafterName = "ngram"
    """Where drafts come from: a name of `specjax drafters`, with :WHERE behind it for
    one that is made from a draft model or a checkpoint. none is plain decoding."""
    k: int = 5
    """Most draft tokens a round."""
    ngram: o.NGramOptions = field(default_factory=o.NGramOptions)
    draft: o.DraftModelOptions = field(default_factory=o.DraftModelOptions)
    rule: o.RuleName = None
    """How drafts are judged. Above temperature 0 only coupled keeps plain decoding's
    tokens; the others keep its law, and lossy ones neither."""
    sampling: o.SamplingOptions = field(default_factory=o.SamplingOptions)
    max_tokens: int = 128
    """Most tokens to generate."""
    capacity: o.Capacity = None
    """Most tokens of prompt and output together."""
    eos: o.EosIds = ()
    """Ids that end the text."""
    ignore_eos: bool = False
    """Go on to --max-tokens, whatever ids come."""
    stop: o.StopTexts = ()
    """Texts that end the output; what matches is left out."""
    logprobs: o.OptionalCount = None
    """Report each token's log-probability and this many alternatives."""
    rounds_per_call: int = 4
    """Rounds on the device between two looks at the text: fewer stream more finely."""
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    saving: SavingOptions = field(default_factory=SavingOptions)
    json: bool = False
    """Print one line: prompt_ids, ids, text, finish_reason, stats (and logprobs)."""
    report: o.Debug = field(default_factory=o.Debug)

    def run(self, arguments: Sequence[str]) -> int:
        """Generate, stream, report."""
        self.saving.check()
        if not self.saving.resume:
            self._check_prompt()
            ids = bool(self.prompt_ids)
            return self._run("" if ids else read_prompt(self.prompt, self.prompt_file))
        form, prompt_file = resumed(self, arguments)
        text = form.prompt or ""
        if prompt_file is not None and read_prompt(None, prompt_file) != text:
            raise UsageError(
                f"--prompt-file {prompt_file} is not the prompt of the run in "
                f"{self.saving.checkpoint}: leave it out"
            )
        return form._run(text)

    def _run(self, text: str) -> int:
        self._check()
        self.memory.check()
        checkpoint = o.load_model("--model", self.model, self.dtype)
        checkpoint = self.memory.applied(checkpoint, self.k)
        tokenizer, ids = self._tokens(checkpoint, text)
        self.memory.admit(len(ids))
        engine = self._engine(checkpoint, len(ids))
        request = o.build_request(ids, self.sampling, self.max_tokens, self.stop)
        with stderr().status("compiling"):
            # so that seconds are seconds of decoding
            warm_up([engine], request)
        with kept_run(self.saving, engine, request, options_of(self, text)) as run:
            return self._decode(engine, request, tokenizer, run)

    def _check_prompt(self) -> None:
        """Whether ids, if they are given, are the only prompt."""
        if not self.prompt_ids:
            return
        for option, given in (
            ("--prompt", self.prompt is not None),
            ("--prompt-file", self.prompt_file is not None),
            ("--chat", self.chat),
        ):
            if given:
                raise UsageError(f"--prompt-ids is a whole prompt: leave out {option}")

    def _tokens(
        self, checkpoint: Checkpoint, text: str
    ) -> tuple[Tokenizer | None, list[int]]:
        """The prompt's ids; the tokenizer may be missing where they were given."""
        vocab = checkpoint.decoder.vocab_size
        for index in self.prompt_ids:
            if not 0 <= index < vocab:
                raise UsageError(
                    f"--prompt-ids {index} is no id of this model: give ids below "
                    f"{vocab}"
                )
        if self.prompt_ids and not self.stop:
            return checkpoint.tokenizer, list(self.prompt_ids)
        tokenizer = needs_tokenizer(checkpoint, self.model)
        if self.prompt_ids:
            return tokenizer, list(self.prompt_ids)
        ids = tokenizer.chat([text]) if self.chat else tokenizer.encode(text)
        if not ids:
            raise UsageError("the prompt has no tokens: give it some text")
        return tokenizer, ids

    def _decode(
        self,
        engine: Engine,
        request: Request,
        tokenizer: Tokenizer | None,
        run: SavedRun | None,
    ) -> int:
        begun = None
        if run is not None and self.saving.resume:
            begun = restored(run, engine, request)
        console = stdout()
        colour, decode = has_colour(console), None
        stream: TextStream | IdStream = IdStream(colour=colour)
        if tokenizer is not None:
            stream = TextStream(tokenizer, self.stop, colour=colour)
            decode = detokenizer(tokenizer)
        generation = Generation(engine, [request], detokenize=decode, resume=begun)
        steps = generation
        if run is not None:
            steps = run.saving(generation, self.saving.every)
        with stderr().status("reading the prompt") as status:
            for completions in steps:
                if self.json:
                    continue
                status.stop()
                sys.stdout.write(stream.push(completions[0]))
                sys.stdout.flush()
        completion = generation.completions[0]
        broken = completion.finish_reason is FinishReason.NAN
        if broken:
            print_error("the model's own logits are not finite: its weights are broken")
        stats = self._stats(completion, generation.times, engine.drafter.max_depth)
        if self.json:
            print(json.dumps(self._as_json(completion, stats)))
            return 1 if broken else 0
        print(stream.finish(completion), flush=True)
        if completion.logprobs is not None:
            console.print(logprob_table(completion, tokenizer))
        self._print_stats(completion, stats)
        return 1 if broken else 0

    def _check(self) -> None:
        """What can be said before anything is loaded."""
        self.saving.check_free()
        spec = drafting.spec_of(self.drafter)
        drafting.check(spec, self.k, self.ngram, self.draft)
        drafting.check_used(self.draft, [spec])
        o.choose_rule(self.rule, self.sampling.temperature)
        o.build_request([0], self.sampling, self.max_tokens, self.stop)
        o.at_least("--rounds-per-call", self.rounds_per_call, 1)
        if self.logprobs is not None:
            o.at_least("--logprobs", self.logprobs, 0)
        if self.capacity is not None:
            o.at_least("--capacity", self.capacity, 1)

    def _engine(self, checkpoint: Checkpoint, prompt: int) -> Engine:
        workshop = drafting.Workshop(checkpoint, self.dtype, self.ngram, self.draft)
        drafter = workshop.make(drafting.spec_of(self.drafter), self.k)
        limit = o.check_prompt("the prompt", prompt, self.capacity, checkpoint)
        o.check_depth(drafter, limit)
        settings = EngineOptions(
            max_capacity=limit,
            capacity_at_least=min(prompt + self.max_tokens, limit or sys.maxsize),
            eos_ids=self._eos_ids(checkpoint),
            rounds_per_call=self.saving.rounds_per_call(self.rounds_per_call),
            top_logprobs=self._top_logprobs(checkpoint),
        )
        rule = o.choose_rule(self.rule, self.sampling.temperature)
        return Engine(checkpoint.decoder, drafter, rule, settings)

    def _eos_ids(self, checkpoint: Checkpoint) -> tuple[int, ...]:
        vocab = checkpoint.decoder.vocab_size
        for eos in self.eos:
            if not 0 <= eos < vocab:
                raise UsageError(
                    f"--eos {eos} is no id of this model: give ids below {vocab}"
                )
        if self.ignore_eos:
            return ()
        return self.eos or checkpoint.eos_ids

    def _top_logprobs(self, checkpoint: Checkpoint) -> int | None:
        vocab = checkpoint.decoder.vocab_size
        if self.logprobs is not None and self.logprobs > vocab:
            raise UsageError(
                f"--logprobs {self.logprobs}: the vocabulary has {vocab} tokens"
            )
        return self.logprobs

    def _as_json(self, completion: Completion, stats: dict[str, Any]) -> dict[str, Any]:
        fields = {
            "prompt_ids": list(completion.prompt_ids),
            "ids": list(completion.ids),
            "text": completion.text,
            "finish_reason": completion.finish_reason.name.lower(),
            "stats": stats,
        }
        if completion.logprobs is not None:
            fields["logprobs"] = [
                {"logprob": entry.logprob, "top": [list(pair) for pair in entry.top]}
                for entry in completion.logprobs
            ]
        return fields

    def _stats(
        self, completion: Completion, times: Times, max_depth: int
    ) -> dict[str, Any]:
        depth = drafting.spec_of(self.drafter).depth(self.k, self.draft)
        tokens = len(completion.ids)
        return {
            "drafter": self.drafter,
            "rule": self.rule or default_rule(self.sampling.temperature),
            "k": depth,
            "tokens": tokens,
            "rounds": len(completion.rounds),
            "drafted": completion.drafted,
            "accepted": completion.accepted,
            "accepted_by_position": completion.accepted_by_position(max_depth),
            "tau": completion.tau,
            "alpha": completion.alpha,
            "prefill_seconds": times.prefill,
            "seconds": times.decode,
            "tokens_per_second": tokens / times.decode if times.decode else 0.0,
        }

    def _doubt(self) -> str:
        """What may be wrong with a drafter that is never right."""
        spec = drafting.spec_of(self.drafter)
        if spec.where is None or not spec.entry.trained:
            return ""
        return (
            f": was the head in {spec.where} trained for {self.model}? It fits by its "
            "sizes, and of more it cannot be asked"
        )

    def _print_stats(self, completion: Completion, s: dict[str, Any]) -> None:
        alpha = f"{s['alpha']:.2f}" if s["drafted"] else "–"
        if s["rule"].startswith("lossy"):
            told = f"--rule {s['rule']}: these tokens need not be the model's own"
            stderr().print(told, style="yellow", soft_wrap=True)
        elif s["drafted"] > NOTHING_RIGHT and not s["accepted"]:
            told = f"no draft was accepted{self._doubt()}"
            stderr().print(told, style="yellow", soft_wrap=True)
        line = (
            f"τ {s['tau']:.2f}  α {alpha}  {s['rounds']} rounds  "
            f"{s['tokens']} tokens  {s['tokens_per_second']:.1f} tokens/s  "
            f"prefill {s['prefill_seconds']:.2f} s  "
            f"ended by {completion.finish_reason.name.lower()}"
        )
        if has_colour(stdout()) and s["accepted"]:
            line += "  (green: accepted drafts)"
        stderr().print(line, style="dim", soft_wrap=True)


NOTHING_RIGHT = 20
"""Drafts, of which even a poor head would have got one right."""


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """The text of one of the two options, byte for byte."""
    if (prompt is None) == (prompt_file is None):
        said = "neither is" if prompt is None else "both are"
        raise UsageError(
            f"give --prompt TEXT or --prompt-file FILE, one of them ({said} given); or "
            "--prompt-ids ID ..."
        )
    if prompt_file is None:
        option, text = "--prompt", prompt or ""
    else:
        option = f"--prompt-file {prompt_file}"
        stdin = prompt_file == "-"
        data = sys.stdin.buffer.read() if stdin else Path(prompt_file).read_bytes()
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{option} is not UTF-8 (byte {error.start}): save it as UTF-8"
            ) from error
    if not text:
        raise UsageError(f"{option} is empty: give it at least one character")
    return text
