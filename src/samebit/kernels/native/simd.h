// Vectors of VL floats for one instruction set, with explicit fused multiply-adds and our own exp and log.
// Everything is elementwise or reduces in a fixed tree, so a lane's bits never depend on its neighbours. The build passes
// -ffp-contract=off: the compiler may not choose where to fuse.
#ifndef SAMEBIT_SIMD_H
#define SAMEBIT_SIMD_H
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define VL 16
#define NV 4   // vectors per weight panel: 6 rows x 4 vectors of sums fill 24 of 32 registers
#define SPREAD(f) f, f, f, f, f, f, f, f, f, f, f, f, f, f, f, f
#elif defined(__AVX2__) && defined(__FMA__)
#define VL 8
#define NV 2
#define SPREAD(f) f, f, f, f, f, f, f, f
#else
#define VL 4
#define NV 2
#define SPREAD(f) f, f, f, f
#endif
#define PANEL (VL * NV)

typedef float V __attribute__((vector_size(4 * VL)));
typedef int32_t VI __attribute__((vector_size(4 * VL)));
typedef uint32_t VU __attribute__((vector_size(4 * VL)));
typedef uint16_t VH __attribute__((vector_size(2 * VL)));

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (VI){__VA_ARGS__})
#endif

static inline V splat(float f) { return (V){SPREAD(f)}; }
static inline VI splat_int(int32_t i) { return (VI){SPREAD(i)}; }
static inline V zero(void) { return (V){0}; }
static inline V load(const float *p) { V v; memcpy(&v, p, sizeof v); return v; }
static inline void store(float *p, V v) { memcpy(p, &v, sizeof v); }
static inline V load_part(const float *p, long n) {
  V v = {0};
  for (int i = 0; i < VL; i++) if (i < n) v[i] = p[i];
  return v;
}
static inline void store_part(float *p, V v, long n) {
  for (int i = 0; i < VL; i++) if (i < n) p[i] = v[i];
}
static inline V load_n(const float *p, long n) { return n >= VL ? load(p) : load_part(p, n); }
static inline void store_n(float *p, V v, long n) { if (n >= VL) store(p, v); else store_part(p, v, n); }
#define LINE 64  // bytes of a cache line
static inline void prefetch(const void *p) { __builtin_prefetch(p, 0, 2); }
static inline V load_bf16(const uint16_t *p) {
  VH h;
  memcpy(&h, p, sizeof h);
  return (V)(__builtin_convertvector(h, VU) << 16);
}
static inline V fma_v(V a, V b, V c) {
#if VL == 16
  return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VL == 8
  return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (V)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
static inline V choose(VI mask, V a, V b) { return (V)(((VI)a & mask) | ((VI)b & ~mask)); }
static inline V larger(V a, V b) { return choose(a > b, a, b); }
static inline VI lanes(void) {
  VI v;
  for (int i = 0; i < VL; i++) v[i] = i;
  return v;
}

static inline float sum_lanes(V v) {
  float a[VL];
  store(a, v);
  for (int half = VL / 2; half; half /= 2)
    for (int i = 0; i < half; i++) a[i] += a[i + half];
  return a[0];
}
static inline float max_lanes(V v) {
  float m = v[0];
  for (int i = 1; i < VL; i++) m = v[i] > m ? v[i] : m;
  return m;
}

// exp(x) = 2^n exp(r), |r| <= ln(2)/2, exp(r) by its Taylor series to r^7 (the rest is below 6e-9). Inputs below -87 count
// as -87, above 88 as 88; NaN stays NaN because both comparisons are false for it.
static inline V exp_v(V x) {
  const V magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  x = choose(x < splat(-87.0f), splat(-87.0f), x);
  x = choose(x > splat(88.0f), splat(88.0f), x);
  V shifted = x * splat(1.44269504f) + magic, n = shifted - magic;
  VI e = (VI)shifted - (VI)magic;
  V r = fma_v(n, splat(2.12194440e-4f), fma_v(n, splat(-0.693359375f), x));
  V p = splat(1.0f / 5040);
  p = fma_v(p, r, splat(1.0f / 720));
  p = fma_v(p, r, splat(1.0f / 120));
  p = fma_v(p, r, splat(1.0f / 24));
  p = fma_v(p, r, splat(1.0f / 6));
  p = fma_v(p, r, splat(0.5f));
  p = fma_v(p, r, splat(1.0f));
  p = fma_v(p, r, splat(1.0f));
  return p * (V)((e + 127) << 23);
}

// log(x) of a normal x > 0: x = 2^e m with m in [sqrt(1/2), sqrt(2)), log(m) = 2 atanh((m - 1) / (m + 1)).
static inline V log_v(V x) {
  VI bits = (VI)x, e = (bits - 0x3f3504f3) >> 23;
  V m = (V)(bits - (e << 23)), n = __builtin_convertvector(e, V);
  V s = (m - splat(1.0f)) / (m + splat(1.0f)), q = s * s;
  V p = splat(2.0f / 11);
  p = fma_v(p, q, splat(2.0f / 9));
  p = fma_v(p, q, splat(2.0f / 7));
  p = fma_v(p, q, splat(2.0f / 5));
  p = fma_v(p, q, splat(2.0f / 3));
  p = fma_v(p * q, s, s + s);
  return fma_v(n, splat(0.693359375f), fma_v(n, splat(-2.12194440e-4f), p));
}
static inline float exp_one(float x) { return exp_v(splat(x))[0]; }
static inline float log_one(float x) { return log_v(splat(x))[0]; }
static inline V silu_times(V gate, V up) { return gate / (splat(1.0f) + exp_v(-gate)) * up; }

// Threads (pool.c): run task(context, i) for every i < count on at most `threads` threads; tasks write disjoint memory.
typedef void (*task_t)(void *context, long index);
extern _Thread_local long launches;  // kernels that this thread has launched; every exported kernel adds one
void pool_run(task_t task, void *context, long count, int threads);
void *scratch(int which, size_t bytes);  // this thread's buffer number 0..3, 64-byte aligned, contents arbitrary

// Products (linear.c), also used by experts (moe.c).
void rows_times_panels(const float *const *x, float *const *y, long rows, const char *w, int bf16, long N, long K, long first,
                       long last);
#endif
