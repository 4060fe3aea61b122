"""The trainable model: the same function as the engine's, differentiable everywhere, and stored without loss."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch._dynamo.testing import CompileCounter

from samebit import LLM, SamplingParams
from samebit.core.errors import CheckpointError
from samebit.engine.model_source import resolve_model
from samebit.train.attention import full_attention, window_attention
from samebit.train.layout import load_model, published_tensors
from samebit.train.model import Inkling
from samebit.train.recipe import RECIPES
from tests.random_checkpoint import SMALL, write_checkpoint

WITH_DEPTHS = {
    "model_type": "inkling_mm_model",
    "text_config": SMALL,
    "mtp_config": {"num_nextn_predict_layers": 2, "chain_hidden_post_norm": False, "local_layer_ids": [0]},
}


def engine_logprobs(llm, token_ids):
    """Logprobs [T - 1] that the engine gives to all tokens but the first."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    scored = llm.generate([token_ids], params)[0].prompt_logprobs
    return torch.tensor([scored[i][token].logprob for i, token in enumerate(token_ids) if i])


@torch.no_grad()
def trained_logprobs(model, token_ids):
    hidden, _ = model(torch.tensor([token_ids]))
    logprobs = model.logits(hidden)[0].log_softmax(-1)
    return logprobs[:-1].gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]


@pytest.fixture(scope="module")
def nano():
    llm = LLM("nano", num_threads=1, max_model_len=2048, max_num_seqs=2)
    return llm, load_model(resolve_model("nano"))


@pytest.mark.parametrize("length", [2, 127, 128, 129, 300, 1400])
def test_the_training_forward_equals_the_engine_on_nano(nano, length):
    llm, model = nano
    token_ids = torch.randint(0, 4096, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    difference = engine_logprobs(llm, token_ids) - trained_logprobs(model, token_ids)
    assert difference.abs().max() < 1e-4


@pytest.mark.parametrize("length", [1, 5, 6, 7, 40])
def test_window_attention_is_full_attention_that_sees_only_the_window(length):
    generator = torch.Generator().manual_seed(length)
    q, k, v, profile = (torch.randn(2, length, n, d, generator=generator) for n, d in ((4, 8), (2, 8), (2, 8), (4, 6)))
    far = torch.arange(length)[:, None] - torch.arange(length) >= 6
    expected = masked_attention(q, k, v, profile, far)
    torch.testing.assert_close(window_attention(q, k, v, profile), expected)
    nothing_far = torch.zeros_like(far)
    torch.testing.assert_close(
        full_attention(q, k, v, profile, torch.ones(length)), masked_attention(q, k, v, profile, nothing_far)
    )


def masked_attention(q, k, v, profile, hidden_keys):
    """The same by definition, key by key."""
    B, T, nh, hd = q.shape
    out = torch.zeros_like(q)
    group = nh // k.shape[2]
    for b in range(B):
        for h in range(nh):
            for i in range(T):
                seen = [j for j in range(i + 1) if not hidden_keys[i, j]]
                bias = [profile[b, i, h, i - j] if i - j < profile.shape[-1] else torch.tensor(0.0) for j in seen]
                scores = k[b, seen, h // group] @ q[b, i, h] / hd + torch.stack(bias)
                out[b, i, h] = scores.softmax(0) @ v[b, seen, h // group]
    return out


def test_a_gradient_reaches_every_parameter():
    model = Inkling(WITH_DEPTHS)
    token_ids = torch.randint(0, 272, (4, 40), generator=torch.Generator().manual_seed(0))
    hidden, _ = model(token_ids)
    sum(model.logits(h).square().mean() for h in (hidden, *model.draft(hidden, token_ids))).backward()
    dry = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert dry == []


@torch.no_grad()
def test_a_draft_depth_reads_its_own_token_and_the_hidden_state_before_it():
    model = Inkling(WITH_DEPTHS).eval()
    token_ids = torch.randint(0, 272, (1, 30), generator=torch.Generator().manual_seed(0))
    hidden = model(token_ids)[0]
    drafted = model.draft(hidden, token_ids)
    other_token, other_hidden = token_ids.clone(), hidden.clone()
    other_token[0, 20] = (other_token[0, 20] + 1) % 272
    other_hidden[0, 20] += 1
    for j in range(2):
        by_token = model.draft(hidden, other_token)[j][0]
        by_hidden = model.draft(other_hidden, token_ids)[j][0]
        assert torch.equal(by_token[:20], drafted[j][0, :20])
        assert not torch.equal(by_token[20], drafted[j][0, 20])
        # What the model knows at a row reaches depth j at j + 1 rows behind it.
        assert torch.equal(by_hidden[: 21 + j], drafted[j][0, : 21 + j])
        assert not torch.equal(by_hidden[21 + j], drafted[j][0, 21 + j])


@torch.no_grad()
def test_a_full_depth_scales_scores_by_the_position_of_the_token_it_embeds():
    model = Inkling(WITH_DEPTHS).eval()
    token_ids = torch.randint(0, 272, (1, 40), generator=torch.Generator().manual_seed(0))
    hidden = model(token_ids)[0]
    first, second = model.draft(hidden, token_ids)
    # The scaling of position p begins where p + 1 exceeds the floor of 16.
    tau = 1 + 0.2 * ((torch.arange(40) + 1) / 16).clamp(min=1).log()
    before = torch.cat([torch.zeros(1, 1, first.shape[-1]), first[:, :-1]], dim=1)
    depth = model.depths[1]
    found, _ = depth.block.expand(depth.block.attend(depth.join(before, model.embedded(token_ids)), tau))
    torch.testing.assert_close(found, second)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler looks at it
def test_layers_and_depths_of_a_kind_share_compiled_code():
    num_graphs = CompileCounter()
    torch._dynamo.reset()
    model = Inkling(RECIPES["toy"].raw)
    model.compile_parts(backend=num_graphs)
    token_ids = torch.randint(0, 640, (1, 40), generator=torch.Generator().manual_seed(0))
    hidden, loads = model(token_ids)
    drafted = model.draft(hidden.detach().requires_grad_(), token_ids)
    # Attention with and without a window, a dense and a sparse MLP, and the join of a depth.
    assert num_graphs.frame_count == 5
    compiled = [hidden, *loads, *drafted]
    model.eval()
    eager = [model(token_ids)[0], *model(token_ids)[1], *model.draft(hidden, token_ids)]
    for one, other in zip(compiled, eager, strict=True):
        torch.testing.assert_close(one, other)
    assert num_graphs.frame_count == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved_is_what_is_loaded(tmp_path, dtype):
    model = Inkling(WITH_DEPTHS, seed=1)
    (tmp_path / "config.json").write_text(json.dumps(WITH_DEPTHS))
    save_file(published_tensors(model, dtype), tmp_path / "model.safetensors")
    again = load_model(tmp_path)
    for (name, before), after in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(before.to(dtype), after.to(dtype)), name


def test_the_random_checkpoint_survives_the_round_trip(tmp_path):
    folder = write_checkpoint(tmp_path / "a", seed=3)
    copy = write_checkpoint(tmp_path / "b", seed=4)
    save_file(published_tensors(load_model(folder), torch.float32), copy / "model.safetensors")
    token_ids = [*range(60)]
    settings = {"num_threads": 1, "page_size": 4, "checkpoint_interval": 4, "max_model_len": 128}
    one, other = (engine_logprobs(LLM(str(path), **settings), token_ids) for path in (folder, copy))
    assert torch.equal(one, other)


def test_a_missing_tensor_is_named(tmp_path):
    folder = write_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"mtp_config": WITH_DEPTHS["mtp_config"]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"model\.mtp\.layers\.0"):
        load_model(folder)


def test_chained_norms_of_depths_are_refused():
    wanted = WITH_DEPTHS | {"mtp_config": {"num_nextn_predict_layers": 1, "chain_hidden_post_norm": True}}
    with pytest.raises(CheckpointError, match="chain_hidden_post_norm"):
        Inkling(wanted)
