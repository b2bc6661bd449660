/* Decoding kernels for few rows on a CPU: what torch does slowly at 1 to 32 rows.
 *
 * Plain C with GCC's vector types; any width of hardware vectors. Shapes follow the Python callers (ops/native_ops.py):
 * R rows, K in, N out, H query heads, G key/value heads, E head size, T entries per page, I feed-forward size.
 * K pages are [G][E][T], V pages are [G][T][E]. T and E are multiples of 16. Integers are int64.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* The width of vectors is the hardware's: of wider ones compilers make slow code. What stays in registers follows from it: sums of
   three rows of w times TILE_ROWS of x, or sums of MAX_QUERIES queries times STEP entries. */
#ifdef __AVX512F__
#define LANES 16
#define TILE_ROWS 8
#define MAX_QUERIES 8
#else
#define LANES 8
#define TILE_ROWS 4
#define MAX_QUERIES 4
#endif
#define STEP 16
#define VECTORS (STEP / LANES)
#define INLINE static inline __attribute__((always_inline))

typedef float quad __attribute__((vector_size(16), aligned(4), may_alias));
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t half_vec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint32_t bits_vec __attribute__((vector_size(4 * LANES)));
typedef int64_t i64;

INLINE float sum_of(vec v) {
  const quad *parts = (const quad *)&v;
  quad total = parts[0];
  for (int part = 1; part < LANES / 4; part++) total += parts[part];
  return (total[0] + total[2]) + (total[1] + total[3]);
}

INLINE vec load(const float *p) { return *(const vec *)p; }

/* A vector of weights as fp32: bfloat16 is the upper half of an fp32. */
INLINE vec load_weights(const void *w, i64 index, const int is_bf16) {
  if (!is_bf16) return *(const vec *)((const float *)w + index);
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

/* Keeps a vector in a register: compilers would rather load it again for every product, and run out of loads. */
#if defined(__AVX512F__)
#define KEEP(v) __asm__ volatile("" : "+v"(v))
#elif defined(__AVX__)
#define KEEP(v) __asm__ volatile("" : "+x"(v))
#else
#define KEEP(v)
#endif

/* How far ahead of its use a weight is fetched if few rows of x pass. */
#define AHEAD_BYTES 1536
/* If more pass than a tile has, blocks of weights stay in the first cache meanwhile: 3 * GROUP rows of w, BLOCK_K columns of them. */
#define GROUP 2
#define BLOCK_K 256
#define MOST_ROWS 64

/* Adds the products of M rows of x and B rows of w, `stream` numbers apart, over `num` columns, to sums[B][M]. Every weight is
   loaded once and serves M rows. `packed` holds x one vector at a time, row beside row. With every vector, what lies at `next` is
   fetched, and `pace` bytes further with the following one. */
INLINE void tile(const float *packed, const void *w, i64 stream, i64 num, const char *next, i64 pace, vec *sums, const int M,
                 const int B, const int is_bf16) {
  const int bytes = is_bf16 ? 2 : 4;
  vec acc[3][TILE_ROWS];
#pragma GCC unroll 3
  for (int b = 0; b < B; b++)
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) acc[b][m] = sums[b * M + m];
  for (i64 k = 0; k < num; k += LANES, next += pace) {
    vec wv[3];
#pragma GCC unroll 3
    for (int b = 0; b < B; b++) {
      wv[b] = load_weights(w, b * stream + k, is_bf16);
      KEEP(wv[b]);
      __builtin_prefetch(next + b * stream * bytes);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      vec xv = *(const vec *)(packed + k * M + m * LANES);
      KEEP(xv);
#pragma GCC unroll 3
      for (int b = 0; b < B; b++) {
        acc[b][m] += wv[b] * xv;
        KEEP(acc[b][m]);
      }
    }
  }
#pragma GCC unroll 3
  for (int b = 0; b < B; b++)
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) sums[b * M + m] = acc[b][m];
}

typedef void (*Tile)(const float *, const void *, i64, i64, const char *, i64, vec *);

#define DEFINE_TILE(NAME, M, B, IS_BF16) \
  static void NAME##_##M##_##B(const float *packed, const void *w, i64 stream, i64 num, const char *next, i64 pace, \
                               vec *sums) { \
    tile(packed, w, stream, num, next, pace, sums, M, B, IS_BF16); \
  }
#define DEFINE_TILES(M, B) DEFINE_TILE(tile, M, B, 0) DEFINE_TILE(half_tile, M, B, 1)
#if TILE_ROWS == 8
#define FOR_EACH_M(DO, ...) DO(1, __VA_ARGS__) DO(2, __VA_ARGS__) DO(3, __VA_ARGS__) DO(4, __VA_ARGS__) \
                            DO(5, __VA_ARGS__) DO(6, __VA_ARGS__) DO(7, __VA_ARGS__) DO(8, __VA_ARGS__)
#else
#define FOR_EACH_M(DO, ...) DO(1, __VA_ARGS__) DO(2, __VA_ARGS__) DO(3, __VA_ARGS__) DO(4, __VA_ARGS__)
#endif
FOR_EACH_M(DEFINE_TILES, 1)
FOR_EACH_M(DEFINE_TILES, 3)

#define TILE_NAME(M, NAME, B) NAME##_##M##_##B,
#define TILES_OF(NAME) {{FOR_EACH_M(TILE_NAME, NAME, 1)}, {FOR_EACH_M(TILE_NAME, NAME, 3)}}
/* By: whether weights are bfloat16, whether three rows of them, rows of x. */
static const Tile TILES[2][2][TILE_ROWS] = {TILES_OF(tile), TILES_OF(half_tile)};

/* Columns [0, whole) of the rows of a tile, a vector at a time, row beside row: rows as they lie may share cache sets. */
static void pack(const float *x, float *packed, i64 rows, i64 K, i64 whole) {
  for (i64 k = 0; k < whole; k += LANES)
    for (i64 m = 0; m < rows; m++) *(vec *)(packed + k * rows + m * LANES) = *(const vec *)(x + m * K + k);
}

/* One product, as its tiles see it. */
typedef struct {
  const float *x, *packed, *bias, *residual;
  const void *w;
  float *out;
  i64 R, K, N, whole, third;
  int is_bf16;
} Product;

static i64 rows_of_tile(const Product *p, i64 first) { return p->R - first < TILE_ROWS ? p->R - first : TILE_ROWS; }

/* Sums to outputs, with the columns after the last whole vector. */
static void finish(const Product *p, const vec *sums, i64 first, i64 rows, i64 row, i64 count) {
  for (i64 b = 0; b < count; b++)
    for (i64 m = 0; m < rows; m++) {
      i64 column = row + b * p->third, at = (first + m) * p->N + column;
      float total = sum_of(sums[b * rows + m]);
      for (i64 k = p->whole; k < p->K; k++) total += load_weight(p->w, column * p->K + k, p->is_bf16) * p->x[(first + m) * p->K + k];
      p->out[at] = total + (p->bias ? p->bias[column] : 0) + (p->residual ? p->residual[at] : 0);
    }
}

/* Rows [row, row + num) of w, and with `count` 3 those one and two thirds further, times all rows of x. While the rows of x pass
   over one block of weights, the next block is fetched, in equal parts. */
static void multiply(const Product *p, i64 row, i64 num, i64 count) {
  vec sums[(MOST_ROWS / TILE_ROWS) * GROUP][3 * TILE_ROWS];
  i64 num_tiles = (p->R + TILE_ROWS - 1) / TILE_ROWS, step = num_tiles > 1 ? BLOCK_K : p->whole, bytes = p->is_bf16 ? 2 : 4;
  const char *w = p->w;
  memset(sums, 0, sizeof sums[0] * (size_t)(num_tiles * GROUP));
  for (i64 begin = 0; begin < p->whole; begin += step) {
    i64 size = begin + step < p->whole ? step : p->whole - begin, is_last = begin + size == p->whole;
    for (i64 t = 0; t < num_tiles; t++) {
      i64 first = t * TILE_ROWS, rows = rows_of_tile(p, first), pace = LANES * bytes / num_tiles;
      Tile add = TILES[p->is_bf16][count == 3][rows - 1];
      for (i64 n = 0; n < num; n++) {
        const char *here = w + ((row + n) * p->K + begin) * bytes, *next = here + AHEAD_BYTES;
        if (num_tiles > 1) next = (is_last ? w + (row + n + num) * p->K * bytes : here + size * bytes) + t * pace * (step / LANES);
        add(p->packed + first * p->whole + begin * rows, here, p->third * p->K, size, next, pace, sums[t * GROUP + n]);
      }
    }
  }
  for (i64 t = 0; t < num_tiles; t++)
    for (i64 n = 0; n < num; n++) finish(p, sums[t * GROUP + n], t * TILE_ROWS, rows_of_tile(p, t * TILE_ROWS), row + n, count);
}

/* out[R][N] = x[R][K] w[N][K]' + bias[N] + residual[R][N]; bias and residual may be null, out may be residual.
   Rows of w that are taken together lie N / 3 apart, so that each thread reads three long streams, which prefetching follows. */
static void multiply_some(const float *x, const void *w, const float *bias, const float *residual, float *out, i64 R, i64 K, i64 N,
                          int is_bf16) {
  i64 third = N / 3, whole = K / LANES * LANES, group = R > TILE_ROWS ? GROUP : 1;
  float *packed = scratch_of(R * whole);
  Product p = {x, packed, bias, residual, w, out, R, K, N, whole, third, is_bf16};
  for (i64 first = 0; first < R; first += TILE_ROWS)
    pack(x + first * K, packed + first * whole, rows_of_tile(&p, first), K, whole);
  i64 num_groups = (third + group - 1) / group;
#pragma omp parallel for schedule(static)
  for (i64 block = 0; block < num_groups + N % 3; block++) {
    i64 row = block < num_groups ? block * group : 3 * third + block - num_groups;
    if (block < num_groups)
      multiply(&p, row, third - row < group ? third - row : group, 3);
    else
      multiply(&p, row, 1, 1);
  }
}

void dmtd_matmul(const float *x, const void *w, const float *bias, const float *residual, float *out, i64 R, i64 K, i64 N,
                 i64 is_bf16) {
  for (i64 first = 0; first < R; first += MOST_ROWS)
    multiply_some(x + first * K, w, bias, residual ? residual + first * N : NULL, out + first * N,
                  R - first < MOST_ROWS ? R - first : MOST_ROWS, K, N, is_bf16 != 0);
}

/* e^x by 2^n p(f), |f| <= 1/2: relative error below 2e-7 for x in [-87, 88], which it is clamped to. */
INLINE vec exp_of(vec x) {
  typedef int32_t int_vec __attribute__((vector_size(4 * LANES)));
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

/* A vector of numbers, or the `count` that are left. */
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

/* Scores of NQ queries with the T entries of one page. Score rows lie `stride` apart. The next page is fetched meanwhile: pages of
   one key head lie far apart. */
INLINE void score_page(const float *q, const float *k_page, const float *next, float *scores, i64 stride, i64 E, i64 T, const int NQ) {
  for (i64 t = 0; t < T; t += STEP) {
    vec acc[MAX_QUERIES][VECTORS];
#pragma GCC unroll 8
    for (int j = 0; j < NQ; j++)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) acc[j][v] = (vec){0};
    for (i64 e = 0; e < E; e++) {
      __builtin_prefetch(next + e * T + t);
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) {
        vec keys = load(k_page + e * T + t + v * LANES);
#pragma GCC unroll 8
        for (int j = 0; j < NQ; j++) acc[j][v] += q[j * E + e] * keys;
      }
    }
#pragma GCC unroll 8
    for (int j = 0; j < NQ; j++)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) *(vec *)(scores + j * stride + t + v * LANES) = acc[j][v];
  }
}

/* Adds the values of one page, weighted, to NQ outputs; the next page is fetched. */
INLINE void add_page(const float *weights, const float *v_page, const float *next, float *out, i64 stride, i64 E, i64 T, const int NQ) {
  for (i64 e = 0; e < E; e += STEP) {
    vec acc[MAX_QUERIES][VECTORS];
#pragma GCC unroll 8
    for (int j = 0; j < NQ; j++)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) acc[j][v] = load(out + j * E + e + v * LANES);
    for (i64 t = 0; t < T; t++) {
      __builtin_prefetch(next + t * E + e);
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) {
        vec values = load(v_page + t * E + e + v * LANES);
#pragma GCC unroll 8
        for (int j = 0; j < NQ; j++) acc[j][v] += weights[j * stride + t] * values;
      }
    }
#pragma GCC unroll 8
    for (int j = 0; j < NQ; j++)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) *(vec *)(out + j * E + e + v * LANES) = acc[j][v];
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

static const float *page_of(const float *pool, const Attention *a, i64 number, i64 group) {
  return pool + (a->pages[number] * a->G + group) * a->E * a->T;
}

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
    const float *k_page = page_of(a->k_pool, a, p, group), *next = page_of(a->k_pool, a, p + 1 < num_pages ? p + 1 : p, group);
    for (i64 j = 0; j < num_queries; j += MAX_QUERIES) {
      i64 count = num_queries - j < MAX_QUERIES ? num_queries - j : MAX_QUERIES;
#define SCORE(NQ) score_page(q + j * E, k_page, next, scores + j * stride + p * T, stride, E, T, NQ)
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
    const float *v_page = page_of(a->v_pool, a, p, group), *next = page_of(a->v_pool, a, p + 1 < num_pages ? p + 1 : p, group);
    for (i64 j = 0; j < num_queries; j += MAX_QUERIES) {
      i64 count = num_queries - j < MAX_QUERIES ? num_queries - j : MAX_QUERIES;
#define ADD(NQ) add_page(scores + j * stride + p * T, v_page, next, out + j * E, stride, E, T, NQ)
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
