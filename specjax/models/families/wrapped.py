"""Decoders inside models of images and sounds: where they keep configuration, names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specjax.models.build import Builder
from specjax.models.families.fields import ConfigError, Fields

_SHARED = ("tie_word_embeddings", "vocab_size")
"""Fields that the outer configuration may hold for the decoder."""


def text_fields(
    raw: Mapping[str, Any], family: str, defaults: Mapping[str, Any] | None = None
) -> Fields:
    """The fields of ``text_config``, or of a configuration that is of text alone.

    ``defaults`` are for families whose files leave out what their class knows.

    Of the outer configuration only what concerns the decoder is taken; the rest is
    about images, sounds and how they enter.
    """
    text = raw.get("text_config")
    if text is None:
        return Fields({**(defaults or {}), **raw}, family)
    if not isinstance(text, Mapping):
        raise ConfigError(f"config field 'text_config' ({family}): an object is needed")
    outer = {name: raw[name] for name in _SHARED if raw.get(name) is not None}
    return Fields({**(defaults or {}), **outer, **text}, f"{family} text_config")


def decoder_prefix(make: Builder, prefixes: Sequence[str]) -> str:
    """The prefix under which this checkpoint keeps its decoder."""
    for prefix in prefixes:
        if make.has(f"{prefix}embed_tokens.weight"):
            return prefix
    return prefixes[0]
