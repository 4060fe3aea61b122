"""Sampling parameters that are refused by name, whoever sends them."""

import pytest

from samebit import SamplingParams
from samebit.core.errors import InvalidRequestError
from samebit.core.request import MIN_TEMPERATURE


@pytest.mark.parametrize(
    "field",
    [
        {"max_tokens": "5"},
        {"max_tokens": 2.5},
        {"n": "2"},
        {"n": True},
        {"temperature": None},
        {"temperature": "1"},
        {"top_k": 1.5},
        {"seed": 1.5},
        {"stop": 5},
        {"stop": ["a", 1]},
        {"stop_token_ids": 5},
        {"stop_token_ids": ["a"]},
        {"min_tokens": None},
        {"logprobs": True},
        {"ignore_eos": 1},
    ],
    ids=str,
)
def test_a_value_of_the_wrong_type_is_refused_by_name(field):
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(**field).validate()
    assert error.value.param == next(iter(field))
    assert str(error.value).startswith(error.value.param)


@pytest.mark.parametrize("field", [{"temperature": 1}, {"stop": ("a", "b")}, {"stop_token_ids": (1, 2)}, {"seed": -1}])
def test_a_value_that_says_the_same_in_another_type_is_taken(field):
    SamplingParams(**field).validate()


def test_a_temperature_whose_quotients_overflow_is_refused():
    SamplingParams(temperature=MIN_TEMPERATURE).validate()
    for temperature in (MIN_TEMPERATURE / 2, 1e-38, 1e-45, 5e-324):
        with pytest.raises(InvalidRequestError, match="greedy"):
            SamplingParams(temperature=temperature).validate()
