"""Where two outputs part, and by what margin."""

import numpy as np
import pytest

from specjax.acceptance import RULES, Coupled, Greedy
from specjax.analysis.identity import (
    Difference,
    Identity,
    compare,
    first_difference,
    near_tie,
    plain_scores,
    promises_tokens,
)
from specjax.analysis.runs import run
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.requests import Request
from specjax.drafters import NullDrafter
from specjax.testing.toys import toy_llama


@pytest.fixture(scope="module")
def target():
    return toy_llama().decoder


def plain(target, rule):
    options = EngineOptions(capacity_at_least=128, prefill_width=8)
    return Engine(target, NullDrafter(), rule, options)


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 2], []) == 0
    assert first_difference([], []) is None


def test_a_bound_forgives_near_ties_only():
    assert Identity(None).identical and Identity(None).holds(0.0)
    tie = Identity(Difference(3, 1e-5))
    assert not tie.identical
    assert tie.holds(1e-3) and not tie.holds(1e-6)
    assert not Identity(Difference(3, None)).holds(1e9)


def test_a_low_temperature_stretches_the_bound():
    assert near_tie("float32") == near_tie("float32", 1.0) == near_tie("float32", 2.0)
    assert near_tie("float32", 0.1) == pytest.approx(10 * near_tie("float32"))


def test_a_narrow_cache_widens_the_bound():
    assert near_tie("float32") < near_tie("float32", cache="int8")
    assert near_tie("float32", cache="int8") < near_tie("float32", cache="fp8")
    assert near_tie("int8", cache="fp8") == near_tie("int8")


def test_which_rules_are_held_to_the_tokens():
    """All but lossy ones at temperature 0; above it those that share the noise."""
    greedy = {name for name in RULES if promises_tokens(RULES[name].build(), 0.0)}
    assert greedy == set(RULES) - {"lossy-typical", "lossy-threshold"}
    assert {n for n in RULES if promises_tokens(RULES[n].build(), 0.8)} == {
        "greedy",  # refused above temperature 0, wherever it is asked for
        "coupled",
    }


SETTINGS = {
    "greedy": {},
    "sampled": {"temperature": 0.7, "seed": 11},
    "penalties": {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    "sampled with penalties": {
        "temperature": 0.9,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_teacher_forced_scores_choose_every_token(target, name):
    """Their largest is the token that decoding took, position by position."""
    rule = Coupled() if "temperature" in SETTINGS[name] else Greedy()
    engine = plain(target, rule)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    request = Request(prompt_ids=prompt, max_tokens=12, **SETTINGS[name])
    ids = run(engine, request).completion.ids
    assert len(ids) == 12
    chosen = [int(np.argmax(plain_scores(engine, request, ids[:n]))) for n in range(12)]
    assert chosen == list(ids)


def test_the_margin_is_the_gap_to_the_token_that_was_taken(target):
    engine = plain(target, Greedy())
    request = Request(prompt_ids=[1, 2, 3], max_tokens=6)
    ids = list(run(engine, request).completion.ids)
    assert compare(engine, request, ids, ids).identical
    scores = plain_scores(engine, request, ids[:4])
    other = int(np.argsort(scores)[-3])
    changed = [*ids[:4], other, ids[5]]
    difference = compare(engine, request, ids, changed).first_difference
    assert difference is not None
    assert difference.position == 4
    assert difference.margin == pytest.approx(scores.max() - scores[other])


def test_a_missing_token_has_no_margin(target):
    engine = plain(target, Greedy())
    request = Request(prompt_ids=[1, 2, 3], max_tokens=4)
    ids = run(engine, request).completion.ids
    short = compare(engine, request, ids, ids[:2]).first_difference
    assert short == Difference(2, None)


def test_a_token_that_a_cut_off_forbids_has_no_margin(target):
    engine = plain(target, Coupled())
    request = Request(prompt_ids=[1, 2, 3], max_tokens=2, temperature=1.0, top_k=1)
    ids = run(engine, request).completion.ids
    other = (ids[0] + 1) % target.vocab_size
    difference = compare(engine, request, ids, [other]).first_difference
    assert difference == Difference(0, None)
