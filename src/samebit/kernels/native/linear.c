// y[M, N] = x[M, K] w[N, K]^T. Every output is one fused chain over K within blocks of 256, and the block sums are added in
// order: neither the number of rows, nor a row's place, nor the threads (which split panels and rows) can change its bits.
// Weights lie in panels of PANEL columns, [N / PANEL][K][PANEL], fp32 or bf16 (widened in registers, which is exact). While
// a block is used, the next one, which lies behind it, is fetched.
#include "simd.h"

#define K_BLOCK 256
#define MAX_ROWS 6
#define ROW_CHUNK 48
#define HANDOVER_WORK 100000  // below some 5 us, handing work over costs more than it gives

long panel_columns(void) { return PANEL; }

#define DEFINE_BLOCK(NAME, ROWS, TYPE, LOAD)                                                                         \
  static void NAME(const float *const *x, float *const *y, const void *weights, long k0, long count, long column,    \
                   long columns) {                                                                                   \
    const TYPE *w = weights;                                                                                         \
    V sums[ROWS][NV];                                                                                                \
    for (int i = 0; i < ROWS; i++)                                                                                   \
      for (int j = 0; j < NV; j++) sums[i][j] = zero();                                                              \
    const float *a[ROWS];                                                                                            \
    for (int i = 0; i < ROWS; i++) a[i] = x[i] + k0;                                                                 \
    for (long k = 0; k < count; k++, w += PANEL) {                                                                   \
      V b[NV];                                                                                                       \
      for (long l = 0; l < PANEL * (long)sizeof(TYPE); l += LINE) prefetch((const char *)(w + count * PANEL) + l);   \
      for (int j = 0; j < NV; j++) b[j] = LOAD(w + j * VL);                                                          \
      _Pragma("GCC unroll 6") for (int i = 0; i < ROWS; i++) {                                                       \
        V s = splat(a[i][k]);                                                                                        \
        _Pragma("GCC unroll 4") for (int j = 0; j < NV; j++) sums[i][j] = fma_v(s, b[j], sums[i][j]);                \
      }                                                                                                              \
    }                                                                                                                \
    for (int i = 0; i < ROWS; i++)                                                                                   \
      for (int j = 0; j < NV && j * VL < columns; j++) {                                                             \
        float *to = y[i] + column + j * VL;                                                                          \
        long left = columns - j * VL;                                                                                \
        store_n(to, k0 ? load_n(to, left) + sums[i][j] : sums[i][j], left);                                          \
      }                                                                                                              \
  }
#define DEFINE_BLOCKS(SUFFIX, TYPE, LOAD)                                                                            \
  DEFINE_BLOCK(block1_##SUFFIX, 1, TYPE, LOAD)                                                                       \
  DEFINE_BLOCK(block2_##SUFFIX, 2, TYPE, LOAD)                                                                       \
  DEFINE_BLOCK(block3_##SUFFIX, 3, TYPE, LOAD)                                                                       \
  DEFINE_BLOCK(block4_##SUFFIX, 4, TYPE, LOAD)                                                                       \
  DEFINE_BLOCK(block5_##SUFFIX, 5, TYPE, LOAD)                                                                       \
  DEFINE_BLOCK(block6_##SUFFIX, 6, TYPE, LOAD)
DEFINE_BLOCKS(f32, float, load)
DEFINE_BLOCKS(bf16, uint16_t, load_bf16)

typedef void (*block_t)(const float *const *, float *const *, const void *, long, long, long, long);
static const block_t blocks[2][MAX_ROWS] = {
    {block1_f32, block2_f32, block3_f32, block4_f32, block5_f32, block6_f32},
    {block1_bf16, block2_bf16, block3_bf16, block4_bf16, block5_bf16, block6_bf16}};

// Panels first..last-1 of y[i] = x[i] w^T for `rows` row pointers.
void rows_times_panels(const float *const *x, float *const *y, long rows, const char *w, int bf16, long N, long K, long first,
                       long last) {
  long bytes = bf16 ? 2 : 4;
  for (long p = first; p < last; p++)
    for (long k0 = 0; k0 < K || k0 == 0; k0 += K_BLOCK) {
      const char *b = w + (p * K + k0) * PANEL * bytes;
      long count = K - k0 < K_BLOCK ? K - k0 : K_BLOCK, column = p * PANEL, columns = N - column;
      for (long i = 0; i < rows; i += MAX_ROWS) {
        long n = rows - i < MAX_ROWS ? rows - i : MAX_ROWS;
        blocks[bf16][n - 1](x + i, y + i, b, k0, count, column, columns < PANEL ? columns : PANEL);
      }
    }
}

typedef struct {
  const float *x;
  const char *w;
  float *y;
  long M, N, K, panels, group;
  int bf16;
} linear_t;

static void linear_task(void *context, long index) {
  const linear_t *c = context;
  long groups = (c->panels + c->group - 1) / c->group, m0 = index / groups * ROW_CHUNK, p0 = index % groups * c->group;
  long rows = c->M - m0 < ROW_CHUNK ? c->M - m0 : ROW_CHUNK, p1 = p0 + c->group;
  const float *x[ROW_CHUNK];
  float *y[ROW_CHUNK];
  for (long i = 0; i < rows; i++) x[i] = c->x + (m0 + i) * c->K, y[i] = c->y + (m0 + i) * c->N;
  rows_times_panels(x, y, rows, c->w, c->bf16, c->N, c->K, p0, p1 < c->panels ? p1 : c->panels);
}

void linear(const float *x, const void *w, float *y, long M, long N, long K, long bf16, long threads) {
  launches++;
  linear_t c = {x, w, y, M, N, K, (N + PANEL - 1) / PANEL, 1, (int)bf16};
  long chunks = (M + ROW_CHUNK - 1) / ROW_CHUNK;
  if (N * K * (M + 3) / 4 < HANDOVER_WORK) threads = 1;  // few rows are bound by reading the weights
  while (c.group < c.panels && chunks * (c.panels / (2 * c.group)) >= 4 * threads) c.group *= 2;
  pool_run(linear_task, &c, chunks * ((c.panels + c.group - 1) / c.group), (int)threads);
}
