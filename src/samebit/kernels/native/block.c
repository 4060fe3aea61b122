// Attention of blocks of guesses: a block's rows see the pages before it, and one another's keys, which never enter a page. The
// former are summed first, by absolute position, then the latter by their place in the block (attention.h).
#include "attention.h"

#define ROWS 4  // block rows per tile

typedef struct {
  const float *q, *k, *v, *k_pages, *v_pages;
  const int32_t *lengths, *row_slots, *page_table;
  float *y;
  long B, nh, nk, hd, page, table_width, window, causal, q_stride, k_stride, v_stride, padded, tiles;
  float scale;
} block_t;

// Raw dots become scaled scores where keys low..high-1 are seen, `lowest` elsewhere.
static V bound_scores(const span_t *t, float *s, long low, long high, float scale, V biggest, V lowest) {
  for (long b = 0; b < t->nb; b++) {
    VI at = splat_int((int)(t->base + b * VL)) + lanes();
    VI seen = (at >= splat_int((int)low)) & (at < splat_int((int)high));
    V x = choose(seen, load(s + b * VL) * splat(scale), lowest);
    store(s + b * VL, x);
    biggest = choose(biggest > x, biggest, x);
  }
  return biggest;
}

static V weigh(const span_t *t, float *s, V top, V lowest, V total) {
  for (long b = 0; b < t->nb; b++) {
    V x = load(s + b * VL);
    x = choose(x == lowest, zero(), exp_v(x - top));
    store(s + b * VL, x);
    total = total + x;
  }
  return total;
}

static void block_task(void *context, long index) {
  const block_t *a = context;
  long p = index / (a->nk * a->tiles), head = index / a->tiles % a->nk, first = index % a->tiles * ROWS;
  long count = a->B - first < ROWS ? a->B - first : ROWS, group = a->nh / a->nk, rows = count * group;
  long n = a->lengths[p], reach = a->window ? a->window - 1 : n + a->B, lowest_key = n + first - reach;
  span_t past = {a->page_table + (long)a->row_slots[p] * a->table_width, a->page, a->nk, a->hd, a->padded, head};
  past = span_between(past, lowest_key < 0 ? 0 : lowest_key < n ? lowest_key : n, n);
  const int32_t only_page = 0;
  // The block's own keys and values of this head as one page of their own.
  span_t own = {&only_page, (a->B + VL - 1) / VL * VL, 1, a->padded, a->padded, 0};
  own = span_between(own, 0, a->B);
  long ld = (past.nb + own.nb) * VL, own_size = own.page * a->padded;
  float *s = scratch(0, sizeof(float) * (rows * ld + 2 * own_size + (2 * rows + VL) * a->padded));
  float *k = s + rows * ld, *v = k + own_size, *q = v + own_size, *out = q + rows * a->padded;
  past.copy = out + rows * a->padded;
  long past_low[rows], past_high[rows], own_low[rows], own_high[rows];
  float inverse[rows];
  memset(k, 0, sizeof(float) * 2 * own_size);
  memset(out, 0, sizeof(float) * rows * a->padded);
  for (long o = 0; o < a->B; o++) {
    pad_row(k + o * a->padded, a->k + (p * a->B + o) * a->k_stride + head * a->hd, a->hd, a->padded);
    pad_row(v + o * a->padded, a->v + (p * a->B + o) * a->v_stride + head * a->hd, a->hd, a->padded);
  }
  for (long r = 0; r < rows; r++)
    pad_row(q + r * a->padded, a->q + (p * a->B + first + r / group) * a->q_stride + (head * group + r % group) * a->hd, a->hd,
            a->padded);
  score(&past, a->k_pages, q, rows, s, ld);
  score(&own, k, q, rows, s + past.nb * VL, ld);
  const V lowest = splat(-3e38f);
  for (long r = 0; r < rows; r++) {
    long o = first + r / group, low = n + o - reach;
    past_low[r] = low < 0 ? 0 : low < n ? low : n, past_high[r] = n;
    own_low[r] = o - reach < 0 ? 0 : o - reach;
    own_high[r] = a->causal ? o + 1 : o + reach + 1 < a->B ? o + reach + 1 : a->B;
    float *mine = s + r * ld, *own_part = mine + past.nb * VL;
    V top = bound_scores(&past, mine, past_low[r], n, a->scale, lowest, lowest);
    top = splat(max_lanes(bound_scores(&own, own_part, own_low[r], own_high[r], a->scale, top, lowest)));
    inverse[r] = 1.0f / sum_lanes(weigh(&own, own_part, top, lowest, weigh(&past, mine, top, lowest, zero())));
  }
  mix(&past, a->v_pages, s, ld, past_low, past_high, rows, out);
  mix(&own, v, s + past.nb * VL, ld, own_low, own_high, rows, out);
  for (long r = 0; r < rows; r++)
    unpad_scaled(a->y + ((p * a->B + first + r / group) * a->nh + head * group + r % group) * a->hd, out + r * a->padded, inverse[r],
                 a->hd, a->padded);
}

void block_attention(const float *q, const float *k, const float *v, const float *k_pages, const float *v_pages,
                     const int32_t *lengths, const int32_t *row_slots, const int32_t *page_table, float *y, long P, long B, long nh,
                     long nk, long hd, long page, long table_width, long window, long causal, long q_stride, long k_stride,
                     long v_stride, double scale, long threads) {
  launches++;
  long work = 0, tiles = (B + ROWS - 1) / ROWS;
  for (long p = 0; p < P; p++) work += B * nh * hd * (B + (window && lengths[p] > window ? window : lengths[p]));
  block_t a = {q, k, v, k_pages, v_pages, lengths, row_slots, page_table, y, B, nh, nk, hd, page, table_width, window, causal,
               q_stride, k_stride, v_stride, (hd + VL - 1) / VL * VL, tiles, (float)scale};
  pool_run(block_task, &a, P * nk * tiles, work < HANDOVER_WORK ? 1 : (int)threads);
}
