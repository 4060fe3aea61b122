// Kernels over single rows and channels: norm, swiglu, short convolution, K/V writes, embedding, routing.
#include "simd.h"

#define ROW_CHUNK 32
#define HANDOVER_WORK 200000  // below some 40 us: rows come from the caller's cache and go back there
#define CHANNEL_CHUNK (4 * VL)

typedef struct { const float *x, *gain; float *y; long T, groups, C, stride; float eps; } norm_t;

static void norm_task(void *context, long index) {
  const norm_t *c = context;
  for (long n = index * ROW_CHUNK; n < (index + 1) * ROW_CHUNK && n < c->T * c->groups; n++) {
    const float *x = c->x + n / c->groups * c->stride + n % c->groups * c->C;
    V sums[4] = {zero(), zero(), zero(), zero()};
    for (long i = 0, j = 0; i < c->C; i += VL, j++) {
      V v = load_n(x + i, c->C - i);
      sums[j & 3] = fma_v(v, v, sums[j & 3]);
    }
    float mean = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3])) / (float)c->C;
    V inverse = splat(1.0f / __builtin_sqrtf(mean + c->eps));
    for (long i = 0; i < c->C; i += VL)
      store_n(c->y + n * c->C + i, load_n(x + i, c->C - i) * inverse * load_n(c->gain + i, c->C - i), c->C - i);
  }
}
// `x` has rows of `groups` times C columns, `stride` apart.
void rms_norm(const float *x, const float *gain, float *y, long T, long groups, long C, long stride, double eps, long threads) {
  launches++;
  norm_t c = {x, gain, y, T, groups, C, stride, (float)eps};
  pool_run(norm_task, &c, (T * groups + ROW_CHUNK - 1) / ROW_CHUNK, T * groups * C < HANDOVER_WORK ? 1 : (int)threads);
}

typedef struct { const float *z; float *y; long T, I; } swiglu_t;

static void swiglu_task(void *context, long index) {
  const swiglu_t *c = context;
  for (long t = index * ROW_CHUNK; t < (index + 1) * ROW_CHUNK && t < c->T; t++) {
    const float *gate = c->z + t * 2 * c->I, *up = gate + c->I;
    for (long i = 0; i < c->I; i += VL)
      store_n(c->y + t * c->I + i, silu_times(load_n(gate + i, c->I - i), load_n(up + i, c->I - i)), c->I - i);
  }
}
void swiglu(const float *z, float *y, long T, long I, long threads) {
  launches++;
  swiglu_t c = {z, y, T, I};
  pool_run(swiglu_task, &c, (T + ROW_CHUNK - 1) / ROW_CHUNK, T * I < HANDOVER_WORK ? 1 : (int)threads);
}

typedef struct {
  const float *x, *taps, *residual;
  float *rows, *y;
  const int32_t *query_start, *read_rows, *store_rows, *write_rows, *entry_sources, *entry_dest;
  long T, C, K, B, E, stride, strip;
} conv_t;

static void conv_row(const conv_t *c, const float *const *in, long t, long c0, long width) {
  long C = c->C, K = c->K;
  float *y = c->y + t * C + c0;
  if (!c->taps) {
    memcpy(y, in[K - 2] + c0, sizeof(float) * width);
    return;
  }
  for (long v = 0; v < width; v += VL) {
    long left = width - v;
    V sum = zero();
    for (long j = 0; j < K; j++) sum = fma_v(load_n(c->taps + j * C + c0 + v, left), load_n(in[j] + c0 + v, left), sum);
    sum = sum + load_n(in[K - 1] + c0 + v, left);
    if (c->residual) sum = sum + load_n(c->residual + t * C + c0 + v, left);
    store_n(y + v, sum, left);
  }
}

// One strip of channels: all reads of the pool come before its writes, so strips need no order among themselves.
static void conv_task(void *context, long index) {
  const conv_t *c = context;
  long c0 = index * c->strip, width = c->C - c0 < c->strip ? c->C - c0 : c->strip, bytes = sizeof(float) * width;
  long C = c->C, H = c->K - 1, stored = c->B * H, entered = c->E * H, live = c->query_start[c->B];
  const float *in[c->K];
  // Rows of a pool come from far away: all are on their way before the first is used.
  for (long i = 0; i < stored; i++)
    for (long v = c0; v < c0 + width; v += LINE / (long)sizeof(float)) prefetch(c->rows + c->read_rows[i] * C + v);
  for (long b = 0; b < c->B; b++)
    for (long start = c->query_start[b], t = start; t < c->query_start[b + 1]; t++) {
      for (long j = 0, s = t - H; j <= H; j++, s++)
        in[j] = s >= start ? c->x + s * c->stride : c->rows + c->read_rows[b * H + s - start + H] * C;
      conv_row(c, in, t, c0, width);
    }
  float *kept = scratch(0, bytes * (stored + entered) + 1), *entries = kept + stored * width;
  for (long i = 0; i < stored; i++)
    if (c->store_rows[i] > 1) memcpy(kept + i * width, c->rows + c->read_rows[i] * C + c0, bytes);
  for (long i = 0; i < entered; i++) {
    long s = c->entry_sources[i];
    if (c->entry_dest[i] > 1) memcpy(entries + i * width, (s < 0 ? c->rows - (s + 1) * C : c->x + s * c->stride) + c0, bytes);
  }
  for (long i = 0; i < entered; i++)
    if (c->entry_dest[i] > 1) memcpy(c->rows + c->entry_dest[i] * C + c0, entries + i * width, bytes);
  for (long i = 0; i < stored; i++)
    if (c->store_rows[i] > 1) memcpy(c->rows + c->store_rows[i] * C + c0, kept + i * width, bytes);
  for (long t = 0; t < live; t++)
    if (c->write_rows[t] > 1) memcpy(c->rows + c->write_rows[t] * C + c0, c->x + t * c->stride + c0, bytes);
  for (long t = live; t < c->T; t++) memset(c->y + t * C + c0, 0, bytes);
}

// `x` has rows `stride` apart, `taps` is [K, C]; without taps, y[t] is x[t - 1].
void short_conv(const float *x, const float *taps, float *rows, int64_t *tags, const int32_t *query_start,
                const int32_t *read_rows, const int64_t *read_tags, const int32_t *store_rows, const int64_t *store_tags,
                const int32_t *write_rows, const int64_t *write_tags, const int32_t *entry_sources,
                const int64_t *entry_source_tags, const int32_t *entry_dest, const int64_t *entry_tag,
                const float *residual, float *y, long T, long C, long K, long B, long E, long stride, long threads) {
  launches++;
  long H = K - 1, strip = T * C < HANDOVER_WORK ? C : CHANNEL_CHUNK;
  conv_t c = {x, taps, residual, rows, y, query_start, read_rows, store_rows, write_rows, entry_sources, entry_dest,
              T, C, K, B, E, stride, strip};
  pool_run(conv_task, &c, (C + strip - 1) / strip, (int)threads);
  int64_t *kept = scratch(1, sizeof(int64_t) * ((B + E) * H + 1)), *sources = kept + B * H;
  for (long i = 0; i < B * H; i++) if (store_rows[i] > 1) kept[i] = store_tags[i] ^ tags[read_rows[i]] ^ read_tags[i];
  for (long i = 0; i < E * H; i++)
    sources[i] = entry_sources[i] < 0 ? tags[-(entry_sources[i] + 1)] ^ entry_source_tags[i] : 0;
  for (long i = 0; i < E * H; i++) if (entry_dest[i] > 1) tags[entry_dest[i]] = entry_tag[i / H] ^ sources[i];
  for (long i = 0; i < B * H; i++) if (store_rows[i] > 1) tags[store_rows[i]] = kept[i];
  for (long t = 0; t < query_start[B]; t++) if (write_rows[t] > 1) tags[write_rows[t]] = write_tags[t];
}

// Pages are [heads, page, width].
void write_kv(const float *k, const float *v, float *k_pages, float *v_pages, int64_t *tags, const int32_t *slots,
              const int32_t *stamp_pages, const int64_t *stamp_tags, long T, long heads, long page, long width, long k_stride,
              long v_stride) {
  launches++;
  for (long t = 0; t < T; t++) {
    for (long h = 0; h < heads && slots[t] > 0; h++) {
      long at = ((slots[t] / page * heads + h) * page + slots[t] % page) * width;
      memcpy(k_pages + at, k + t * k_stride + h * width, sizeof(float) * width);
      memcpy(v_pages + at, v + t * v_stride + h * width, sizeof(float) * width);
    }
    if (stamp_pages[t] > 0) tags[stamp_pages[t]] = stamp_tags[t];
  }
}

// Returns 0, or 1 where an id is outside the table.
long embedding(const int32_t *ids, const void *table, float *y, long T, long rows, long C, long bf16) {
  launches++;
  for (long t = 0; t < T; t++) if (ids[t] < 0 || ids[t] >= rows) return 1;
  for (long t = 0; t < T; t++) {
    const uint16_t *half = (const uint16_t *)table + ids[t] * C;
    if (!bf16) memcpy(y + t * C, (const float *)table + ids[t] * C, sizeof(float) * C);
    else
      for (long i = 0; i < C; i++) {
        uint32_t bits = (uint32_t)half[i] << 16;
        memcpy(y + t * C + i, &bits, 4);
      }
  }
  return 0;
}

void route(const float *logits, const float *bias, int32_t *ids, float *weights, long T, long E, long top_k, long shared,
           double scale) {
  launches++;
  long k = top_k + shared;
  float *scores = scratch(0, sizeof(float) * (E + VL));
  for (long t = 0; t < T; t++) {
    const float *z = logits + t * (E + shared);
    int32_t *id = ids + t * k;
    float *w = weights + t * k;
    for (long i = 0; i < E; i += VL)
      store(scores + i, splat(1.0f) / (splat(1.0f) + exp_v(-load_n(z + i, E - i))) + load_n(bias + i, E - i));
    for (long s = 0; s < top_k; s++) {
      long best = -1;
      for (long e = 0; e < E; e++) {
        int taken = 0;
        for (long before = 0; before < s; before++) taken |= id[before] == e;
        if (!taken && (best < 0 || scores[e] > scores[best])) best = e;
      }
      id[s] = (int32_t)best;
    }
    for (long s = 0; s < shared; s++) id[top_k + s] = (int32_t)(E + s);
    float biggest = -3e38f, total = 0;
    for (long s = 0; s < k; s++) {
      float a = z[id[s]];
      w[s] = (a < 0 ? a : 0) - log_one(1.0f + exp_one(a < 0 ? a : -a));
      biggest = w[s] > biggest ? w[s] : biggest;
    }
    for (long s = 0; s < k; s++) total += w[s] = exp_one(w[s] - biggest);
    for (long s = 0; s < k; s++) w[s] = w[s] / total * (float)scale;
  }
}
