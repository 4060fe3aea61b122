import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from samebit.engine.detokenizer import IncrementalDetokenizer, StopAutomaton
from samebit.engine.model_source import resolve_model
from samebit.engine.tokenizer import Tokenizer

TOKENIZER = Tokenizer(resolve_model("nano"))
BYTE_IDS = {TOKENIZER.token_bytes(i): i for i in range(16, TOKENIZER.vocab_size)}

# Mostly real text, with tokens thrown in that break characters apart.
token_ids = st.one_of(
    st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=30),
    st.text(max_size=12).map(lambda text: [BYTE_IDS[bytes([b])] for b in text.encode("utf-8", "replace")]),
    st.binary(max_size=20).map(lambda data: [BYTE_IDS[bytes([b])] for b in data]),
)
# A tiny alphabet makes overlaps, repeats and nested stop strings common.
small_text = st.text("ab\n", max_size=24)
stop_lists = st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=6)


def byte_tokens(text):
    return [BYTE_IDS[bytes([byte])] for byte in text.encode()]


def stream(ids, **options):
    """Push until the stop; return the deltas (the last one from finish) and the detokenizer."""
    detokenizer = IncrementalDetokenizer(TOKENIZER, **options)
    deltas = []
    for token_id in ids:
        deltas.append(detokenizer.push(token_id))
        if detokenizer.match is not None:
            break
    return [*deltas, detokenizer.finish()], detokenizer


def first_stop(text, stops):
    """By definition: the match that ends first, of those the longest, as (start, end)."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end - max(map(len, ending)), end
    return None


@given(token_ids, st.booleans())
@example(byte_tokens("🦊")[:3], True)
def test_the_deltas_join_to_the_decoded_text(ids, skip):
    deltas, _ = stream(ids, skip_special_tokens=skip)
    assert "".join(deltas) == TOKENIZER.decode(ids, skip_special_tokens=skip)


@given(token_ids)
def test_text_that_was_sent_never_changes(ids):
    deltas, _ = stream(ids)
    sent = ""
    for delta in deltas[:-1]:
        sent += delta
        assert TOKENIZER.decode(ids).startswith(sent)


def test_a_cut_emoji_is_never_emitted():
    deltas, _ = stream(byte_tokens("a🦊b"))
    assert deltas == ["a", "", "", "", "🦊", "b", ""]


def test_an_unfinished_character_at_the_end_is_one_replacement_character():
    deltas, _ = stream(byte_tokens("🦊")[:2])
    assert deltas == ["", "", "\ufffd"]


@given(small_text, stop_lists, st.booleans())
@example("aab", ["ab", "b"], False)
@example("abab", ["abb", "ba"], False)
def test_the_stop_that_ends_first_cuts_the_text(text, stops, include):
    deltas, detokenizer = stream(byte_tokens(text), stop=StopAutomaton(stops), include_stop=include)
    found = first_stop(text, stops)
    if found is None:
        assert detokenizer.match is None
        assert "".join(deltas) == text
        return
    start, end = found
    assert detokenizer.match.stop_string == text[start:end]
    assert detokenizer.match.num_tokens == end
    assert "".join(deltas) == text[: end if include else start]


@given(small_text, stop_lists, st.lists(st.integers(1, 4)), st.booleans())
def test_the_text_does_not_depend_on_how_tokens_cut_it(text, stops, cuts, include):
    pieces, rest = [], text
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    pieces.append(rest)
    ids = [i for piece in pieces for i in TOKENIZER.encode(piece, allow_special=False)]
    options = {"stop": StopAutomaton(stops), "include_stop": include}
    assert "".join(stream(ids, **options)[0]) == "".join(stream(byte_tokens(text), **options)[0])


@given(small_text, stop_lists)
def test_only_text_that_may_still_become_a_stop_is_held_back(text, stops):
    detokenizer = IncrementalDetokenizer(TOKENIZER, stop=StopAutomaton(stops))
    sent = seen = ""
    for character in text:
        seen += character
        sent += detokenizer.push(byte_tokens(character)[0])
        if detokenizer.match is not None:
            return
        prefixes = [stop[:n] for stop in stops for n in range(1, len(stop))]
        held = max((len(prefix) for prefix in prefixes if seen.endswith(prefix)), default=0)
        assert sent == seen[: len(seen) - held]


@given(small_text, stop_lists, st.integers(0, 12))
def test_stops_within_the_first_min_tokens_are_passed_over(text, stops, min_tokens):
    deltas, detokenizer = stream(byte_tokens(text), stop=StopAutomaton(stops), min_tokens=min_tokens)
    ends = [end for end in range(min_tokens + 1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    if not ends:
        assert "".join(deltas) == text
        return
    assert detokenizer.match.num_tokens == ends[0]
    assert "".join(deltas) == text[: ends[0] - len(detokenizer.match.stop_string)]


def test_a_stop_that_was_passed_over_is_not_held_back():
    detokenizer = IncrementalDetokenizer(TOKENIZER, stop=StopAutomaton(["ab"]), min_tokens=9)
    assert [detokenizer.push(token_id) for token_id in byte_tokens("xab")] == ["x", "", "ab"]


def test_a_stop_may_begin_in_one_token_and_end_inside_another():
    ids = TOKENIZER.encode("return None", allow_special=False)
    assert len(ids) == 2
    deltas, detokenizer = stream(ids, stop=StopAutomaton(["n N"]))
    assert "".join(deltas) == "retur"
    assert detokenizer.match.num_tokens == 2


def test_nothing_may_follow_a_stop():
    _, detokenizer = stream(byte_tokens("a"), stop=StopAutomaton(["a"]))
    with pytest.raises(AssertionError):
        detokenizer.push(byte_tokens("b")[0])


def test_thousands_of_stop_strings_cost_little_per_token():
    # Counting steps, not seconds: every character is looked up at most twice on average.
    stops = [f"{'a' * 20}{number}" for number in range(4000)]

    class Counting(StopAutomaton):
        steps = 0

        def step(self, state, character):
            Counting.steps += 1
            return super().step(state, character)

    automaton = Counting(stops)
    Counting.steps = 0
    text = "a" * 2000
    deltas, _ = stream(byte_tokens(text), stop=automaton)
    assert "".join(deltas) == text
    assert Counting.steps == len(text)
