"""Sentences with choices: every form can be drawn, nothing else can, and capitals stand where sentences begin."""

import random
import re

from hypothesis import given
from hypothesis import strategies as st

from samebit.train.forms import Forms, capital
from samebit.train.noise import CLOSINGS, LEADS, QUESTION_LEADS, REASONS, REMARKS, TAILS
from samebit.train.sentences import CHANGES, CLAUSES, MARKS, QUESTIONS, SENTENCES, correction, question, statement
from samebit.train.words import MINE, THING

FORMS = Forms(["[a|b|] <kind> {v}", "<kind>!"], lists={"kind": ["x", "y <who>"]}, words={"who": ["Ann", "Bo"]})


def drawn(forms, count=2000):
    rng = random.Random(0)
    return {forms.draw(rng) for _ in range(count)}


def test_every_form_is_drawn_and_no_other_text():
    ends = ("x", "y Ann", "y Bo")
    assert drawn(FORMS) == {f"{first} {end} {{v}}" for first in ("a", "b", "") for end in ends} | {
        f"{end}!" for end in ends
    }


def test_words_are_not_counted_as_forms_and_repeated_templates_are_counted_once():
    assert FORMS.count == 3 * 2 + 2
    assert Forms(["[a|b] c", "[a|b] c", "d"]).count == 3 == len(drawn(Forms(["[a|b] c", "d"])))


def test_templates_are_equally_likely_whatever_their_choices():
    rng = random.Random(0)
    forms = Forms(["a", "[b|c|d|e|f|g|h]"])
    assert 800 < sum(forms.draw(rng) == "a" for _ in range(2000)) < 1200


def test_a_sentence_begins_with_a_capital_and_what_is_filled_in_later_stays():
    assert capital("yes. {v} it is? no! the end: fine") == "Yes. {v} it is? No! The end: fine"
    assert capital("`key` is {v}.\nand so on") == "`key` is {v}.\nAnd so on"


def test_what_stands_around_a_sentence_names_no_attribute():
    attributes = re.compile(rf"\b(?:{'|'.join((*THING, *MINE))})\b")
    for forms in (LEADS, TAILS, REMARKS, CLOSINGS, REASONS, QUESTION_LEADS, MARKS):
        assert [text for text in drawn(forms, 4000) if attributes.search(text)] == []


def test_no_form_has_doubled_or_outer_spaces():
    parts = (LEADS, TAILS, REMARKS, CLOSINGS, REASONS, QUESTION_LEADS, MARKS)
    for forms in (*parts, *(f for kinds in (CLAUSES, SENTENCES, CHANGES, QUESTIONS) for f in kinds.values())):
        for text in drawn(forms, 4000):
            assert "  " not in text
            assert text.strip() == text.removeprefix(" " if forms is TAILS else ""), text


@given(seed=st.integers(0, 10**6), kind=st.sampled_from(["thing", "mine", "setting"]))
def test_composed_sentences_begin_with_capitals(seed, kind):
    for draw in (statement, correction, question):
        text = draw(random.Random(seed), "train", kind)
        assert text == capital(text)
        assert "  " not in text
