"""What the engine makes of a conversation's tokens, step by step: pieces, the end after one call, tokens that are not shown."""

import pytest

from samebit.core.request import Request, SamplingParams, TokenLogprobs
from samebit.engine.model_source import resolve_model
from samebit.engine.output import OutputProcessor
from samebit.engine.streams import merge
from samebit.engine.tokenizer import Tokenizer
from samebit.scheduler.sequence import Progress

TOKENIZER = Tokenizer(resolve_model("nano"))
CALL = 'f<|content_invoke_tool_json|>{"name":"f","args":{"a":1}}<|end_message|>'
END = TOKENIZER.id_of("<|end_message|>")


def tokens(text):
    return TOKENIZER.encode(text, allow_special=True)


def answer(ids, sizes=(1000,), *, stop_token_id=None, params=None, **fields):
    """The output to `ids`, which come in steps of `sizes`, the last of them repeated."""
    processor = OutputProcessor(TOKENIZER)
    prompt = tokens("<|message_user|><|content_text|>hi<|end_message|><|message_model|>")
    fields = {"wants_pieces": True, **fields}
    processor.open(
        Request(request_id="a", prompt_token_ids=prompt, params=SamplingParams(**params or {}), seed=1, **fields)
    )
    outputs, sizes = [], list(sizes)
    while not (outputs and outputs[-1].finish_reason):
        now, ids = ids[: sizes[0]], ids[sizes[0] :]
        sizes = sizes[1:] or sizes
        items = [TokenLogprobs(i, -1.0, 1, [], []) for i in now]
        stop = None if ids else stop_token_id
        reason = None if ids else "stop" if stop else "length"
        outputs.append(
            processor.process(Progress(request_id="a", tokens=items, finish_reason=reason, stop_token_id=stop))
        )
    return merge(outputs)


@pytest.mark.parametrize("sizes", [(1000,), (1,), (2, 3), (7,)])
def test_steps_of_any_size_give_the_same_reply(sizes):
    ids = tokens(f"<|content_thinking|>hm<|end_message|><|message_model|>{CALL}<|message_model|><|content_text|>é 🙂")
    assert answer(ids, sizes) == answer(ids)
    assert answer(ids).text == "é 🙂"


@pytest.mark.parametrize("sizes", [(1000,), (1,), (5,)])
def test_an_answer_of_one_call_ends_with_it_however_many_tokens_a_step_has(sizes):
    ids = tokens(f"<|content_text|>a<|end_message|><|message_model|>{CALL}<|message_model|>{CALL}")
    output = answer(ids, sizes, ends_after_call=True)
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert output.token_ids == ids[: ids.index(END, ids.index(END) + 1) + 1]
    assert sum(bool(piece.name) for piece in output.pieces) == 1
    assert sum(bool(piece.name) for piece in answer(ids, sizes).pieces) == 2


def test_an_answer_of_one_call_goes_on_to_its_least_length():
    ids = tokens(f"{CALL}<|message_model|>{CALL}")
    least = len(tokens(CALL)) + 3
    assert answer(ids, ends_after_call=True, params={"min_tokens": least, "max_tokens": 500}).token_ids == ids[:least]


def test_a_stop_token_that_ends_a_call_completes_it():
    output = answer(tokens(CALL), stop_token_id=END, params={"stop_token_ids": [END]})
    assert output.stop_reason == END
    assert [piece.name or piece.text for piece in output.pieces] == ["f", '{"a":1}']
    both = answer(tokens(CALL), stop_token_id=END, params={"stop_token_ids": [END]}, ends_after_call=True)
    assert (both.finish_reason, both.stop_reason) == ("stop", END)
    late = tokens(f"{CALL}<|message_model|>")
    assert (
        answer(late, stop_token_id=late[-1], params={"stop_token_ids": [late[-1]]}, ends_after_call=True).stop_reason
        is None
    )


def test_a_stop_token_of_text_is_no_part_of_the_text():
    (word,) = tokens("a")
    ids = [*tokens("<|content_text|>b"), word]
    assert answer(ids, stop_token_id=word).text == "b"
    assert answer(ids, stop_token_id=word, params={"include_stop_str_in_output": True}).text == "ba"


def test_a_request_that_does_not_ask_gets_one_text():
    output = answer(tokens(CALL), wants_pieces=False)
    assert output.text == 'f{"name":"f","args":{"a":1}}'
    assert (output.pieces, output.token_kinds) == ([], [])
