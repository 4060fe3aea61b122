"""What is acknowledged on a device: what the twin acknowledges, with any one tag wrong or none."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samebit.kernels import torch_index
from samebit.kernels.triton import acknowledgement
from samebit.kernels.values import SINK_ROW

SLOTS = 3


def wide(rng, *shape):
    size = torch.Size(shape).numel()
    return torch.tensor([rng.getrandbits(62) for _ in range(size)], dtype=torch.int64).reshape(shape)


def sound_step(rng, *, entries, history, streams, layers, num_pages, page_size):
    """The operands of a step after which every tag is as it must be; groups have pages of their own, each used once."""
    windows = [0, *(rng.choice([0, 1, page_size, 3 * page_size - 1]) for _ in layers[1:])]
    rows = [rng.randrange(SLOTS) for _ in range(entries)]
    boundaries = [rng.choice([0, rng.randrange(num_pages * page_size + 1)]) for _ in range(entries)]
    tags = wide(rng, entries)
    dest = torch.full((entries, history), SINK_ROW, dtype=torch.int32)
    row_tags = wide(rng, streams, 2 + entries * history)
    for entry in range(entries):
        if rng.random() < 0.7:
            dest[entry] = 2 + entry * history + torch.arange(history)
            row_tags[:, dest[entry].long()] = tags[entry]
    found, table, stamps = [], [], []
    for count in layers:
        pages = list(range(1, 1 + SLOTS * num_pages))
        rng.shuffle(pages)
        table.append(torch.tensor(pages, dtype=torch.int32).reshape(SLOTS, num_pages))
        stamps.append(wide(rng, SLOTS, num_pages))
        group = wide(rng, count, 1 + SLOTS * num_pages + rng.randrange(3))
        group[:, table[-1].long()] = stamps[-1]
        found.append(group)
    slots = torch.tensor(rng.sample(range(SLOTS), SLOTS), dtype=torch.int32)
    words = (torch.tensor(rows, dtype=torch.int32), torch.tensor(boundaries, dtype=torch.int64), tags, dest, slots)
    return [*words, row_tags, found, table, stamps, windows, page_size]


def check(device, operands):
    """Both answers are the twin's, which are returned."""

    def moved(item):
        if isinstance(item, list):
            return [moved(each) for each in item]
        return item.to(device) if isinstance(item, torch.Tensor) else item

    expected = torch_index.acknowledge(*operands)
    answers = acknowledgement.acknowledge(*map(moved, operands))
    for name, answer, wanted in zip(("pages", "rows"), answers, expected, strict=True):
        assert answer.dtype is torch.bool
        assert torch.equal(answer.cpu(), wanted), name
    return [answer.tolist() for answer in expected]


steps = st.fixed_dictionaries(
    {
        "entries": st.integers(1, 9),
        "history": st.integers(0, 4),
        "streams": st.sampled_from([1, 3, 40]),
        "layers": st.lists(st.sampled_from([1, 2, 19]), min_size=1, max_size=4),
        "num_pages": st.sampled_from([1, 7, 70, 200]),
        "page_size": st.sampled_from([1, 4, 16]),
    }
)


@given(seed=st.integers(0, 2**32), sizes=steps)
def test_every_wrong_tag_is_told_as_the_twin_tells_it(device, seed, sizes):
    rng = random.Random(seed)
    operands = sound_step(rng, **sizes)
    is_kept = ((operands[3] != SINK_ROW).all(dim=1)).tolist()
    assert check(device, operands) == [[True] * sizes["entries"], is_kept]
    row_tags, found = operands[5:7]
    for _ in range(4):
        kept = rng.choice([found[rng.randrange(len(found))], row_tags])
        row = rng.randrange(kept.shape[1])
        kept[rng.randrange(kept.shape[0]), row] ^= 1
        check(device, operands)


@pytest.mark.parametrize("layer", [0, 18])
@pytest.mark.parametrize("page", [0, 63, 64, 199])
def test_one_wrong_page_in_one_layer_spoils_the_entries_above_it_only(device, layer, page):
    operands = sound_step(random.Random(1), entries=3, history=3, streams=2, layers=[19], num_pages=200, page_size=4)
    operands[0][:] = 0
    operands[1][:] = torch.tensor([0, 4 * page, 4 * page + 4])
    slot = operands[4][0]
    operands[6][0][layer, operands[7][0][slot, page].long()] ^= 1
    assert check(device, operands)[0] == [True, True, False]


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_large_steps_are_those_of_the_twin(device, seed):
    rng = random.Random(seed)
    operands = sound_step(rng, entries=256, history=3, streams=126, layers=[9, 33], num_pages=1024, page_size=16)
    is_kept = ((operands[3] != SINK_ROW).all(dim=1)).tolist()
    assert check(device, operands) == [[True] * 256, is_kept]
    for kept in (operands[5], *operands[6]):
        kept[rng.randrange(kept.shape[0]), rng.randrange(2, kept.shape[1])] ^= 1
    check(device, operands)
