"""Checkpoints become engines and arms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specjax.analysis.runs import Arm
from specjax.checkpoints import Checkpoint, Tokenizer
from specjax.cli import options as o
from specjax.cli.drafting import Spec, Workshop
from specjax.cli.errors import UsageError
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.interfaces import AcceptanceRule


def make_arm(
    checkpoint: Checkpoint,
    spec: Spec,
    k: int,
    rule: AcceptanceRule,
    workshop: Workshop,
    *,
    longest: int,
    max_tokens: int,
    eos_ids: tuple[int, ...] = (),
) -> Arm:
    """An arm with one capacity for all its runs, so that it compiles once.

    ``longest`` is the longest prompt's number of tokens.
    """
    built = workshop.make(spec, k)
    limit = o.check_prompt("the longest prompt", longest, None, checkpoint)
    o.check_depth(built, limit)
    options = EngineOptions(
        max_capacity=limit,
        capacity_at_least=longest + max_tokens,
        eos_ids=eos_ids,
    )
    return Arm(spec.text, k, Engine(checkpoint.decoder, built, rule, options))


def needs_tokenizer(checkpoint: Checkpoint, name: str) -> Tokenizer:
    """The checkpoint's tokenizer, or an error."""
    if checkpoint.tokenizer is None:
        raise UsageError(
            f"--model {name} has no tokenizer, so text cannot be put to it: add its "
            "tokenizer.json to the folder"
        )
    return checkpoint.tokenizer


def detokenizer(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    """``decode``, for models whose vocabulary is padded beyond the tokenizer's."""

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode([i for i in ids if i < tokenizer.vocab_size])

    return decode
