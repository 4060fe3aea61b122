// Sampling: one task per row of logits, which reads nothing but its own row and settings.
// Every filter keeps a prefix of the tokens sorted by (scaled logit, lower id), so tokens are taken from a heap until the
// first filter ends the prefix.
#include "simd.h"

#define SUM_BLOCK 1024
#define HANDOVER_WORK 8000  // below some 40 us, waking a helper costs more than it gives
#define HALF_ORDER 0xffffffffu

typedef struct {
  const float *logits, *temperature, *top_p, *min_p;
  const int32_t *top_k, *sample_index, *target;
  const int64_t *seed, *position;
  int32_t *ids, *ranks;
  float *logprobs;
  uint8_t *finite;
  long V, n;
} sample_t;

static void philox(uint32_t k0, uint32_t k1, uint32_t *c0, uint32_t *c1, uint32_t *c2, uint32_t *c3, int n) {
  for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
    for (int i = 0; i < n; i++) {
      uint64_t a = 0xD2511F53ull * c0[i], b = 0xCD9E8D57ull * c2[i];
      c0[i] = (uint32_t)(b >> 32) ^ c1[i] ^ k0, c1[i] = (uint32_t)b;
      c2[i] = (uint32_t)(a >> 32) ^ c3[i] ^ k1, c3[i] = (uint32_t)a;
    }
}

// The words of VL groups of four tokens, group[i] = token / 4; token t of group i has word[4 * i + t % 4].
static void noise_words(const sample_t *c, long row, const uint32_t *group, uint32_t *word) {
  uint32_t a[VL], b[VL], d[VL], e[VL];
  for (int i = 0; i < VL; i++)
    a[i] = group[i], b[i] = (uint32_t)c->position[row], d[i] = (uint32_t)c->sample_index[row], e[i] = 0;
  philox((uint32_t)c->seed[row], (uint32_t)(c->seed[row] >> 32), a, b, d, e, VL);
  for (int i = 0; i < VL; i++) word[4 * i] = a[i], word[4 * i + 1] = b[i], word[4 * i + 2] = d[i], word[4 * i + 3] = e[i];
}

static V gumbel(const uint32_t *word) {
  VU w;
  memcpy(&w, word, sizeof w);
  V u = (__builtin_convertvector((VI)(w >> 9), V) + splat(0.5f)) * splat(1.0f / 8388608.0f);
  return -log_v(-log_v(u));
}

static uint64_t heap_key(float score, uint32_t id) {
  uint32_t bits;
  score += 0.0f;  // -0 and +0 are one value
  memcpy(&bits, &score, 4);
  return (uint64_t)(bits >> 31 ? ~bits : bits | 0x80000000u) << 32 | (HALF_ORDER - id);
}
static uint32_t key_id(uint64_t key) { return HALF_ORDER - (uint32_t)key; }
static float key_score(uint64_t key) {
  uint32_t order = (uint32_t)(key >> 32), bits = order >> 31 ? order & 0x7fffffffu : ~order;
  float score;
  memcpy(&score, &bits, 4);
  return score;
}
static void sift(uint64_t *heap, long n, long i) {
  for (uint64_t moved = heap[i];; ) {
    long child = 2 * i + 1;
    if (child + 1 < n && heap[child + 1] > heap[child]) child++;
    if (child >= n || heap[child] <= moved) { heap[i] = moved; return; }
    heap[i] = heap[child], i = child;
  }
}
static uint64_t pop(uint64_t *heap, long *n) {
  uint64_t top = heap[0];
  heap[0] = heap[--*n];
  if (*n) sift(heap, *n, 0);
  return top;
}
static uint64_t *make_heap(const float *logits, float divisor, long n) {
  uint64_t *heap = scratch(0, sizeof(uint64_t) * (n + 1));
  for (long i = 0; i < n; i++) heap[i] = heap_key(logits[i] / divisor, (uint32_t)i);
  for (long i = n / 2 - 1; i >= 0; i--) sift(heap, n, i);
  return heap;
}

static double sum_exp(const float *x, float divisor, float top, long n) {
  double total = 0;
  for (long from = 0; from < n; from += SUM_BLOCK) {
    V sum = zero();
    for (long i = from; i < n && i < from + SUM_BLOCK; i += VL) {
      V e = exp_v(load_n(x + i, n - i) / splat(divisor) - splat(top));
      sum = sum + choose(lanes() < splat_int((int)(n - i < VL ? n - i : VL)), e, zero());
    }
    total += sum_lanes(sum);
  }
  return total;
}
static float log_total(const float *x, float top, long n) {
  double total = sum_exp(x, 1.0f, top, n);
  return log_one((float)total);
}

static long draw_unfiltered(const sample_t *c, long row, const float *x, float temperature) {
  V best = splat(-3.4e38f);
  VI best_id = splat_int(0);
  uint32_t group[VL], word[4 * VL];
  for (long from = 0; from < c->V; from += 4 * VL) {
    for (int i = 0; i < VL; i++) group[i] = (uint32_t)(from / 4 + i);
    noise_words(c, row, group, word);
    for (long part = 0; part < 4 && from + part * VL < c->V; part++) {
      long i = from + part * VL;
      V score = load_n(x + i, c->V - i) / splat(temperature) + gumbel(word + part * VL);
      VI id = splat_int((int)i) + lanes(), better = (score > best) & (id < splat_int((int)c->V));
      best = choose(better, score, best), best_id = (better & id) | (~better & best_id);
    }
  }
  long token = best_id[0];
  float score = best[0];
  for (int i = 1; i < VL; i++)
    if (best[i] > score || (best[i] == score && best_id[i] < token)) score = best[i], token = best_id[i];
  return token;
}

static long draw_filtered(const sample_t *c, long row, const float *x, float temperature) {
  long left = c->V, limit = c->top_k[row] > 0 && c->top_k[row] < c->V ? c->top_k[row] : c->V, kept = 0;
  uint64_t *heap = make_heap(x, temperature, left);
  uint64_t *taken = scratch(1, sizeof(uint64_t) * (limit + VL));
  float top = key_score(heap[0]), p = c->top_p[row], min_p = c->min_p[row];
  double mass = 0, total = 0;
  long sorted = 0;
  if (p < 1 && limit < c->V) {
    for (; sorted < limit; sorted++) total += exp_one(key_score(taken[sorted] = pop(heap, &left)) - top);
  } else if (p < 1) total = sum_exp(x, temperature, top, c->V);
  for (; kept < limit; kept++) {
    if (kept >= sorted) taken[kept] = pop(heap, &left);
    float likelihood = exp_one(key_score(taken[kept]) - top);
    if (kept && ((p < 1 && mass >= (double)p * total) || likelihood < min_p)) break;
    mass += likelihood;
  }
  long token = -1;
  float best = 0;
  for (long from = 0; from < kept; from += VL) {
    uint32_t group[VL], word[4 * VL], own[VL];
    for (long i = 0; i < VL; i++) group[i] = from + i < kept ? key_id(taken[from + i]) / 4 : 0;
    noise_words(c, row, group, word);
    for (long i = 0; i < VL; i++) own[i] = word[4 * i + (from + i < kept ? key_id(taken[from + i]) % 4 : 0)];
    V noise = gumbel(own);
    for (long i = 0; i < VL && from + i < kept; i++) {
      long id = key_id(taken[from + i]);
      float score = key_score(taken[from + i]) + noise[i];
      if (token < 0 || score > best || (score == best && id < token)) best = score, token = id;
    }
  }
  return token;
}

static void sample_task(void *context, long row) {
  const sample_t *c = context;
  const float *x = c->logits + row * c->V;
  float top = x[0], temperature = c->temperature[row];
  long token = 0, rank = 1;
  uint32_t bad = 0;
  for (long i = 0; i < c->V; i++) {
    uint32_t bits;
    memcpy(&bits, x + i, 4);
    bad |= (bits & 0x7f800000u) == 0x7f800000u;
  }
  c->finite[row] = !bad;
  if (bad) {
    c->ids[row] = 0, c->logprobs[row] = 0, c->ranks[row] = 1;
    return;
  }
  for (long i = 1; i < c->V; i++) if (x[i] > top) top = x[i], token = i;
  if (c->target[row] >= 0) token = c->target[row];
  else if (temperature > 0) {
    int filtered = c->top_k[row] > 0 || c->top_p[row] < 1 || c->min_p[row] > 0;
    token = (filtered ? draw_filtered : draw_unfiltered)(c, row, x, temperature);
  }
  for (long i = 0; i < c->V; i++) rank += x[i] > x[token];
  for (long i = 0; i < token; i++) rank += x[i] == x[token];
  c->ids[row] = (int32_t)token, c->ranks[row] = (int32_t)rank;
  c->logprobs[row] = x[token] - top - log_total(x, top, c->V);
}

// Returns 0, or 1 where a target is not a token.
long sample(const float *logits, const float *temperature, const int32_t *top_k, const float *top_p, const float *min_p,
            const int64_t *seed, const int32_t *sample_index, const int64_t *position, const int32_t *target, int32_t *ids,
            float *logprobs, int32_t *ranks, uint8_t *finite, long L, long V, long threads) {
  launches++;
  for (long i = 0; i < L; i++) if (target[i] >= V) return 1;
  sample_t c = {logits, temperature, top_p, min_p, top_k, sample_index, target, seed, position, ids, ranks, logprobs, finite, V, 0};
  pool_run(sample_task, &c, L, L * V < HANDOVER_WORK ? 1 : (int)threads);
  return 0;
}

static void top_task(void *context, long row) {
  const sample_t *c = context;
  const float *x = c->logits + row * c->V;
  long left = c->V;
  uint64_t *heap = make_heap(x, 1.0f, left);
  float top = key_score(heap[0]), total = log_total(x, top, c->V);
  for (long i = 0; i < c->n; i++) {
    long id = c->ids[row * c->n + i] = (int32_t)key_id(pop(heap, &left));
    c->logprobs[row * c->n + i] = x[id] - top - total;
  }
}
void top_logprobs(const float *logits, int32_t *ids, float *logprobs, long L, long V, long n, long threads) {
  launches++;
  sample_t c = {.logits = logits, .ids = ids, .logprobs = logprobs, .V = V, .n = n};
  pool_run(top_task, &c, L, L * V < HANDOVER_WORK ? 1 : (int)threads);
}
