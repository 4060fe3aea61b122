"""Answers of servers: read in every shape, and compared so that the first of all differences is told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebit.audit.answers import Answer, Token, first_unequal, read_answer
from samebit.audit.http import RefusedError

numbers = st.floats(-20, 0)
tokens = st.builds(Token, st.text(max_size=2), numbers, st.tuples(st.tuples(st.just("x"), numbers)))


def an_answer(items=(), **changes):
    plain = {"text": "", "finish_reason": "length", "token_ids": (), "prompt_token_ids": (), "cached_tokens": None}
    return Answer(**{**plain, "tokens": tuple(items), **changes})


@given(st.lists(tokens, min_size=1), st.data())
def test_the_first_changed_token_is_told(items, data):
    places = data.draw(st.sets(st.integers(0, len(items) - 1), min_size=1))
    changes = {"text": "???", "logprob": 1.0, "tops": (("x", 1.0),)}
    changed = list(items)
    for place in places:
        name = data.draw(st.sampled_from(sorted(changes)))
        changed[place] = items[place]._replace(**{name: changes[name]})
    assert first_unequal(an_answer(items), an_answer(items)) is None
    assert first_unequal(an_answer(items), an_answer(changed)).place == min(places)


def test_a_logprob_that_differs_before_the_ids_do_comes_first():
    one = an_answer([Token("a", -1.0, ()), Token("b", -1.0, ())], token_ids=(1, 2))
    other = an_answer([Token("a", -1.5, ()), Token("c", -1.0, ())], token_ids=(1, 3))
    assert first_unequal(one, other).what == "logprob of 'a': -1.0 and -1.5"
    assert first_unequal(one, other._replace(tokens=one.tokens)).what == "token id 2 and 3"


@pytest.mark.parametrize("changes", [{"text": "a"}, {"finish_reason": "stop"}, {"tokens": (Token("a", None, ()),)}])
def test_what_differs_only_as_a_whole_is_told(changes):
    assert first_unequal(an_answer(), an_answer(**changes)) is not None


def test_what_is_not_part_of_the_promise_is_not_compared():
    assert first_unequal(an_answer(), an_answer(cached_tokens=16, prompt_token_ids=(1,))) is None


def test_pieces_of_a_stream_read_like_the_whole():
    whole = {
        "choices": [
            {
                "text": "ab",
                "finish_reason": "length",
                "token_ids": [1, 2],
                "logprobs": {"tokens": ["a", "b"], "token_logprobs": [-1.0, -2.0], "top_logprobs": [{"a": -1.0}, None]},
            }
        ],
        "usage": {"prompt_tokens_details": {"cached_tokens": 16}},
    }
    first = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{"a": -1.0}]}
    pieces = [
        {"choices": [{"text": "a", "finish_reason": None, "token_ids": [1], "logprobs": first}], "usage": None},
        {"choices": [{"text": "b", "token_ids": [2], "logprobs": {"tokens": ["b"], "token_logprobs": [-2.0]}}]},
        {"choices": [{"text": "", "finish_reason": "length", "logprobs": None}]},
        {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 16}}},
    ]
    assert read_answer([whole]) == read_answer(pieces)
    assert read_answer([whole]).cached_tokens == 16


def test_the_chat_shape_is_read():
    top = {"token": "x", "logprob": -3.0}
    content = [{"token": "a", "logprob": -1.0, "top_logprobs": [top]}]
    choice = {"message": {"content": "a"}, "finish_reason": "stop", "logprobs": {"content": content}}
    answer = read_answer([{"choices": [choice]}])
    assert answer.tokens == (Token("a", -1.0, (("x", -3.0),)),)
    assert (answer.text, answer.finish_reason, answer.cached_tokens) == ("a", "stop", None)


@pytest.mark.parametrize("body", [[], {}, {"choices": []}, {"error": {"message": "no"}, "choices": [{"text": ""}]}])
def test_what_is_no_answer_is_refused(body):
    with pytest.raises(RefusedError):
        read_answer([body])
