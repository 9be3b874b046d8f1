"""Configuration fields that cannot be what they say."""

import math

import pytest

from specjax.models.families import FAMILIES
from specjax.models.families.defaults import DEFAULTS
from specjax.models.families.fields import ConfigError, Fields
from specjax.models.families.llama import config

GOOD = {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 10,
    "num_hidden_layers": 2,
}


@pytest.mark.parametrize("value", [math.nan, math.inf, 0, -1.5, True, "1", [1]])
def test_a_number_is_positive_and_finite(value):
    with pytest.raises(ConfigError, match=r"'x' .*positive number"):
        Fields({"x": value}, "here").number("x")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": [1]}}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": True}}, "rope_theta"),
        ({"rope_theta": math.inf}, "rope_theta"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers.*1000"),
        ({"hidden_size": 2**40}, "hidden_size"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_by_name(change, told):
    assert config(GOOD).hidden_size == 8
    with pytest.raises(ConfigError, match=told):
        config(GOOD | change)


def test_new_and_old_spellings_of_theta():
    assert config(GOOD | {"rope_theta": 5.0}).blocks[0].mixer.rope.theta == 5.0
    new = GOOD | {"rope_parameters": {"rope_theta": 7.0}}
    assert config(new).blocks[0].mixer.rope.theta == 7.0
    assert config(new | {"rope_theta": 7.0}) == config(new)
    with pytest.raises(ConfigError, match=r"'rope_theta'.*5.0 contradicts rope_par"):
        config(new | {"rope_theta": 5.0})


def test_a_field_that_is_absent_takes_the_familys_default_and_null_means_none():
    fields = Fields({"there": 3, "null": None}, "here", {"a": 5, "there": 1, "null": 7})
    assert fields.integer("there") == 3
    assert fields.integer("old_a|a", 2) == 5
    assert (fields.integer("null"), fields.integer("null", 2)) == (7, 2)
    assert [fields.optional_integer(n) for n in ("a", "null", "other")] == [
        5,
        None,
        None,
    ]
    with pytest.raises(ConfigError, match=r"'other'.*missing"):
        fields.integer("other")


def test_spellings_must_agree():
    fields = Fields({"old": 1, "new": 2, "same": 1}, "here")
    assert fields.integer("old|same") == 1
    with pytest.raises(ConfigError, match="contradicts itself: old = 1, new = 2"):
        fields.integer("old|new")


def test_what_is_left_is_told_together():
    fields = Fields({"a": 1, "b": 2, "c": None, "eos_token_id": 3, "d": 4}, "here")
    fields.integer("a")
    with pytest.raises(ConfigError, match=r"'b' .*likewise 'd'"):
        fields.finish()


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"nemotron_h"}))
def test_a_configuration_that_says_nothing_is_its_classs(family):
    parsed = FAMILIES[family].config({"model_type": family})
    known = DEFAULTS[parsed.family]
    assert len(parsed.blocks) == known["num_hidden_layers"]
    assert parsed.hidden_size == known["hidden_size"]
    assert parsed.tied == known.get("tie_word_embeddings", False)


def test_theta_stands_within_or_beside_and_within_comes_first():
    def theta(**fields):
        return config(GOOD | fields).blocks[0].mixer.rope.theta

    assert theta(rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=3.0) == 3.0
    assert theta(rope_parameters={"rope_type": "default"}, rope_theta=3.0) == 3.0
    assert theta(rope_parameters={}) == 10000.0


def test_the_first_context_of_yarn_stands_within_or_beside_or_is_the_whole():
    def original(told, **fields):
        told = {"rope_type": "yarn", "factor": 2.0} | told
        parsed = config(
            GOOD | {"max_position_embeddings": 64, "rope_scaling": told} | fields
        )
        return parsed.blocks[0].mixer.rope.scaling.original_max_position_embeddings

    name = "original_max_position_embeddings"
    assert original({}) == 64
    assert original({name: 32}) == original({}, **{name: 32}) == 32
    assert original({name: 32}, **{name: 32}) == 32
    with pytest.raises(ConfigError, match=f"{name}.*contradicts itself: 16 and"):
        original({name: 32}, **{name: 16})
