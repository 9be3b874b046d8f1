"""``specjax drafters``, and what may stand behind a drafter's name."""

import json

import pytest

from specjax.cli import options as o
from specjax.cli.drafting import check, spec_of
from specjax.cli.errors import UsageError
from specjax.drafters import DRAFTERS


def test_the_table_names_every_drafter(run):
    result = run("drafters", "--json")
    assert result.status == 0
    rows = json.loads(result.out)
    assert list(rows) == list(DRAFTERS)
    for name, row in rows.items():
        entry = DRAFTERS[name]
        assert row["drafts"] and row["trained"] == entry.trained
        # a trained drafter is read from somewhere
        assert not entry.trained or row["layouts"] or row["made of"]
    assert "ngram" in run("drafters").out


def test_a_name_and_where():
    assert spec_of("ngram").where is None
    spec = spec_of("draft:some/model:v2")
    assert (spec.name, spec.where) == ("draft-model", "some/model:v2")
    assert spec.text == "draft:some/model:v2"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("draft:", "behind the colon"),
        ("draft-model", "draft-model:NAME|PATH"),
        ("ngram:there", "leave out :there"),
        ("nothing:there", "must be one of"),
    ],
)
def test_what_is_refused(text, said):
    with pytest.raises(UsageError) as caught:
        check(spec_of(text), 3, o.NGramOptions(), o.DraftModelOptions())
    assert said in str(caught.value) and text.split(":")[0] in str(caught.value)


def test_a_draft_model_whose_ids_mean_something_else(run, model, other_tokenizer):
    """Its drafts are translated, which is said; the output is the target's."""
    common = ("generate", "--model", model, "--prompt", "abcabc", "--json", "--k", 3)
    common += ("--max-tokens", 8)
    other = run(*common, "--drafter", f"draft:{other_tokenizer}")
    plain = run(*common, "--drafter", "none")
    assert other.status == plain.status == 0
    assert json.loads(other.out)["ids"] == json.loads(plain.out)["ids"]
    assert json.loads(other.out)["stats"]["drafted"] > 0
    assert "has another vocabulary than the target" in other.err
    assert "the 255 tokens that both have, of 256" in other.err


def test_a_draft_model_behind_the_colon(run, model):
    common = ("generate", "--model", model, "--prompt", "abcabc", "--json", "--k", 3)
    common += ("--max-tokens", 8)
    behind = run(*common, "--drafter", f"draft:{model}")
    beside = run(*common, "--drafter", "draft-model", "--draft-model", model)
    assert behind.status == beside.status == 0
    assert json.loads(behind.out)["ids"] == json.loads(beside.out)["ids"]
    assert json.loads(behind.out)["stats"]["accepted"] > 0
