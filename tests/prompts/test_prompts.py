"""The bundled prompts are sound, and a user's file is read or refused clearly."""

import dataclasses
import json
from pathlib import Path

import pytest

from specjax.prompts import KINDS, Prompt, bundled_prompts, read_jsonl

RAW_KINDS = {"code", "wiki"}
GOOD = b'{"prompt": "fine"}'


def body(prompt: Prompt) -> str:
    return "\n".join(prompt.turns) if prompt.text is None else prompt.text


def write(folder: Path, data: bytes | str) -> Path:
    path = folder / "mine.jsonl"
    path.write_bytes(data.encode("utf-8") if isinstance(data, str) else data)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_at_least_ten_prompts(kind: str) -> None:
    prompts = bundled_prompts([kind])
    assert len(prompts) >= 10
    assert {prompt.kind for prompt in prompts} == {kind}


@pytest.mark.parametrize("prompt", bundled_prompts(), ids=lambda prompt: prompt.id)
def test_bundled_prompt_is_well_formed(prompt: Prompt) -> None:
    assert prompt.id.startswith(f"{prompt.kind}-")
    assert (prompt.text is not None) == (prompt.kind in RAW_KINDS)
    assert len(prompt.turns) == (0 if prompt.kind in RAW_KINDS else 1)
    # 40 to 450 tokens, at very roughly 2.5 to 5.5 characters a token.
    assert 100 <= len(body(prompt)) <= 2000
    assert "\ufffd" not in body(prompt)


def test_bundled_ids_and_texts_are_unique() -> None:
    prompts = bundled_prompts()
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert len({body(prompt) for prompt in prompts}) == len(prompts)


def test_edit_prompts_quote_a_python_function() -> None:
    for prompt in bundled_prompts("edit"):
        head, code, tail = prompt.turns[0].split("```")
        assert head.strip() and not tail
        assert 15 <= len(code.removeprefix("python\n").splitlines()) <= 40
        compile(code.removeprefix("python\n"), prompt.id, "exec")


def test_bundled_selection_keeps_the_order_asked_for() -> None:
    prompts = bundled_prompts(("wiki", "code", "wiki"), per_kind=2)
    expected = ["wiki-01", "wiki-02", "code-01", "code-02"]
    assert [prompt.id for prompt in prompts] == expected
    assert bundled_prompts("chat") == bundled_prompts(["chat"])


def test_bundled_selection_refuses_what_it_does_not_have() -> None:
    with pytest.raises(
        ValueError, match="unknown prompt kind 'poem'; choose from code"
    ):
        bundled_prompts(["poem"])
    for count in (0, -1, 1000):
        with pytest.raises(ValueError, match=f"per_kind is {count}, .* from 1 to"):
            bundled_prompts(per_kind=count)


def test_prompt_is_frozen_and_has_exactly_one_form() -> None:
    prompt = Prompt("a", "user", "text", ())
    with pytest.raises(dataclasses.FrozenInstanceError):
        prompt.text = "other"  # type: ignore[misc]
    for text, turns in ((None, ()), ("text", ("turn",))):
        with pytest.raises(ValueError, match="exactly one"):
            Prompt("a", "user", text, turns)


def test_read_fills_in_defaults_and_skips_blank_lines(tmp_path: Path) -> None:
    lines = [
        '{"prompt": "one"}',
        "",
        '{"turns": ["two", "three"], "extra": 1}',
        "   \t",
        '{"prompt": "four", "id": "own", "kind": "poem"}',
    ]
    expected = [
        Prompt("mine-1", "user", "one", ()),
        Prompt("mine-3", "user", None, ("two", "three")),
        Prompt("own", "poem", "four", ()),
    ]
    assert read_jsonl(write(tmp_path, "\n".join(lines))) == expected
    # A path as text, Windows line ends, a byte order mark and a final newline.
    data = "\ufeff" + "\r\n".join(lines) + "\r\n"
    assert read_jsonl(str(write(tmp_path, data))) == expected


@pytest.mark.parametrize("ascii_only", [True, False])
def test_unicode_round_trip(tmp_path: Path, ascii_only: bool) -> None:
    text = '  naïve 日本語 👩‍🚀 e\u0301 \u202e \u2028 \x85 \x0c \\n "quoted"\n\ttab  '
    records = [{"prompt": text}, {"turns": [text, "второй"], "id": "ключ"}]
    data = "\n".join(json.dumps(item, ensure_ascii=ascii_only) for item in records)
    first, second = read_jsonl(write(tmp_path, data))
    assert first.text == text
    assert second.turns == (text, "второй")
    assert second.id == "ключ"


@pytest.mark.parametrize(
    ("line", "problem", "fix"),
    [
        (b'{"prompt": "a"', "broken JSON", "one complete JSON object"),
        (b'{"prompt": "a"} x', "broken JSON", "one complete JSON object"),
        (b"[" * 200_000, "cannot be read", "one plain JSON object"),
        (b'["a"]', "found a list", "write it as"),
        (b'"a"', "found a string", "write it as"),
        (b"null", "found null", "write it as"),
        (b'{"text": "a"}', "neither", 'add "prompt"'),
        (b'{"prompt": "a", "turns": ["b"]}', "both", "keep only one"),
        (b'{"prompt": ""}', '"prompt" is empty', "give it some text"),
        (b'{"prompt": " \\n"}', '"prompt" is empty', "give it some text"),
        (b'{"prompt": 3}', "must be a string, not a number", "quotes"),
        (b'{"prompt": null}', "must be a string, not null", "quotes"),
        (b'{"prompt": "\\ud83d"}', "surrogate", "the whole character"),
        (b'{"turns": "a"}', "must be a list of strings, not a string", "write it as"),
        (b'{"turns": []}', '"turns" is empty', "at least one"),
        (b'{"turns": ["a", ""]}', '"turns" item 2 is empty', "give it some text"),
        (b'{"turns": ["a", {}]}', '"turns" item 2 must be a string', "quotes"),
        (b'{"prompt": "a", "id": 7}', '"id" must be a string', "quotes"),
        (b'{"prompt": "a", "kind": true}', "not a boolean", "quotes"),
        (b'{"prompt": "a", "id": ""}', '"id" is empty', "remove it"),
        (b'{"prompt": "a", "id": "mine-1"}', "already used on line 1", "its own id"),
        (b'{"prompt": "caf\xe9"}', "not valid UTF-8 (byte 0xe9)", "save the file"),
    ],
    # Shortened, because the line itself would make some names unreadable.
    ids=lambda value: value[:32].decode("latin-1") if isinstance(value, bytes) else "",
)
def test_broken_line_is_named(
    tmp_path: Path, line: bytes, problem: str, fix: str
) -> None:
    # The blank line checks that skipped lines are still counted.
    path = write(tmp_path, b"\n".join([GOOD, b"", GOOD, line, GOOD]))
    with pytest.raises(ValueError) as caught:
        read_jsonl(path)
    message = str(caught.value)
    assert message.startswith(f"{path}, line 4: ")
    assert problem in message
    assert fix in message


@pytest.mark.parametrize("data", [b"", b"\n \r\n\n", b"\xef\xbb\xbf"])
def test_file_without_prompts_is_refused(tmp_path: Path, data: bytes) -> None:
    path = write(tmp_path, data)
    with pytest.raises(ValueError) as caught:
        read_jsonl(path)
    message = str(caught.value)
    assert message.startswith(f"{path}, line 1: the file holds no prompts")
    assert "add at least one line" in message


def test_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_jsonl(tmp_path / "absent.jsonl")
