"""Keys, values and stamps go where they belong, and nowhere else."""

import pytest
import torch

from samebit.kernels import torch_set
from samebit.kernels.triton.pages import write_kv
from tests.kernels.cases import ints, longs, normal


def case(device, activation, tokens, heads=2, width=5, page=4, num_pages=6, seed=0):
    """Operands of ``write_kv`` as columns of wider tensors: random slots, a third of them 0, and pages of sevens."""
    generator = torch.Generator().manual_seed(seed)
    pages = torch.full((num_pages, heads, page, width), 7.0, device=device, dtype=activation)
    slots = torch.randperm(num_pages * page - 1, generator=generator)[:tokens] + 1
    slots[torch.rand(len(slots), generator=generator) < 0.3] = 0
    stamps = torch.where(torch.rand(len(slots), generator=generator) < 0.5, slots // page, 0)
    wide = normal(seed, len(slots), 2 * heads * width + 8)
    wide[slots == 0] = torch.nan
    wide = wide.to(device)
    return (
        wide[:, : heads * width], wide[:, -heads * width :], pages, pages.clone(),
        torch.zeros(num_pages, dtype=torch.int64, device=device), slots.to(device, torch.int32),
        stamps.to(device, torch.int32), (slots * 3 + 2**40).to(device),
    )  # fmt: skip


def run_both(operands):
    """The pages and tags after the kernel, and after the twin."""
    twin = [x.to(operands[2].dtype).float().cpu() if x.is_floating_point() else x.cpu() for x in operands]
    write_kv(*operands, 1)
    torch_set.write_kv(*twin, 1)
    return operands[2:5], twin[2:5]


@pytest.mark.parametrize("shape", [(2, 5, 4), (1, 48, 7), (3, 600, 1)])
def test_keys_and_values_land_in_their_slots_and_nothing_else_changes(device, activation, shape):
    heads, width, page = shape
    found, wanted = run_both(case(device, activation, 12, heads, width, page, 20))
    for one, other in zip(found[:2], wanted[:2], strict=True):
        torch.testing.assert_close(one.float().cpu(), other, rtol=0, atol=0, equal_nan=True)
    # A page that is stamped by several tokens has the stamp of one of them.
    assert ((found[2].cpu() != 0) == (wanted[2] != 0)).all()
    assert found[2][0] == 0


def test_completed_pages_get_their_stamps(device, activation):
    operands = list(case(device, activation, 4))
    operands[5:] = [x.to(device) for x in (ints(14, 15, 4, 0), ints(0, 3, 0, 0), longs(5, -(2**62), 7, 8))]
    found, _ = run_both(operands)
    assert found[2].tolist() == [0, 0, 0, -(2**62), 0, 0]


def test_pages_may_be_part_of_a_larger_tensor(device, activation):
    operands = list(case(device, activation, 9))
    whole = torch.full((6, 2, 2, 4, 5), 7.0, device=device, dtype=activation)
    operands[2], operands[3] = whole[:, 0], whole[:, 1]
    found, wanted = run_both(operands)
    for one, other in zip(found[:2], wanted[:2], strict=True):
        torch.testing.assert_close(one.float().cpu(), other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_pages_beyond_two_to_the_31_elements_are_reached(device):
    pages = torch.zeros(2**18 + 4, 4, 16, 256, device=device, dtype=torch.bfloat16)
    k = normal(0, 2, 1024).to(device)
    slots = (ints(2**18 + 3, 2**18 + 2) * 16 + 5).to(device)
    tags = torch.zeros(len(pages), dtype=torch.int64, device=device)
    write_kv(k, k, pages, pages.clone(), tags, slots, ints(0, 2**18).to(device), longs(1, 2).to(device), 1)
    assert torch.equal(pages[slots // 16, :, 5].flatten(1), k.to(torch.bfloat16))
    assert tags[2**18] == 2
