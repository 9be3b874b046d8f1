"""``specjax generate`` on a tiny model."""

import io
import re
import sys
from pathlib import Path

import pytest

PROMPT = "abcabcabcabc"
ESCAPE = "\x1b["


def stats_agree(stats: dict, ids: list) -> None:
    assert stats["tokens"] == len(ids)
    assert stats["tau"] == pytest.approx(stats["tokens"] / stats["rounds"])
    drafted, accepted = stats["drafted"], stats["accepted"]
    assert stats["alpha"] == pytest.approx(accepted / drafted if drafted else 0)
    assert sum(stats["accepted_by_position"]) == accepted
    rate = stats["tokens"] / stats["seconds"]
    assert stats["tokens_per_second"] == pytest.approx(rate)


@pytest.fixture
def plain(run, model):
    def plain(*more):
        options = ("--drafter", "none", "--max-tokens", 24, "--ignore-eos", "--json")
        return run("generate", "--model", model, "--prompt", PROMPT, *options, *more)

    return plain


def test_json_has_what_machines_need(run, model):
    result = run(
        *("generate", "--model", model, "--prompt", PROMPT, "--k", 4, "--json"),
        *("--max-tokens", 24, "--ignore-eos"),
    )
    assert result.status == 0
    assert result.err == ""
    assert len(result.out.splitlines()) == 1
    line = result.json
    assert set(line) == {"prompt_ids", "ids", "text", "finish_reason", "stats"}
    assert len(line["prompt_ids"]) == len(PROMPT)
    assert len(line["ids"]) == 24
    assert line["finish_reason"] == "length"
    assert line["stats"]["drafter"] == "ngram" and line["stats"]["k"] == 4
    stats_agree(line["stats"], line["ids"])


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize(
    "drafter", [("ngram", "--k", 4), ("draft-model", "--k", 3, "--draft-model")]
)
def test_drafts_change_no_token(run, model, plain, drafter, temperature):
    settings = ("--temperature", temperature, "--seed", 7)
    name, *more = drafter
    more += [model] if more[-1] == "--draft-model" else []
    expected = plain(*settings).json
    got = plain("--drafter", name, *more, *settings).json
    assert got["ids"] == expected["ids"]
    assert got["text"] == expected["text"]
    assert got["stats"]["drafted"] > 0 and expected["stats"]["drafted"] == 0
    assert got["stats"]["rounds"] <= expected["stats"]["rounds"] == 24
    if temperature == 0:
        assert got["stats"]["accepted"] > 0
    stats_agree(got["stats"], got["ids"])
    stats_agree(expected["stats"], expected["ids"])


def test_the_stream_is_the_text_and_the_last_line_the_figures(run, model, plain):
    expected = plain().json
    result = run(
        *("generate", "--model", model, "--prompt", PROMPT, "--k", 4),
        *("--max-tokens", 24, "--ignore-eos", "--rounds-per-call", 1),
    )
    assert result.status == 0
    assert result.out == expected["text"] + "\n"
    assert ESCAPE not in result.out + result.err
    last = result.err.splitlines()[-1]
    figures = (
        r"τ \d+\.\d\d  α \d\.\d\d  \d+ rounds  24 tokens  [\d.]+ tokens/s  prefill"
    )
    assert re.match(figures, last), last


def test_colour_marks_accepted_drafts_and_nothing_else(run, model, plain, monkeypatch):
    expected = plain().json
    options = ("generate", "--model", model, "--prompt", PROMPT, "--k", 4)
    options += ("--max-tokens", 24, "--ignore-eos")
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = run(*options)
    assert "\x1b[32m" in coloured.out
    assert re.sub(r"\x1b\[\d*m", "", coloured.out) == expected["text"] + "\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert ESCAPE not in run(*options).out


def test_a_prompt_file_is_taken_byte_for_byte(run, model, tmp_path, monkeypatch):
    text = "  a\r\n\tb é\n"
    file = tmp_path / "prompt"
    file.write_bytes(text.encode())
    options = ("--max-tokens", 1, "--json", "--model", model)
    ids = run("generate", "--prompt-file", file, *options).json["prompt_ids"]
    assert len(ids) == len(text.encode())
    stdin = io.TextIOWrapper(io.BytesIO(text.encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert run("generate", "--prompt-file", "-", *options).json["prompt_ids"] == ids


def test_a_prompt_of_ids_is_that_of_its_text(run, model):
    options = ("--max-tokens", 6, "--ignore-eos", "--json", "--model", model)
    told = run("generate", "--prompt", PROMPT, *options).json
    by_ids = run("generate", "--prompt-ids", *told["prompt_ids"], *options).json
    for name in ("prompt_ids", "ids", "text"):
        assert by_ids[name] == told[name]


def test_a_prompt_of_ids_needs_no_tokenizer(run):
    model = Path(__file__).resolve().parents[1] / "data/oracles/qwen3_5"
    asked = ("generate", "--model", model, "--prompt-ids", 5, 17, 9, 4)
    asked += ("--max-tokens", 7, "--drafter", "mtp", "--k", 2, "--ignore-eos")
    asked += ("--logprobs", 1)
    told = run(*asked, "--json").json
    assert told["prompt_ids"] == [5, 17, 9, 4] and told["text"] is None
    assert len(told["ids"]) == 7 and told["stats"]["drafted"] > 0
    first, *table = run(*asked).out.splitlines()
    assert first.split() == [str(i) for i in told["ids"]]
    assert [row.split()[0] for row in table[1:]] == [f"#{i}" for i in told["ids"]]
    refused = run(*asked, "--stop", "a")
    assert refused.status != 0 and "has no tokenizer" in refused.err
    refused = run(*asked[:3], "--prompt-ids", 5, 999)
    assert refused.status != 0 and "--prompt-ids 999 is no id" in refused.err


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_drafts_change_no_token_over_a_narrow_cache(run, model, plain, kind):
    narrow = ("--cache-dtype", kind, "--temperature", 0.8, "--seed", 7, "--logprobs", 0)
    expected = plain(*narrow).json
    drafter = ("--drafter", "draft-model", "--draft-model", model, "--k", 3)
    drafted = plain(*drafter, *narrow).json
    assert drafted["ids"] == expected["ids"]
    assert drafted["stats"]["accepted"] > 0
    wide = plain(*narrow[2:]).json
    assert wide["logprobs"][0] != expected["logprobs"][0]  # the cache is another


def test_a_prompt_may_begin_with_a_hyphen(run, model):
    options = ("--max-tokens", 1, "--json", "--model", model)
    assert run("generate", "--prompt=--k", *options).status == 0


def test_chat_goes_through_the_template(run, model):
    options = ("--max-tokens", 1, "--json", "--model", model)
    ids = run("generate", "--prompt", "hello", "--chat", *options).json["prompt_ids"]
    assert len(ids) == len("[user] hello\n")


def test_stop_texts_end_the_output_before_them(run, model, plain):
    text = plain().json["text"]
    assert len(text) > 8
    stop = text[5:8]
    cut = text[: text.find(stop)]
    stopped = plain("--drafter", "ngram", "--stop", stop, "zzzzzz").json
    assert stopped["text"] == cut
    assert stopped["finish_reason"] == "stop_string"
    stats_agree(stopped["stats"], stopped["ids"])
    streamed = run(
        *("generate", "--model", model, "--prompt", PROMPT, "--max-tokens", 24),
        *("--ignore-eos", "--rounds-per-call", 1, "--stop", stop, "zzzzzz"),
    )
    assert streamed.out == cut + "\n"


def test_eos_ends_the_output(run, model, plain):
    ids = plain().json["ids"]
    stop = ids[10]
    got = run(
        *("generate", "--model", model, "--prompt", PROMPT, "--max-tokens", 24),
        *("--json", "--eos", stop),
    ).json
    assert got["ids"] == ids[: ids.index(stop) + 1]
    assert got["finish_reason"] == "stop"
    assert plain("--eos", stop).json["ids"] == ids  # --ignore-eos wins


def test_logprobs_are_reported(run, model, plain):
    line = plain("--logprobs", 3).json
    assert len(line["logprobs"]) == len(line["ids"])
    for entry, index in zip(line["logprobs"], line["ids"], strict=True):
        assert entry["top"][0] == [index, pytest.approx(entry["logprob"])]
        assert len(entry["top"]) == 3
    shown = run(
        *("generate", "--model", model, "--prompt", PROMPT, "--logprobs", 2),
        *("--max-tokens", 3, "--ignore-eos"),
    )
    assert "most probable" in shown.out


def test_capacity_ends_the_output(plain):
    line = plain("--capacity", len(PROMPT) + 6, "--k", 3).json
    assert len(line["ids"]) == 6
    assert line["finish_reason"] == "capacity"


def test_no_tokens_can_be_asked_for(plain):
    line = plain("--max-tokens", 0).json
    assert line["ids"] == [] and line["text"] == ""
    assert line["stats"]["tokens_per_second"] == 0


def test_penalties_and_cut_offs_are_passed_on(plain):
    free = plain().json["ids"]
    assert plain("--repetition-penalty", 5.0).json["ids"] != free
    one = plain("--temperature", 1.5, "--top-k", 1).json["ids"]
    assert one == free
