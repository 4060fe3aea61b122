"""Replies of the bundled model with tools: whoever guesses tokens, a reply is taken apart alike, and no marker is text."""

import random

import pytest

from samebit.core.config import EngineConfig, Schedule, SpeculativeConfig
from samebit.core.request import Request, SamplingParams
from samebit.engine.chat_template import load_chat_template
from samebit.engine.engine import Engine
from samebit.engine.model_source import resolve_model
from samebit.engine.streams import merge
from samebit.train.tools import declare, tool_use

POOLS = {"num_pages": 800, "num_window_pages": 800, "num_checkpoints": 64, "max_num_seqs": 16, "num_threads": 1}
STOPS = (None, None, "is", ["the ", '"', "}"])


def requests(count, engine):
    """Questions for tools, asked in all ways."""
    template = load_chat_template(resolve_model("nano"), engine.tokenizer)
    rng = random.Random(count)
    for number in range(count):
        tools = declare(rng)
        use = tool_use(rng, tools)
        messages = [{"role": "user", "content": use.question}]
        if number % 3 == 2:
            call = {"id": "a", "function": {"name": use.name, "arguments": dict(use.arguments)}}
            messages += [{"role": "assistant", "reasoning_content": "A call.", "tool_calls": [call]}]
            messages += [{"role": "tool", "tool_call_id": "a", "content": use.result}]
        yield Request(
            request_id=str(number),
            prompt_token_ids=template.render(messages, tools=[dict(tool.declared) for tool in tools]),
            params=SamplingParams(
                max_tokens=rng.randrange(2, 90),
                temperature=rng.choice((0, 0.8, 1.4)),
                logprobs=0,
                stop=rng.choice(STOPS),
            ),
            seed=number,
            eos_token_ids=(engine.tokenizer.id_of("<|content_model_end_sampling|>"),),
            wants_pieces=True,
            ends_after_call=number % 4 == 0,
        )


def replies(count, kernel_kind, method=None, schedule=None):
    """What came of each request, and the guesses that were accepted."""
    speculation = None if method is None else SpeculativeConfig(method=method)
    config = EngineConfig(
        model="nano", kernels=kernel_kind, speculative_config=speculation, schedule=schedule or Schedule(), **POOLS
    )
    engine = Engine(config)
    outputs = {}
    for request in requests(count, engine):
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    merged = {name: merge(parts) for name, parts in outputs.items()}
    told = {
        name: (o.token_ids, o.logprobs, o.text, o.pieces, o.token_kinds, o.finish_reason, o.stop_reason)
        for name, o in merged.items()
    }
    return told, merged.values(), sum(o.speculation.num_accepted_tokens for o in merged.values())


def check(count, kernel_kind, method):
    plain, outputs, _ = replies(count, kernel_kind)
    schedule = Schedule(seed=1, preempt_percent=2, chunk_sizes=(7, 16), spoil_percent=20)
    guessed, _, num_accepted = replies(count, kernel_kind, method, schedule)
    assert guessed == plain
    assert num_accepted > count / 4, "guesses were accepted, several tokens at a time"
    assert sum(any(piece.name for piece in output.pieces) for output in outputs) > count / 4, "there were calls"
    for output in outputs:
        said = [output.text, *(piece.text + piece.name for piece in output.pieces)]
        assert not any("<|" in text for text in said)


@pytest.mark.parametrize("method", ["ngram", "mtp"])
def test_a_reply_is_the_same_pieces_whoever_guesses_its_tokens(kernel_kind, method):
    check(24, kernel_kind, method)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "mtp", "dflash", "dspark"])
def test_hundreds_of_replies_are_the_same_pieces_whoever_guesses_their_tokens(kernel_kind, method):
    check(550, kernel_kind, method)
