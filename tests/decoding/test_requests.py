"""What a caller may ask for, and what becomes of it."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.requests import (
    Request,
    RequestError,
    check_ids,
    counts_of,
    limits_of,
    sampling_of,
)
from specjax.decoding.types import FinishReason, Sampling

V = 10


def built(**given: Any) -> Request:
    """A request made without the types that tests are checked for."""
    request = object.__new__(Request)
    for field in dataclasses.fields(Request):
        empty = {} if field.name == "logit_bias" else field.default
        object.__setattr__(request, field.name, given.get(field.name, empty))
    request.__post_init__()
    return request


@pytest.mark.parametrize(
    ("field", "value", "fix"),
    [
        ("prompt_ids", (), "at least one token"),
        ("max_tokens", -1, "0 or more"),
        ("max_tokens", 4.5, "integer"),
        ("max_tokens", 2**45, "0 or more"),
        ("prompt_ids", (3.0, 4), "integer"),
        ("prompt_ids", "hello", "list of token ids"),
        ("prompt_ids", (True, 1), "integer"),
        ("prompt_ids", ((1, 2), (3,)), "integer"),
        ("seed", 1.7, "integer"),
        ("seed", None, "integer"),
        ("top_k", 1.5, "integer"),
        ("top_k", 2**31, "0 (all) or more"),
        ("top_p", 1e-50, "above 0"),
        ("top_p", "1", "number"),
        ("repetition_penalty", 1e-50, "above 0"),
        ("frequency_penalty", 1e39, "finite"),
        ("presence_penalty", -1e39, "finite"),
        ("logit_bias", {3: 1e39}, "1e6"),
        ("logit_bias", {3.5: 1.0}, "integer"),
        ("stop", (5,), "list of strings"),
        ("stop", None, "list of strings"),
        ("seed", -1, "2**32"),
        ("seed", 2**32, "2**32"),
        ("temperature", -0.1, "0 or more"),
        ("temperature", math.nan, "0 or more"),
        ("temperature", math.inf, "0 or more"),
        ("top_k", -1, "0 (all) or more"),
        ("top_p", 0.0, "above 0"),
        ("top_p", 1.001, "at most 1"),
        ("top_p", math.nan, "above 0"),
        ("min_p", -0.1, "between 0 and 1"),
        ("min_p", 1.1, "between 0 and 1"),
        ("min_p", math.nan, "between 0 and 1"),
        ("repetition_penalty", 0.0, "above 0"),
        ("repetition_penalty", -1.0, "above 0"),
        ("repetition_penalty", math.inf, "above 0"),
        ("presence_penalty", math.nan, "finite"),
        ("frequency_penalty", math.inf, "finite"),
        ("logit_bias", {3: math.nan}, "-inf"),
        ("logit_bias", {3: math.inf}, "-inf"),
        ("stop", ("fine", ""), "empty string"),
    ],
)
def test_a_bad_value_is_refused_by_name_and_with_what_would_do(
    field: str, value: Any, fix: str
):
    with pytest.raises(RequestError) as error:
        built(**({"prompt_ids": (1, 2)} | {field: value}))
    assert field in str(error.value) and fix in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", None),
        ("seed", 2**32 - 1),
        ("top_k", 10**6),
        ("top_p", 1e-9),
        ("min_p", 1.0),
        ("repetition_penalty", 0.5),
        ("presence_penalty", -2.0),
        ("logit_bias", {3: -math.inf}),
    ],
)
def test_values_at_the_edge_are_taken(field: str, value: Any):
    assert getattr(Request(**({"prompt_ids": (1,)} | {field: value})), field) == value


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"prompt_ids": (1, V)}, f"holds {V}"),
        ({"prompt_ids": (1, -1, 2)}, "holds -1"),
        ({"prompt_ids": (1,), "logit_bias": {V: 1.0}}, f"names id {V}"),
        ({"prompt_ids": (1,), "logit_bias": {-1: 1.0}}, "names id -1"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused_with_the_request_that_holds_them(
    changes: dict[str, Any], problem: str
):
    good = Request(prompt_ids=(0, V - 1), logit_bias={0: 1.0, V - 1: -1.0})
    check_ids([good], V)
    with pytest.raises(RequestError) as error:
        check_ids([good, Request(**changes)], V)
    assert problem in str(error.value) and "request 1" in str(error.value)


def test_settings_nobody_uses_are_not_traced():
    assert sampling_of([Request(prompt_ids=(1,))] * 2, V) == Sampling()
    # cut-offs mean nothing to rows that are all greedy
    greedy = Request(prompt_ids=(1,), top_k=3, top_p=0.5, min_p=0.1)
    assert sampling_of([greedy], V) == Sampling()


def test_a_setting_that_one_request_uses_is_neutral_in_the_others():
    plain = Request(prompt_ids=(1,))
    rich = Request(
        prompt_ids=(1,),
        temperature=0.5,
        top_k=4,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        logit_bias={2: -math.inf, 5: 1.5},
    )
    made = sampling_of([plain, rich], V)
    for name, values in {
        "temperature": [0.0, 0.5],
        "top_k": [0, 4],
        "top_p": [1.0, 0.9],
        "min_p": [0.0, 0.1],
        "repetition": [1.0, 1.2],
        "presence": [0.0, 0.3],
        "frequency": [0.0, 0.4],
    }.items():
        got = getattr(made, name)
        assert got.dtype == (jnp.int32 if name == "top_k" else jnp.float32)
        np.testing.assert_array_equal(got, np.array(values, got.dtype))
    wanted = np.zeros((2, V))
    wanted[1, 2], wanted[1, 5] = -math.inf, 1.5
    np.testing.assert_array_equal(made.bias, wanted)


def test_counts_are_made_where_penalties_need_them():
    requests = [Request(prompt_ids=(1, 1, 3)), Request(prompt_ids=(9,))]
    assert counts_of(requests, Sampling(), V) is None
    counts = counts_of(requests, Sampling(presence=jnp.ones(2)), V)
    assert counts is not None
    assert counts.prompt.tolist() == [
        [0, 2, 0, 1, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
    ]
    assert counts.output.tolist() == [[0] * V] * 2


@pytest.mark.parametrize(
    ("max_tokens", "limit", "reason"),
    [
        (0, 3, FinishReason.LENGTH),
        (1, 4, FinishReason.LENGTH),
        (5, 8, FinishReason.LENGTH),  # just fits
        (6, 8, FinishReason.CAPACITY),
        (10**9, 8, FinishReason.CAPACITY),
        (None, 8, FinishReason.CAPACITY),
    ],
)
def test_the_limit_is_the_budget_or_the_capacity(max_tokens, limit, reason):
    request = Request(prompt_ids=(1, 2, 3), max_tokens=max_tokens)
    limits, reasons = limits_of([request], 8)
    assert limits.tolist() == [limit] and reasons.tolist() == [reason]
    assert limits.dtype == reasons.dtype == np.int32


def test_a_prompt_longer_than_the_capacity_is_refused():
    fits = Request(prompt_ids=(1,) * 8)
    limits_of([fits], 8)
    with pytest.raises(RequestError, match=r"request 1: the prompt has 9 .* is 8"):
        limits_of([fits, Request(prompt_ids=(1,) * 9)], 8)


def test_a_request_holds_copies_in_plain_types():
    ids = [3, 4]
    made = built(prompt_ids=ids, stop="end")
    ids.append(5)
    assert made.prompt_ids == (3, 4) and made.stop == ("end",)
    for array in (np.array([3, 4], np.int64), jnp.array([3, 4], jnp.int32)):
        assert built(prompt_ids=array).prompt_ids == (3, 4)


def test_a_bias_that_leaves_nothing_to_say_is_refused():
    nothing = Request(prompt_ids=(1,), logit_bias=dict.fromkeys(range(V), -math.inf))
    with pytest.raises(RequestError, match="excludes every id"):
        check_ids([nothing], V)
