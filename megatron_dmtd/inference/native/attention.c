/* Attention of rows over pages, read in place: of a few rows of many requests, and of whole pieces of prompts.
 *
 * Shapes follow the Python caller (ops/native_ops.py): R rows of a pass, H query heads, G key/value heads, D head width,
 * T entries per page. K pages are [G][D][T], V pages are [G][T][D]. T and D are multiples of 16. Integers are int64.
 *
 * The queries of a chunk are taken in blocks, the entries in segments that begin at multiples of SEGMENT. Each segment gives a sum of
 * its own, and the sums are merged in their order; so what a row gets does not depend on which thread computed what, nor on the
 * other rows.
 *
 * Rows of a request with cache operations read a view: pages in any order, and for each entry the position of the token that it shows,
 * or -1. Their ranges are of positions, and vectors of entries that no row of a block sees are left out.
 */
#include <omp.h>

#include "vectors.h"

/* What stays in registers: sums of MAX_QUERIES queries times up to MAX_VECTORS vectors of entries, or of an output. */
#ifdef __AVX512F__
#define MAX_QUERIES 8
#else
#define MAX_QUERIES 4
#endif
#define MAX_VECTORS 2
/* Entries whose scores are held at once. */
#define SEGMENT 256
#define MAX_TILES (SEGMENT / LANES)
/* Queries, all heads counted, that pass over the entries together. */
#define BLOCK_QUERIES 32
/* With fewer pieces of work for each thread, those of a long text are divided by its segments. */
#define PIECES_PER_THREAD 4

#define NOTHING (-3.0e38f)

/* A vector's worth of neighbouring entries: where their keys and values begin. */
typedef struct {
  const float *keys, *values;
} Tile;

/* Scores of NQ queries with V tiles. Score rows lie SEGMENT apart. Keys of the next tiles and values of these are fetched meanwhile. */
INLINE void score_tiles(const float *q, const Tile *tiles, const Tile *next, float *scores, i64 D, i64 T, const int NQ,
                        const int V) {
  vec acc[MAX_QUERIES][MAX_VECTORS];
#pragma GCC unroll 8
  for (int j = 0; j < NQ; j++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) acc[j][v] = (vec){0};
  for (i64 d = 0; d < D; d++) {
    vec keys[MAX_VECTORS];
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) {
      keys[v] = load(tiles[v].keys + d * T);
      __builtin_prefetch(next[v].keys + d * T);
      __builtin_prefetch(tiles[v].values + d * LANES);
    }
#pragma GCC unroll 8
    for (int j = 0; j < NQ; j++)
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) acc[j][v] += q[j * D + d] * keys[v];
  }
#pragma GCC unroll 8
  for (int j = 0; j < NQ; j++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) *(vec *)(scores + j * SEGMENT + v * LANES) = acc[j][v];
}

/* V vectors of NQ outputs, from dimension d on: the values of all tiles, weighted. */
INLINE void add_values(const float *weights, const Tile *tiles, i64 num_tiles, float *out, i64 D, i64 d, const int NQ, const int V) {
  vec acc[MAX_QUERIES][MAX_VECTORS];
#pragma GCC unroll 8
  for (int j = 0; j < NQ; j++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) acc[j][v] = (vec){0};
  for (i64 tile = 0; tile < num_tiles; tile++) {
    const float *from = tiles[tile].values + d, *weight = weights + tile * LANES;
    for (i64 t = 0; t < LANES; t++) {
      vec values[MAX_VECTORS];
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) values[v] = load(from + t * D + v * LANES);
#pragma GCC unroll 8
      for (int j = 0; j < NQ; j++)
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) acc[j][v] += weight[j * SEGMENT + t] * values[v];
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < NQ; j++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) *(vec *)(out + j * D + d + v * LANES) = acc[j][v];
}

/* Both for NQ queries and all tiles of a segment. */
INLINE void score_each(const float *q, const Tile *tiles, i64 num_tiles, float *scores, i64 D, i64 T, const int NQ) {
  i64 tile = 0;
  for (; tile + MAX_VECTORS <= num_tiles; tile += MAX_VECTORS)
    score_tiles(q, tiles + tile, tiles + (tile + 2 * MAX_VECTORS <= num_tiles ? tile + MAX_VECTORS : tile), scores + tile * LANES,
                D, T, NQ, MAX_VECTORS);
  for (; tile < num_tiles; tile++) score_tiles(q, tiles + tile, tiles + tile, scores + tile * LANES, D, T, NQ, 1);
}

INLINE void add_each(const float *weights, const Tile *tiles, i64 num_tiles, float *out, i64 D, const int NQ) {
  i64 d = 0;
  for (; d + MAX_VECTORS * LANES <= D; d += MAX_VECTORS * LANES) add_values(weights, tiles, num_tiles, out, D, d, NQ, MAX_VECTORS);
  for (; d < D; d += LANES) add_values(weights, tiles, num_tiles, out, D, d, NQ, 1);
}

#define SCORE_CASE(NQ) case NQ: score_each(q, tiles, num_tiles, scores, D, T, NQ); break;
#define ADD_CASE(NQ) case NQ: add_each(weights, tiles, num_tiles, out, D, NQ); break;
#if MAX_QUERIES == 8
#define EACH_COUNT(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#else
#define EACH_COUNT(CASE) CASE(1) CASE(2) CASE(3) CASE(4)
#endif

static void score_all(const float *q, const Tile *tiles, i64 num_tiles, float *scores, i64 D, i64 T, int count) {
  switch (count) { EACH_COUNT(SCORE_CASE) }
}

static void add_all(const float *weights, const Tile *tiles, i64 num_tiles, float *out, i64 D, int count) {
  switch (count) { EACH_COUNT(ADD_CASE) }
}

static float dot(const float *a, const float *b, i64 size) {
  vec acc = {0};
  for (i64 i = 0; i < size; i += LANES) acc += load(a + i) * load(b + i);
  return sum_of(acc);
}

/* A half-open range; empty if `end` is not above `begin`. */
typedef struct {
  i64 begin, end;
} Range;

static i64 size_of(Range range) { return range.end > range.begin ? range.end - range.begin : 0; }

/* The softmax of one query over a part of its keys: the largest score, and the sum of e^(score - largest). */
typedef struct {
  float top, sum;
} Softmax;

/* Scores to weights: those of `seen`, which is not empty, count, all others become 0. `num` is a multiple of LANES. */
static Softmax soften(float *scores, i64 num, Range seen) {
  float top = NOTHING;
#pragma omp simd reduction(max : top)
  for (i64 i = seen.begin; i < seen.end; i++) top = scores[i] > top ? scores[i] : top;
  vec total = {0};
  for (i64 i = 0; i < num; i += LANES) {
    i64 first = seen.begin > i ? seen.begin - i : 0, end = seen.end < i + LANES ? seen.end - i : LANES;
    int is_whole = first == 0 && end == LANES;
    if (!is_whole)
      for (i64 lane = 0; lane < LANES; lane++)
        if (lane < first || lane >= end) scores[i + lane] = NOTHING;
    vec weight = exp_of(load(scores + i) - top);
    if (!is_whole)
      for (i64 lane = 0; lane < LANES; lane++)
        if (lane < first || lane >= end) weight[lane] = 0;
    *(vec *)(scores + i) = weight;
    total += weight;
  }
  return (Softmax){top, sum_of(total)};
}

/* All bits set for those of LANES neighbouring positions that lie in `seen`. */
INLINE lane_vec are_seen(const int *positions, Range seen) {
  typedef int32_t unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
  const lane_vec position = *(const unaligned *)positions;
  const int32_t end = (int32_t)(seen.end < INT32_MAX ? seen.end : INT32_MAX), begin = (int32_t)(seen.begin < end ? seen.begin : end);
  return (position >= begin) & (position < end);
}

/* The same where each entry of tile i, `entries[i]` and those after it, is seen if its position is in `seen`. Nothing seen: zeros. */
static Softmax soften_view(float *scores, const i64 *entries, i64 num_tiles, const int *positions, Range seen) {
  const vec nothing = (vec){0} + NOTHING;
  vec tops = nothing;
  for (i64 i = 0; i < num_tiles; i++) {
    const lane_vec is_seen = are_seen(positions + entries[i], seen);
    const vec score = (vec)(((lane_vec)load(scores + i * LANES) & is_seen) | ((lane_vec)nothing & ~is_seen));
    const lane_vec is_higher = score > tops;
    *(vec *)(scores + i * LANES) = score;
    tops = (vec)(((lane_vec)score & is_higher) | ((lane_vec)tops & ~is_higher));
  }
  float top = NOTHING;
  for (i64 lane = 0; lane < LANES; lane++) top = tops[lane] > top ? tops[lane] : top;
  if (top == NOTHING) {
    memset(scores, 0, (size_t)(num_tiles * LANES) * sizeof(float));
    return (Softmax){NOTHING, 0};
  }
  vec total = {0};
  for (i64 i = 0; i < num_tiles * LANES; i += LANES) {
    const vec score = load(scores + i);
    const vec weight = (vec)((lane_vec)exp_of(score - top) & (score != nothing));
    *(vec *)(scores + i) = weight;
    total += weight;
  }
  return (Softmax){top, sum_of(total)};
}

/* Adds the output over a part of the keys to that over the parts before it. */
static void merge(Softmax *all, float *out, Softmax part, const float *part_out, i64 D) {
  if (part.sum == 0) return;
  float top = part.top > all->top ? part.top : all->top, before = expf(all->top - top), now = expf(part.top - top);
  for (i64 d = 0; d < D; d += LANES) *(vec *)(out + d) = load(out + d) * before + load(part_out + d) * now;
  *all = (Softmax){top, all->sum * before + part.sum * now};
}

/* What all of one call share. */
typedef struct {
  const float *qkv, *k_pages, *v_pages;
  const i64 *entry_begin, *entry_end, *local_begin, *local_end;
  float *out;
  i64 H, G, D, T, width, sharing;
  const i64 *views;     /* of each row; -1: a plain one. NULL: all are plain */
  const int *positions; /* of each view's entries, [views][num_entries] */
  i64 num_entries;
} Attention;

/* Some queries of one chunk, which pass over the entries of its request together. */
typedef struct {
  const i64 *rows, *pages;
  i64 num_rows, first_out;
  Range entries; /* what any of them reads; begins at a multiple of LANES */
  const int *positions; /* of the entries of their view; NULL: they read ranges of entries */
  Range seen;           /* positions that any of them reads */
} Block;

static i64 num_segments(const Block *b) {
  return size_of(b->entries) ? (b->entries.end - 1) / SEGMENT - b->entries.begin / SEGMENT + 1 : 0;
}

/* The rows' queries of one key head, scaled: [row][sharing head][D]. */
static void take_queries(const Attention *a, const Block *b, i64 group, float *q) {
  float scale = 1.0f / sqrtf((float)a->D);
  for (i64 i = 0; i < b->num_rows; i++) {
    const float *from = a->qkv + b->rows[i] * a->width + group * a->sharing * a->D;
    for (i64 d = 0; d < a->sharing * a->D; d++) q[i * a->sharing * a->D + d] = from[d] * scale;
  }
}

static int any_seen(const int *positions, Range seen) {
  const lane_vec is_seen = are_seen(positions, seen);
  int found = 0;
  for (i64 lane = 0; lane < LANES; lane++) found |= is_seen[lane];
  return found;
}

/* Outputs `out` of all queries over segment `number`, each with a softmax of its own. `scores` has room for [queries][SEGMENT]. */
static void attend_segment(const Attention *a, const Block *b, i64 group, i64 number, const float *q, float *scores, float *out,
                           Softmax *softmax) {
  i64 T = a->T, D = a->D, num_queries = b->num_rows * a->sharing;
  i64 first = (b->entries.begin / SEGMENT + number) * SEGMENT, end = first + SEGMENT;
  if (first < b->entries.begin) first = b->entries.begin;
  if (end > b->entries.end) end = b->entries.end;
  Tile tiles[MAX_TILES];
  i64 num_tiles = 0, entries[MAX_TILES];
  for (i64 entry = first; entry < end; entry += LANES) {
    if (b->positions && !any_seen(b->positions + entry, b->seen)) continue;
    i64 page = b->pages[entry / T] * a->G + group, offset = entry % T;
    entries[num_tiles] = entry;
    tiles[num_tiles++] = (Tile){a->k_pages + page * D * T + offset, a->v_pages + (page * T + offset) * D};
  }
  for (i64 j = 0; j < num_queries; j += MAX_QUERIES) {
    int count = (int)(num_queries - j < MAX_QUERIES ? num_queries - j : MAX_QUERIES);
    score_all(q + j * D, tiles, num_tiles, scores + j * SEGMENT, D, T, count);
    for (i64 n = j; n < j + count; n++) {
      i64 row = b->rows[n / a->sharing];
      if (b->positions) {
        Range seen = {a->entry_begin[row], a->entry_end[row]};
        softmax[n] = soften_view(scores + n * SEGMENT, entries, num_tiles, b->positions, seen);
        continue;
      }
      Range seen = {a->entry_begin[row] - first, a->entry_end[row] - first};
      if (seen.begin < 0) seen.begin = 0;
      if (seen.end > end - first) seen.end = end - first;
      softmax[n] = (Softmax){NOTHING, 0};
      if (size_of(seen))
        softmax[n] = soften(scores + n * SEGMENT, num_tiles * LANES, seen);
      else
        memset(scores + n * SEGMENT, 0, (size_t)(num_tiles * LANES) * sizeof(float));
    }
    add_all(scores + j * SEGMENT, tiles, num_tiles, out + j * D, D, count);
  }
}

/* Adds what query n reads of rows of this call to its output. */
static void attend_local(const Attention *a, const Block *b, i64 group, i64 n, const float *q, float *part, float *out,
                         Softmax *softmax) {
  i64 row = b->rows[n / a->sharing], D = a->D;
  for (i64 i = a->local_begin[row]; i < a->local_end[row]; i++) {
    const float *k = a->qkv + i * a->width + (a->H + group) * D, *v = k + a->G * D;
    memcpy(part, v, (size_t)D * sizeof(float));
    merge(softmax, out, (Softmax){dot(q + n * D, k, D), 1}, part, D);
  }
}

/* Outputs over all segments become those over rows of this call, too, and are written to where they belong. */
static void finish_block(const Attention *a, const Block *b, i64 group, const float *q, float *part, float *out,
                         Softmax *softmax) {
  i64 D = a->D, num_queries = b->num_rows * a->sharing;
  for (i64 n = 0; n < num_queries; n++) {
    attend_local(a, b, group, n, q, part, out + n * D, softmax + n);
    float *to = a->out + ((b->first_out + n / a->sharing) * a->H + group * a->sharing + n % a->sharing) * D;
    float inverse = 1.0f / softmax[n].sum;
    for (i64 d = 0; d < D; d++) to[d] = out[n * D + d] * inverse;
  }
}

static void begin_outputs(float *out, Softmax *softmax, i64 num_queries, i64 D) {
  memset(out, 0, (size_t)(num_queries * D) * sizeof(float));
  for (i64 n = 0; n < num_queries; n++) softmax[n] = (Softmax){NOTHING, 0};
}

/* Memory of a thread for a block: queries, outputs so far, those of a segment, scores, and the softmax of each. */
typedef struct {
  float *q, *out, *part, *scores;
  Softmax *softmax, *part_softmax;
} Room;

static Room room_of(i64 num_queries, i64 D) {
  float *q = scratch_of(num_queries * (3 * D + SEGMENT + 4)), *out = q + num_queries * D, *part = out + num_queries * D;
  float *scores = part + num_queries * D;
  Softmax *softmax = (Softmax *)(scores + num_queries * SEGMENT);
  return (Room){q, out, part, scores, softmax, softmax + num_queries};
}

/* One block and key head, by one thread. */
static void attend_block(const Attention *a, const Block *b, i64 group) {
  i64 num_queries = b->num_rows * a->sharing;
  Room room = room_of(num_queries, a->D);
  take_queries(a, b, group, room.q);
  begin_outputs(room.out, room.softmax, num_queries, a->D);
  for (i64 number = 0; number < num_segments(b); number++) {
    attend_segment(a, b, group, number, room.q, room.scores, room.part, room.part_softmax);
    for (i64 n = 0; n < num_queries; n++)
      merge(room.softmax + n, room.out + n * a->D, room.part_softmax[n], room.part + n * a->D, a->D);
  }
  finish_block(a, b, group, room.q, room.part, room.out, room.softmax);
}

/* The same with the segments of all blocks and key heads spread over the threads. */
static void attend_by_segments(const Attention *a, const Block *blocks, i64 num_blocks, i64 most_segments, i64 most_queries) {
  i64 stride = most_queries * (a->D + 2), num_items = num_blocks * a->G;
  float *parts = malloc((size_t)(num_items * most_segments * stride) * sizeof(float));
  if (!parts) abort();
#pragma omp parallel for schedule(dynamic, 1) collapse(2)
  for (i64 item = 0; item < num_items; item++)
    for (i64 number = 0; number < most_segments; number++) {
      const Block *b = blocks + item / a->G;
      if (number >= num_segments(b)) continue;
      float *part = parts + (item * most_segments + number) * stride;
      Room room = room_of(b->num_rows * a->sharing, a->D);
      take_queries(a, b, item % a->G, room.q);
      attend_segment(a, b, item % a->G, number, room.q, room.scores, part, (Softmax *)(part + most_queries * a->D));
    }
#pragma omp parallel for schedule(static)
  for (i64 item = 0; item < num_items; item++) {
    const Block *b = blocks + item / a->G;
    i64 num_queries = b->num_rows * a->sharing;
    Room room = room_of(num_queries, a->D);
    take_queries(a, b, item % a->G, room.q);
    begin_outputs(room.out, room.softmax, num_queries, a->D);
    for (i64 number = 0; number < num_segments(b); number++) {
      const float *part = parts + (item * most_segments + number) * stride;
      const Softmax *softmax = (const Softmax *)(part + most_queries * a->D);
      for (i64 n = 0; n < num_queries; n++) merge(room.softmax + n, room.out + n * a->D, softmax[n], part + n * a->D, a->D);
    }
    finish_block(a, b, item % a->G, room.q, room.part, room.out, room.softmax);
  }
  free(parts);
}

static Block block_of(const Attention *a, const i64 *rows, i64 num_rows, const i64 *pages, i64 first_out) {
  Range entries = {INT64_MAX, 0};
  for (i64 i = 0; i < num_rows; i++) {
    i64 begin = a->entry_begin[rows[i]], end = a->entry_end[rows[i]];
    if (end > begin && begin < entries.begin) entries.begin = begin;
    if (end > begin && end > entries.end) entries.end = end;
  }
  if (a->views && a->views[rows[0]] >= 0) {
    Range all = {0, size_of(entries) ? a->num_entries : 0};
    return (Block){rows, pages, num_rows, first_out, all, a->positions + a->views[rows[0]] * a->num_entries, entries};
  }
  entries.begin = size_of(entries) ? entries.begin / LANES * LANES : 0;
  return (Block){rows, pages, num_rows, first_out, entries, NULL, {0, 0}};
}

/* Attention of `query_rows`, by chunk: row r reads entries [entry_begin[r], entry_end[r]) of its request's pages and rows
   [local_begin[r], local_end[r]) of this call. Chunk c has queries [query_start[c], query_start[c + 1]) and rows
   [row_start[c], row_start[c + 1]), all of one view. qkv[R][stride], out[number of queries][H D]. With `views`, a row of a view reads
   the entries of its table whose `positions` are in its range instead. */
void dmtd_attend(const float *qkv, i64 stride, const float *k_pages, const float *v_pages, const i64 *pages, i64 pages_stride, const i64 *slot,
                 const i64 *entry_begin, const i64 *entry_end, const i64 *local_begin, const i64 *local_end,
                 const i64 *query_rows, const i64 *query_start, const i64 *row_start, i64 num_chunks, float *out, i64 H, i64 G,
                 i64 D, i64 T, const i64 *views, const int *positions, i64 num_entries) {
  i64 sharing = H / G, rows_per_block = sharing < BLOCK_QUERIES ? BLOCK_QUERIES / sharing : 1, num_blocks = 0;
  Attention a = {qkv, k_pages, v_pages, entry_begin, entry_end, local_begin, local_end, out, H, G, D, T, stride, sharing,
                 views, positions, num_entries};
  i64 most_blocks = query_start[num_chunks] / rows_per_block + num_chunks, most_segments = 0;
  Block *blocks = malloc((size_t)most_blocks * sizeof(Block));
  if (!blocks) abort();
  for (i64 c = 0; c < num_chunks; c++)
    for (i64 first = query_start[c]; first < query_start[c + 1]; first += rows_per_block) {
      i64 left = query_start[c + 1] - first, num_rows = left < rows_per_block ? left : rows_per_block;
      blocks[num_blocks] = block_of(&a, query_rows + first, num_rows, pages + slot[row_start[c]] * pages_stride, first);
      i64 segments = num_segments(blocks + num_blocks++);
      if (segments > most_segments) most_segments = segments;
    }
  if (num_blocks * G < PIECES_PER_THREAD * omp_get_max_threads() && most_segments > 1)
    attend_by_segments(&a, blocks, num_blocks, most_segments, rows_per_block * sharing);
  else {
#pragma omp parallel for schedule(dynamic, 1) collapse(2)
    for (i64 block = 0; block < num_blocks; block++)
      for (i64 group = 0; group < G; group++) attend_block(&a, blocks + num_blocks - 1 - block, group);
  }
  free(blocks);
}

/* K and V of entries, copied to other entries: K, whose dimension d pairs with d + D / 2, turned by the angle of cosines and sines
   [number of entries][D]. Pages as above; entry i lies in page[i] at offset[i]. */
void dmtd_move(float *k_pages, float *v_pages, const i64 *from_page, const i64 *from_offset, const i64 *to_page, const i64 *to_offset,
               const float *cosines, const float *sines, i64 num, i64 G, i64 D, i64 T) {
#pragma omp parallel for schedule(static)
  for (i64 i = 0; i < num; i++) {
    const float *c = cosines + i * D, *s = sines + i * D;
    for (i64 group = 0; group < G; group++) {
      const float *k = k_pages + (from_page[i] * G + group) * D * T + from_offset[i];
      float *to = k_pages + (to_page[i] * G + group) * D * T + to_offset[i];
      for (i64 d = 0; d < D / 2; d++) {
        float first = k[d * T], second = k[(d + D / 2) * T];
        to[d * T] = first * c[d] - second * s[d];
        to[(d + D / 2) * T] = second * c[d + D / 2] + first * s[d + D / 2];
      }
      memcpy(v_pages + ((to_page[i] * G + group) * T + to_offset[i]) * D, v_pages + ((from_page[i] * G + group) * T + from_offset[i]) * D,
             (size_t)D * sizeof(float));
    }
  }
}
