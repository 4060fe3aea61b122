"""Attention of blocks of guesses on a device: the twin's values, and bits that depend on the block alone."""

from dataclasses import replace

import pytest
import torch

from samebit.kernels import torch_set
from samebit.kernels.triton.attention import TILINGS
from samebit.kernels.triton.block_attention import attend_blocks, block_attention
from tests.kernels.cases import PagedCache, ints, normal
from tests.kernels.triton.paged import TINY, TOLERANCE, Shape, error

KINDS = [(0, False), (0, True), (1, True), (7, False), (19, True), (300, False)]
PAIR = Shape(2, 1, 16)


class Blocks:
    """Blocks of ``num_tokens`` tokens behind pages of as many keys as ``lengths`` say, rounded to ``dtype``."""

    def __init__(self, shape, num_tokens, lengths, device, dtype, seed=0):
        self.shape, self.num_tokens, self.lengths, self.device, self.dtype = shape, num_tokens, lengths, device, dtype
        cache = PagedCache([n + 1 for n in lengths], shape.page, shape.kv_heads, shape.width, seed)
        self.k_pages, self.v_pages = cache.k_pages.to(device, dtype), cache.v_pages.to(device, dtype)
        for slot, n in enumerate(lengths):  # what stands behind the length is from guesses of before
            page, offset = int(cache.table[slot, n // shape.page]), n % shape.page
            self.k_pages[page, :, offset], self.v_pages[page, :, offset] = torch.nan, torch.nan
        self.table = cache.table.to(device)
        count = len(lengths) * num_tokens
        self.operands = [
            normal(seed + 2000 + i, count, n * shape.width).to(device, dtype)
            for i, n in enumerate((shape.heads, shape.kv_heads, shape.kv_heads))
        ]

    def attend(self, kind, *, tiling=None, only=None, operands=None):
        slots = range(len(self.lengths)) if only is None else [only]
        n = self.num_tokens
        part = slice(None) if only is None else slice(only * n, (only + 1) * n)
        lengths = ints(*(self.lengths[slot] for slot in slots)).to(self.device)
        return attend_blocks(
            *(x[part] for x in operands or self.operands), self.k_pages, self.v_pages, lengths,
            ints(*slots).to(self.device), self.table, *kind, 0.2, tiling or TILINGS[self.dtype],
        )  # fmt: skip

    def twin(self, kind):
        operands = [x.float().cpu() for x in (*self.operands, self.k_pages, self.v_pages)]
        lengths, slots = ints(*self.lengths), ints(*range(len(self.lengths)))
        return torch_set.block_attention(*operands, lengths, slots, self.table.cpu(), *kind, 0.2, 1)


@pytest.mark.parametrize(
    ("shape", "num_tokens", "kind"),
    [
        *((PAIR, 8, kind) for kind in KINDS),
        (Shape(6, 2, 20, page=4), 17, (0, True)),
        (Shape(1, 1, 48, page=7), 1, (19, False)),
    ],
)
def test_block_attention_agrees_with_its_twin(device, activation, shape, num_tokens, kind):
    blocks = Blocks(shape, num_tokens, [0, 1, 16, 50], device, activation)
    assert error(blocks.attend(kind, tiling=TINY), blocks.twin(kind)) < TOLERANCE[activation]


def test_block_attention_in_tiles_as_they_are_used_agrees_with_its_twin(device, activation):
    blocks = Blocks(PAIR, 5, [0, 70, 520], device, activation)
    assert error(blocks.attend((0, False)), blocks.twin((0, False))) < TOLERANCE[activation]


@pytest.mark.parametrize("kind", [(0, False), (19, True)])
@pytest.mark.parametrize("num_tokens", [3, 17])
def test_a_block_does_not_know_its_company(device, activation, kind, num_tokens):
    blocks = Blocks(PAIR, num_tokens, [0, 33, 7, 64], device, activation)
    together = blocks.attend(kind, tiling=TINY)
    for slot in range(4):
        part = slice(slot * num_tokens, (slot + 1) * num_tokens)
        assert torch.equal(blocks.attend(kind, tiling=TINY, only=slot), together[part])


@pytest.mark.parametrize("kind", [(0, False), (40, True)])
def test_neither_splitting_nor_tiles_change_bits(device, activation, kind):
    blocks = Blocks(Shape(3, 1, 16), 6, [0, 33, 70], device, activation)
    wanted = blocks.attend(kind, tiling=TINY)
    for change in ({"max_partials": 8, "short_rows": 18}, {"short_rows": 18}, {"long_block_m": 16}):
        assert torch.equal(blocks.attend(kind, tiling=replace(TINY, **change)), wanted), change


@pytest.mark.parametrize(("window", "length"), [(0, 0), (0, 16), (0, 45), (3, 16), (19, 45), (19, 5)])
def test_what_lies_behind_the_length_or_below_the_window_is_not_read(device, activation, window, length):
    """Addresses outside of the pages stand there; what shares a page with a key is NaN."""
    blocks = Blocks(PAIR, 4, [79], device, activation)
    blocks.lengths = [length]
    clean = blocks.attend((window, False), tiling=TINY)
    low = max(0, length - window + 1) if window else 0
    for position in (*range(low), *range(length, 80)):
        page, offset = int(blocks.table[0, position // 16]), position % 16
        blocks.k_pages[page, :, offset], blocks.v_pages[page, :, offset] = torch.nan, torch.nan
    blocks.table[0, : low // 16] = -(10**6)
    blocks.table[0, -(-length // 16) :] = -(10**6)
    assert torch.equal(blocks.attend((window, False), tiling=TINY), clean)


def test_a_place_sees_later_ones_of_its_block_unless_it_is_causal(device, activation):
    blocks = Blocks(PAIR, 8, [20], device, activation)
    q, k, v = blocks.operands
    changed = k.clone()
    changed[5] += 1
    for is_causal, first in ((True, 5), (False, 0)):
        same = blocks.attend((0, is_causal), tiling=TINY)
        other = blocks.attend((0, is_causal), tiling=TINY, operands=[q, changed, v])
        assert torch.equal(same[:first], other[:first])
        assert (same[first:] != other[first:]).any(1).all()


def test_operands_may_be_columns_of_one_wider_tensor_and_of_a_wider_type(device, activation):
    blocks = Blocks(PAIR, 3, [30, 9], device, activation)
    q, k, v = (x.float() for x in blocks.operands)
    nothing = torch.full((len(q), 8), torch.nan, device=device)
    wide_q, wide_k, _, wide_v = torch.cat([q, k, nothing, v], 1).split([32, 16, 8, 16], 1)
    found = block_attention(
        wide_q, wide_k, wide_v, blocks.k_pages, blocks.v_pages, ints(30, 9).to(device), ints(0, 1).to(device),
        blocks.table, 0, False, 0.2, 1,
    )  # fmt: skip
    assert torch.equal(found, blocks.attend((0, False)))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*KINDS, (512, True), (700, False)])
@pytest.mark.parametrize(
    ("shape", "num_tokens"),
    [(Shape(16, 4, 128), 8), (Shape(16, 4, 128), 20), (Shape(8, 4, 64), 5), (Shape(4, 4, 48), 70)],
)
def test_many_blocks_agree_with_the_twin_and_know_no_company(device, activation, shape, num_tokens, kind):
    blocks = Blocks(shape, num_tokens, [0, 1, 511, 512, 513, 1500, 2047, 2100], device, activation)
    together = blocks.attend(kind)
    assert error(together, blocks.twin(kind)) < TOLERANCE[activation]
    for slot in range(len(blocks.lengths)):
        part = slice(slot * num_tokens, (slot + 1) * num_tokens)
        assert torch.equal(blocks.attend(kind, only=slot), together[part])
    for change in ({"max_partials": 0}, {"max_partials": 50}, {"short_rows": 0}):
        assert torch.equal(blocks.attend(kind, tiling=replace(TILINGS[activation], **change)), together), change
