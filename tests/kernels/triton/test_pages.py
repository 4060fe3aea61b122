"""Keys, values and stamps go where they belong, and nowhere else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samebit.kernels import torch_set
from samebit.kernels.composed import composed
from samebit.kernels.triton.launch import IS_INTERPRETED, num_launches
from samebit.kernels.triton.pages import write_heads
from samebit.kernels.triton.set import implementations
from tests.kernels.cases import ints, longs, normal

# Query heads, heads of keys and values, columns of a head, tokens of a page.
SHAPES = [(4, 2, 64, 16), (6, 2, 48, 4), (5, 1, 16, 1), (8, 8, 128, 4)]
if IS_INTERPRETED:
    # Compiled, columns of any number go to threads by what is known of addresses, and that is not the same in a page.
    SHAPES += [(9, 3, 7, 4), (2, 1, 1, 4), (10, 2, 100, 16), (8, 4, 257, 2)]


def heads_case(device, activation, tokens, heads, kv_heads, width, page=4, seed=0, *, turns=False):
    """Operands of ``write_heads``: queries, keys and values as columns of wider tensors, and what turns heads.

    Slots are random, a third of them 0, and pages hold sevens.
    """
    generator, num_pages, columns = torch.Generator().manual_seed(seed), tokens // page + 2, kv_heads * width
    pages = torch.full((num_pages, kv_heads, page, width), 7.0, device=device, dtype=activation)
    slots = torch.randperm(num_pages * page - 1, generator=generator)[:tokens] + 1
    slots[torch.rand(tokens, generator=generator) < 0.3] = 0
    stamps = torch.where(torch.rand(tokens, generator=generator) < 0.5, slots // page, 0)
    keys_values, queries = normal(seed, tokens, 2 * columns + 8), normal(seed + 1, tokens, heads * width + 5)
    keys_values[slots == 0] = torch.nan
    keys_values, queries = keys_values.to(device, activation), queries.to(device, activation)
    gains = (normal(seed + n, width).to(device) for n in (2, 3))
    positions = torch.randint(0, 50, (tokens,), generator=torch.Generator().manual_seed(seed)).to(device)
    turning = (positions, *(normal(seed + n, 50, width).to(device) for n in (4, 5))) if turns else (None,) * 3
    return (
        queries[:, 3 : 3 + heads * width], keys_values[:, :columns], keys_values[:, -columns:], *gains, 1e-6, pages,
        pages.clone(), torch.zeros(num_pages, dtype=torch.int64, device=device), slots.to(device, torch.int32),
        stamps.to(device, torch.int32), (slots * 3 + 2**40).to(device), *turning,
    )  # fmt: skip


def of_tokens(operands, part):
    """The operands of a step of some of the tokens."""
    return [x[part] if n in {0, 1, 2, 9, 10, 11, 12} and x is not None else x for n, x in enumerate(operands)]


def in_parts(activation):
    """The same operator, made of the norm of rows and of torch's writes."""
    return composed({**implementations(activation), "write_kv": torch_set.write_kv})["write_heads"]


def apart(operands):
    """The same operands, but those that change are copies."""
    return [*operands[:6], *(x.clone() for x in operands[6:9]), *operands[9:]]


def run_heads(write, operands):
    """The queries, pages and tags, as integers: NaN is NaN in a page, too."""
    operands = apart(operands)
    out = write(*operands, 1)
    return [x.cpu().view(torch.int16 if x.element_size() == 2 else torch.int32) for x in (out, *operands[6:8])] + [
        operands[8].cpu()
    ]


def even(shape):
    """The shape with heads that have halves."""
    heads, kv_heads, width, page = shape
    return heads, kv_heads, width + width % 2, page


def test_completed_pages_get_their_stamps(device, activation):
    operands = list(heads_case(device, activation, 9, 4, 2, 16))
    slots, stamped, stamps = torch.zeros(3, 9, dtype=torch.int64, device=device)
    slots[:3], stamped[1] = ints(14, 15, 4), 3
    stamps[:4] = longs(5, -(2**62), 7, 8)
    operands[9:12] = slots.int(), stamped.int(), stamps
    assert run_heads(write_heads, operands)[3].tolist() == [0, 0, 0, -(2**62)]


def test_pages_may_be_part_of_a_larger_tensor(device, activation):
    operands = list(heads_case(device, activation, 9, 4, 2, 16))
    wanted = run_heads(write_heads, operands)
    whole = torch.full((4, 3, 2, 4, 16), 7.0, device=device, dtype=activation)
    operands[6], operands[7] = whole[:, 0], whole[:, 2]
    found = write_heads(*operands, 1), whole[:, 0], whole[:, 2]
    for one, other in zip(found, wanted, strict=False):
        assert torch.equal(one.cpu(), other.view(activation))
    assert (whole[:, 1] == 7).all()


@given(tokens=st.integers(1, 18), shape=st.sampled_from(SHAPES), seed=st.integers(0, 99), keys_only=st.booleans())
def test_one_launch_writes_the_bits_of_norms_turns_and_writes(device, tokens, shape, seed, keys_only):
    heads, *others = even(shape)
    operands = heads_case(device, torch.float32, tokens, 0 if keys_only else heads, *others, seed, turns=True)
    before = num_launches()
    found = run_heads(write_heads, operands)
    assert num_launches() == before + 1
    *wanted, stamps = run_heads(in_parts(torch.float32), operands)
    for one, other in zip(found[:3], wanted, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(found[3] != 0, stamps != 0)


@given(tokens=st.integers(1, 18), shape=st.sampled_from(SHAPES), seed=st.integers(0, 99))
def test_one_launch_writes_the_bits_of_norms_and_writes(device, tokens, shape, seed):
    for activation in (torch.float32, torch.bfloat16):
        operands = heads_case(device, activation, tokens, *shape, seed)
        before = num_launches()
        found = run_heads(write_heads, operands)
        assert num_launches() == before + 1
        *wanted, stamps = run_heads(in_parts(activation), operands)
        for one, other in zip(found[:3], wanted, strict=True):
            assert torch.equal(one, other)
        # A page that is stamped by several tokens has the stamp of one of them.
        assert torch.equal(found[3] != 0, stamps != 0)


@pytest.mark.parametrize("turns", [False, True], ids=["normed", "turned"])
def test_heads_agree_with_the_twin(device, activation, turns):
    operands = heads_case(device, activation, 11, 6, 2, 48, turns=turns)
    twin = [(x.float() if x.is_floating_point() else x).cpu().clone() if torch.is_tensor(x) else x for x in operands]
    found = write_heads(*operands, 1), *operands[6:8]
    wanted = composed(torch_set.IMPLEMENTATIONS)["write_heads"](*twin, 1), *twin[6:8]
    bound = 1e-5 if activation is torch.float32 else 2.0**-8
    # The two terms of a turn may cancel.
    least = bound * (4 if turns else 1e-3)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype is activation
        torch.testing.assert_close(one.float().cpu(), other, rtol=bound, atol=least)
    assert ((operands[8].cpu() != 0) == (twin[8] != 0)).all()


@given(tokens=st.integers(1, 18), first=st.integers(0, 17), width=st.sampled_from([16, 48, 128]), turns=st.booleans())
def test_heads_do_not_know_their_company(device, tokens, first, width, turns):
    one = slice(first % tokens, first % tokens + 1)
    for activation in (torch.float32, torch.bfloat16):
        operands = heads_case(device, activation, tokens, 6, 2, width, turns=turns)
        alone, found = apart(of_tokens(operands, one)), apart(operands)
        assert torch.equal(write_heads(*found, 1)[one], write_heads(*alone, 1))
        slot = int(operands[9][one])
        for whole, single in zip(found[6:8], alone[6:8], strict=True):
            assert slot == 0 or torch.equal(whole[slot // 4, :, slot % 4], single[slot // 4, :, slot % 4])


def test_padding_tokens_store_no_heads_and_stamp_nothing(device, activation):
    operands = list(heads_case(device, activation, 9, 4, 2, 16))
    operands[9][:], operands[10][:] = 0, 0
    found = run_heads(write_heads, operands)
    for one, other in zip(found[1:], apart(operands)[6:9], strict=True):
        assert torch.equal(one, other.cpu().view(one.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 64), (16, 4, 128), (16, 8, 128), (32, 8, 128)])
def test_heads_of_models_are_pure_and_have_the_bits_of_norms_and_writes(device, activation, heads, kv_heads, width):
    operands = heads_case(device, activation, 2048, heads, kv_heads, width, 64)
    whole = run_heads(write_heads, operands)
    for one, other in zip(whole[:3], run_heads(in_parts(activation), operands)[:3], strict=True):
        assert torch.equal(one, other)
    for count in (*range(1, 65), 512):
        first = 2047 * count % (2048 - count)
        part = slice(first, first + count)
        cut = of_tokens(operands, part)
        found, slots = run_heads(write_heads, cut), cut[9].cpu()
        assert torch.equal(found[0], whole[0][part])
        slots = slots[slots > 0]
        for one, other in zip(found[1:3], whole[1:3], strict=True):
            assert torch.equal(one[slots // 64, :, slots % 64], other[slots // 64, :, slots % 64])


@pytest.mark.gpu
def test_pages_beyond_two_to_the_31_elements_are_reached(device):
    pages = torch.zeros(2**18 + 4, 4, 16, 256, device=device, dtype=torch.bfloat16)
    k, gain = normal(0, 2, 1024).to(device, torch.bfloat16), normal(1, 256).to(device)
    slots = (ints(2**18 + 3, 2**18 + 2) * 16 + 5).to(device)
    tags = torch.zeros(len(pages), dtype=torch.int64, device=device)
    stamps = ints(0, 2**18).to(device), longs(1, 2).to(device)
    write_heads(k, k, k, gain, gain, 1e-6, pages.clone(), pages, tags, slots, *stamps, None, None, None, 1)
    assert torch.equal(pages[slots // 16, :, 5].flatten(1), k)
    assert tags[2**18] == 2
