// A layer of experts: rows are gathered per expert, multiplied by the same blocks as linear.c, and the k results of a token
// are added in slot order. Nothing depends on how many tokens an expert got.
#include "simd.h"

#define ROW_CHUNK 48
#define HANDOVER_WORK 100000  // below some 5 us, handing work over costs more than it gives

typedef struct {
  const float *x, *weights;
  const char *w13, *w2;
  float *y, *slots;
  const long *order, *tasks;
  long T, H, I, k, stride13, stride2;
  int bf16;
} moe_t;

static void swiglu_row(const float *z, float *h, long I) {
  for (long i = 0; i < I; i += VL) store_n(h + i, silu_times(load_n(z + i, I - i), load_n(z + I + i, I - i)), I - i);
}

static void expert_task(void *context, long index) {
  const moe_t *c = context;
  const long *task = c->tasks + 3 * index, *pairs = c->order + task[1];
  long rows = task[2], H = c->H, I = c->I;
  float *z = scratch(0, sizeof(float) * ROW_CHUNK * 3 * I), *h = z + ROW_CHUNK * 2 * I;
  const float *in[ROW_CHUNK];
  float *out[ROW_CHUNK];
  for (long i = 0; i < rows; i++) in[i] = c->x + pairs[i] / c->k * H, out[i] = z + i * 2 * I;
  rows_times_panels(in, out, rows, c->w13 + task[0] * c->stride13, c->bf16, 2 * I, H, 0, (2 * I + PANEL - 1) / PANEL);
  for (long i = 0; i < rows; i++) {
    swiglu_row(z + i * 2 * I, h + i * I, I);
    in[i] = h + i * I, out[i] = c->slots + pairs[i] * H;
  }
  rows_times_panels(in, out, rows, c->w2 + task[0] * c->stride2, c->bf16, H, I, 0, (H + PANEL - 1) / PANEL);
}

static void combine_task(void *context, long index) {
  const moe_t *c = context;
  long end = (index + 1) * ROW_CHUNK;
  for (long t = index * ROW_CHUNK; t < end && t < c->T; t++)
    for (long i = 0; i < c->H; i += VL) {
      V sum = zero();
      for (long s = 0; s < c->k; s++)
        sum = fma_v(splat(c->weights[t * c->k + s]), load_n(c->slots + (t * c->k + s) * c->H + i, c->H - i), sum);
      store_n(c->y + t * c->H + i, sum, c->H - i);
    }
}

// Returns 0, or 1 where an expert id is out of range (nothing is computed then).
long moe(const float *x, const int32_t *ids, const float *weights, const int32_t *num_tokens, const void *w13,
         const void *w2, float *y, long T, long H, long I, long k, long E, long bf16, long threads) {
  launches++;
  long live = num_tokens[0] < T ? num_tokens[0] : T, pairs = live * k, bytes = bf16 ? 2 : 4;
  memset(y + live * H, 0, sizeof(float) * (T - live) * H);
  long *order = scratch(1, sizeof(long) * (pairs + E + 1 + 3 * (pairs / ROW_CHUNK + E)));
  long *start = order + pairs, *tasks = start + E + 1, count = 0;
  memset(start, 0, sizeof(long) * (E + 1));
  for (long p = 0; p < pairs; p++) {
    if (ids[p] < 0 || ids[p] >= E) return 1;
    start[ids[p] + 1]++;
  }
  for (long e = 0; e < E; e++) start[e + 1] += start[e];
  // The last experts are shared by all tokens, so theirs are the longest tasks: they come first.
  for (long e = E - 1; e >= 0; e--) {
    long rows = start[e + 1] - start[e];
    for (long i = 0; i < rows; i += ROW_CHUNK, count++)
      tasks[3 * count] = e, tasks[3 * count + 1] = start[e] + i, tasks[3 * count + 2] = rows - i < ROW_CHUNK ? rows - i : ROW_CHUNK;
  }
  for (long p = 0; p < pairs; p++) order[start[ids[p]]++] = p;
  long panels13 = (2 * I + PANEL - 1) / PANEL, panels2 = (H + PANEL - 1) / PANEL;
  moe_t c = {x, weights, w13, w2, y, scratch(2, sizeof(float) * (pairs * H + VL)), order, tasks, live, H, I, k,
             panels13 * PANEL * H * bytes, panels2 * PANEL * I * bytes, (int)bf16};
  if (pairs * H * I < HANDOVER_WORK) threads = 1;
  pool_run(expert_task, &c, count, (int)threads);
  pool_run(combine_task, &c, (live + ROW_CHUNK - 1) / ROW_CHUNK, (int)threads);
  return 0;
}
