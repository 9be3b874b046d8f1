"""``specjax bench`` and ``specjax demo`` on a tiny model."""

import dataclasses
import json

import jax.numpy as jnp
import pytest
from flax import struct

from specjax.acceptance import RULES
from specjax.analysis.identity import NEAR_TIE
from specjax.analysis.records import Record
from specjax.decoding.interfaces import ProposalLaw
from specjax.decoding.types import NO_TOKEN, Acceptance

FIELDS = set(
    """
    model dtype drafter k rule temperature batch kind tokens rounds drafted accepted
    accepted_by_position tau alpha c_draft c_verify draft_bytes repetition seconds
    tokens_per_second speedup identical first_difference ignore_eos memory device
    versions
    commit command date prompt_id repeat prefill_seconds
    """.split()  # noqa: SIM905
)


class AcceptAll(struct.PyTreeNode):
    """Keeps every draft of a chain, whatever the target says: a wrong rule."""

    name = "greedy"
    takes = frozenset(ProposalLaw)

    def accept(self, proposal, window, laws, seeds, *, max_depth):
        num = window.valid.sum(axis=1, dtype=jnp.int32)
        last = jnp.maximum(num - 1, 0)
        bonus = jnp.argmax(laws.adjusted_at(last), axis=-1).astype(jnp.int32)
        slots = jnp.arange(max_depth + 1, dtype=jnp.int32)
        row = jnp.minimum(slots + 1, window.width - 1)
        drafts = jnp.take_along_axis(window.tokens, row[None], axis=1)
        tokens = jnp.where(slots == last[:, None], bonus[:, None], drafts)
        taken = slots < num[:, None]
        return Acceptance(
            path=jnp.where(taken, slots, 0),
            tokens=jnp.where(taken, tokens, NO_TOKEN),
            num_tokens=num,
        )


@pytest.fixture
def wrong_rule(monkeypatch):
    entry = dataclasses.replace(RULES["greedy"], build=AcceptAll)
    monkeypatch.setitem(RULES, "greedy", entry)


@pytest.fixture
def bench(run, model, tmp_path):
    prompts, out = tmp_path / "mine.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"prompt": "abcabcabcabcabc", "kind": "letters"},
        {"turns": ["tell me, tell me, tell me"]},
        {"prompt": "xyz xyz xyz xyw"},
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def bench(*more):
        result = run(
            *("bench", "--model", model, "--prompts", prompts, "--json", out),
            *("--max-tokens", 16, "--ignore-eos", *more),
        )
        lines = out.read_text().splitlines() if out.exists() else []
        return result, [json.loads(line) for line in lines]

    return bench


def records_agree(records, plain):
    for r in records:
        assert set(r) == FIELDS
        assert r["tau"] == pytest.approx(r["tokens"] / r["rounds"])
        drafted, accepted = r["drafted"], r["accepted"]
        assert r["alpha"] == pytest.approx(accepted / drafted if drafted else 0)
        assert len(r["accepted_by_position"]) == r["k"]
        assert sum(r["accepted_by_position"]) == accepted
        assert r["tokens"] - r["rounds"] <= accepted <= r["tokens"]
        assert r["tokens_per_second"] == pytest.approx(r["tokens"] / r["seconds"])
        base = plain[r["prompt_id"], r["repeat"]]["tokens_per_second"]
        assert r["speedup"] == pytest.approx(r["tokens_per_second"] / base)
        if r["identical"] is not False:
            assert r["first_difference"] is None
        assert r["batch"] == 1 and r["ignore_eos"] is True
        assert 0 <= r["repetition"] <= 1
        assert r["prefill_seconds"] > 0 and r["seconds"] > 0
        assert set(r["versions"]) == {"specjax", "python", "jax", "jaxlib", "numpy"}


def plain_of(records):
    return {(r["prompt_id"], r["repeat"]): r for r in records if r["drafter"] == "none"}


@pytest.mark.parametrize(
    "temperature", [pytest.param(0.0, marks=pytest.mark.full), 0.8]
)
def test_records_are_complete_and_agree(bench, temperature):
    result, records = bench("--k", 2, 4, "--repeats", 2, "--temperature", temperature)
    assert result.status == 0, result.err
    assert len(records) == 3 * 2 * 3  # prompts, repeats, arms
    plain = plain_of(records)
    assert len(plain) == 6
    records_agree(records, plain)
    assert all(r["identical"] for r in records)
    assert {(r["drafter"], r["k"]) for r in records} == {
        ("none", 0),
        ("ngram", 2),
        ("ngram", 4),
    }
    assert {r["kind"] for r in records} == {"letters", "user"}
    for r in records:
        assert r["rule"] == ("coupled" if temperature else "greedy")
        assert r["temperature"] == temperature and r["dtype"] == "float32"
        assert r["command"].startswith("specjax bench --model ")
        if r["drafter"] == "none":
            assert r["tau"] == 1 and r["speedup"] == 1
            assert r["c_draft"] == 0 and r["c_verify"] == 1
        else:
            assert r["draft_bytes"] == 0
            assert r["c_draft"] > 0 and r["c_verify"] > 0
    for part in ("letters", "user", "all", "τ", "identical", "6 of 6", "middle half"):
        assert part in result.out
    assert "\x1b[" not in result.out


def test_records_are_appended(bench):
    first = bench("--k", 2)[1]
    second = bench("--k", 2, "--pages", 16)[1]
    assert second[: len(first)] == first and len(second) == 2 * len(first)
    defaults = {"rollback": "replay", "cache_dtype": "auto"}
    defaults |= {"pages": None, "page_size": 16}
    assert first[0]["memory"] == {**defaults, "invariant": False}
    assert second[-1]["memory"] == {**first[0]["memory"], "pages": 16}
    assert all(r["identical"] for r in second)


def test_a_draft_model_counts_its_bytes(bench, model):
    options = ("--drafters", "draft-model", "--draft-model", model, "--k", 2)
    result, records = bench(*options)
    assert result.status == 0
    records_agree(records, plain_of(records))
    weights = (model / "model.safetensors").stat().st_size
    for r in records:
        if r["drafter"] == "draft-model":
            assert 0.9 * weights < r["draft_bytes"] <= weights
            # the model agrees with itself
            assert r["identical"] and r["alpha"] > 0.9


def test_a_wrong_rule_is_found_out(bench, wrong_rule):
    result, records = bench("--k", 3)
    assert result.status == 1
    records_agree(records, plain_of(records))
    plain = [r for r in records if r["drafter"] == "none"]
    wrong = [r for r in records if not r["identical"]]
    assert all(r["identical"] for r in plain)
    assert wrong
    for r in wrong:
        assert r["alpha"] == 1
        assert 0 <= r["first_difference"]["position"] < 16
    margins = [r["first_difference"]["margin"] for r in wrong]
    assert max(margins) > NEAR_TIE["float32"]
    assert "NOT plain decoding's tokens" in result.out


SIDE_BY_SIDE = ("coupled", "deterministic-children", "lossy-typical")


@pytest.mark.parametrize(
    "temperature", [0.8, pytest.param(0.0, marks=pytest.mark.full)]
)
def test_rules_side_by_side(bench, temperature):
    result, records = bench(
        "--k", 2, "--rule", *SIDE_BY_SIDE, "--temperature", temperature
    )
    assert result.status == 0, result.out + result.err
    records_agree(records, plain_of(records))
    assert len(records) == 3 * (1 + len(SIDE_BY_SIDE))
    verdicts = {}
    for r in records:
        verdicts.setdefault((r["drafter"], r["rule"]), []).append(r["identical"])
    assert verdicts == {
        ("none", "coupled" if temperature else "greedy"): [True] * 3,
        ("ngram", "coupled"): [True] * 3,
        ("ngram", "deterministic-children"): [None if temperature else True] * 3,
        ("ngram", "lossy-typical"): [None] * 3,
    }
    cells = {}
    for line in result.out.splitlines():
        words = line.split()
        if words[:2] == ["all", "ngram"]:
            cells[words[2]] = line
    assert cells["coupled"].rstrip().endswith("3 of 3")
    law = "law only" if temperature else "3 of 3"
    assert cells["deterministic-children"].rstrip().endswith(law)
    assert cells["lossy-typical"].rstrip().endswith("lossy")


class WrongLaw(AcceptAll):
    """The wrong rule, under the name of one that keeps the law alone."""

    name = "rejection"
    same_tokens = False


def test_a_rule_that_keeps_the_law_is_held_to_the_tokens_at_temperature_0(
    bench, monkeypatch
):
    entry = dataclasses.replace(RULES["rejection"], build=WrongLaw)
    monkeypatch.setitem(RULES, "rejection", entry)
    result, records = bench("--k", 2, "--rule", "rejection")
    assert result.status == 1
    assert any(r["identical"] is False for r in records)
    assert "ngram k=2 rejection: differs from token" in result.out


def test_rule_without_a_name_is_not_all_of_them_nor_the_default(bench):
    result, records = bench("--rule")
    assert result.status == 2 and records == []
    assert "--rule is empty: give at least one" in result.err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--draft-model", "x"), "--draft-model does nothing with --drafters ngram"),
        (
            ("--drafters", "ngram", "none", "--draft-pick", "drawn"),
            "--draft-pick does nothing with --drafters ngram none: it is for ",
        ),
    ],
)
def test_options_that_no_drafter_uses_are_refused(bench, options, told):
    result, records = bench(*options)
    assert result.status == 2 and records == []
    assert told in result.err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--rule", "coupled", "gready"), "--rule gready: it must be one of"),
        (
            ("--rule", "coupled", "greedy", "--temperature", 0.5),
            "--rule greedy cannot follow --temperature 0.5: leave out --rule",
        ),
        (
            ("--rule", "coupled", "multi-round", "--temperature", 0.5),
            "rule multi-round takes i.i.d. children, independent proposals, but",
        ),
    ],
)
def test_rules_that_do_not_fit_are_refused_before_anything_runs(
    bench, run, model, options, told
):
    result, records = bench("--k", 2, *options)
    assert result.status == 2 and records == []
    assert told in result.err and "compiling" not in result.err
    last = options.index("--rule") + 2
    alone = run(
        *("generate", "--model", model, "--prompt", "a", "--drafter", "ngram"),
        *("--rule", *options[last:], "--k", 2),
    )
    assert alone.err.splitlines()[-1] == result.err.splitlines()[-1]


def test_bundled_prompts(run, model, tmp_path):
    out = tmp_path / "out.jsonl"
    result = run(
        *("bench", "--model", model, "--kinds", "wiki", "--per-kind", 1, "--k", 2),
        *("--max-tokens", 4, "--json", out),
    )
    assert result.status == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["prompt_id"] for r in records] == ["wiki-01", "wiki-01"]
    assert all(r["ignore_eos"] is False for r in records)


def test_the_fields_are_those_of_the_record():
    assert {field.name for field in dataclasses.fields(Record)} == FIELDS


DEMO = ("--k", 3, "--max-tokens", 6)


def test_demo_shows_a_row_for_each_kind_and_what_to_try_next(run, model):
    result = run("demo", "--model", model, *DEMO)
    assert result.status == 0, result.out + result.err
    rows = {line.split()[0]: line for line in result.out.splitlines() if line}
    for kind in ("code", "list", "wiki", "chat", "edit"):
        assert "yes" in rows[kind] and "×" in rows[kind]
    for column in ("τ", "α", "tokens/s", "speed-up", "identical"):
        assert column in rows  # explained
    assert "Speed is shown in" in result.out
    tail = result.out.splitlines()[-2:]
    assert "specjax generate" in tail[0] and "specjax bench" in tail[1]
    assert "\x1b[" not in result.out + result.err
    assert "compiling" in result.err and "edit:" in result.err


def test_demo_fails_on_a_wrong_rule_and_says_so_in_red(
    run, model, wrong_rule, monkeypatch
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = run("demo", "--model", model, *DEMO)
    assert result.status == 1
    assert "\x1b[1;31mNO, token" in result.out
    assert "Not identical in float32" in result.out
