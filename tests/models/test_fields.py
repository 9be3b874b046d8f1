"""Configuration fields that cannot be what they say."""

import math

import pytest

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
    new = GOOD | {"rope_parameters": {"rope_theta": 7.0}, "rope_theta": 5.0}
    assert config(new).blocks[0].mixer.rope.theta == 7.0
