"""Chat templates: Jinja as Hugging Face's libraries run it, in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from specjax.checkpoints.errors import CheckpointError

Turn = str | Mapping[str, Any]
"""A user's message, or a mapping with ``role`` and ``content``."""


class ChatTemplate:
    """A compiled template.

    Raises ``CheckpointError`` if the source is no valid template.
    """

    def __init__(self, source: str, where: str) -> None:
        self._where = where
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(
                f"the chat template of {where} is broken: {error}; give raw text"
            ) from error

    def render(self, turns: Iterable[Turn], special_tokens: Mapping[str, str]) -> str:
        """The conversation as text, ending where the assistant is to go on.

        Raises ``CheckpointError`` if there is no turn, or with what the template says
        of the turns.
        """
        messages = [
            {"role": "user", "content": turn} if isinstance(turn, str) else dict(turn)
            for turn in turns
        ]
        if not messages:
            raise CheckpointError("a chat needs at least one turn")
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **special_tokens,
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise CheckpointError(
                f"the chat template of {self._where} refuses these turns: {error}"
            ) from error


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``, which marks trainable text and prints its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own spelling)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """A block whose body stands for itself."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)
