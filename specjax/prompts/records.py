"""The prompt record and the JSON-lines format that it is read from."""

import json
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """One prompt: either raw text to continue, or messages for a chat template.

    Attributes:
        id: name that is unique within the set the prompt was read with.
        kind: group that results are reported under, such as "code" or "user".
        text: raw text that the model continues as it stands, or None.
        turns: user messages in order, to be wrapped in the model's chat template;
            empty where `text` is given.

    Raises:
        ValueError: both or neither of `text` and `turns` are given.
    """

    id: str
    kind: str
    text: str | None
    turns: tuple[str, ...]

    def __post_init__(self) -> None:
        if (self.text is None) == (not self.turns):
            raise ValueError(
                f"prompt {self.id!r} needs either text or turns; give exactly one"
            )


def read_jsonl(path: str | PathLike[str]) -> list[Prompt]:
    """Read the prompts in a JSON-lines file, in file order.

    Each line holds `{"prompt": "raw text"}` or `{"turns": ["user message", ...]}`,
    with an optional "id" (default: file stem and line number, "mine-3") and an
    optional "kind" (default: "user"). Blank lines are skipped, but they count as
    lines; other fields are ignored.

    Raises:
        ValueError: a line is not valid, an id occurs twice, or the file holds no
            prompt. The message names the file and the line and says what to do.
        OSError: the file cannot be read.
    """
    path = Path(path)
    return parse_jsonl(path.read_bytes(), name=str(path), stem=path.stem)


def parse_jsonl(data: bytes, name: str, stem: str) -> list[Prompt]:
    """Parse the bytes of a JSON-lines file; see `read_jsonl` for the format.

    `name` stands for the file in messages and `stem` begins the default ids.
    """
    prompts: list[Prompt] = []
    line_of: dict[str, int] = {}
    # Bytes are split before decoding, so that a bad byte is pinned to its line and
    # U+2028 and the like, which JSON allows inside strings, do not end a line.
    for number, raw in enumerate(data.split(b"\n"), start=1):
        try:
            line = _decode(raw, first=number == 1)
            if not line.strip():
                continue
            prompt = _prompt(_object(line), default_id=f"{stem}-{number}")
            if prompt.id in line_of:
                raise ValueError(
                    f"id {prompt.id!r} was already used on line {line_of[prompt.id]}; "
                    "give every prompt its own id"
                )
        except ValueError as error:
            raise ValueError(f"{name}, line {number}: {error}") from error
        line_of[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise ValueError(
            f"{name}, line 1: the file holds no prompts; add at least one line "
            'such as {"prompt": "some text"}'
        )
    return prompts


def _decode(raw: bytes, first: bool) -> str:
    """Decode one line; a byte order mark is dropped from the first."""
    try:
        return raw.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not valid UTF-8 (byte 0x{error.object[error.start]:02x}); "
            "save the file as UTF-8"
        ) from error


def _object(line: str) -> dict[str, Any]:
    """Parse one line as a JSON object."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"broken JSON ({error.msg} at column {error.colno}); "
            "write one complete JSON object on each line"
        ) from error
    except (ValueError, RecursionError) as error:
        # An absurdly long number or absurdly deep nesting, which no prompt needs.
        raise ValueError(
            f"JSON that cannot be read ({error}); write one plain JSON object"
        ) from error
    if not isinstance(value, dict):
        raise ValueError(
            f"expected a JSON object but found {_type_name(value)}; "
            'write it as {"prompt": "some text"}'
        )
    return value


def _prompt(record: dict[str, Any], default_id: str) -> Prompt:
    """Turn one parsed line into a `Prompt`."""
    if "prompt" in record and "turns" in record:
        raise ValueError('both "prompt" and "turns" are given; keep only one of them')
    if "prompt" not in record and "turns" not in record:
        raise ValueError(
            'neither "prompt" nor "turns" is given; add "prompt" with raw text, '
            'or "turns" with a list of user messages'
        )
    identifier = _text(record.get("id", default_id), '"id"')
    kind = _text(record.get("kind", "user"), '"kind"')
    if "prompt" in record:
        return Prompt(identifier, kind, _text(record["prompt"], '"prompt"'), ())
    return Prompt(identifier, kind, None, _turns(record["turns"]))


def _turns(value: Any) -> tuple[str, ...]:
    """Check the list of user messages."""
    if not isinstance(value, list):
        raise ValueError(
            f'"turns" must be a list of strings, not {_type_name(value)}; '
            'write it as {"turns": ["some text"]}'
        )
    if not value:
        raise ValueError('"turns" is empty; give at least one user message')
    return tuple(_text(turn, f'"turns" item {i}') for i, turn in enumerate(value, 1))


def _text(value: Any, field: str) -> str:
    """Check that a field is a string with something in it that can be encoded."""
    if not isinstance(value, str):
        raise ValueError(
            f"{field} must be a string, not {_type_name(value)}; put it in quotes"
        )
    if not value.strip():
        raise ValueError(f"{field} is empty; give it some text or remove it")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        # An escape such as \ud83d alone is valid JSON, but no tokenizer can take it.
        raise ValueError(
            f"{field} holds half of a surrogate pair; write the whole character"
        ) from error
    return value


def _type_name(value: Any) -> str:
    """Name a parsed value the way JSON does."""
    if value is None:
        return "null"
    # bool comes before int because Python counts it as one.
    names = {bool: "a boolean", int: "a number", float: "a number"}
    names |= {str: "a string", list: "a list", dict: "an object"}
    return names[type(value)]
