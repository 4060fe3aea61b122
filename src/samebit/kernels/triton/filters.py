"""The filters of sampling as one number per row: the place of the last token they keep. Knows nothing of noise.

A token's place is an int64 that orders a row by descending value, ties to the lower id, so that every filter keeps the
tokens down to some place. Places are found by counting, or adding up mass, above thresholds: nothing is sorted. Mass is
a multiple of 2^-42 of the likeliest token's, added as integers: no order of summation, block or thread changes a bit.
"""

import triton
import triton.language as tl

WAYS = tl.constexpr(8)
"""Thresholds that one walk over a row tries."""
LOWEST = tl.constexpr(-(2**63))
"""Below every token's place."""
UNITS = tl.constexpr(2.0**42)
"""Mass of the likeliest token: 2^20 such tokens still stay below 2^63."""
MAX_VOCAB = 2**20


@triton.jit
def image(x):
    """An int32 in the order of fp32 values; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def value(key):
    """The fp32 value with this image."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def place(x, ids, V: tl.constexpr):
    """The place of tokens ``ids`` with values ``x``; LOWEST outside the vocabulary."""
    return tl.where(ids < V, (image(x).to(tl.int64) << 32) | (V - 1 - ids).to(tl.int64), LOWEST)


@triton.jit
def token_at(place, V: tl.constexpr):
    """The token at a place that is not LOWEST."""
    return V - 1 - place.to(tl.int32)


@triton.jit
def load_row(row, ids, V: tl.constexpr):
    """A row's logits; -inf outside the vocabulary."""
    return tl.load(row + ids, mask=ids < V, other=-float("inf"))


@triton.jit
def load_scaled(row, ids, heat, V: tl.constexpr):
    """A row's logits divided by its temperature."""
    return tl.div_rn(load_row(row, ids, V), heat)


@triton.jit
def likelihood(x, top):
    """exp(x - top) in fp64, for infinities too."""
    return tl.exp(tl.where(x == top, 0.0, x - top).to(tl.float64))


@triton.jit
def mass(x, top):
    """The likelihood in integers."""
    return (likelihood(x, top) * UNITS + 0.5).to(tl.int64)


@triton.jit
def _above(row, heat, top, bounds, BY_MASS: tl.constexpr, V: tl.constexpr, NARROW: tl.constexpr):
    """How many tokens, or how much mass, have an image above each of the int32 ``bounds`` [WAYS]: int64 [WAYS]."""
    sums = tl.zeros([WAYS, NARROW], tl.int64 if BY_MASS else tl.int32)
    for start in tl.range(0, V, NARROW, num_stages=3):
        ids = start + tl.arange(0, NARROW)
        x = load_scaled(row, ids, heat, V)
        is_above = (image(x)[None, :] > bounds[:, None]) & (ids < V)[None, :]
        if BY_MASS:
            sums += tl.where(is_above, mass(x, top)[None, :], 0)
        else:
            sums += is_above.to(tl.int32)
    return tl.sum(sums, 1).to(tl.int64)


@triton.jit
def _threshold(row, heat, top, low, limit, BY_MASS: tl.constexpr, V: tl.constexpr, NARROW: tl.constexpr):
    """The smallest image from ``low`` on with less than ``limit`` above it, at most that of ``top``; and what is above it."""
    low = low.to(tl.int64)
    high = image(top).to(tl.int64)
    ways = tl.arange(0, WAYS).to(tl.int64)
    while low < high:
        step = (high - low + (WAYS - 1)) // WAYS
        bounds = tl.minimum(low + ways * step, high).to(tl.int32)
        enough = _above(row, heat, top, bounds, BY_MASS, V, NARROW) >= limit
        too_low = tl.sum(enough.to(tl.int64))
        high = tl.minimum(low + too_low * step, high)
        low = tl.where(too_low == 0, low, low + (too_low - 1) * step + 1)
    found = high.to(tl.int32)
    bounds = found + tl.zeros([WAYS], tl.int32)
    return found, tl.max(_above(row, heat, top, bounds, BY_MASS, V, NARROW))


@triton.jit
def _nth(row, heat, key, count, V: tl.constexpr, BLOCK: tl.constexpr):
    """The place of the ``count``-th token with image ``key``, of the last one if they are fewer; above all if 0."""
    seen = tl.zeros([], tl.int32)
    last = tl.full([], -1, tl.int32)
    for start in tl.range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        is_tied = (image(load_scaled(row, ids, heat, V)) == key) & (ids < V)
        number = seen + tl.cumsum(is_tied.to(tl.int32), 0)
        last = tl.maximum(last, tl.max(tl.where(is_tied & (number <= count), ids, -1)))
        seen += tl.sum(is_tied.to(tl.int32))
    return place(value(key), last, V)


@triton.jit
def _mass_down_to(row, heat, top, last, V: tl.constexpr, BLOCK: tl.constexpr):
    """The mass of the tokens down to a place."""
    sums = tl.zeros([BLOCK], tl.int64)
    for start in tl.range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = load_scaled(row, ids, heat, V)
        sums += tl.where(place(x, ids, V) >= last, mass(x, top), 0)
    return tl.sum(sums)


@triton.jit
def _last_likely(row, heat, top, least, V: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest place of the tokens whose fp32 likelihood is at least ``least``, at most 1."""
    last = tl.full([BLOCK], 2**63 - 1, tl.int64)
    for start in tl.range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = load_scaled(row, ids, heat, V)
        is_likely = (likelihood(x, top).to(tl.float32) >= least) & (ids < V)
        last = tl.minimum(last, tl.where(is_likely, place(x, ids, V), 2**63 - 1))
    return tl.min(last)


@triton.jit
def last_kept(row, heat, top, top_k, top_p, min_p, V: tl.constexpr, BLOCK: tl.constexpr, NARROW: tl.constexpr):
    """The place down to which a row's settings keep its tokens; ``top`` is the largest scaled logit.

    Rows are walked in BLOCK columns, in NARROW ones where WAYS thresholds are tried at once.
    """
    last = tl.full([], LOWEST + 1, tl.int64)
    if (top_k > 0) & (top_k < V):
        key, ahead = _threshold(row, heat, top, last >> 32, top_k.to(tl.int64), False, V, NARROW)
        last = _nth(row, heat, key, top_k - ahead, V, BLOCK)
    if top_p < 1:
        total = _mass_down_to(row, heat, top, last, V, BLOCK)
        needed = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
        # Above a threshold that is not below top-k's, everything is kept by top-k.
        key, ahead = _threshold(row, heat, top, last >> 32, needed, True, V, NARROW)
        each = tl.maximum(mass(value(key), top), 1)
        last = tl.maximum(last, _nth(row, heat, key, (needed - ahead + each - 1) // each, V, BLOCK))
    if min_p > 0:
        last = tl.maximum(last, _last_likely(row, heat, top, min_p, V, BLOCK))
    return tl.minimum(last, _nth(row, heat, image(top), 1, V, BLOCK))
