"""The sampler on a device: what it keeps, draws and reports is what the twin in torch does, and rows are alone."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from samebit.kernels import torch_sampling
from samebit.kernels.noise import gumbel_noise
from samebit.kernels.triton import sampling
from samebit.kernels.triton.filters import last_kept, load_row, place
from samebit.kernels.triton.last import counters
from samebit.kernels.values import SampleColumns
from tests.kernels.cases import columns, longs, normal
from tests.kernels.test_sampling import GOLDEN

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # NumPy, which interprets

TOLERANCE = 1e-6
"""Share of a row's mass within which sums of rounded likelihoods may disagree about where top-p ends."""
VOCABS = [1, 2, 5, 63, 255, 256, 257, 600]


def settings_of(cols, device="cpu"):
    return [getattr(cols, name).to(device) for name in SampleColumns.__slots__]


def sample(logits, cols, device):
    return [result.cpu() for result in sampling.sample(logits.to(device), *settings_of(cols, device), 1)]


def top_logprobs(logits, n, device):
    return [result.cpu() for result in sampling.top_logprobs(logits.to(device), n, 1)]


def mixed_columns(rows, seed, **fixed):
    """Settings of all kinds side by side, the same ones for a seed."""
    generator = torch.Generator().manual_seed(seed)

    def some(*values):
        return torch.tensor(values)[torch.randint(len(values), (rows,), generator=generator)]

    cols = columns(rows, sample_index=seed % 5, position=seed % 70000)
    cols.seed.copy_(torch.randint(-(2**62), 2**62, (rows,), generator=generator))
    cols.temperature.copy_(some(0.0, 0.3, 0.7, 1.0, 1.3, 4.0))
    cols.top_k.copy_(some(0, 0, 1, 4, 50, 1000000))
    cols.top_p.copy_(some(1.0, 1.0, 0.99003, 0.9003, 0.4007, 0.0))
    cols.min_p.copy_(some(0.0, 0.0, 0.0, 0.0501, 0.0007, 1.0))
    for name, number in fixed.items():
        getattr(cols, name).fill_(number)
    return cols


def logits_of(kind, rows, vocab, seed):
    x = normal(seed, rows, vocab) * 3
    if kind == "ties":
        x = (x * 2).round() / 4
        x[:, ::3] *= -1.0
    elif kind == "banned":
        x[torch.rand(rows, vocab, generator=torch.Generator().manual_seed(seed)) < 0.7] = -1e30
    elif kind == "zeros":
        x = x.sign() * 0.0
    elif kind == "huge":
        x *= 1e30
    return x


def scaled_of(logits, cols):
    return logits / torch.where(cols.temperature <= 0, 1.0, cols.temperature)[:, None]


def doubtful(scaled, cols):
    """Tokens that a filter's limit meets so closely that rounding decides: bool [L, V]."""
    ordered, order = torch.sort(scaled.double(), dim=-1, descending=True, stable=True)
    likelihood = torch.exp(ordered - ordered[:, :1])
    limit = torch.where(cols.top_k > 0, cols.top_k, scaled.shape[1])[:, None]
    mass = torch.where(torch.arange(scaled.shape[1]) < limit, likelihood, 0.0).cumsum(-1)
    total, least = mass[:, -1:], cols.min_p[:, None].double()
    near = ((mass - likelihood) - cols.top_p[:, None].double() * total).abs() <= TOLERANCE * total
    near &= (cols.top_p < 1)[:, None]
    near |= ((likelihood - least).abs() <= TOLERANCE * least) & (likelihood < 1) & (least > 0)
    near[:, 0] = False  # the most likely token stays, whatever the limits
    return torch.zeros_like(near).scatter(1, order, near)


def assert_agrees(found, logits, cols):
    """Tokens, ranks and finiteness are the twin's, unless the twin's or the found token is a doubtful one."""
    wanted = torch_sampling.sample(logits, *settings_of(cols), 1)
    assert torch.equal(found[3], wanted[3])
    finite = wanted[3]
    close = doubtful(scaled_of(torch.where(finite[:, None], logits, 0.0), cols), cols)
    either = close.gather(1, found[0].long()[:, None]) | close.gather(1, wanted[0].long()[:, None])
    # Two draws from sets that differ in doubtful tokens only differ in nothing else.
    sure = ~either[:, 0] | (cols.target >= 0) | (cols.temperature <= 0)
    assert torch.equal(found[0][sure], wanted[0][sure])
    assert torch.equal(found[2][sure & finite], wanted[2][sure & finite])
    torch.testing.assert_close(found[1][sure & finite], wanted[1][sure & finite], rtol=1e-6, atol=1e-6)
    return sure


@triton.jit
def kept_kernel(scaled, tops, top_k, top_p, min_p, kept, V: tl.constexpr, BLOCK: tl.constexpr, NARROW: tl.constexpr):
    at = tl.program_id(0)
    row = scaled + at * V
    k, p, least, top = tl.load(top_k + at), tl.load(top_p + at), tl.load(min_p + at), tl.load(tops + at)
    last = last_kept(row, 1.0, top, k, p, least, V, BLOCK, NARROW)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        tl.store(kept + at * V + ids, (place(load_row(row, ids, V), ids, V) >= last).to(tl.int8), mask=ids < V)


def kept_by_the_filters(scaled, cols, device):
    rows, vocab = scaled.shape
    kept = torch.empty(rows, vocab, dtype=torch.int8, device=device)
    picked = (getattr(cols, name).to(device) for name in ("top_k", "top_p", "min_p"))
    tops = scaled.amax(1).to(device)
    kept_kernel[(rows,)](scaled.to(device), tops, *picked, kept, V=vocab, **sampling._config(vocab))
    return kept.cpu().bool()


@triton.jit
def noise_kernel(seed, sample_index, position, noise, V: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        drawn = sampling.gumbel(
            tl.load(seed + at), tl.load(sample_index + at), tl.load(position + at), start, BLOCK
        )  # fmt: skip
        tl.store(noise + at * V + ids, drawn, mask=ids < V)


def noise_on(device, seed, sample_index, position, vocab):
    noise = torch.empty(seed.shape[0], vocab, device=device)
    places = (x.to(device) for x in (seed, sample_index, position))
    noise_kernel[(seed.shape[0],)](*places, noise, V=vocab, BLOCK=64)
    return noise.cpu()


def test_noise_is_the_contracts(device):
    seed, sample_index, position = longs(0, 1, -(2**40) - 7), longs(0, 2, 0).int(), longs(0, 5, 70000)
    found = noise_on(device, seed, sample_index, position, 6)
    torch.testing.assert_close(found, torch.tensor(GOLDEN), rtol=0, atol=2e-6)
    wanted = gumbel_noise(seed, sample_index, position, 700)
    torch.testing.assert_close(noise_on(device, seed, sample_index, position, 700), wanted, rtol=1.2e-7, atol=0)


def test_noise_takes_every_bit_of_its_counters(device):
    seed = longs(2**63 - 1, -(2**63), -1, 2**32, 5)
    sample_index, position = longs(2**31 - 1, 0, 7, 1, 2).int(), longs(2**32 + 3, 2**31, 2**40, 0, 1)
    found, wanted = noise_on(device, seed, sample_index, position, 130), gumbel_noise(seed, sample_index, position, 130)
    torch.testing.assert_close(found, wanted, rtol=1.2e-7, atol=0)


@settings(max_examples=12)
@given(vocab=st.sampled_from(VOCABS), kind=st.sampled_from(["normal", "ties", "banned"]), seed=st.integers(0, 10**6))
def test_filters_keep_what_the_twins_filters_keep(device, vocab, kind, seed):
    cols = mixed_columns(2, seed)
    scaled = scaled_of(logits_of(kind, 2, vocab, seed), cols)
    found = kept_by_the_filters(scaled, cols, device)
    wanted = torch_sampling._kept(scaled, cols.top_k, cols.top_p, cols.min_p)
    assert ((found == wanted) | doubtful(scaled, cols)).all()


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        ({"top_k": 3}, {1, 0, 2}),
        ({"top_k": 2}, {1, 0}),
        ({"top_p": 0.5}, {1, 0, 2}),
        ({"top_p": 0.0}, {1}),
        ({"top_k": 4, "top_p": 0.5}, {1, 0}),
        ({"top_k": 4, "top_p": 0.75}, {1, 0, 2}),
        ({"top_k": 4, "top_p": 0.75, "min_p": 1.0}, {1}),
        ({"min_p": 0.25}, {1, 0, 2, 3, 4, 6}),
        ({"top_k": 300}, set(range(200))),
        ({"top_k": 199}, set(range(199))),
    ],
)
def test_ties_at_a_filters_limit_go_to_the_lower_ids(device, limits, wanted):
    """Token 1 has the likelihood 1, five others 1/2 and the rest nearly none: 3.5 in all, 2.5 in the first four."""
    scaled = torch.full((1, 200), -40.0)
    scaled[0, 1] = 0.0
    scaled[0, [0, 2, 3, 4, 6]] = -0.6931472
    found = kept_by_the_filters(scaled, columns(1, **limits), device)[0]
    assert set(found.nonzero()[:, 0].tolist()) == wanted


@pytest.mark.parametrize(("top_p", "count"), [(0.5, 128), (0.25, 64), (0.2501, 65), (0.99609375, 255), (1e-9, 1)])
def test_top_p_stops_at_exactly_its_mass(device, top_p, count):
    logits = torch.zeros(1, 256)
    logits[0, ::2] = -0.0
    found = kept_by_the_filters(logits, columns(1, top_p=top_p), device)[0]
    assert found.nonzero()[:, 0].tolist() == list(range(count))


@pytest.mark.parametrize(
    ("limits", "wanted"), [({"min_p": 1.0}, [3, 7]), ({"top_p": 0.75}, [3, 7]), ({"top_p": 0.5}, [3])]
)
def test_scaled_logits_that_overflow_are_equally_likely(device, limits, wanted):
    scaled = torch.zeros(1, 9)
    scaled[0, [3, 7]] = torch.inf
    found = kept_by_the_filters(scaled, columns(1, **limits), device)[0]
    assert found.nonzero()[:, 0].tolist() == wanted


@settings(max_examples=12)
@given(
    vocab=st.sampled_from(VOCABS),
    kind=st.sampled_from(["normal", "ties", "banned", "zeros", "huge"]),
    seed=st.integers(0, 10**6),
)
@example(vocab=600, kind="ties", seed=1)
def test_draws_are_the_twins(device, vocab, kind, seed):
    cols = mixed_columns(3, seed)
    if seed % 2:
        cols.target[seed % 3] = seed % vocab
    logits = logits_of(kind, 3, vocab, seed)
    assume(assert_agrees(sample(logits, cols, device), logits, cols).any())


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-5, 3e38])
@pytest.mark.parametrize("limits", [{}, {"top_k": 3}, {"top_p": 0.9003}, {"min_p": 0.0501}])
def test_temperatures_may_be_extreme(device, temperature, limits):
    logits = torch.stack([logits_of(kind, 1, 280, 3)[0] for kind in ("ties", "banned", "huge", "zeros")])
    cols = columns(4, seed=11, temperature=temperature, **limits)
    assert assert_agrees(sample(logits, cols, device), logits, cols).all()


def test_banned_tokens_only_are_drawn_by_noise_alone(device):
    logits, cols = torch.full((3, 260), -1e30), columns(3, seed=4, top_p=0.9003)
    assert_agrees(sample(logits, cols, device), logits, cols)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, 299])
def test_a_row_that_is_not_finite_is_flagged_and_disturbs_nobody(device, bad, at):
    logits, cols = logits_of("normal", 3, 300, 1), columns(3, top_p=0.9)
    clean = sample(logits, cols, device)
    logits[1, at] = bad
    tokens, logprobs, ranks, finite = sample(logits, cols, device)
    assert finite.tolist() == [True, False, True]
    assert tokens[1] == 0
    for found, wanted in zip((tokens, logprobs, ranks), clean, strict=False):
        assert torch.equal(found[::2], wanted[::2])


def test_a_row_alone_is_the_row_in_a_batch(device):
    wide, cols = logits_of("ties", 4, 360, 5).to(device), mixed_columns(4, 8)
    logits = wide[:, 20:320]
    together = sample(logits, cols, device)
    best = top_logprobs(logits, 4, device)
    for row in range(4):
        alone = sample(logits[row : row + 1].clone(), cols.part(slice(row, row + 1)), device)
        for a, b in zip(together, alone, strict=True):
            assert torch.equal(a[row : row + 1], b)
        for a, b in zip(best, top_logprobs(logits[row : row + 1].clone(), 4, device), strict=True):
            assert torch.equal(a[row : row + 1], b)


def test_blocks_and_warps_change_no_bits(device, monkeypatch):
    logits, cols = logits_of("normal", 3, 300, 6), mixed_columns(3, 9)
    found = sample(logits, cols, device), top_logprobs(logits, 3, device)
    monkeypatch.setattr(sampling, "_config", lambda _: {"BLOCK": 128, "NARROW": 64, "num_warps": 4})
    again = sample(logits, cols, device), top_logprobs(logits, 3, device)
    for a, b in zip((*found[0], *found[1]), (*again[0], *again[1]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["normal", "banned"])
def test_programs_that_share_a_row_change_no_bits(device, kind, monkeypatch):
    """Some have no token of theirs, some none that is kept; one row is not finite, and afterwards nobody is waited for."""
    logits, cols = logits_of(kind, 4, 300, 6), mixed_columns(4, 9)
    logits[3, 200] = torch.nan
    monkeypatch.setattr(sampling, "_config", lambda _: {"BLOCK": 64, "NARROW": 64, "num_warps": 4})
    found = []
    for few, most in [(16, 8), (16, 2), (0, 8)]:
        monkeypatch.setattr(sampling, "FEW_ROWS", few)
        monkeypatch.setattr(sampling, "MOST_SHARES", most)
        found.append(sample(logits, cols, device))
        drawn = sampling.draw(logits.to(device), *settings_of(cols, device), 1)
        assert torch.equal(drawn.cpu(), found[-1][0])
        assert not counters(drawn.device).any()
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.equal(a[:3], b[:3])
    assert found[0][3].tolist() == [True] * 3 + [False]


@pytest.mark.parametrize("vocab", [1, 5, 256, 600])
@pytest.mark.parametrize("kind", ["normal", "ties", "banned", "zeros"])
def test_the_likeliest_are_the_twins_with_the_bits_of_a_draw(device, vocab, kind):
    logits = logits_of(kind, 2, vocab, vocab)
    ids, logprobs = top_logprobs(logits, 22, device)
    wanted = torch_sampling.top_logprobs(logits, 22, 1)
    assert torch.equal(ids, wanted[0])
    torch.testing.assert_close(logprobs, wanted[1], rtol=1e-6, atol=1e-6)
    last = ids.shape[1] - 1
    for place_of in {0, last // 2, last}:
        cols = columns(2)
        cols.target.copy_(ids[:, place_of])
        drawn = sample(logits, cols, device)
        assert torch.equal(drawn[1], logprobs[:, place_of])
        assert drawn[2].tolist() == [place_of + 1] * 2


def test_likeliest_of_a_row_that_is_not_finite_are_tokens(device):
    logits = normal(1, 2, 300)
    logits[0] = torch.nan
    ids, _ = top_logprobs(logits, 5, device)
    assert ((ids >= 0) & (ids < 300)).all()


def test_no_rows_are_no_work(device):
    assert sample(torch.zeros(0, 9), columns(0), device)[0].shape == (0,)
    assert top_logprobs(torch.zeros(0, 9), 2, device)[1].shape == (0, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [4096, 32768, 201024])
def test_large_vocabularies_agree_with_the_twin(device, vocab):
    rows = 300
    logits, cols = normal(vocab, rows, vocab) * 3, mixed_columns(rows, vocab)
    cols.target[::17] = torch.arange(rows, dtype=torch.int32)[::17]
    found, best = sample(logits, cols, device), top_logprobs(logits, 20, device)
    sure = 0
    for first in range(0, rows, 50):
        part = slice(first, first + 50)
        sure += assert_agrees([x[part] for x in found], logits[part], cols.part(part)).sum().item()
        ids, logprobs = torch_sampling.top_logprobs(logits[part], 20, 1)
        assert torch.equal(best[0][part], ids)
        torch.testing.assert_close(best[1][part], logprobs, rtol=1e-6, atol=1e-6)
    assert sure > 0.98 * rows
    for row in (0, 1, 2, 137, 299):
        alone = sample(logits[row : row + 1], cols.part(slice(row, row + 1)), device)
        for a, b in zip(found, alone, strict=True):
            assert torch.equal(a[row : row + 1], b)


@pytest.mark.gpu
def test_filters_of_large_vocabularies_keep_what_the_twins_keep(device):
    scaled, cols = normal(7, 48, 201024) * 3, mixed_columns(48, 3)
    found = kept_by_the_filters(scaled, cols, device)
    wanted = torch_sampling._kept(scaled, cols.top_k, cols.top_p, cols.min_p)
    assert ((found == wanted) | doubtful(scaled, cols)).all()


@pytest.mark.gpu
def test_a_captured_draw_replays_with_new_settings(device):
    logits, cols = normal(2, 5, 32768).to(device), mixed_columns(5, 4)
    inputs = settings_of(cols, device)
    sampling.sample(logits, *inputs, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = sampling.sample(logits, *inputs, 1)
    other = mixed_columns(5, 5)
    for held, new in zip(inputs, settings_of(other, device), strict=True):
        held.copy_(new)
    graph.replay()
    for a, b in zip(results, sample(logits, other, device), strict=True):
        assert torch.equal(a.cpu(), b)
