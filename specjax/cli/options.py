"""Options that several subcommands share, and how they become an engine's parts."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from tyro import conf

from specjax.acceptance import RULES, default_rule
from specjax.checkpoints import Checkpoint, load, progress_bar
from specjax.checkpoints.errors import close_names
from specjax.cli.errors import UsageError
from specjax.decoding.interfaces import AcceptanceRule, Drafter
from specjax.decoding.requests import Request, RequestError
from specjax.drafters.draft_tree import Siblings
from specjax.drafters.drawing import Pick
from specjax.models.build import WeightType

DTYPES = ("float32", "bfloat16", "int8")

NONE = "(default: none)"
OptionalText = Annotated[str | None, conf.arg(metavar="TEXT", help_behavior_hint="")]
OptionalFile = Annotated[str | None, conf.arg(metavar="FILE", help_behavior_hint="")]
OptionalCount = Annotated[int | None, conf.arg(metavar="N", help_behavior_hint=NONE)]
Names = Annotated[tuple[str, ...], conf.arg(metavar="NAME ...")]
Numbers = Annotated[tuple[int, ...], conf.arg(metavar="N ...")]
StopTexts = Annotated[
    tuple[str, ...], conf.arg(metavar="TEXT ...", help_behavior_hint=NONE)
]
EosIds = Annotated[
    tuple[int, ...],
    conf.arg(metavar="ID ...", help_behavior_hint="(default: the checkpoint's)"),
]
PromptIds = Annotated[
    tuple[int, ...], conf.arg(metavar="ID ...", help_behavior_hint="")
]
Capacity = Annotated[
    int | None,
    conf.arg(metavar="TOKENS", help_behavior_hint="(default: the model's context)"),
]
PerKind = Annotated[
    int | None, conf.arg(metavar="N", help_behavior_hint="(default: all of them)")
]
PromptsFile = Annotated[
    str | None,
    conf.arg(metavar="FILE", help_behavior_hint="(default: the bundled prompts)"),
]
DType = Annotated[str, conf.arg(metavar="|".join(DTYPES))]
DrafterName = Annotated[str, conf.arg(metavar="NAME[:WHERE]|FILE.py:CLASS")]
RuleName = Annotated[
    str | None,
    conf.arg(
        metavar="|".join(RULES),
        help_behavior_hint="(default: greedy at temperature 0, else coupled)",
    ),
]
RuleNames = Annotated[
    tuple[str, ...] | None,
    conf.arg(
        metavar="NAME ...",
        help_behavior_hint="(default: greedy at temperature 0, else coupled)",
    ),
]
Model = Annotated[str, conf.arg(metavar="NAME|PATH")]
OptionalModel = Annotated[
    str | None, conf.arg(metavar="NAME|PATH", help_behavior_hint=NONE)
]


@dataclasses.dataclass(frozen=True)
class Debug:
    """For reports of errors."""

    debug: bool = False
    """Show the traceback of an error."""


@dataclasses.dataclass(frozen=True)
class NGramOptions:
    """Options of the n-gram drafter, which copies from the text so far."""

    min_n: int = 2
    """Fewest last tokens that must stand earlier in the text for a draft."""
    max_n: int = 3
    """Most last tokens that are looked for; the longest match is used."""


@dataclasses.dataclass(frozen=True)
class DraftModelOptions:
    """Options of drafters that are models or heads."""

    draft_model: OptionalModel = None
    """The draft model where --drafter does not name it: draft-model:NAME does."""
    draft_pick: Annotated[str, conf.arg(metavar="|".join(p.value for p in Pick))] = (
        "coupled"
    )
    """When sampling: "coupled" drafts with the target's own noise, "drawn" with noise
    of its own (for --rule rejection and block), "best" the most probable token."""
    draft_branching: Numbers = (2, 2)
    """Of --drafter draft-tree: children of a node at each depth (in place of --k)."""
    draft_siblings: Annotated[
        str, conf.arg(metavar="|".join(s.value for s in Siblings))
    ] = "best"
    """Of --drafter draft-tree: "best" takes the most probable children, the others draw
    them, for --rule multi-round, without-replacement and traversal."""
    draft_top_k: int = 10
    """Of dynamic trees (eagle2 and kin): children of a node, and nodes that go on."""
    draft_nodes: int = 59
    """Of dynamic trees: draft nodes that the target verifies."""
    draft_least: float = 0.0
    """Stop a draft before its probability, by the draft model, falls below this."""


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """How a token is picked from the model's distribution."""

    temperature: float = 0.0
    """0 takes the most probable token; 1 samples from the model's own distribution."""
    seed: int = 0
    """With the same seed the same tokens are sampled, whatever drafts."""
    top_k: int = 0
    """Sample among this many most probable tokens; 0: all."""
    top_p: float = 1.0
    """Sample among the most probable tokens that together reach this probability."""
    min_p: float = 0.0
    """Leave out tokens less probable than this share of the most probable one."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens of prompt and output less probable."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token that the output holds."""
    frequency_penalty: float = 0.0
    """Taken from the logit of a token for each time the output holds it."""


def one_of(option: str, value: str, known: Iterable[str]) -> str:
    """The value, if it is a known one; else a ``UsageError``."""
    known = list(known)
    if value not in known:
        hint = close_names(value, known)
        raise UsageError(
            f"{option} {value}: it must be one of {', '.join(known)}{hint}"
        )
    return value


def at_least(option: str, value: int, least: int, fix: str = "") -> int:
    """The value, if it is no smaller; else a ``UsageError``."""
    if value < least:
        raise UsageError(
            f"{option} {value}: it must be at least {least}{fix and f'; {fix}'}"
        )
    return value


def writable(option: str, path: str | None) -> None:
    """Refuse a file that could not be written in the end, before long work begins."""
    if path is None:
        return
    folder = Path(path).absolute().parent
    if Path(path).is_dir():
        raise UsageError(f"{option} {path}: it is a folder, name a file")
    if not folder.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {folder}, make it first")
    if not os.access(Path(path) if Path(path).exists() else folder, os.W_OK):
        raise UsageError(f"{option} {path}: it cannot be written")


def load_model(option: str, name: str, dtype: str) -> Checkpoint:
    """Load with a progress bar; errors name the option."""
    one_of("--dtype", dtype, DTYPES)
    if not name:
        raise UsageError(f"{option} is empty: give a name or a path")
    try:
        with progress_bar() as progress:
            return load(name, WeightType(dtype), progress=progress)
    except ValueError as error:
        raise UsageError(f"{option} {name}: {error}") from error


def choose_rule(name: str | None, temperature: float) -> AcceptanceRule:
    """The rule asked for, or the one that suits the temperature."""
    if name is None:
        return RULES[default_rule(temperature)].build()
    rule = RULES[one_of("--rule", name, RULES)].build()
    if temperature > 0 and not getattr(rule, "samples", True):
        raise UsageError(
            f"--rule {name} cannot follow --temperature {temperature:g}: leave out "
            "--rule, or set --temperature 0"
        )
    return rule


def build_request(
    prompt_ids: list[int],
    sampling: SamplingOptions,
    max_tokens: int,
    stop: tuple[str, ...] = (),
) -> Request:
    """A request whose errors name the options."""
    try:
        return Request(
            prompt_ids=prompt_ids,
            max_tokens=max_tokens,
            stop=stop,
            **dataclasses.asdict(sampling),
        )
    except RequestError as error:
        raise UsageError(name_option(str(error))) from error


def name_option(message: str) -> str:
    """``"top_p = 2: it must ..."`` as ``"--top-p 2: it must ..."``."""
    match = re.match(r"(\w+)(?: =)? (.*)", message, re.DOTALL)
    if match is None:
        return message
    return f"--{match[1].replace('_', '-')} {match[2]}"


def context_length(checkpoint: Checkpoint) -> int | None:
    """The longest text the model was made for, where its configuration says so."""
    value = checkpoint.raw_config.get("max_position_embeddings")
    return value if isinstance(value, int) and value > 0 else None


def check_prompt(
    what: str, tokens: int, capacity: int | None, checkpoint: Checkpoint
) -> int | None:
    """The most tokens of a row, if it is known; an error if the prompt is longer."""
    limit = context_length(checkpoint) if capacity is None else capacity
    if limit is None or tokens <= limit:
        return limit
    if capacity is None:
        raise UsageError(
            f"{what} has {tokens} tokens, the model's context is {limit}: shorten it, "
            "or choose a model of longer context"
        )
    raise UsageError(
        f"--capacity {capacity}: {what} has {tokens} tokens; raise --capacity, or "
        "shorten the prompt"
    )


def check_depth(drafter: Drafter, limit: int | None) -> None:
    """An error if a draft is longer than all that a row may hold."""
    if limit is not None and drafter.max_depth >= limit:
        raise UsageError(
            f"--k {drafter.max_depth}: so many drafts do not fit a capacity of {limit} "
            "tokens; lower --k"
        )
