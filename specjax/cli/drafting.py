"""From what ``--drafter`` says to a drafter.

``NAME``, ``NAME:WHERE`` or ``FILE.py:CLASS``.

``WHERE`` is what the drafter is made from: a draft model (a name or a path, as --model
takes it), or the checkpoint of a draft head (a folder or a hub id).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.checkpoints import Checkpoint
from specjax.checkpoints.drafters import check_runs, load_part
from specjax.checkpoints.mtp import load_mtp
from specjax.checkpoints.vocabulary import vocabulary_between
from specjax.cli import options as o
from specjax.cli.console import stderr
from specjax.cli.errors import UsageError
from specjax.cli.own import drafter_entry
from specjax.decoding.interfaces import Drafter, Target
from specjax.drafters import DRAFTERS, DrafterEntry, DrafterOptions, Source
from specjax.drafters.draft_tree import Siblings
from specjax.drafters.drawing import Pick
from specjax.drafters.ngram import LONGEST_MATCH
from specjax.drafters.vocabulary import Translated
from specjax.models.build import WeightType

SHORT = {"draft": "draft-model", "tree": "draft-tree"}
"""Shorter names."""

FIELDS = ("pick", "branching", "siblings", "top_k", "nodes", "least")
"""``DrafterOptions`` that are named ``--draft-...`` and that few drafters use."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """A drafter that was asked for."""

    text: str
    """As it was written: the name in tables and records."""
    name: str
    where: str | None
    entry: DrafterEntry

    def depth(self, k: int, settings: o.DraftModelOptions) -> int:
        """The longest draft, as tables tell it."""
        if not self.entry.drafts:
            return 0
        return k if self.entry.takes_k else len(settings.draft_branching)


def spec_of(text: str, option: str = "--drafter") -> Spec:
    """What one value of the option means."""
    head, _, where = text.partition(":")
    name = SHORT.get(head, head)
    if name not in DRAFTERS:
        return Spec(text, text, None, drafter_entry(text, option))
    if ":" in text and not where:
        raise UsageError(f"{option} {text}: say behind the colon where it is")
    return Spec(text, name, where or None, DRAFTERS[name])


def check(
    spec: Spec,
    k: int,
    ngram: o.NGramOptions,
    draft: o.DraftModelOptions,
    option: str = "--drafter",
) -> None:
    """What can be said before anything is loaded."""
    if spec.entry.drafts:
        o.at_least("--k", k, 1, "use --drafter none for plain decoding")
    o.at_least("--min-n", ngram.min_n, 1)
    o.at_least("--max-n", ngram.max_n, ngram.min_n, "it cannot be below --min-n")
    if ngram.max_n > LONGEST_MATCH:
        raise UsageError(f"--max-n {ngram.max_n}: it must be at most {LONGEST_MATCH}")
    o.one_of("--draft-pick", draft.draft_pick, [p.value for p in Pick])
    o.one_of("--draft-siblings", draft.draft_siblings, [s.value for s in Siblings])
    if not draft.draft_branching or min(draft.draft_branching) < 1:
        raise UsageError(
            f"--draft-branching {draft.draft_branching}: give numbers >= 1"
        )
    o.at_least("--draft-top-k", draft.draft_top_k, 1)
    o.at_least("--draft-nodes", draft.draft_nodes, 1)
    if not 0 <= draft.draft_least <= 1:
        raise UsageError(f"--draft-least {draft.draft_least}: it must lie in 0 .. 1")
    _check_source(spec, draft, option)


def _check_source(spec: Spec, draft: o.DraftModelOptions, option: str) -> None:
    """Whether it says what the drafter is made from, and nothing more."""
    source = spec.entry.source
    if source is Source.MODEL and not (spec.where or draft.draft_model):
        raise UsageError(
            f"{option} {spec.text} needs a model: give {spec.text}:NAME|PATH, or "
            "--draft-model NAME|PATH"
        )
    if source is Source.PART and spec.where is None:
        raise UsageError(
            f"{option} {spec.text} needs {source.value}: give {spec.text}:PATH, a "
            "folder or a hub id"
        )
    if spec.where is not None and source not in (Source.MODEL, Source.PART):
        raise UsageError(
            f"{option} {spec.text}: {spec.name} is made from {source.value}; leave out "
            f":{spec.where}"
        )


def check_used(
    draft: o.DraftModelOptions, specs: list[Spec], option: str = "--drafter"
) -> None:
    """Refuse options that would do nothing with any of these drafters."""
    plain, named = o.DraftModelOptions(), " ".join(spec.text for spec in specs)
    from_model = [s for s in specs if s.entry.needs_model and s.where is None]
    if draft.draft_model is not None and not from_model:
        fix = "set --drafter draft-model" if option == "--drafter" else "add one"
        raise UsageError(
            f"--draft-model does nothing with {option} {named}: {fix}, or leave it out"
        )
    for field in FIELDS:
        users = [name for name, entry in DRAFTERS.items() if field in entry.uses]
        value = getattr(draft, f"draft_{field}")
        if value == getattr(plain, f"draft_{field}"):
            continue
        if not any(field in spec.entry.uses for spec in specs):
            raise UsageError(
                f"--draft-{field.replace('_', '-')} does nothing with {option} "
                f"{named}: it is for {', '.join(users)}; leave it out"
            )


class Workshop:
    """Makes drafters for one target; what they are made from is loaded once."""

    def __init__(
        self,
        target: Checkpoint,
        dtype: str,
        ngram: o.NGramOptions | None = None,
        draft: o.DraftModelOptions | None = None,
    ) -> None:
        self._target, self._dtype = target, dtype
        self._ngram = ngram or o.NGramOptions()
        self._draft = draft or o.DraftModelOptions()
        self._loaded: dict[tuple[str, str | None], Any] = {}

    def make(self, spec: Spec, k: int) -> Drafter:
        """The drafter, for at most ``k`` drafts a round."""
        source, draft = spec.entry.source, self._draft
        made_from = self._made_from(spec)
        options = DrafterOptions(
            k=k,
            min_n=self._ngram.min_n,
            max_n=self._ngram.max_n,
            model=made_from if source is Source.MODEL else None,
            part=made_from if source in (Source.PART, Source.TARGET) else None,
            pick=Pick(draft.draft_pick),
            branching=draft.draft_branching,
            siblings=Siblings(draft.draft_siblings),
            top_k=draft.draft_top_k,
            nodes=draft.draft_nodes,
            least=draft.draft_least,
        )
        try:
            return spec.entry.build(options)
        except UsageError:
            raise
        except ValueError as error:
            raise UsageError(f"--drafter {spec.text}: {error}") from error

    def _made_from(self, spec: Spec) -> Any:
        key = (spec.name, spec.where)
        if key not in self._loaded:
            self._loaded[key] = self._load(spec)
        return self._loaded[key]

    def _load(self, spec: Spec) -> Any:
        source = spec.entry.source
        if source is Source.MODEL:
            option = "--draft-model" if spec.where is None else f"--drafter {spec.name}"
            name = spec.where or self._draft.draft_model or ""
            return load_draft_model(option, name, self._dtype, self._target)
        if source is Source.PART:
            return load_head(spec, self._dtype, self._target)
        if source is Source.TARGET:
            return load_own_head(spec, self._dtype, self._target)
        return None


def load_head(spec: Spec, dtype: str, target: Checkpoint) -> Any:
    """A draft head from its folder, of a kind that the drafter runs."""
    try:
        loaded = load_part(spec.where or "", target, WeightType(dtype))
        check_runs(spec.name, loaded)
    except ValueError as error:
        raise UsageError(f"--drafter {spec.text}: {error}") from error
    return loaded.part


def load_own_head(spec: Spec, dtype: str, target: Checkpoint) -> Any:
    """The head that the target's own checkpoint holds."""
    try:
        return load_mtp(target, WeightType(dtype))
    except ValueError as error:
        raise UsageError(f"--drafter {spec.text}: {error}") from error


def load_draft_model(option: str, name: str, dtype: str, target: Checkpoint) -> Target:
    """Load a draft model; one of another vocabulary is made to speak the target's."""
    draft = o.load_model(option, name, dtype)
    ours, theirs = target.decoder.vocab_size, draft.decoder.vocab_size
    ids, other = target.tokenizer, draft.tokenizer
    if ids is None or other is None:
        if ours == theirs:
            return draft.decoder
        raise UsageError(
            f"{option} {name} has a vocabulary of {theirs}, the target of {ours}, and "
            "without the tokenizers of both it is not known which tokens they share: "
            "add tokenizer.json, or choose a draft model of the same family"
        )
    if ours == theirs and ids.tokens == other.tokens:
        return draft.decoder
    try:
        vocabulary = vocabulary_between(ids, other, ours, theirs)
    except ValueError as error:
        raise UsageError(f"{option} {name}: {error}") from error
    stderr().print(
        f"{option} {name} has another vocabulary than the target: it drafts the "
        f"{vocabulary.shared} tokens that both have, of {ids.vocab_size}",
        soft_wrap=True,
    )
    return Translated(draft.decoder, vocabulary)
