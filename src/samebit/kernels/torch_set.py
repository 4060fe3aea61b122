"""The kernels in plain torch: slow, exact, on any host. Also the twin that other sets are tested against.

Row-pure by construction: sums that a library may reorder go through ``exact``, everything else is elementwise or walks
a small axis in order. Knows no model.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from samebit.kernels import exact
from samebit.kernels.torch_index import accept, acknowledge, step_index
from samebit.kernels.torch_sampling import sample, top_logprobs

QUERY_BLOCK = 64


def pack_linear(weight: Tensor) -> Tensor:
    """[..., N, K] to [2, ..., N, K] float64: the high and low slices."""
    return torch.stack(exact.split(weight, exact.slice_bits(weight.shape[-1])))


def linear(x: Tensor, weight: Tensor, num_out: int, wide: bool, library: bool, threads: int) -> Tensor:
    parts = exact.split(x, exact.slice_bits(x.shape[-1]))
    return exact.dot(parts, (weight[0], weight[1])).to(torch.float32)


def rms_norm(x: Tensor, gain: Tensor, eps: float, threads: int) -> Tensor:
    width = gain.shape[0]
    wide = x.unflatten(1, (-1, width)).to(torch.float64)
    mean = exact.sum_last(wide * wide, max(1, width.bit_length())) / width
    normed: Tensor = (wide / torch.sqrt(mean + eps)).to(torch.float32) * gain
    return normed.flatten(1)


def swiglu(z: Tensor, threads: int) -> Tensor:
    gate, up = z.chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


def short_conv(
    x: Tensor,
    taps: Tensor,
    rows: Tensor,
    row_tags: Tensor,
    query_start: Tensor,
    read_rows: Tensor,
    read_tags: Tensor,
    store_rows: Tensor,
    store_tags: Tensor,
    write_rows: Tensor,
    write_tags: Tensor,
    entry_sources: Tensor,
    entry_source_tags: Tensor,
    entry_dest: Tensor,
    entry_tag: Tensor,
    residual: Tensor | None,
    threads: int,
) -> Tensor:
    y = torch.zeros_like(x)
    for part, inputs in _with_history(x, rows, query_start, read_rows):
        total = torch.zeros_like(x[part])
        for tap in range(taps.shape[0]):
            total = total + taps[tap] * inputs[tap : tap + len(total)]
        total = total + x[part]
        y[part] = total if residual is None else total + residual[part]
    _keep_inputs(
        x, rows, row_tags, query_start, read_rows, read_tags, store_rows, store_tags, write_rows, write_tags,
        entry_sources, entry_source_tags, entry_dest, entry_tag,
    )  # fmt: skip
    return y


def shift(
    x: Tensor,
    rows: Tensor,
    row_tags: Tensor,
    query_start: Tensor,
    read_rows: Tensor,
    read_tags: Tensor,
    store_rows: Tensor,
    store_tags: Tensor,
    write_rows: Tensor,
    write_tags: Tensor,
    entry_sources: Tensor,
    entry_source_tags: Tensor,
    entry_dest: Tensor,
    entry_tag: Tensor,
    threads: int,
) -> Tensor:
    y = torch.zeros_like(x)
    for part, inputs in _with_history(x, rows, query_start, read_rows):
        y[part] = inputs[read_rows.shape[1] - 1 : -1]
    _keep_inputs(
        x, rows, row_tags, query_start, read_rows, read_tags, store_rows, store_tags, write_rows, write_tags,
        entry_sources, entry_source_tags, entry_dest, entry_tag,
    )  # fmt: skip
    return y


def _with_history(x: Tensor, rows: Tensor, query_start: Tensor, read_rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The tokens of each batch row, and their inputs behind those from before the step."""
    before = rows[read_rows]
    for row, (start, end) in enumerate(itertools.pairwise(query_start.tolist())):
        yield slice(start, end), torch.cat([before[row], x[start:end]])


def _keep_inputs(
    x: Tensor,
    rows: Tensor,
    row_tags: Tensor,
    query_start: Tensor,
    read_rows: Tensor,
    read_tags: Tensor,
    store_rows: Tensor,
    store_tags: Tensor,
    write_rows: Tensor,
    write_tags: Tensor,
    entry_sources: Tensor,
    entry_source_tags: Tensor,
    entry_dest: Tensor,
    entry_tag: Tensor,
) -> None:
    """Write checkpoint entries, the rows that were read, and the step's inputs; all reads come first."""
    live = int(query_start[-1])
    before, before_tags = rows[read_rows], row_tags[read_rows]
    from_pool = entry_sources < 0
    pool_source = torch.where(from_pool, -(entry_sources + 1), 0)
    entry_values = rows[pool_source]
    entry_values[~from_pool] = x[entry_sources[~from_pool]]
    stale = torch.where(from_pool, row_tags[pool_source] ^ entry_source_tags, 0)
    entry_tags = entry_tag[:, None] ^ stale
    tokens = write_rows[:live]
    for where, values, tags in (
        (entry_dest, entry_values, entry_tags),
        (store_rows, before, store_tags ^ before_tags ^ read_tags),
        (tokens, x[:live], write_tags[:live]),
    ):
        wanted = where > 1
        rows[where[wanted]] = values[wanted]
        row_tags[where[wanted]] = tags[wanted]


def write_kv(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_tags: Tensor,
    write_slots: Tensor,
    stamp_pages: Tensor,
    stamp_tags: Tensor,
    threads: int,
) -> None:
    wanted = write_slots > 0
    slots, (_, heads, size, _) = write_slots[wanted].long(), k_pages.shape
    for pages, values in ((k_pages, k), (v_pages, v)):
        pages[slots // size, :, slots % size] = values[wanted].unflatten(1, (heads, -1))
    wanted = stamp_pages > 0
    page_tags[stamp_pages[wanted]] = stamp_tags[wanted]


def attention(
    q: Tensor,
    rel: Tensor,
    rel_proj: Tensor,
    tau: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    query_start: Tensor,
    row_start: Tensor,
    row_slots: Tensor,
    page_table: Tensor,
    longest: int,
    window: int,
    scale: float,
    threads: int,
) -> Tensor:
    q, rel = q.unflatten(1, (-1, k_pages.shape[3])), rel.unflatten(1, (-1, rel_proj.shape[0]))
    out = torch.zeros(q.shape)
    size = k_pages.shape[2]
    starts = query_start.tolist()
    bits = exact.slice_bits(rel_proj.shape[0])
    profile = exact.split(rel_proj.mT, bits)
    for row, first in enumerate(row_start.tolist()):
        pages = page_table[row_slots[row]]
        for begin in range(starts[row], starts[row + 1], QUERY_BLOCK):
            end = min(begin + QUERY_BLOCK, starts[row + 1])
            at = torch.arange(first + begin - starts[row], first + end - starts[row])
            low = max(0, int(at[0]) - window + 1) if window else 0
            keys = torch.arange(low, int(at[-1]) + 1)
            where = pages[keys // size], keys % size
            distance = at[:, None] - keys
            bias = exact.dot(exact.split(rel[begin:end].transpose(0, 1), bits), profile).to(torch.float32)
            near = distance.clamp(0, rel_proj.shape[1] - 1).expand(q.shape[1], -1, -1)
            bias = torch.where(distance < rel_proj.shape[1], bias.gather(2, near), 0.0)
            seen = (distance >= 0) & (distance < window) if window else distance >= 0
            out[begin:end] = _attend(
                q[begin:end],
                k_pages.transpose(1, 2)[where],
                v_pages.transpose(1, 2)[where],
                bias,
                tau[begin:end],
                seen,
                scale,
            ).transpose(0, 1)
    return out.flatten(1)


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    lengths: Tensor,
    row_slots: Tensor,
    page_table: Tensor,
    window: int,
    is_causal: bool,
    scale: float,
    threads: int,
) -> Tensor:
    num_blocks, (_, _, size, width) = lengths.shape[0], k_pages.shape
    blocks = [x.reshape(num_blocks, -1, x.shape[1] // width, width) for x in (q, k, v)]
    out = torch.empty(blocks[0].shape)
    place = torch.arange(blocks[0].shape[1])
    for p, length in enumerate(lengths.tolist()):
        past = torch.arange(max(0, length - window + 1) if window else 0, length)
        at, where = length + place, torch.cat([past, length + place])
        distance = at[:, None] - where
        seen = distance.abs() < window if window else torch.ones_like(distance, dtype=torch.bool)
        if is_causal:
            seen &= distance >= 0
        pages = page_table[row_slots[p]][past // size], past % size
        own_q, own_k, own_v = (block[p] for block in blocks)
        keys = torch.cat([k_pages.transpose(1, 2)[pages], own_k])
        values = torch.cat([v_pages.transpose(1, 2)[pages], own_v])
        nothing = torch.zeros(own_q.shape[1], *distance.shape)
        out[p] = _attend(own_q, keys, values, nothing, torch.ones(len(place)), seen, scale).transpose(0, 1)
    return out.reshape(q.shape)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, tau: Tensor, seen: Tensor, scale: float) -> Tensor:
    """[m, nh, hd] queries on [n, nk, hd] keys with bias [nh, m, n] and mask [m, n]; returns [nh, m, hd]."""
    group = q.shape[1] // k.shape[1]
    keys = k.transpose(0, 1).repeat_interleave(group, 0)
    values = v.transpose(0, 1).repeat_interleave(group, 0).to(torch.float64)
    bits = exact.slice_bits(q.shape[2])
    products = exact.dot(exact.split(q.transpose(0, 1), bits), exact.split(keys, bits)).to(torch.float32)
    scores = (products * scale + bias) * tau[:, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = exact.sum_last(weights, exact.MAX_KEYS_LOG2)
    # The scale of a value row moves into the weights, so that all keys of a sum share one unit.
    value_scale = exact.power_of_two_above(values)
    high, low = exact.split(values / value_scale, exact.KEY_BITS)
    scaled = exact.split(weights * value_scale.mT, exact.KEY_BITS)
    return (exact.dot(scaled, (high.mT, low.mT)) / total).to(torch.float32)


def route(
    logits: Tensor, bias: Tensor, top_k: int, num_shared: int, scale: float, threads: int
) -> tuple[Tensor, Tensor]:
    routed = bias.shape[0]
    scores = 1 / (1 + torch.exp(-logits[:, :routed])) + bias
    chosen = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :top_k]
    shared = torch.arange(routed, routed + num_shared).expand(logits.shape[0], -1)
    ids = torch.cat([chosen, shared], -1)
    raw = logits.gather(1, ids)
    log_sigmoid = raw.clamp(max=0) - torch.log1p(torch.exp(-raw.abs()))
    weights = torch.exp(log_sigmoid - log_sigmoid.amax(-1, keepdim=True))
    total = torch.zeros_like(weights[:, 0])
    for slot in range(ids.shape[1]):
        total = total + weights[:, slot]
    return ids.to(torch.int32), weights / total[:, None] * scale


def moe(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    num_tokens: Tensor,
    w13: Tensor,
    w2: Tensor,
    intermediate: int,
    threads: int,
) -> Tensor:
    live = int(num_tokens.item())
    slots = torch.zeros(live, expert_ids.shape[1], x.shape[1])
    for expert in expert_ids[:live].unique().tolist():
        token, chosen = torch.nonzero(expert_ids[:live] == expert, as_tuple=True)
        hidden = swiglu(linear(x[token], w13[:, expert], 2 * intermediate, True, False, threads), threads)
        slots[token, chosen] = linear(hidden, w2[:, expert], x.shape[1], True, False, threads)
    out = torch.zeros_like(x)
    for slot in range(expert_ids.shape[1]):
        out[:live] = out[:live] + weights[:live, slot, None] * slots[:, slot]
    return out


def embedding(ids: Tensor, table: Tensor, threads: int) -> Tensor:
    return table[ids].to(torch.float32)


IMPLEMENTATIONS: dict[str, Any] = {
    "step_index": step_index,
    "accept": accept,
    "acknowledge": acknowledge,
    "linear": linear,
    "rms_norm": rms_norm,
    "swiglu": swiglu,
    "short_conv": short_conv,
    "shift": shift,
    "write_kv": write_kv,
    "attention": attention,
    "block_attention": block_attention,
    "route": route,
    "moe": moe,
    "embedding": embedding,
    "sample": sample,
    "top_logprobs": top_logprobs,
}
