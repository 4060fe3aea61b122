"""The offline interface: what it accepts, what it refuses, and that it leaves nothing behind."""

import pytest

from samebit import LLM, EngineConfig, SamplingParams
from samebit.core.errors import ConfigError, InvalidRequestError, PromptTooLongError
from tests.random_checkpoint import write_checkpoint

SMALL_POOLS = {"num_pages": 64, "num_window_pages": 64, "num_checkpoints": 8, "max_num_seqs": 8, "num_threads": 1}


@pytest.fixture(scope="module")
def llm():
    return LLM("nano", **SMALL_POOLS)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kernels": "fast"}, "kernels='fast': must be one of 'auto', 'native', 'torch'"),
        ({"dtype": "float16"}, "dtype='float16': must be one of 'auto', 'float32'"),
        ({"page_size": 0}, "page_size=0: must be at least 1"),
        ({"checkpoint_interval": 24}, "checkpoint_interval=24: must be a multiple of page_size (16)"),
        ({"max_model_len": 9000}, "max_model_len=9000: the model's limit is 8192"),
        ({"num_window_pages": 3}, "num_window_pages=3: one request needs 10 with a window of 128"),
        ({"max_num_seqs": "many"}, "engine settings: Expected `int`, got `str` - at `$.max_num_seqs`"),
        ({"speculative_config": {"method": "magic"}}, "speculative_config.method='magic': must be one of 'ngram'"),
        ({"speculative_config": {"method": "ngram", "k": 5}}, "speculative_config.k=5: not known; there are method, "),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": "5"}},
            "speculative_config={'method': 'ngram', 'num_speculative_tokens': '5'}: Expected `int",
        ),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 33}},
            "speculative_config.num_speculative_tokens=33: must be between 1 and 32",
        ),
        (
            {"speculative_config": {"method": "ngram", "prompt_lookup_min": 6}},
            "speculative_config.prompt_lookup_min=6: must be between 1 and prompt_lookup_max (5)",
        ),
        (
            {"speculative_config": {"method": "ngram", "prompt_lookup_max": 10**9}},
            "speculative_config.prompt_lookup_max=1000000000: must be at most 64",
        ),
        ({"speculative_config": {}}, "missing required field `method`"),
        ({"speculative_config": "ngram"}, "at `$.speculative_config`"),
        ({"page_sise": 16}, "engine settings: Object contains unknown field `page_sise`"),
    ],
)
def test_a_wrong_setting_is_named_with_its_limit(settings, said):
    with pytest.raises(ConfigError) as error:
        LLM("nano", **settings)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": 1 << 31}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [5000]}, "stop_token_ids"),
        ({"seed": 1 << 63}, "seed"),
        ({"n": 0}, "n"),
    ],
)
def test_a_wrong_sampling_parameter_is_named(llm, params, param):
    with pytest.raises(InvalidRequestError) as error:
        llm.generate(["a"], SamplingParams(**params))
    assert error.value.param == param
    assert param in str(error.value) or "token id" in str(error.value)


@pytest.mark.parametrize("prompt", [[], "", [4096], [-1], [3.5], None, 7])
def test_a_wrong_prompt_is_refused_and_its_batch_with_it(llm, prompt):
    with pytest.raises(InvalidRequestError):
        llm.generate(["a good one", prompt], SamplingParams(max_tokens=2))
    # Nothing is left behind: the next call works and finds an idle engine.
    assert len(llm.generate(["a"], SamplingParams(max_tokens=2))[0].outputs[0].token_ids) == 2


@pytest.mark.parametrize("prompts", [b"bytes", {"prompt": "a"}, None, 5])
def test_prompts_that_are_no_list_are_refused(llm, prompts):
    with pytest.raises(InvalidRequestError, match=type(prompts).__name__):
        llm.generate(prompts)


@pytest.mark.parametrize("messages", ["hi", {"role": "user", "content": "hi"}, None])
def test_messages_that_are_no_list_are_refused(llm, messages):
    with pytest.raises(InvalidRequestError, match=type(messages).__name__):
        llm.chat(messages)


def test_a_prompt_that_can_never_fit_names_the_limit(llm):
    with pytest.raises(PromptTooLongError, match="at most 1024 fit"):
        llm.generate([[100] * 1020], SamplingParams(max_tokens=10))


def test_samples_of_one_prompt_differ_and_repeat_with_their_seed(llm):
    params = SamplingParams(n=3, temperature=1.2, seed=11, max_tokens=12)
    once, again = (llm.generate(["def "], params)[0] for _ in range(2))
    texts = [sample.text for sample in once.outputs]
    assert len(set(texts)) == 3
    assert texts == [sample.text for sample in again.outputs]
    assert [sample.index for sample in once.outputs] == [0, 1, 2]


def test_requests_without_a_seed_follow_the_engine_seed():
    first, second, other = (LLM("nano", seed=seed, **SMALL_POOLS) for seed in (5, 5, 6))
    params = SamplingParams(temperature=1.0, max_tokens=12)
    texts = [engine.generate(["def "] * 2, params) for engine in (first, second, other)]
    found = [[output.outputs[0].text for output in outputs] for outputs in texts]
    assert found[0] == found[1]
    assert found[0] != found[2]
    assert found[0][0] != found[0][1]


def test_logprobs_hold_the_chosen_token_and_the_likeliest(llm):
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=20, logprobs=2, prompt_logprobs=1)
    output = llm.generate(["class Cache:"], params)[0]
    sample = output.outputs[0]
    for token_id, found in zip(sample.token_ids, sample.logprobs, strict=True):
        assert token_id in found
        assert len(found) in (2, 3)
        assert found[token_id].logprob <= max(item.logprob for item in found.values())
        assert all(item.decoded_token == llm.get_tokenizer().token_text(other) for other, item in found.items())
    assert sample.cumulative_logprob == sum(
        f[t].logprob for t, f in zip(sample.token_ids, sample.logprobs, strict=True)
    )
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_min_tokens_bars_the_end_token_and_stop_strings(llm):
    chat = [{"role": "user", "content": "Hello."}]
    free = llm.chat(chat, SamplingParams(temperature=0, max_tokens=40))[0].outputs[0]
    assert free.finish_reason == "stop"
    assert free.stop_reason is None
    length = len(free.token_ids)
    held = llm.chat(chat, SamplingParams(temperature=0, max_tokens=40, min_tokens=length + 5, logprobs=0))[0].outputs[0]
    assert held.token_ids[: length - 1] == free.token_ids[:-1]
    assert len(held.token_ids) >= length + 5
    # The barred token was the likeliest; logprobs are still those of the raw distribution.
    assert held.logprobs[length - 1][held.token_ids[length - 1]].rank > 1


def test_a_stop_string_ends_text_tokens_and_logprobs_together(llm):
    plain = llm.generate(["def add(a, b):"], SamplingParams(temperature=0, max_tokens=30))[0].outputs[0]
    stop = plain.text[10:13]
    params = SamplingParams(temperature=0, max_tokens=30, stop=stop, logprobs=0)
    cut = llm.generate(["def add(a, b):"], params)[0].outputs[0]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.text == plain.text[: plain.text.index(stop)]
    assert cut.token_ids == plain.token_ids[: len(cut.token_ids)]
    assert len(cut.logprobs) == len(cut.token_ids)
    kept = llm.generate(
        ["def add(a, b):"],
        SamplingParams(temperature=0, max_tokens=30, stop=stop, include_stop_str_in_output=True),
    )
    assert kept[0].outputs[0].text == cut.text + stop


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(llm):
    from samebit.core.request import Request
    from samebit.engine.engine import Engine

    engine = Engine(EngineConfig(**SMALL_POOLS))

    class Failing:
        def launch(self, plan):
            raise RuntimeError("broken")

    good, engine._runner = engine._runner, Failing()
    request = Request(request_id="a", prompt_token_ids=[5, 6], params=SamplingParams(max_tokens=2), seed=0)
    engine.add(request)
    (output,) = engine.step()
    assert (output.finish_reason, output.error) == ("error", "step 1 failed: RuntimeError: broken")
    assert not engine.has_work
    engine.scheduler.check()
    engine._runner = good
    engine.add(request)
    while engine.has_work:
        last = engine.step()
    assert last[-1].finish_reason == "length"


def test_template_variables_reach_the_prompt(llm):
    chat = [{"role": "user", "content": "Hello."}]
    plain, low = (llm.render_chat(chat, **extra) for extra in ({}, {"reasoning_effort": 0.2}))
    assert plain != low
    assert llm.chat(chat, SamplingParams(max_tokens=1), chat_template_kwargs={"reasoning_effort": 0.2})


def test_a_token_that_the_tokenizer_lacks_has_no_text_and_does_no_harm(tmp_path):
    write_checkpoint(tmp_path, vocab_size=1024, unpadded_vocab_size=1000)
    llm = LLM(tmp_path, num_threads=1, kernels="torch")
    sample = llm.generate("ab", SamplingParams(temperature=100.0, max_tokens=30, seed=1, logprobs=1))[0].outputs[0]
    assert max(sample.token_ids) > 272
    assert sample.text == llm._tokenizer.decode([token for token in sample.token_ids if token < 272])


def test_a_chat_declares_tools_and_keeps_the_tokens_of_its_turns(llm):
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
    chat = [{"role": "user", "content": "How is the weather in Oslo?"}]
    first = llm.chat(chat, SamplingParams(max_tokens=8, temperature=2, seed=3), tools=tools)[0]
    assert "get_weather" in llm.get_tokenizer().decode(first.prompt_token_ids)
    said = first.outputs[0].token_ids
    turn = {"role": "assistant", "content": first.outputs[0].text, "token_ids": said}
    second = llm.chat([*chat, turn, *chat], SamplingParams(max_tokens=1), tools=tools)[0]
    assert second.prompt_token_ids[: len(first.prompt_token_ids) + len(said)] == [*first.prompt_token_ids, *said]
