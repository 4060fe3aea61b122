// Dot products with keys and weighted sums of values of one head in pages, shared by attention.c and block.c. Every sum is indexed
// by the absolute position of the key: blocks of VL keys at multiples of VL, then key by key.
#ifndef SAMEBIT_ATTENTION_H
#define SAMEBIT_ATTENTION_H
#include "simd.h"

#define HANDOVER_WORK 50000  // below some 5 us, handing work over costs more than it gives

typedef struct { const float *at; long stride; } keys_t;

typedef struct {
  const int32_t *table;              // page of each absolute page index
  long page, nk, hd, padded, head;   // pages are [nk, page, hd], so that a head's keys lie together; padded: hd in whole vectors
  long low, high, base, nb;          // keys low..high-1 exist; nb blocks start at base
  float *copy;                       // [VL][padded]
} span_t;

// Blocks that hold the keys low..high-1.
static inline span_t span_between(span_t of, long low, long high) {
  of.low = low, of.high = high, of.base = low / VL * VL, of.nb = high > low ? (high - of.base + VL - 1) / VL : 0;
  return of;
}

// Where a position's key or value lies.
static inline const float *key_at(const span_t *t, const float *pages, long at) {
  return pages + ((t->table[at / t->page] * t->nk + t->head) * t->page + at % t->page) * t->hd;
}

// VL keys from position `at`: in place where they lie in one page and fill vectors, else copied, absent ones as zeros.
static inline keys_t key_block(const span_t *t, const float *pages, long at) {
  if (t->page % VL == 0 && t->padded == t->hd) return (keys_t){key_at(t, pages, at), t->hd};
  memset(t->copy, 0, sizeof(float) * VL * t->padded);
  for (long i = 0; i < VL; i++)
    if (at + i >= t->low && at + i < t->high)
      memcpy(t->copy + i * t->padded, key_at(t, pages, at + i), sizeof(float) * t->hd);
  return (keys_t){t->copy, t->padded};
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
static inline V dots(const float *q, keys_t k, long padded) {
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

// Adds weighted sums of values to `out` for ROWS query rows and VECS vectors of the head; low/high bound each row's keys.
#define DEFINE_MIX(NAME, ROWS, VECS)                                                                                 \
  static inline void NAME(const span_t *t, const float *v_pages, const float *s, long ld, const long *low, const long *high, \
                          long d, float *out) {                                                                      \
    V c[ROWS][VECS];                                                                                                 \
    long all_low = low[0], all_high = high[0];                                                                       \
    for (int r = 0; r < ROWS; r++) {                                                                                 \
      for (int e = 0; e < VECS; e++) c[r][e] = load(out + r * t->padded + d + e * VL);                               \
      all_low = low[r] > all_low ? low[r] : all_low, all_high = high[r] < all_high ? high[r] : all_high;             \
    }                                                                                                                \
    for (long b = 0; b < t->nb; b++) {                                                                               \
      long at = t->base + b * VL;                                                                                    \
      keys_t v = key_block(t, v_pages, at);                                                                          \
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
      for (int e = 0; e < VECS; e++) store(out + r * t->padded + d + e * VL, c[r][e]);                                 \
  }
DEFINE_MIX(mix_4_4, 4, 4)
DEFINE_MIX(mix_2_4, 2, 4)
DEFINE_MIX(mix_1_4, 1, 4)
DEFINE_MIX(mix_4_1, 4, 1)
DEFINE_MIX(mix_2_1, 2, 1)
DEFINE_MIX(mix_1_1, 1, 1)

// Adds the weighted sums of the values of all keys to out [rows][padded]; weights s [rows][ld] begin with the first block.
static inline void mix(const span_t *t, const float *v_pages, const float *s, long ld, const long *low, const long *high, long rows,
                       float *out) {
  for (long r = 0, n; r < rows; r += n) {
    n = rows - r >= 4 ? 4 : rows - r >= 2 ? 2 : 1;
    for (long d = 0, wide; d < t->padded; d += wide ? 4 * VL : VL) {
      wide = t->padded - d >= 4 * VL;
      (n == 4 ? (wide ? mix_4_4 : mix_4_1) : n == 2 ? (wide ? mix_2_4 : mix_2_1) : (wide ? mix_1_4 : mix_1_1))(
          t, v_pages, s + r * ld, ld, low + r, high + r, d, out + r * t->padded);
    }
  }
}

// Raw dots of `rows` queries q [rows][padded] with all keys, to s [rows][ld].
static inline void score(const span_t *t, const float *k_pages, const float *q, long rows, float *s, long ld) {
  for (long n = 0; n < t->nb; n++) {
    keys_t k = key_block(t, k_pages, t->base + n * VL);
    for (long r = 0; r < rows; r++) store(s + r * ld + n * VL, dots(q + r * t->padded, k, t->padded));
  }
}

// Columns of a head from and to a row that has `hd` of `padded`.
static inline void pad_row(float *to, const float *from, long hd, long padded) {
  memcpy(to, from, sizeof(float) * hd);
  for (long d = hd; d < padded; d++) to[d] = 0;
}
static inline void unpad_scaled(float *to, float *from, float scale, long hd, long padded) {
  for (long d = 0; d < padded; d += VL) store(from + d, load(from + d) * splat(scale));
  memcpy(to, from, sizeof(float) * hd);
}
#endif
