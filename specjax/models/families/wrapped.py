"""Decoders inside models of images and sounds: where they keep configuration, names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specjax.models.build import Builder
from specjax.models.families.defaults import DEFAULTS
from specjax.models.families.fields import ConfigError, Fields

TIED = "tie_word_embeddings"
_OUTER = (
    "text_config",
    # images, and how they enter
    "vision_config",
    "mm_tokens_per_image",
    "language_model_only",
    # said of the decoder once more, by files that repeat themselves
    "vocab_size",
    "hidden_size",
)
"""What the outer configuration may hold beside the harmless fields."""


def text_fields(raw: Mapping[str, Any], family: str) -> Fields:
    """The fields of ``text_config``, or of a configuration that is of text alone.

    Of two flags that tie the head the outer one counts, as the head is the whole
    model's; the same is true of an outer flag alone.
    """
    defaults = DEFAULTS[family]
    text = raw.get("text_config")
    if text is None:
        return Fields(raw, family, defaults)
    if not isinstance(text, Mapping):
        raise ConfigError(f"config field 'text_config' ({family}): an object is needed")
    outer = Fields(raw, family)
    outer.ignore(*_OUTER, TIED)
    outer.finish()
    tied = {TIED: raw[TIED]} if outer.has(TIED) else {}
    inner = {**text, **tied}
    for name in ("vocab_size", "hidden_size"):
        if outer.has(name) and inner.setdefault(name, raw[name]) != raw[name]:
            raise outer.error(name, f"contradicts text_config: {inner[name]}")
    return Fields(inner, f"{family} text_config", defaults)


def decoder_prefix(make: Builder, prefixes: Sequence[str]) -> str:
    """The prefix under which this checkpoint keeps its decoder."""
    for prefix in prefixes:
        if make.has(f"{prefix}embed_tokens.weight"):
            return prefix
    return prefixes[0]
