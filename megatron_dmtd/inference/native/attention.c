/* Attention of few rows over pages, read in place.
 *
 * Shapes follow the Python caller (ops/native_ops.py): R rows of a pass, H query heads, G key/value heads, D head width,
 * T entries per page. K pages are [G][D][T], V pages are [G][T][D]. T and D are multiples of 16. Integers are int64.
 */
#include "vectors.h"

/* What stays in registers: sums of MAX_QUERIES queries times STEP entries. */
#ifdef __AVX512F__
#define MAX_QUERIES 8
#else
#define MAX_QUERIES 4
#endif
#define STEP 16
#define VECTORS (STEP / LANES)

/* Scores of NQ queries with the T entries of one page. Score rows lie `stride` apart. The next page is fetched meanwhile: pages of
   one key head lie far apart. */
INLINE void score_page(const float *q, const float *k_page, const float *next, float *scores, i64 stride, i64 D, i64 T,
                       const int NQ) {
  for (i64 t = 0; t < T; t += STEP) {
    vec acc[MAX_QUERIES][VECTORS];
#pragma GCC unroll 8
    for (int j = 0; j < NQ; j++)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) acc[j][v] = (vec){0};
    for (i64 d = 0; d < D; d++) {
      __builtin_prefetch(next + d * T + t);
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) {
        vec keys = load(k_page + d * T + t + v * LANES);
#pragma GCC unroll 8
        for (int j = 0; j < NQ; j++) acc[j][v] += q[j * D + d] * keys;
      }
    }
#pragma GCC unroll 8
    for (int j = 0; j < NQ; j++)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) *(vec *)(scores + j * stride + t + v * LANES) = acc[j][v];
  }
}

/* Adds the values of one page, weighted, to NQ outputs; the next page is fetched. */
INLINE void add_page(const float *weights, const float *v_page, const float *next, float *out, i64 stride, i64 D, i64 T,
                     const int NQ) {
  for (i64 d = 0; d < D; d += STEP) {
    vec acc[MAX_QUERIES][VECTORS];
#pragma GCC unroll 8
    for (int j = 0; j < NQ; j++)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) acc[j][v] = load(out + j * D + d + v * LANES);
    for (i64 t = 0; t < T; t++) {
      __builtin_prefetch(next + t * D + d);
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) {
        vec values = load(v_page + t * D + d + v * LANES);
#pragma GCC unroll 8
        for (int j = 0; j < NQ; j++) acc[j][v] += weights[j * stride + t] * values;
      }
    }
#pragma GCC unroll 8
    for (int j = 0; j < NQ; j++)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) *(vec *)(out + j * D + d + v * LANES) = acc[j][v];
  }
}

#if MAX_QUERIES == 8
#define EACH_COUNT(CALL) \
  switch (count) { \
    case 1: CALL(1); break; case 2: CALL(2); break; case 3: CALL(3); break; case 4: CALL(4); break; \
    case 5: CALL(5); break; case 6: CALL(6); break; case 7: CALL(7); break; case 8: CALL(8); break; \
  }
#else
#define EACH_COUNT(CALL) \
  switch (count) { case 1: CALL(1); break; case 2: CALL(2); break; case 3: CALL(3); break; case 4: CALL(4); break; }
#endif

static float dot(const float *a, const float *b, i64 size) {
  vec acc = {0};
  for (i64 i = 0; i < size; i += LANES) acc += load(a + i) * load(b + i);
  return sum_of(acc);
}

/* A half-open range; empty if `end` is not above `begin`. */
typedef struct {
  i64 begin, end;
} Range;

/* Scores to probabilities: those of the pages in `seen` and the local ones in `near` count, all others become 0. `num_paged` is a
   multiple of LANES. Returns 1 / sum; the caller scales its output instead of every entry. */
static float soften(float *paged, i64 num_paged, Range seen, float *local, i64 num_local, Range near) {
  float top = -3.0e38f;
#pragma omp simd reduction(max : top)
  for (i64 i = seen.begin; i < seen.end; i++) top = paged[i] > top ? paged[i] : top;
  for (i64 i = near.begin; i < near.end; i++) top = local[i] > top ? local[i] : top;
  vec total = {0};
  for (i64 i = 0; i < num_paged; i += LANES) {
    i64 first = seen.begin > i ? seen.begin - i : 0, end = seen.end < i + LANES ? seen.end - i : LANES;
    int is_whole = first == 0 && end == LANES;
    if (!is_whole)
      for (i64 lane = 0; lane < LANES; lane++)
        if (lane < first || lane >= end) paged[i + lane] = -3.0e38f;
    vec weight = exp_of(load(paged + i) - top);
    if (!is_whole)
      for (i64 lane = 0; lane < LANES; lane++)
        if (lane < first || lane >= end) weight[lane] = 0;
    *(vec *)(paged + i) = weight;
    total += weight;
  }
  float sum = sum_of(total);
  for (i64 i = 0; i < num_local; i++) {
    local[i] = i >= near.begin && i < near.end ? expf(local[i] - top) : 0;
    sum += local[i];
  }
  return 1.0f / sum;
}

/* What every (chunk, key head) of one call shares. */
typedef struct {
  const float *qkv, *k_pages, *v_pages;
  const i64 *pages, *entry_begin, *entry_end, *local_begin, *local_end;
  float *out;
  i64 H, G, D, T, first_out;
} Attention;

/* Page `number` of the request, which is one of `all`. */
static const float *page_of(const float *all, const Attention *a, i64 number, i64 group) {
  return all + (a->pages[number] * a->G + group) * a->D * a->T;
}

/* Queries `query_rows[0..n)` of one chunk whose rows are [chunk_begin, chunk_end), against one key head. */
static void attend_one(const Attention *a, const i64 *query_rows, i64 n, i64 chunk_begin, i64 chunk_end, i64 group) {
  i64 H = a->H, G = a->G, D = a->D, T = a->T, width = (H + 2 * G) * D, per_group = H / G, num_queries = n * per_group;
  Range read = {INT64_MAX, 0};
  i64 has_local = 0;
  for (i64 i = 0; i < n; i++) {
    i64 row = query_rows[i];
    if (a->entry_begin[row] < read.begin) read.begin = a->entry_begin[row];
    if (a->entry_end[row] > read.end) read.end = a->entry_end[row];
    if (a->local_end[row] > a->local_begin[row]) has_local = 1;
  }
  i64 first_page = read.begin / T, last_page = (read.end + T - 1) / T, first_entry = first_page * T;
  i64 num_paged = (last_page - first_page) * T, num_local = has_local ? chunk_end - chunk_begin : 0;
  i64 stride = num_paged + (num_local + LANES - 1) / LANES * LANES;
  float *q = scratch_of(num_queries * (2 * D + stride + 1)), *out = q + num_queries * D, *scores = out + num_queries * D;
  float *inverse = scores + num_queries * stride, scale = 1.0f / sqrtf((float)D);
  for (i64 j = 0; j < num_queries; j++) {
    const float *from = a->qkv + query_rows[j / per_group] * width + (group * per_group + j % per_group) * D;
    for (i64 d = 0; d < D; d++) q[j * D + d] = from[d] * scale;
  }
  memset(out, 0, (size_t)(num_queries * D) * sizeof(float));
  for (i64 p = first_page; p < last_page; p++) {
    const float *k_page = page_of(a->k_pages, a, p, group);
    const float *next = page_of(a->k_pages, a, p + 1 < last_page ? p + 1 : p, group);
    for (i64 j = 0; j < num_queries; j += MAX_QUERIES) {
      i64 count = num_queries - j < MAX_QUERIES ? num_queries - j : MAX_QUERIES;
#define SCORE(NQ) score_page(q + j * D, k_page, next, scores + j * stride + p * T - first_entry, stride, D, T, NQ)
      EACH_COUNT(SCORE)
    }
  }
  for (i64 j = 0; j < num_queries; j++) {
    i64 row = query_rows[j / per_group];
    float *paged = scores + j * stride, *local = paged + num_paged;
    for (i64 i = 0; i < num_local; i++) local[i] = dot(q + j * D, a->qkv + (chunk_begin + i) * width + (H + group) * D, D);
    Range seen = {a->entry_begin[row] - first_entry, a->entry_end[row] - first_entry};
    Range near = {a->local_begin[row] - chunk_begin, a->local_end[row] - chunk_begin};
    inverse[j] = soften(paged, num_paged, seen, local, num_local, near);
  }
  for (i64 p = first_page; p < last_page; p++) {
    const float *v_page = page_of(a->v_pages, a, p, group);
    const float *next = page_of(a->v_pages, a, p + 1 < last_page ? p + 1 : p, group);
    for (i64 j = 0; j < num_queries; j += MAX_QUERIES) {
      i64 count = num_queries - j < MAX_QUERIES ? num_queries - j : MAX_QUERIES;
#define ADD(NQ) add_page(scores + j * stride + p * T - first_entry, v_page, next, out + j * D, stride, D, T, NQ)
      EACH_COUNT(ADD)
    }
  }
  for (i64 j = 0; j < num_queries; j++) {
    for (i64 i = 0; i < num_local; i++) {
      float weight = scores[j * stride + num_paged + i];
      const float *v = a->qkv + (chunk_begin + i) * width + (H + G + group) * D;
      for (i64 d = 0; d < D; d++) out[j * D + d] += weight * v[d];
    }
    float *to = a->out + (a->first_out + j / per_group) * H * D + (group * per_group + j % per_group) * D;
    for (i64 d = 0; d < D; d++) to[d] = out[j * D + d] * inverse[j];
  }
}

/* Attention of `query_rows`, by chunk: row r reads entries [entry_begin[r], entry_end[r]) of its request's pages and rows
   [local_begin[r], local_end[r]) of this call. Chunk c has queries [query_start[c], query_start[c + 1]) and rows
   [row_start[c], row_start[c + 1]). out[number of queries][H D]. */
void dmtd_attend(const float *qkv, const float *k_pages, const float *v_pages, const i64 *pages, i64 pages_stride, const i64 *slot,
                 const i64 *entry_begin, const i64 *entry_end, const i64 *local_begin, const i64 *local_end,
                 const i64 *query_rows, const i64 *query_start, const i64 *row_start, i64 num_chunks, float *out, i64 H, i64 G,
                 i64 D, i64 T) {
#pragma omp parallel for schedule(dynamic, 1) collapse(2)
  for (i64 c = 0; c < num_chunks; c++)
    for (i64 group = 0; group < G; group++) {
      i64 first = query_start[c], n = query_start[c + 1] - first;
      if (!n) continue;
      const i64 *own_pages = pages + slot[row_start[c]] * pages_stride;
      Attention a = {qkv, k_pages, v_pages, own_pages, entry_begin, entry_end, local_begin, local_end, out, H, G, D, T, first};
      attend_one(&a, query_rows + first, n, row_start[c], row_start[c + 1], group);
    }
}
