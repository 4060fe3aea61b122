// Addresses of a step from its inputs and the slot tables: integers only, each written once. The order of `fields`, `tables`
// and `results` is that of IndexFields, INDEX_TABLES and INDEX_RESULTS in kernels/values.py.
#include "simd.h"

#define TAG_STEP 0x9E3779B97F4A7C15ULL
#define SINK 1

enum { TOKENS, ROWS, ENTRIES, SAMPLES, DELTAS, GROUPS, PAGES, STREAMS, POOL_ROWS, HISTORY, RING, RING_ORIGIN, SNAPSHOT_ORIGIN, PAGE_SIZE, MAX_DRAFTS };

typedef struct {
  const int32_t *query_start, *token_ids, *slots, *continues, *resume;
  const int64_t *given_start, *tags, *resume_tag;
  int64_t *length;
  const int32_t *next_token, *drafts;
  int64_t *ring_tags;
  int32_t *start;
  const long *n;
} step_t;

static int64_t tag_at(int64_t tag, int64_t position) { return (int64_t)((uint64_t)tag + (uint64_t)position * TAG_STEP); }

static int64_t ring_row(const step_t *s, long row, int64_t position) {
  return s->n[RING_ORIGIN] + s->slots[row] * s->n[RING] + position % s->n[RING];
}

// The pool row that holds `position` < start of a batch row, and the tag it must carry.
static int64_t history_row(const step_t *s, long row, int64_t position, int64_t *tag) {
  long history = s->n[HISTORY];
  if (s->resume[row] > 0) {
    *tag = s->resume_tag[row];
    return s->n[SNAPSHOT_ORIGIN] + s->resume[row] * history + position - (s->start[row] - history);
  }
  *tag = 0;
  if (position < 0) return 0;
  long slot = s->slots[row], ring = s->n[RING];
  // A position that the ring has left behind shares its row with a later one, whose tag must not pass for its own.
  *tag = s->ring_tags[slot * ring + position % ring] ^ (position < s->length[slot] + s->n[MAX_DRAFTS] - ring);
  return ring_row(s, row, position);
}

static void apply_deltas(void **fields, void **tables, const long *n) {
  const int32_t *groups = fields[0], *slots = fields[1], *indices = fields[2], *pages = fields[3];
  const int64_t *stamps = fields[4];
  for (long d = 0; d < n[DELTAS]; d++) {
    long at = slots[d] * n[PAGES] + indices[d];
    ((int32_t *)tables[groups[d]])[at] = pages[d];
    ((int64_t *)tables[n[GROUPS] + groups[d]])[at] = stamps[d];
  }
}

static void index_rows(const step_t *s, const int64_t *pool_tags, void **results) {
  int32_t *read_rows = results[0], *store_rows = results[2];
  int64_t *read_tags = results[1], *store_tags = results[3];
  uint8_t *intact = results[4];
  long history = s->n[HISTORY];
  for (long b = 0; b < s->n[ROWS]; b++) {
    intact[b] = 1;
    for (long i = 0; i < history; i++) {
      long at = b * history + i;
      int64_t position = (int64_t)s->start[b] - history + i, row = history_row(s, b, position, &read_tags[at]);
      read_rows[at] = (int32_t)row;
      store_rows[at] = s->resume[b] > 0 && position >= 0 ? (int32_t)ring_row(s, b, position) : SINK;
      store_tags[at] = tag_at(s->tags[b], position);
      for (long stream = 0; stream < s->n[STREAMS]; stream++)
        intact[b] &= pool_tags[stream * s->n[POOL_ROWS] + row] == read_tags[at];
    }
  }
}

// A row that continues takes the last drawn token of its slot, then the slot's drafts.
static int32_t known_token(const step_t *s, long slot, long offset) {
  return offset == 0 ? s->next_token[slot] : s->drafts[slot * s->n[MAX_DRAFTS] + offset - 1];
}

static void index_tokens(const step_t *s, void **results) {
  int32_t *ids = results[0], *write_rows = results[2];
  int64_t *positions = results[1], *tags = results[3];
  for (long b = 0; b < s->n[ROWS]; b++)
    for (long t = s->query_start[b]; t < s->query_start[b + 1]; t++) {
      int64_t position = (int64_t)s->start[b] + t - s->query_start[b];
      ids[t] = s->continues[b] ? known_token(s, s->slots[b], t - s->query_start[b]) : s->token_ids[t];
      positions[t] = position;
      write_rows[t] = t >= s->query_start[b + 1] - s->n[RING] ? (int32_t)ring_row(s, b, position) : SINK;
      tags[t] = tag_at(s->tags[b], position);
    }
  for (long t = s->query_start[s->n[ROWS]]; t < s->n[TOKENS]; t++)
    ids[t] = s->token_ids[t], positions[t] = 0, write_rows[t] = SINK, tags[t] = 0;
}

static void index_entries(const step_t *s, void **fields, void **results) {
  const int32_t *rows = fields[0], *snapshots = fields[1];
  const int64_t *boundaries = fields[2];
  int32_t *sources = results[0], *dest = results[2];
  int64_t *source_tags = results[1];
  long history = s->n[HISTORY];
  for (long e = 0; e < s->n[ENTRIES]; e++)
    for (long i = 0; i < history; i++) {
      long at = e * history + i, b = rows[e];
      int64_t position = boundaries[e] - history + i, ahead = position - s->start[b];
      source_tags[at] = 0;
      sources[at] = ahead >= 0 ? (int32_t)(s->query_start[b] + ahead)
                               : (int32_t)-(history_row(s, b, position, &source_tags[at]) + 1);
      dest[at] = snapshots[e] > 0 ? (int32_t)(s->n[SNAPSHOT_ORIGIN] + snapshots[e] * history + i) : SINK;
    }
}

static void index_pages(const step_t *s, const int32_t *table, int64_t *stamps, int32_t *slots, int32_t *completed) {
  long size = s->n[PAGE_SIZE];
  for (long t = 0; t < s->n[TOKENS]; t++) slots[t] = completed[t] = 0;
  for (long b = 0; b < s->n[ROWS]; b++)
    for (long t = s->query_start[b]; t < s->query_start[b + 1]; t++) {
      int64_t position = (int64_t)s->start[b] + t - s->query_start[b];
      long at = s->slots[b] * s->n[PAGES] + position / size;
      slots[t] = (int32_t)(table[at] * size + position % size);
      if (position % size != size - 1) continue;
      completed[t] = table[at];
      stamps[at] = tag_at(s->tags[b], position);
    }
}

static void index_samples(const step_t *s, void **fields, void **results) {
  const int32_t *rows = fields[0], *offsets = fields[1];
  int64_t *tokens = results[0], *positions = results[1];
  for (long l = 0; l < s->n[SAMPLES]; l++) {
    tokens[l] = s->query_start[rows[l]] + offsets[l];
    positions[l] = (int64_t)s->start[rows[l]] + offsets[l] + 1;
  }
}

// Rings as they must be once the step's kernels have run; after everything that reads them.
static void record_writes(const step_t *s) {
  long ring = s->n[RING];
  for (long b = 0; b < s->n[ROWS]; b++) {
    if (s->slots[b] == 0) continue;
    int64_t *tags = s->ring_tags + s->slots[b] * ring, end = s->start[b] + s->query_start[b + 1] - s->query_start[b];
    int64_t first = end - ring > s->start[b] ? end - ring : s->start[b];
    if (s->resume[b] > 0)
      for (int64_t p = s->start[b] - s->n[HISTORY]; p < s->start[b]; p++)
        if (p >= 0) tags[p % ring] = tag_at(s->tags[b], p);
    for (int64_t p = first; p < end; p++) tags[p % ring] = tag_at(s->tags[b], p);
  }
}

void step_index(void **fields, void **tables, void **results, const long *n) {
  launches++;
  apply_deltas(fields + 13, tables + 5, n);
  step_t s = {fields[0], fields[1], fields[2], fields[3], fields[4], fields[5], fields[6], fields[7],
              tables[0], tables[1], tables[2], tables[3], results[0], n};
  for (long b = 0; b < n[ROWS]; b++)
    s.start[b] = (int32_t)(s.continues[b] ? s.length[s.slots[b]] : s.given_start[b]);
  index_tokens(&s, results + 1);
  index_rows(&s, tables[4], results + 5);
  index_entries(&s, fields + 8, results + 10);
  index_samples(&s, fields + 11, results + 13);
  for (long g = 0; g < n[GROUPS]; g++)
    index_pages(&s, tables[5 + g], tables[5 + n[GROUPS] + g], results[15 + g], results[15 + n[GROUPS] + g]);
  record_writes(&s);
}

// How many drafts of each batch row are what was drawn in their places; its slot's length and last token follow from that.
void accept(const int32_t *drawn, const int32_t *token_ids, const int32_t *query_start, const int32_t *slots,
            const int32_t *start, const int32_t *drafts, const int32_t *first_draw, int64_t *length, int32_t *next_token,
            int32_t *accepted, long rows) {
  launches++;
  for (long b = 0; b < rows; b++) {
    int32_t count = 0, draw = first_draw[b], guess = query_start[b + 1] - drafts[b];
    while (count < drafts[b] && drawn[draw + count] == token_ids[guess + count]) count++;
    accepted[b] = count;
    if (slots[b] == 0) continue;
    length[slots[b]] = (int64_t)start[b] + guess - query_start[b] + count;
    if (draw >= 0) next_token[slots[b]] = drawn[draw + count];
  }
}
