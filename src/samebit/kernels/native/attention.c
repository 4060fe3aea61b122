// Paged causal attention with a relative bias. Every sum is indexed by the absolute position of the key (blocks of VL keys
// at multiples of VL, then key by key), so decode, any chunk and prefill give a query the same bits. Scores of a tile of
// query rows are kept in full: there is no running maximum to rescale by.
#include "simd.h"

#define TOKENS 4  // query tokens per tile
#define HANDOVER_WORK 50000  // below some 5 us, handing work over costs more than it gives

typedef struct {
  const float *q, *rel, *proj, *tau, *k_pages, *v_pages;
  const int32_t *query_start, *row_start, *row_slots, *page_table;
  float *y;
  long T, B, nh, nk, hd, d_rel, extent, page, table_width, window, q_stride, rel_stride, padded;  // padded: hd in whole vectors
  float scale;
  const long *first_task;  // [B + 1]
} attn_t;

typedef struct { const float *at; long stride; } keys_t;

typedef struct {
  const attn_t *a;
  const int32_t *table;
  float *copy;                     // [VL][padded]
  long head, low, high, base, nb;  // keys low..high-1 exist for the tile; blocks start at base
} tile_t;

// Where a position's key or value of the tile's head lies; pages are [nk, page, hd], so that a head's lie together.
static const float *key_at(const tile_t *t, const float *pages, long at) {
  const attn_t *a = t->a;
  return pages + ((t->table[at / a->page] * a->nk + t->head) * a->page + at % a->page) * a->hd;
}

// VL keys from position `at`: in place where they lie in one page and fill vectors, else copied, absent ones as zeros.
static keys_t key_block(const tile_t *t, const float *pages, long at) {
  const attn_t *a = t->a;
  if (a->page % VL == 0 && a->padded == a->hd) return (keys_t){key_at(t, pages, at), a->hd};
  memset(t->copy, 0, sizeof(float) * VL * a->padded);
  for (long i = 0; i < VL; i++)
    if (at + i >= t->low && at + i < t->high)
      memcpy(t->copy + i * a->padded, key_at(t, pages, at + i), sizeof(float) * a->hd);
  return (keys_t){t->copy, a->padded};
}

// Two vectors that each hold VL / (2 n) sums of 2 n lanes become one that holds both in n lanes: the pairs (i, i + n) add.
#if VL == 16
#define FOLD8(a, b) (SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) + SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#define FOLD4(a, b) (SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) + SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31))
#define FOLD2(a, b) (SHUFFLE(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) + SHUFFLE(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31))
#define FOLD1(a, b) (SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) + SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31))
#define REVERSE(a) SHUFFLE(a, a, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)
#elif VL == 8
#define FOLD4(a, b) (SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15))
#define FOLD2(a, b) (SHUFFLE(a, b, 0, 1, 4, 5, 8, 9, 12, 13) + SHUFFLE(a, b, 2, 3, 6, 7, 10, 11, 14, 15))
#define FOLD1(a, b) (SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14) + SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15))
#define REVERSE(a) SHUFFLE(a, a, 7, 6, 5, 4, 3, 2, 1, 0)
#else
#define FOLD2(a, b) (SHUFFLE(a, b, 0, 1, 4, 5) + SHUFFLE(a, b, 2, 3, 6, 7))
#define FOLD1(a, b) (SHUFFLE(a, b, 0, 2, 4, 6) + SHUFFLE(a, b, 1, 3, 5, 7))
#define REVERSE(a) SHUFFLE(a, a, 3, 2, 1, 0)
#endif
#define FOLD_LEVEL(FOLD, n) _Pragma("GCC unroll 8") for (int i = 0; i < n; i++) s[i] = FOLD(s[2 * i], s[2 * i + 1]);

// Dot products of one query with VL keys; lane l is key l.
static V dots(const float *q, keys_t k, long padded) {
  V s[VL];
  _Pragma("GCC unroll 16") for (int i = 0; i < VL; i++) s[i] = zero();
  for (long d = 0; d < padded; d += VL) {
    V x = load(q + d);
    _Pragma("GCC unroll 16") for (int i = 0; i < VL; i++) s[i] = fma_v(x, load(k.at + i * k.stride + d), s[i]);
  }
#if VL == 16
  FOLD_LEVEL(FOLD8, 8) FOLD_LEVEL(FOLD4, 4)
#elif VL == 8
  FOLD_LEVEL(FOLD4, 4)
#endif
  FOLD_LEVEL(FOLD2, 2) FOLD_LEVEL(FOLD1, 1)
  return s[0];
}

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
static float soften(const tile_t *t, float *s, const float *profile, long position, float tau) {
  const attn_t *a = t->a;
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

// Weighted sums of values for ROWS query rows and VECS vectors of the head; low/high bound each row's keys.
#define DEFINE_MIX(NAME, ROWS, VECS)                                                                                 \
  static void NAME(const tile_t *t, const float *s, long ld, const long *low, const long *high, const float *inverse, \
                   long d, float *out) {                                                                             \
    const attn_t *a = t->a;                                                                                          \
    V c[ROWS][VECS];                                                                                                 \
    long all_low = low[0], all_high = high[0];                                                                       \
    for (int r = 0; r < ROWS; r++) {                                                                                 \
      for (int e = 0; e < VECS; e++) c[r][e] = zero();                                                               \
      all_low = low[r] > all_low ? low[r] : all_low, all_high = high[r] < all_high ? high[r] : all_high;             \
    }                                                                                                                \
    for (long b = 0; b < t->nb; b++) {                                                                               \
      long at = t->base + b * VL;                                                                                    \
      keys_t v = key_block(t, a->v_pages, at);                                                                       \
      const float *w = s + b * VL;                                                                                   \
      if (at >= all_low && at + VL <= all_high)                                                                      \
        for (long j = 0; j < VL; j++)                                                                                \
          _Pragma("GCC unroll 4") for (int e = 0; e < VECS; e++) {                                                   \
            V x = load(v.at + j * v.stride + d + e * VL);                                                            \
            _Pragma("GCC unroll 4") for (int r = 0; r < ROWS; r++) c[r][e] = fma_v(splat(w[r * ld + j]), x, c[r][e]); \
          }                                                                                                          \
      else                                                                                                           \
        _Pragma("GCC unroll 4") for (int r = 0; r < ROWS; r++) {                                                     \
          long j0 = low[r] > at ? low[r] - at : 0, j1 = high[r] - at < VL ? high[r] - at : VL;                       \
          for (long j = j0; j < j1; j++)                                                                             \
            _Pragma("GCC unroll 4") for (int e = 0; e < VECS; e++)                                                   \
              c[r][e] = fma_v(splat(w[r * ld + j]), load(v.at + j * v.stride + d + e * VL), c[r][e]);                \
        }                                                                                                            \
    }                                                                                                                \
    for (int r = 0; r < ROWS; r++)                                                                                   \
      for (int e = 0; e < VECS; e++) store(out + r * a->padded + d + e * VL, c[r][e] * splat(inverse[r]));           \
  }
DEFINE_MIX(mix_4_4, 4, 4)
DEFINE_MIX(mix_2_4, 2, 4)
DEFINE_MIX(mix_1_4, 1, 4)
DEFINE_MIX(mix_4_1, 4, 1)
DEFINE_MIX(mix_2_1, 2, 1)
DEFINE_MIX(mix_1_1, 1, 1)

static void attention_task(void *context, long index) {
  const attn_t *a = context;
  long b = 0, group = a->nh / a->nk;
  while (index >= a->first_task[b + 1]) b++;
  long within = index - a->first_task[b], offset = within / a->nk * TOKENS, t0 = a->query_start[b] + offset;
  long tokens = a->query_start[b + 1] - t0 < TOKENS ? a->query_start[b + 1] - t0 : TOKENS, rows = tokens * group;
  long position = a->row_start[b] + offset, low = a->window && position >= a->window ? position - a->window + 1 : 0;
  tile_t t = {a, a->page_table + (long)a->row_slots[b] * a->table_width, NULL, within % a->nk, low, position + tokens,
              low / VL * VL, 0};
  t.nb = (t.high - t.base + VL - 1) / VL;
  long ld = t.nb * VL, reach = t.high - low;
  float *s = scratch(0, sizeof(float) * (rows * ld + (reach + 8 * VL) + (2 * rows + VL + 4) * a->padded + rows + VL));
  float *profile = s + rows * ld, *q = profile + (reach + 8 * VL), *out = q + rows * a->padded;
  t.copy = out + rows * a->padded;
  float inverse[rows];
  long lows[rows], highs[rows];
  for (long r = 0; r < rows; r++) {
    long token = t0 + r / group, head = t.head * group + r % group;
    for (long d = a->hd; d < a->padded; d++) q[r * a->padded + d] = 0;
    memcpy(q + r * a->padded, a->q + token * a->q_stride + head * a->hd, sizeof(float) * a->hd);
  }
  for (long n = 0; n < t.nb; n++) {
    keys_t k = key_block(&t, a->k_pages, t.base + n * VL);
    for (long r = 0; r < rows; r++) store(s + r * ld + n * VL, dots(q + r * a->padded, k, a->padded));
  }
  for (long r = 0; r < rows; r++) {
    long token = t0 + r / group, head = t.head * group + r % group, at = position + r / group;
    highs[r] = at + 1, lows[r] = a->window && at >= a->window ? at - a->window + 1 : 0;
    bias_profile(a, a->rel + token * a->rel_stride + head * a->d_rel, profile, highs[r] - lows[r]);
    inverse[r] = soften(&t, s + r * ld, profile, at, a->tau[token]);
  }
  for (long r = 0, n; r < rows; r += n) {
    n = rows - r >= 4 ? 4 : rows - r >= 2 ? 2 : 1;
    for (long d = 0, wide; d < a->padded; d += wide ? 4 * VL : VL) {
      wide = a->padded - d >= 4 * VL;
      (n == 4 ? (wide ? mix_4_4 : mix_4_1) : n == 2 ? (wide ? mix_2_4 : mix_2_1) : (wide ? mix_1_4 : mix_1_1))(
          &t, s + r * ld, ld, lows + r, highs + r, inverse + r, d, out + r * a->padded);
    }
  }
  for (long r = 0; r < rows; r++)
    memcpy(a->y + ((t0 + r / group) * a->nh + t.head * group + r % group) * a->hd, out + r * a->padded, sizeof(float) * a->hd);
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
