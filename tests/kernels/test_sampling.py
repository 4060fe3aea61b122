"""Sampling: the public contract of tokens, noise and log-probabilities."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samebit.kernels.noise import gumbel_noise, philox
from tests.kernels.cases import columns, normal, row_of

WORD = 0xFFFFFFFF


def words(values):
    return tuple(torch.tensor([v], dtype=torch.int64) for v in values)


@pytest.mark.parametrize(
    ("key", "counter", "wanted"),
    [
        ((0, 0), (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((WORD, WORD), (WORD, WORD, WORD, WORD), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_answers(key, counter, wanted):
    found = philox(words(key), words(counter))
    assert " ".join(f"{int(word):08x}" for word in found) == wanted


def noise_by_definition(seed, sample_index, position, token):
    key = (seed & WORD, (seed >> 32) & WORD)
    counter = (token // 4, position & WORD, sample_index & WORD, 0)
    word = int(philox(words(key), words(counter))[token % 4])
    return -math.log(-math.log(((word >> 9) + 0.5) * 2.0**-23))


GOLDEN = [
    [0.0848203, 2.0616610, 1.1811831, 0.6896916, 3.5701605, -0.0157349],
    [-0.5347060, 0.6397055, -0.7991487, 0.9059492, 0.7893424, -1.3452859],
    [-0.0958775, -0.5355084, 1.1187998, -0.4334649, -1.5328351, 0.3759574],
]


def test_noise_has_golden_values():
    seed = torch.tensor([0, 1, -(2**40) - 7])
    found = gumbel_noise(seed, torch.tensor([0, 2, 0]), torch.tensor([0, 5, 70000]), 6)
    golden = torch.tensor(GOLDEN)
    torch.testing.assert_close(found, golden, rtol=0, atol=2e-6)
    assert found[2, 5].item() == pytest.approx(noise_by_definition(-(2**40) - 7, 0, 70000, 5), abs=1e-6)


def test_a_set_draws_with_the_contracts_noise(kernels):
    """Two candidates whose logits differ by less, then by more, than the noise between them."""
    for position in range(12):
        noise = [noise_by_definition(9, 3, position, token) for token in (2, 7)]
        gap = noise[0] - noise[1]
        for shift, winner in ((-1e-4, 2), (1e-4, 7)):
            logits = torch.full((1, 9), -50.0)
            logits[0, 2], logits[0, 7] = 0.0, gap + shift
            cols = columns(1, seed=9, sample_index=3, position=position)
            filtered = columns(1, seed=9, sample_index=3, position=position, top_k=2)
            assert kernels.sample(logits, cols)[0].item() == winner
            assert kernels.sample(logits, filtered)[0].item() == winner


def test_equal_noisy_scores_go_to_the_lowest_id(kernels):
    """At 2^24 floats are 2 apart, so that noise between 1 and 3 lifts token 2 to exactly token 7's score."""
    logits = torch.full((1, 9), -1e30)
    logits[0, 2], logits[0, 7] = 2.0**24, 2.0**24 + 2
    ties = 0
    for position in range(60):
        low, high = (noise_by_definition(9, 0, position, token) for token in (2, 7))
        if 1.1 < low < 2.9 and -0.9 < high < 0.9:
            ties += 1
            for top_k in (0, 2):
                cols = columns(1, seed=9, position=position, top_k=top_k)
                assert kernels.sample(logits, cols)[0].item() == 2
    assert ties > 3


def kept_by_definition(logits, temperature, top_k, top_p, min_p):
    """Ids the filters keep, from a plain sorted list."""
    scaled = [float(torch.tensor(x) / torch.tensor(temperature)) for x in logits]
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    order = order[: top_k or len(order)]
    likelihood = [math.exp(scaled[i] - scaled[order[0]]) for i in order]
    total, mass, kept = sum(likelihood), 0.0, []
    for i, e in zip(order, likelihood, strict=True):
        if kept and ((top_p < 1 and mass >= top_p * total) or e < min_p):
            break
        kept.append(i)
        mass += e
    return kept


@given(
    vocab=st.sampled_from([1, 5, 63, 257]),
    temperature=st.sampled_from([0.3, 1.0, 4.0]),
    top_k=st.sampled_from([0, 1, 4, 1000]),
    top_p=st.sampled_from([1.0, 0.9003, 0.4007, 0.0]),
    min_p=st.sampled_from([0.0, 0.0501, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_filters_keep_what_their_definition_keeps(kernels, vocab, temperature, top_k, top_p, min_p, seed):
    # Rounded, so that there are ties, and few enough values that no sum comes close to a threshold.
    logits = (normal(seed % 97, 1, vocab) * 4).round() / 2
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    kept = kept_by_definition(logits[0].tolist(), **settings)
    noise = [noise_by_definition(seed, 0, 3, token) for token in kept]
    scaled = logits[0] / torch.tensor(temperature)
    score = {token: float(scaled[token]) + n for token, n in zip(kept, noise, strict=True)}
    token = kernels.sample(logits, columns(1, seed=seed, position=3, **settings))[0].item()
    assert token in score
    assert score[token] >= max(score.values()) - 1e-5


@given(rows=st.integers(1, 9), first=st.integers(0, 8), threads=st.integers(1, 3))
def test_a_row_of_logits_does_not_know_its_company(kernels, rows, first, threads):
    logits = normal(rows, rows, 100) * 3
    cols = columns(rows, seed=5)
    cols.temperature[::2] = 0.7
    cols.top_p[::3] = 0.9
    cols.top_k[1::3] = 7
    cols.temperature[2::4] = 0
    row = first % rows
    together = replace(kernels, num_threads=threads).sample(logits, cols)
    alone = kernels.sample(logits[row : row + 1], row_of(cols, row))
    for a, b in zip(together, alone, strict=True):
        assert torch.equal(a[row : row + 1], b)


def test_threads_do_not_change_samples(kernels):
    logits, cols = normal(1, 12, 3000), columns(12, top_p=0.9)
    single = replace(kernels, num_threads=1)
    for a, b in zip(kernels.sample(logits, cols), single.sample(logits, cols), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(kernels.top_logprobs(logits, 20)[1], single.top_logprobs(logits, 20)[1])


def test_draws_follow_the_distribution(kernels):
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05, 1e-9]).log().expand(6000, -1).contiguous()
    tokens = kernels.sample(logits, columns(6000, seed=3))[0]
    share = torch.bincount(tokens, minlength=5) / 6000
    assert (share - logits[0].exp()).abs().max() < 0.025
    filtered = kernels.sample(logits, columns(6000, seed=3, top_k=2))[0]
    share = torch.bincount(filtered, minlength=5) / 6000
    assert (share[:2] - torch.tensor([0.625, 0.375])).abs().max() < 0.025
    assert share[2:].sum() == 0


def test_greedy_takes_the_lowest_id_among_equals(kernels):
    logits = torch.tensor([[1.0, 3.0, -0.0, 3.0, 3.0]])
    tokens, _, ranks, _ = kernels.sample(logits, columns(1, temperature=0.0))
    assert tokens.tolist() == kernels.draw(logits, columns(1, temperature=0.0)).tolist() == [1]
    assert ranks.tolist() == [1]


def test_top_k_keeps_the_lowest_ids_among_equals(kernels):
    logits = torch.zeros(64, 40)
    logits[:, 3] = -0.0
    tokens = kernels.sample(logits, columns(64, top_k=5))[0]
    assert set(tokens.tolist()) == {0, 1, 2, 3, 4}
    assert torch.equal(kernels.draw(logits, columns(64, top_k=5)), tokens)


def test_top_p_stops_at_exactly_its_mass_and_min_p_keeps_exactly_its_share(kernels):
    logits = torch.zeros(64, 4)
    assert set(kernels.sample(logits, columns(64, top_p=0.5))[0].tolist()) == {0, 1}
    assert set(kernels.sample(logits, columns(64, min_p=1.0))[0].tolist()) == {0, 1, 2, 3}


def test_a_target_is_taken_as_drawn_and_ranked_with_ties_by_id(kernels):
    logits = torch.tensor([[2.0, 5.0, 2.0, 1.0]]).expand(4, -1).contiguous()
    cols = columns(4, temperature=0.7, top_k=1)
    cols.target.copy_(torch.arange(4))
    tokens, logprobs, ranks, finite = kernels.sample(logits, cols)
    assert tokens.tolist() == [0, 1, 2, 3]
    assert ranks.tolist() == [2, 1, 3, 4]
    torch.testing.assert_close(logprobs, logits[0].log_softmax(-1), rtol=0, atol=1e-6)
    assert finite.all()


@pytest.mark.parametrize("vocab", [1, 63, 100, 4160])
def test_logprobs_are_the_log_softmax_of_the_raw_logits(kernels, vocab):
    logits = normal(1, 5, vocab) * 5
    tokens, logprobs, _, _ = kernels.sample(logits, columns(5, temperature=0.5))
    wanted = logits.double().log_softmax(-1)
    torch.testing.assert_close(logprobs.double(), wanted.gather(1, tokens.long()[:, None])[:, 0], rtol=1e-6, atol=2e-6)
    count = min(5, vocab)
    ids, top = kernels.top_logprobs(logits, count)
    best = wanted.topk(count)
    assert torch.equal(ids.long(), best.indices)
    torch.testing.assert_close(top.double(), best.values, rtol=1e-6, atol=2e-6)
    same = kernels.sample(logits, replace(columns(5), target=ids[:, 0].contiguous()))[1]
    assert torch.equal(top[:, 0], same)


def test_top_logprobs_order_equals_by_id(kernels):
    ids, _ = kernels.top_logprobs(torch.tensor([[0.0, 1.0, -0.0, 1.0, 0.0]]), 5)
    assert ids.tolist() == [[1, 3, 0, 2, 4]]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_is_flagged_and_disturbs_nobody(kernels, bad):
    logits, cols = normal(1, 3, 63), columns(3, top_p=0.9)
    clean = kernels.sample(logits, cols)
    logits[1, 62] = bad
    tokens, logprobs, ranks, finite = kernels.sample(logits, cols)
    assert finite.tolist() == [True, False, True]
    assert tokens[1] == 0
    for found, wanted in zip((tokens, logprobs, ranks), clean, strict=False):
        assert torch.equal(found[::2], wanted[::2])


def test_banned_tokens_are_never_drawn(kernels):
    logits = torch.full((200, 70), -1e30)
    logits[:, 11] = -3.0
    logits[:, 69] = -3.0
    for settings in ({}, {"top_p": 0.99}, {"temperature": 1e-5}):
        tokens, _, _, finite = kernels.sample(logits, columns(200, **settings))
        assert finite.all()
        assert set(tokens.tolist()) <= {11, 69}


def test_a_native_sampler_refuses_a_target_outside_the_vocabulary(native):
    with pytest.raises(ValueError, match="not below 5"):
        native.sample(normal(1, 1, 5), columns(1, target=5))
