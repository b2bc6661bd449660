/* Decoding kernels for few rows on a CPU: what torch does slowly at 1 to 32 rows.
 *
 * Plain C with GCC's vector types; any width of hardware vectors. Shapes follow the Python callers (native_ops.py):
 * R rows, K in, N out, H query heads, G key/value heads, E head size, T entries per page, I feed-forward size.
 * K pages are [G][E][T], V pages are [G][T][E]. T and E are multiples of 16. Integers are int64.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define MAX_QUERIES 8
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t half_vec __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint32_t bits_vec __attribute__((vector_size(64)));
typedef int64_t i64;

INLINE float sum_of(vec v) {
  float total = 0;
  for (int lane = 0; lane < LANES; lane++) total += v[lane];
  return total;
}

INLINE vec load(const float *p) { return *(const vec *)p; }

/* Sixteen weights as fp32: bfloat16 is the upper half of an fp32. */
INLINE vec load_weights(const void *w, i64 index, const int is_bf16) {
  if (!is_bf16) return load((const float *)w + index);
  bits_vec bits = __builtin_convertvector(*(const half_vec *)((const uint16_t *)w + index), bits_vec) << 16;
  return (vec)bits;
}

INLINE float load_weight(const void *w, i64 index, const int is_bf16) {
  if (!is_bf16) return ((const float *)w)[index];
  uint32_t bits = (uint32_t)((const uint16_t *)w)[index] << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static __thread float *scratch = NULL;
static __thread i64 scratch_size = 0;

static float *scratch_of(i64 size) {
  if (size > scratch_size) {
    free(scratch);
    scratch = malloc((size_t)size * sizeof(float));
    if (!scratch) abort();
    scratch_size = size;
  }
  return scratch;
}

#define AHEAD_BYTES 1536

/* Products of M rows of x and B rows of w, `stream` rows apart. Every weight is loaded once and serves M rows. `packed` holds x
   sixteen columns at a time, row beside row; `x` itself serves the columns after them. */
INLINE void tile(const float *packed, const float *x, const void *w, i64 row, i64 stream, i64 K, const int M, const int B, const int is_bf16,
                 float out[3][8]) {
  const int bytes = is_bf16 ? 2 : 4;
  vec acc[3][8];
#pragma GCC unroll 3
  for (int b = 0; b < B; b++)
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) acc[b][m] = (vec){0};
  i64 k = 0;
  for (; k + LANES <= K; k += LANES) {
    vec wv[3];
#pragma GCC unroll 3
    for (int b = 0; b < B; b++) {
      i64 index = (row + b * stream) * K + k;
      wv[b] = load_weights(w, index, is_bf16);
      __builtin_prefetch((const char *)w + index * bytes + AHEAD_BYTES);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      vec xv = load(packed + k * M + m * LANES);
#pragma GCC unroll 3
      for (int b = 0; b < B; b++) acc[b][m] += wv[b] * xv;
    }
  }
#pragma GCC unroll 3
  for (int b = 0; b < B; b++)
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      float total = sum_of(acc[b][m]);
      for (i64 tail = k; tail < K; tail++) total += load_weight(w, (row + b * stream) * K + tail, is_bf16) * x[m * K + tail];
      out[b][m] = total;
    }
}

typedef void (*Tile)(const float *, const float *, const void *, i64, i64, i64, float[3][8]);

#define DEFINE_TILE(M, B) \
  static void tile_##M##_##B(const float *packed, const float *x, const void *w, i64 row, i64 stream, i64 K, \
                                  float out[3][8]) { \
    tile(packed, x, w, row, stream, K, M, B, 0, out); \
  } \
  static void half_tile_##M##_##B(const float *packed, const float *x, const void *w, i64 row, i64 stream, i64 K, \
                                  float out[3][8]) { \
    tile(packed, x, w, row, stream, K, M, B, 1, out); \
  }
#define FOR_EACH_M(DO, B) DO(1, B) DO(2, B) DO(3, B) DO(4, B) DO(5, B) DO(6, B) DO(7, B) DO(8, B)
FOR_EACH_M(DEFINE_TILE, 1)
FOR_EACH_M(DEFINE_TILE, 3)

#define TILE_NAME(M, B) tile_##M##_##B,
#define HALF_TILE_NAME(M, B) half_tile_##M##_##B,
static const Tile TILES[2][2][8] = {{{FOR_EACH_M(TILE_NAME, 1)}, {FOR_EACH_M(TILE_NAME, 3)}},
                                    {{FOR_EACH_M(HALF_TILE_NAME, 1)}, {FOR_EACH_M(HALF_TILE_NAME, 3)}}};

/* Columns [0, whole) of up to eight rows, sixteen at a time, row beside row: rows as they lie may share cache sets. */
static void pack(const float *x, float *packed, i64 rows, i64 K, i64 whole) {
  for (i64 k = 0; k < whole; k += LANES)
    for (i64 m = 0; m < rows; m++) *(vec *)(packed + k * rows + m * LANES) = load(x + m * K + k);
}

/* out[R][N] = x[R][K] w[N][K]' + bias[N] + residual[R][N]; bias and residual may be null, out may be residual.
   Three rows of w times eight of x are 24 sums, which stay in registers. The three rows lie N / 3 apart, so that each thread reads
   three long streams, which prefetching follows across rows. */
void dmtd_matmul(const float *x, const void *w, const float *bias, const float *residual, float *out, i64 R, i64 K, i64 N,
                 i64 is_bf16) {
  i64 third = N / 3, whole = K / LANES * LANES;
  float *packed = scratch_of(R * whole);
  for (i64 first = 0; first < R; first += 8) pack(x + first * K, packed + first * whole, R - first < 8 ? R - first : 8, K, whole);
#pragma omp parallel for schedule(static)
  for (i64 block = 0; block < third + N % 3; block++)
    for (i64 first = 0; first < R; first += 8) {
      i64 rows = R - first < 8 ? R - first : 8, columns = block < third ? 3 : 1, row = block < third ? block : block + 2 * third;
      float sums[3][8] = {{0}};
      TILES[is_bf16 != 0][columns == 3][rows - 1](packed + first * whole, x + first * K, w, row, third, K, sums);
      for (i64 b = 0; b < columns; b++)
        for (i64 m = 0; m < rows; m++) {
          i64 column = row + b * third, at = (first + m) * N + column;
          out[at] = sums[b][m] + (bias ? bias[column] : 0) + (residual ? residual[at] : 0);
        }
    }
}

/* e^x by 2^n p(f), |f| <= 1/2: relative error below 2e-7 for x in [-87, 88], which it is clamped to. */
INLINE vec exp_of(vec x) {
  typedef int32_t int_vec __attribute__((vector_size(64)));
  int_vec low = x < -87.0f, high = x > 88.0f;
  x = (vec)(((int_vec)x & ~low & ~high) | ((int_vec)(x * 0 - 87.0f) & low) | ((int_vec)(x * 0 + 88.0f) & high));
  vec y = x * 1.44269504088896341f;
  int_vec n = __builtin_convertvector(y + (vec)(((int_vec)y & INT32_MIN) | (int_vec)(x * 0 + 0.5f)), int_vec);
  vec whole = __builtin_convertvector(n, vec);
  vec f = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  vec p = 1.9875691500e-4f * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * f * f + f + 1.0f;
  return p * (vec)((n + 127) << 23);
}

/* Sixteen numbers, or the `count` that are left. */
INLINE vec load_some(const float *p, i64 count) {
  if (count >= LANES) return load(p);
  float some[LANES] = {0};
  memcpy(some, p, (size_t)count * sizeof(float));
  return load(some);
}

INLINE void store_some(float *p, vec value, i64 count) {
  if (count >= LANES)
    *(vec *)p = value;
  else
    memcpy(p, &value, (size_t)count * sizeof(float));
}

static void norm_row(const float *x, const float *weight, float *out, i64 size, float eps) {
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (i64 i = 0; i < size; i++) total += x[i] * x[i];
  float scale = 1.0f / sqrtf(total / (float)size + eps);
#pragma omp simd
  for (i64 i = 0; i < size; i++) out[i] = weight[i] * (x[i] * scale);
}

/* RMSNorm of R rows. */
void dmtd_norm(const float *x, const float *weight, float *out, i64 R, i64 size, float eps) {
#pragma omp parallel for schedule(static) if (R * size > 16384)
  for (i64 r = 0; r < R; r++) norm_row(x + r * size, weight, out + r * size, size, eps);
}

/* out[R][I] = silu(gate) * up, of gate_up[R][2 I]. */
void dmtd_gate(const float *gate_up, float *out, i64 R, i64 I) {
#pragma omp parallel for schedule(static) collapse(2) if (R * I > 4096)
  for (i64 r = 0; r < R; r++)
    for (i64 start = 0; start < I; start += 1024) {
      const float *gate = gate_up + r * 2 * I, *up = gate + I;
      i64 stop = start + 1024 < I ? start + 1024 : I;
      for (i64 i = start; i < stop; i += LANES) {
        vec g = load_some(gate + i, stop - i), u = load_some(up + i, stop - i);
        store_some(out + r * I + i, g / (1.0f + exp_of(-g)) * u, stop - i);
      }
    }
}

static void norm_rotate(float *head, const float *norm, const float *cos_E, const float *sin_E, i64 E, float eps) {
  if (norm) norm_row(head, norm, head, E, eps);
  i64 half = E / 2;
#pragma omp simd
  for (i64 i = 0; i < half; i++) {
    float first = head[i], second = head[i + half];
    head[i] = first * cos_E[i] - second * sin_E[i];
    head[i + half] = second * cos_E[i + half] + first * sin_E[i + half];
  }
}

/* Norm (unless null) and rotate q and k of qkv[R][(H + 2 G) E] in place; store k and v of written rows in their pages. */
void dmtd_rotate_and_store(float *qkv, const float *q_norm, const float *k_norm, const float *cos_TE, const float *sin_TE,
                           const i64 *position, const i64 *slot, const i64 *is_written, const i64 *pages, i64 pages_stride,
                           float *k_pool, float *v_pool, i64 R, i64 H, i64 G, i64 E, i64 T, float eps) {
#pragma omp parallel for schedule(static) collapse(2) if (R * (H + 2 * G) * E > 16384)
  for (i64 r = 0; r < R; r++)
    for (i64 head = 0; head < H + G; head++) {
      float *row = qkv + r * (H + 2 * G) * E;
      const float *cos_E = cos_TE + position[r] * E, *sin_E = sin_TE + position[r] * E;
      norm_rotate(row + head * E, head < H ? q_norm : k_norm, cos_E, sin_E, E, eps);
      if (head < H || !is_written[r]) continue;
      i64 group = head - H, page = pages[slot[r] * pages_stride + position[r] / T], entry = position[r] % T;
      float *k_page = k_pool + (page * G + group) * E * T, *v_page = v_pool + (page * G + group) * T * E;
      const float *k = row + head * E, *v = row + (head + G) * E;
      for (i64 e = 0; e < E; e++) k_page[e * T + entry] = k[e];
      memcpy(v_page + entry * E, v, (size_t)E * sizeof(float));
    }
}

/* Scores of NQ queries with the T entries of one page. Score rows lie `stride` apart. */
INLINE void score_page(const float *q, const float *k_page, float *scores, i64 stride, i64 E, i64 T, const int NQ) {
  for (i64 t = 0; t < T; t += LANES) {
    vec acc[MAX_QUERIES];
#pragma GCC unroll 8
    for (int j = 0; j < NQ; j++) acc[j] = (vec){0};
    for (i64 e = 0; e < E; e++) {
      vec kv = load(k_page + e * T + t);
#pragma GCC unroll 8
      for (int j = 0; j < NQ; j++) acc[j] += q[j * E + e] * kv;
    }
#pragma GCC unroll 8
    for (int j = 0; j < NQ; j++) *(vec *)(scores + j * stride + t) = acc[j];
  }
}

/* Adds the values of one page, weighted, to NQ outputs. */
INLINE void add_page(const float *weights, const float *v_page, float *out, i64 stride, i64 E, i64 T, const int NQ) {
  for (i64 e = 0; e < E; e += LANES) {
    vec acc[MAX_QUERIES];
#pragma GCC unroll 8
    for (int j = 0; j < NQ; j++) acc[j] = load(out + j * E + e);
    for (i64 t = 0; t < T; t++) {
      vec value = load(v_page + t * E + e);
#pragma GCC unroll 8
      for (int j = 0; j < NQ; j++) acc[j] += weights[j * stride + t] * value;
    }
#pragma GCC unroll 8
    for (int j = 0; j < NQ; j++) *(vec *)(out + j * E + e) = acc[j];
  }
}

#define EACH_COUNT(CALL) \
  switch (count) { \
    case 1: CALL(1); break; case 2: CALL(2); break; case 3: CALL(3); break; case 4: CALL(4); break; \
    case 5: CALL(5); break; case 6: CALL(6); break; case 7: CALL(7); break; case 8: CALL(8); break; \
  }

static float dot(const float *a, const float *b, i64 size) {
  vec acc = {0};
  for (i64 i = 0; i < size; i += LANES) acc += load(a + i) * load(b + i);
  return sum_of(acc);
}

/* Scores to probabilities: entries [0, history) of the pages and [begin, end) of the local ones count, all others become 0.
   Returns 1 / sum; the caller scales its output instead of every entry. */
static float soften(float *paged, i64 num_paged, i64 history, float *local, i64 num_local, i64 begin, i64 end) {
  float top = -3.0e38f;
#pragma omp simd reduction(max : top)
  for (i64 i = 0; i < history; i++) top = paged[i] > top ? paged[i] : top;
  for (i64 i = begin; i < end; i++) top = local[i] > top ? local[i] : top;
  vec total = {0};
  for (i64 i = 0; i < num_paged; i += LANES) {
    if (i + LANES > history)
      for (i64 hidden = i > history ? i : history; hidden < i + LANES; hidden++) paged[hidden] = -3.0e38f;
    vec weight = exp_of(load(paged + i) - top);
    if (i + LANES > history)
      for (i64 lane = i > history ? 0 : history - i; lane < LANES; lane++) weight[lane] = 0;
    *(vec *)(paged + i) = weight;
    total += weight;
  }
  float sum = sum_of(total);
  for (i64 i = 0; i < num_local; i++) {
    local[i] = i >= begin && i < end ? expf(local[i] - top) : 0;
    sum += local[i];
  }
  return 1.0f / sum;
}

/* What every (chunk, key head) of one call shares. */
typedef struct {
  const float *qkv, *k_pool, *v_pool;
  const i64 *pages, *history, *begin, *end;
  float *out;
  i64 H, G, E, T, first_out;
} Attention;

/* Queries `query_rows[0..n)` of one chunk whose rows are [chunk_begin, chunk_end), against one key head. */
static void attend_one(const Attention *a, const i64 *query_rows, i64 n, i64 chunk_begin, i64 chunk_end, i64 group) {
  i64 H = a->H, G = a->G, E = a->E, T = a->T, width = (H + 2 * G) * E, per_group = H / G, num_queries = n * per_group;
  i64 longest = 0, has_local = 0;
  for (i64 i = 0; i < n; i++) {
    i64 row = query_rows[i];
    if (a->history[row] > longest) longest = a->history[row];
    if (a->end[row] > a->begin[row]) has_local = 1;
  }
  i64 num_pages = (longest + T - 1) / T, num_paged = num_pages * T, num_local = has_local ? chunk_end - chunk_begin : 0;
  i64 stride = num_paged + (num_local + LANES - 1) / LANES * LANES;
  float *q = scratch_of(num_queries * (2 * E + stride + 1)), *out = q + num_queries * E, *scores = out + num_queries * E;
  float *inverse = scores + num_queries * stride, scale = 1.0f / sqrtf((float)E);
  for (i64 j = 0; j < num_queries; j++) {
    const float *from = a->qkv + query_rows[j / per_group] * width + (group * per_group + j % per_group) * E;
    for (i64 e = 0; e < E; e++) q[j * E + e] = from[e] * scale;
  }
  memset(out, 0, (size_t)(num_queries * E) * sizeof(float));
  for (i64 p = 0; p < num_pages; p++) {
    const float *k_page = a->k_pool + (a->pages[p] * G + group) * E * T;
    for (i64 j = 0; j < num_queries; j += MAX_QUERIES) {
      i64 count = num_queries - j < MAX_QUERIES ? num_queries - j : MAX_QUERIES;
#define SCORE(NQ) score_page(q + j * E, k_page, scores + j * stride + p * T, stride, E, T, NQ)
      EACH_COUNT(SCORE)
    }
  }
  for (i64 j = 0; j < num_queries; j++) {
    i64 row = query_rows[j / per_group];
    float *paged = scores + j * stride, *local = paged + num_paged;
    for (i64 i = 0; i < num_local; i++) local[i] = dot(q + j * E, a->qkv + (chunk_begin + i) * width + (H + group) * E, E);
    inverse[j] = soften(paged, num_paged, a->history[row], local, num_local, a->begin[row] - chunk_begin, a->end[row] - chunk_begin);
  }
  for (i64 p = 0; p < num_pages; p++) {
    const float *v_page = a->v_pool + (a->pages[p] * G + group) * T * E;
    for (i64 j = 0; j < num_queries; j += MAX_QUERIES) {
      i64 count = num_queries - j < MAX_QUERIES ? num_queries - j : MAX_QUERIES;
#define ADD(NQ) add_page(scores + j * stride + p * T, v_page, out + j * E, stride, E, T, NQ)
      EACH_COUNT(ADD)
    }
  }
  for (i64 j = 0; j < num_queries; j++) {
    for (i64 i = 0; i < num_local; i++) {
      float weight = scores[j * stride + num_paged + i];
      const float *v = a->qkv + (chunk_begin + i) * width + (H + G + group) * E;
      for (i64 e = 0; e < E; e++) out[j * E + e] += weight * v[e];
    }
    float *to = a->out + (a->first_out + j / per_group) * H * E + (group * per_group + j % per_group) * E;
    for (i64 e = 0; e < E; e++) to[e] = out[j * E + e] * inverse[j];
  }
}

/* Attention of `query_rows`, grouped by chunk: chunk c has queries [query_start[c], query_start[c + 1]) and rows
   [row_start[c], row_start[c + 1]). out[number of queries][H E]. */
void dmtd_attend(const float *qkv, const float *k_pool, const float *v_pool, const i64 *pages, i64 pages_stride, const i64 *slot,
                 const i64 *history, const i64 *begin, const i64 *end, const i64 *query_rows, const i64 *query_start,
                 const i64 *row_start, i64 num_chunks, float *out, i64 H, i64 G, i64 E, i64 T) {
#pragma omp parallel for schedule(dynamic, 1) collapse(2)
  for (i64 c = 0; c < num_chunks; c++)
    for (i64 group = 0; group < G; group++) {
      i64 first = query_start[c], n = query_start[c + 1] - first;
      if (!n) continue;
      const i64 *own_pages = pages + slot[row_start[c]] * pages_stride;
      Attention a = {qkv, k_pool, v_pool, own_pages, history, begin, end, out, H, G, E, T, first};
      attend_one(&a, query_rows + first, n, row_start[c], row_start[c + 1], group);
    }
}
