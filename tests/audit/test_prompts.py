"""The requests that an audit runs: built-in ones at the edges, siblings that leave them, and the user's."""

import pytest

from samebit.audit.prompts import builtin_prompts, sibling, user_prompts
from samebit.core.config import EngineConfig
from samebit.core.errors import InvalidRequestError
from samebit.engine.batch_file import BatchLine
from samebit.engine.engine import Engine
from samebit.engine.model_source import resolve_model


@pytest.fixture(scope="module")
def nano():
    return Engine(EngineConfig(model="nano", num_threads=1, num_pages=600, num_window_pages=100, num_checkpoints=4))


@pytest.fixture(scope="module")
def builtin(nano):
    return builtin_prompts(nano, count=16, max_tokens=5, seed=1)


def test_built_in_prompts_lie_on_the_edges_of_pages_and_windows(builtin):
    lengths = [len(prompt.token_ids) for prompt in builtin]
    assert len(lengths) == 16
    assert (lengths[0], lengths[-1]) == (1, 3 * 128 + 1)
    assert {length % 16 for length in lengths} >= {15, 0, 1}


def test_half_of_the_built_in_prompts_share_a_beginning(builtin):
    longest = builtin[-1].token_ids
    shared = [prompt.token_ids == longest[: len(prompt.token_ids)] for prompt in builtin]
    assert shared[1::2] == [True] * 8
    assert not any(shared[6::2])


def test_sampling_of_every_kind_is_among_them(builtin):
    params = [prompt.params for prompt in builtin]
    assert {one.temperature > 0 for one in params} == {True, False}
    assert {one.prompt_logprobs is None for one in params} == {True, False}
    assert any(one.top_p < 1 for one in params)
    assert any(one.top_k for one in params)
    assert len({prompt.seed for prompt in builtin}) == 16


def test_the_same_seed_gives_the_same_prompts(nano, builtin):
    assert builtin_prompts(nano, count=16, max_tokens=5, seed=1) == builtin
    assert builtin_prompts(nano, count=16, max_tokens=5, seed=2) != builtin


def test_a_sibling_leaves_its_prompt_inside_a_page(builtin):
    for prompt in builtin[8:]:
        other = sibling(prompt, 16)
        pairs = list(zip(prompt.token_ids, other.token_ids, strict=False))
        fork = next(place for place, (a, b) in enumerate(pairs) if a != b)
        assert 16 <= fork < len(prompt.token_ids)
        assert fork % 16
        assert other.params.max_tokens == 1
        assert all(0 <= token_id < 4096 for token_id in other.token_ids)


def test_answers_that_leave_no_room_for_a_prompt_are_refused(nano):
    with pytest.raises(InvalidRequestError, match="max_tokens=8192"):
        builtin_prompts(nano, count=1, max_tokens=8192, seed=0)


def test_lines_of_a_file_become_requests_with_logprobs(nano):
    lines = [
        BatchLine(prompt="import os\n", sampling={"n": 2, "seed": 9, "logprobs": 7}),
        BatchLine(prompt=[5, 6]),
        BatchLine(messages=[{"role": "user", "content": "hi"}]),
    ]
    found = user_prompts(nano, resolve_model("nano"), lines, seed=4)
    assert [prompt.name for prompt in found] == ["line 1", "line 1, sample 1", "line 2", "line 3"]
    assert [prompt.sample_index for prompt in found] == [0, 1, 0, 0]
    assert [prompt.seed for prompt in found] == [9, 9, 4, 4]
    assert [prompt.params.logprobs for prompt in found] == [7, 7, 5, 5]
    assert found[2].token_ids == [5, 6]
    assert len(found[3].token_ids) > 3
    assert found[0].eos_token_ids


def test_a_conversation_for_a_model_without_a_template_is_refused(small_model):
    engine = Engine(EngineConfig(model=small_model, num_threads=1, page_size=4, checkpoint_interval=4, num_pages=80))
    lines = [BatchLine(messages=[{"role": "user", "content": "hi"}])]
    with pytest.raises(InvalidRequestError, match="chat template"):
        user_prompts(engine, resolve_model(small_model), lines, seed=0)
