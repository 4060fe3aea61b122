"""Cases of paged attention on a device, and how far results may be from the twin's."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from samebit.kernels import torch_set
from samebit.kernels.triton.attention import TILINGS, Rows, Tiling, attend
from tests.kernels.cases import PagedCache, normal

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
"""Of the largest value of a row: two roundings to bf16, or a few hundred to fp32."""
TINY = Tiling(block_n=16, chunk=32, window_chunk=16, short_rows=12, split_above=0, long_block_m=32)
"""So small that a few dozen keys make several chunks, and a few tokens a long row."""


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    width: int
    d_rel: int = 4
    extent: int = 32
    page: int = 16


class Case:
    """Batch rows (first position, tokens), one a slot, and padding tokens of NaN; operands are rounded to ``dtype``."""

    def __init__(
        self,
        shape: Shape,
        rows: list[tuple[int, int]],
        device: torch.device,
        dtype: torch.dtype,
        *,
        padding: int = 0,
        seed: int = 0,
    ) -> None:
        self.rows, self.device, self.dtype = rows, device, dtype
        self.tokens = sum(count for _, count in rows)
        self.cache = PagedCache(
            [first + count + 1 for first, count in rows], shape.page, shape.kv_heads, shape.width, seed
        )
        num_tokens = self.tokens + padding
        q = normal(seed + 1000, num_tokens, shape.heads * shape.width)
        rel = normal(seed + 1001, num_tokens, shape.heads * shape.d_rel)
        tau = torch.linspace(0.5, 1.5, num_tokens)
        for x in (q, rel, tau):
            x[self.tokens :] = torch.nan
        self.q, self.rel, self.tau = q.to(device, dtype), rel.to(device, dtype), tau.to(device)
        self.rel_proj = normal(seed + 1002, shape.d_rel, shape.extent).to(device, dtype)
        self.k_pages, self.v_pages = (x.to(device, dtype) for x in (self.cache.k_pages, self.cache.v_pages))
        self.table = self.cache.table.to(device)

    def attend(
        self,
        window: int,
        *,
        tiling: Tiling | None = None,
        rows: list[tuple[int, int, int]] | None = None,
        part: slice = slice(None),
    ) -> Tensor:
        """The attention of all batch rows, or of ``rows`` (slot, first position, tokens) with the tokens ``part``."""
        return self.prepared(window, tiling=tiling, rows=rows, part=part)()

    def prepared(
        self,
        window: int,
        *,
        tiling: Tiling | None = None,
        rows: list[tuple[int, int, int]] | None = None,
        part: slice = slice(None),
    ) -> Callable[[], Tensor]:
        """What gives the attention, with all that it takes on the device."""
        ix = self.cache.index(rows or [(slot, *row) for slot, row in enumerate(self.rows)])
        starts = (x.to(self.device) for x in (ix.query_start, ix.row_start, ix.row_slots))
        q = self.q[part]
        return partial(
            attend, q, self.rel[part], self.rel_proj, self.tau[part], self.k_pages, self.v_pages,
            Rows(*starts, self.table, ix.longest, 0, True, q, q), window, 0.2, tiling or TILINGS[self.dtype],
        )  # fmt: skip

    def twin(self, window: int) -> Tensor:
        ix = self.cache.index([(slot, *row) for slot, row in enumerate(self.rows)])
        operands = [x.float().cpu() for x in (self.q, self.rel, self.rel_proj, self.tau, self.k_pages, self.v_pages)]
        return torch_set.attention(
            *operands, ix.query_start, ix.row_start, ix.row_slots, ix.page_table, ix.longest, window, 0.2, 1
        )


def error(found: Tensor, wanted: Tensor) -> float:
    """The largest difference of a row, relative to its largest value."""
    difference = (found.float().cpu() - wanted).abs().amax(1)
    assert not difference.isnan().any()
    return float((difference / wanted.abs().amax(1).clamp(min=1e-30)).max())
