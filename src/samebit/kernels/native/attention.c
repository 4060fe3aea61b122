// Paged causal attention with a relative bias. Every sum is indexed by the absolute position of the key (attention.h), so decode,
// any chunk and prefill give a query the same bits. Scores of a tile of query rows are kept in full: there is no running
// maximum to rescale by.
#include "attention.h"

#define TOKENS 4  // query tokens per tile

typedef struct {
  const float *q, *rel, *proj, *tau, *k_pages, *v_pages;
  const int32_t *query_start, *row_start, *row_slots, *page_table;
  float *y;
  long T, B, nh, nk, hd, d_rel, extent, page, table_width, window, q_stride, rel_stride, padded;  // padded: hd in whole vectors
  float scale;
  const long *first_task;  // [B + 1]
} attn_t;

// profile[VL + d] = rel . proj[:, d] for the distances that occur (at most `reach`), zeros around them.
static void bias_profile(const attn_t *a, const float *rel, float *profile, long reach) {
  long need = reach < a->extent ? reach : a->extent;
  store(profile, zero());
  long d = 0;
  for (; d + 4 * VL <= need; d += 4 * VL) {
    V s[4] = {zero(), zero(), zero(), zero()};
    for (long r = 0; r < a->d_rel; r++) {
      V x = splat(rel[r]);
      _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) s[i] = fma_v(x, load(a->proj + r * a->extent + d + i * VL), s[i]);
    }
    for (int i = 0; i < 4; i++) store(profile + VL + d + i * VL, s[i]);
  }
  for (; d < need; d += VL) {
    V s = zero();
    for (long r = 0; r < a->d_rel; r++) s = fma_v(splat(rel[r]), load_n(a->proj + r * a->extent + d, a->extent - d), s);
    store(profile + VL + d, s);
  }
  store(profile + VL + d, zero());
}

// Raw dots of one query row become weights, in place; returns one over their sum.
static float soften(const attn_t *a, const span_t *t, float *s, const float *profile, long position, float tau) {
  const V lowest = splat(-3e38f);
  V biggest = lowest, total = zero();
  for (long b = 0; b < t->nb; b++) {
    long d0 = position - t->base - b * VL;  // distance of lane 0
    VI distance = splat_int((int)d0) - lanes();
    VI seen = distance >= 0;
    if (a->window) seen &= distance < splat_int((int)a->window);
    V x = load(s + b * VL) * splat(a->scale);
    if (d0 >= 0 && d0 - (VL - 1) < a->extent) x = x + REVERSE(load(profile + d0 + 1));
    x = choose(seen, x * splat(tau), lowest);
    store(s + b * VL, x);
    biggest = choose(biggest > x, biggest, x);
  }
  V top = splat(max_lanes(biggest));
  for (long b = 0; b < t->nb; b++) {
    V x = load(s + b * VL);
    x = choose(x == lowest, zero(), exp_v(x - top));
    store(s + b * VL, x);
    total = total + x;
  }
  return 1.0f / sum_lanes(total);
}

static void attention_task(void *context, long index) {
  const attn_t *a = context;
  long b = 0, group = a->nh / a->nk;
  while (index >= a->first_task[b + 1]) b++;
  long within = index - a->first_task[b], offset = within / a->nk * TOKENS, t0 = a->query_start[b] + offset;
  long tokens = a->query_start[b + 1] - t0 < TOKENS ? a->query_start[b + 1] - t0 : TOKENS, rows = tokens * group;
  long position = a->row_start[b] + offset, low = a->window && position >= a->window ? position - a->window + 1 : 0;
  span_t t = {a->page_table + (long)a->row_slots[b] * a->table_width, a->page, a->nk, a->hd, a->padded, within % a->nk};
  t = span_between(t, low, position + tokens);
  long ld = t.nb * VL, reach = t.high - low;
  float *s = scratch(0, sizeof(float) * (rows * ld + (reach + 8 * VL) + (2 * rows + VL + 4) * a->padded + rows + VL));
  float *profile = s + rows * ld, *q = profile + (reach + 8 * VL), *out = q + rows * a->padded;
  t.copy = out + rows * a->padded;
  float inverse[rows];
  long lows[rows], highs[rows];
  for (long r = 0; r < rows; r++) {
    long token = t0 + r / group, head = t.head * group + r % group;
    pad_row(q + r * a->padded, a->q + token * a->q_stride + head * a->hd, a->hd, a->padded);
  }
  memset(out, 0, sizeof(float) * rows * a->padded);
  score(&t, a->k_pages, q, rows, s, ld);
  for (long r = 0; r < rows; r++) {
    long token = t0 + r / group, head = t.head * group + r % group, at = position + r / group;
    highs[r] = at + 1, lows[r] = a->window && at >= a->window ? at - a->window + 1 : 0;
    bias_profile(a, a->rel + token * a->rel_stride + head * a->d_rel, profile, highs[r] - lows[r]);
    inverse[r] = soften(a, &t, s + r * ld, profile, at, a->tau[token]);
  }
  mix(&t, a->v_pages, s, ld, lows, highs, rows, out);
  for (long r = 0; r < rows; r++)
    unpad_scaled(a->y + ((t0 + r / group) * a->nh + t.head * group + r % group) * a->hd, out + r * a->padded, inverse[r], a->hd,
                 a->padded);
}

void attention(const float *q, const float *rel, const float *proj, const float *tau, const float *k_pages,
               const float *v_pages, const int32_t *query_start, const int32_t *row_start, const int32_t *row_slots,
               const int32_t *page_table, float *y, long T, long B, long nh, long nk, long hd, long d_rel, long extent,
               long page, long table_width, long window, long q_stride, long rel_stride, double scale, long threads) {
  launches++;
  long *first_task = scratch(1, sizeof(long) * (B + 1)), work = 0;
  first_task[0] = 0;
  for (long b = 0; b < B; b++) {
    long n = query_start[b + 1] - query_start[b], keys = row_start[b] + n;
    first_task[b + 1] = first_task[b] + (n + TOKENS - 1) / TOKENS * nk;
    work += n * nh * hd * (window && keys > window ? window : keys);
  }
  long live = query_start[B];
  memset(y + live * nh * hd, 0, sizeof(float) * (T - live) * nh * hd);
  attn_t a = {q, rel, proj, tau, k_pages, v_pages, query_start, row_start, row_slots, page_table, y, T, B, nh, nk, hd,
              d_rel, extent, page, table_width, window, q_stride, rel_stride, (hd + VL - 1) / VL * VL, (float)scale, first_task};
  pool_run(attention_task, &a, first_task[B], work < HANDOVER_WORK ? 1 : (int)threads);
}
