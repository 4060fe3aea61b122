"""Masks are a function of the tokens before a place, however they are asked for."""

import random
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebit.core.request import Request, SamplingParams
from samebit.core.structured import StructuredOutputsParams
from samebit.engine.engine import vocabulary_of
from samebit.engine.model_source import resolve_model
from samebit.engine.tokenizer import Tokenizer
from samebit.grammar.grammars import Grammars
from samebit.grammar.matcher import is_allowed, without
from samebit.grammar.vocabulary import Vocabulary
from tests.grammar.schemas import schema_of


@pytest.fixture(scope="module")
def grammars():
    tokenizer = Tokenizer(resolve_model("nano"))
    return Grammars(vocabulary_of(tokenizer, tokenizer.vocab_size))


def begin(grammars, **wanted):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**wanted))
    return grammars.matcher(Request(request_id="r", prompt_token_ids=[300], params=params, seed=0, eos_token_ids=(6,)))


def allowed(mask):
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))


def way(matcher, seed, most):
    """Random tokens that the grammar allows, up to its end, with the mask before each and behind the last."""
    rng, tokens, masks = random.Random(seed), [], [matcher.masks([])[0]]
    while len(tokens) < most and not matcher.is_over and matcher.error is None:
        tokens.append(int(rng.choice(allowed(masks[-1]))))
        matcher.accept(tokens[-1])
        masks.append(matcher.masks([])[0])
    return tokens, masks


@given(seed=st.integers(0, 10_000), data=st.data())
def test_masks_behind_guesses_are_those_behind_the_same_tokens(grammars, seed, data):
    schema = schema_of(seed)
    tokens, masks = way(begin(grammars, json=schema), seed, 40)
    matcher, at = begin(grammars, json=schema), 0
    while at < len(tokens):
        right = data.draw(st.integers(0, len(tokens) - at))
        wrong = data.draw(st.lists(st.integers(0, 4095), max_size=3))
        guesses = [*tokens[at : at + right], *wrong]
        for length in data.draw(st.permutations([len(guesses), data.draw(st.integers(0, len(guesses)))])):
            found = matcher.masks(guesses[:length])
            assert len(found) == length + 1
            known = masks[at : at + min(right, length) + 1]
            # Behind the last token of the grammar there is none to draw.
            assert [mask for mask in found[: len(known)] if mask] == [mask for mask in known if any(mask)]
        for token in tokens[at : at + max(1, right // 2)]:
            matcher.accept(token)
            at += 1
            assert matcher.masks([])[0] == masks[at]
    assert matcher.error is None


def test_guesses_count_up_to_the_first_that_is_not_allowed(grammars):
    matcher = begin(grammars, regex="[ab]{3}")
    a, b, c = (next(i for i in range(4096) if grammars._vocabulary.token_bytes(i) == x) for x in (b"a", b"b", b"c"))
    assert matcher.num_allowed([a, b, c, a]) == 2
    assert matcher.num_allowed([c]) == 0
    assert matcher.num_allowed([a, b, a, 6, 6]) == 3  # behind the end token nothing is drawn
    assert matcher.masks([c, a])[1:] == [b"", b""]


def test_a_mask_has_no_bits_but_of_the_vocabulary_and_loses_those_it_is_told_to():
    vocabulary = Vocabulary(
        33, lambda i: b"" if i == 32 else bytes([97 + i]), {}, lambda text: [ord(x) - 97 for x in text]
    )
    matcher = begin(Grammars(vocabulary), regex="[a-c]+")
    mask = matcher.masks([])[0]
    assert len(mask) == 8
    assert allowed(mask).tolist() == [0, 1, 2]
    matcher.accept(1)
    assert allowed(matcher.masks([])[0]).tolist() == [0, 1, 2, 6]
    assert allowed(without(mask, [1, 9])).tolist() == [0, 2]
    assert [is_allowed(mask, token) for token in (0, 3, 32)] == [True, False, False]


def test_a_vocabulary_that_cannot_spell_a_text_is_an_error_where_it_ends():
    vocabulary = Vocabulary(8, lambda i: b"ax"[i % 2 : i % 2 + 1], {}, lambda _: [])
    matcher = begin(Grammars(vocabulary), regex="[ab][bc]")
    assert matcher.error is None
    matcher.accept(0)
    assert matcher.error == "no token is allowed"
    assert not matcher.is_over


@pytest.mark.parametrize(
    ("regex", "most_states", "ends_some"),
    [
        ("(.*a.{25}){5}[^b]*", 5_000, True),
        ("(.*[aeiou].{18}){4}q*", 5_000, True),
        ("(.*a.{12}){3}[^b]*", 400, True),
        (
            "(?i)" + "[a-zà-ü]{1,60}" * 50,
            50_000,
            False,
        ),  # which a limit of fuel a step would end, unless others had paid it
    ],
)
def test_where_the_limits_end_an_answer_does_not_depend_on_who_has_followed_the_same_grammar(
    grammars, monkeypatch, regex, most_states, ends_some
):
    monkeypatch.setitem(sys.modules["samebit.grammar.grammars"]._LIMITS, "max_lexer_states", most_states)
    ends = {}
    for seed in range(8):
        alone = begin(Grammars(grammars._vocabulary), regex=regex)
        ends[seed] = way(alone, seed, 80)[0], alone.error
    assert any(error for _, error in ends.values()) == ends_some
    company = Grammars(grammars._vocabulary)
    for seed in (*ends, *ends):
        matcher = begin(company, regex=regex)
        assert (way(matcher, seed, 80)[0], matcher.error) == ends[seed]


def test_what_others_have_used_of_a_grammar_is_no_part_of_a_request(grammars):
    wanted = {"regex": "(.*a.{25}){5}[^b]*"}
    tokens, masks = way(begin(grammars, **wanted), 200, 120)
    early = begin(grammars, **wanted)
    (text,) = [text for text in grammars._compiled if "{25}" in text]
    shared = grammars._compiled[text]
    for seed in range(200):
        way(begin(grammars, **wanted), seed, 120)
        if grammars._compiled.get(text) is not shared:
            break
    else:
        pytest.fail("the limits of the shared lexer were not reached")
    for matcher in (early, begin(grammars, **wanted)):
        for token, mask in zip(tokens, masks, strict=False):
            assert matcher.masks([])[0] == mask
            matcher.accept(token)
            assert matcher.error is None
