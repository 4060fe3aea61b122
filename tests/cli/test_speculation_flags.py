"""Two spellings of who guesses tokens ahead: what they come to, and what is refused."""

import json

import pytest

from samebit.cli.speculation import from_flags, from_json
from samebit.core.config import parse_settings
from samebit.core.errors import ConfigError


def flags(text=None, algorithm=None, num_draft_tokens=None, num_steps=None, model=None):
    return from_flags(text, algorithm, num_draft_tokens, num_steps, model)


def test_without_flags_nobody_guesses():
    assert flags() is None
    assert from_json(None) is None


def test_the_json_object_is_taken_as_it_is():
    wanted = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    assert from_json(json.dumps(wanted)) == flags(json.dumps(wanted)) == wanted


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("NGRAM", "ngram"),
        ("ngram", "ngram"),
        ("NEXTN", "mtp"),
        ("EAGLE", "mtp"),
        ("DFLASH", "dflash"),
        ("DSPARK", "dspark"),
    ],
)
def test_an_algorithm_of_sglang_is_a_method(name, method):
    assert flags(algorithm=name) == {"method": method}
    assert flags(algorithm=name, model="drafter") == {"method": method, "model": "drafter"}


@pytest.mark.parametrize("counts", [{"num_steps": 4}, {"num_draft_tokens": 5}, {"num_steps": 4, "num_draft_tokens": 5}])
def test_draft_tokens_of_sglang_count_the_token_before_the_guesses(counts):
    assert flags(algorithm="NGRAM", **counts) == {"method": "ngram", "num_speculative_tokens": 4}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"text": '{"method": '}, "'{\"method\": ': not JSON"),
        ({"text": "ngram"}, "'ngram': not JSON"),
        ({"text": "[1]"}, "'[1]': must be an object"),
        ({"algorithm": "MEDUSA"}, "'MEDUSA': must be one of NGRAM, NEXTN, EAGLE, DFLASH, DSPARK"),
        ({"num_steps": 3}, "--speculative-num-steps=3: needs --speculative-algorithm"),
        ({"model": "drafter"}, "--speculative-draft-model-path='drafter': needs --speculative-algorithm"),
        ({"algorithm": "NGRAM", "text": "{}"}, "not both"),
        ({"algorithm": "NGRAM", "num_steps": 4, "num_draft_tokens": 4}, "must be one more, not 4"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_value(given, said):
    with pytest.raises(ConfigError) as error:
        flags(**given)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_drafter_without_a_name_is_refused_and_not_looked_for():
    with pytest.raises(ConfigError, match=r"speculative_config\.model='': names no drafter"):
        parse_settings({"speculative_config": from_json('{"method": "dspark", "model": ""}')}).validate()
