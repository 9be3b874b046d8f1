"""Prompts for benchmarks: the bundled sets and a reader for a user's own file."""

from collections.abc import Iterable
from importlib.resources import files

from specjax.prompts.records import Prompt, parse_jsonl, read_jsonl

__all__ = ["KINDS", "Prompt", "bundled_prompts", "read_jsonl"]

KINDS: tuple[str, ...] = ("code", "list", "wiki", "chat", "edit")
"""The bundled kinds; `data/SOURCES.md` says where each comes from."""


def bundled_prompts(
    kinds: Iterable[str] = KINDS, per_kind: int | None = None
) -> list[Prompt]:
    """Return the bundled prompts of `kinds`, kind by kind in the order asked for.

    `kinds` may also be the name of a single kind; a kind named twice counts once.
    `per_kind` keeps only that many prompts from the start of each kind; None
    keeps all of them. Within a kind the order never changes, so equal arguments
    give equal benchmarks.

    Raises:
        ValueError: a kind is unknown, or `per_kind` is below one or above the
            number of prompts that a kind has.
    """
    # A bare string is iterable too, and would otherwise be read letter by letter.
    names = (kinds,) if isinstance(kinds, str) else tuple(dict.fromkeys(kinds))
    return [prompt for name in names for prompt in _load(name, per_kind)]


def _load(kind: str, per_kind: int | None) -> list[Prompt]:
    """Read one bundled kind and keep its first `per_kind` prompts."""
    if kind not in KINDS:
        raise ValueError(
            f"unknown prompt kind {kind!r}; choose from {', '.join(KINDS)}"
        )
    source = files(__name__).joinpath("data", f"{kind}.jsonl")
    prompts = parse_jsonl(source.read_bytes(), name=source.name, stem=kind)
    if per_kind is None:
        return prompts
    # Fewer prompts than asked for would skew a benchmark without a word.
    if not 1 <= per_kind <= len(prompts):
        raise ValueError(
            f"per_kind is {per_kind}, but kind {kind!r} has {len(prompts)} prompts; "
            f"give a number from 1 to {len(prompts)}, or None for all"
        )
    return prompts[:per_kind]
