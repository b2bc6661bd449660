/* Products of few rows and a matrix: what torch does slowly at 1 to 32 rows.
 *
 * Shapes follow the Python caller (ops/matmul.py): R rows of a pass.
 */
#include "vectors.h"

void dmtd_matmul_panels(const float *, const void *, const float *, const float *, float *, i64, i64, i64, int);

/* How far ahead of its use a weight is fetched if few rows of x pass. */
#define AHEAD_BYTES 1536
/* If more pass than a tile has, blocks of weights stay in the first cache meanwhile: 3 * GROUP rows of w, BLOCK_COLUMNS columns of
   them. */
#define GROUP 2
#define BLOCK_COLUMNS 256
/* More rows go to panels.c. */
#define MOST_ROWS 24

/* Adds the products of M rows of x and B rows of w, `stream` numbers apart, over `num` columns, to sums[B][M]. Every weight is
   loaded once and serves M rows. `packed` holds x interleaved: the first vector of every row, then the second of every row. With
   each vector of weights, what lies at `next` is prefetched, which then moves on by `stride` bytes. */
INLINE void tile(const float *packed, const void *w, i64 stream, i64 num, const char *next, i64 stride, vec *sums, const int M,
                 const int B, const int is_bf16) {
  const int bytes = is_bf16 ? 2 : 4;
  vec acc[3][TILE_ROWS];
#pragma GCC unroll 3
  for (int b = 0; b < B; b++)
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) acc[b][m] = sums[b * M + m];
  for (i64 k = 0; k < num; k += LANES, next += stride) {
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
  static void NAME##_##M##_##B(const float *packed, const void *w, i64 stream, i64 num, const char *next, i64 stride, \
                               vec *sums) { \
    tile(packed, w, stream, num, next, stride, sums, M, B, IS_BF16); \
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

/* Columns [0, whole) of the rows of a tile, interleaved vector by vector: in their own layout the rows may share cache sets. */
static void pack(const float *x, float *packed, i64 rows, i64 num_in, i64 whole) {
  for (i64 k = 0; k < whole; k += LANES)
    for (i64 m = 0; m < rows; m++) *(vec *)(packed + k * rows + m * LANES) = *(const vec *)(x + m * num_in + k);
}

/* One product, as its tiles see it. */
typedef struct {
  const float *x, *packed, *bias, *residual;
  const void *w;
  float *out;
  i64 R, num_in, num_out, whole, third;
  int is_bf16;
} Product;

static i64 rows_of_tile(const Product *p, i64 first) { return p->R - first < TILE_ROWS ? p->R - first : TILE_ROWS; }

/* Sums to outputs, with the columns after the last whole vector. */
static void finish(const Product *p, const vec *sums, i64 first, i64 rows, i64 row, i64 count) {
  float totals[3 * TILE_ROWS + LANES];
  i64 size = rows * count, whole = size / LANES * LANES;
  for (i64 i = 0; i < whole; i += LANES) *(vec *)(totals + i) = sums_of(sums + i);
  for (i64 i = whole; i < size; i++) totals[i] = sum_of(sums[i]);
  for (i64 b = 0; b < count; b++)
    for (i64 m = 0; m < rows; m++) {
      i64 column = row + b * p->third, at = (first + m) * p->num_out + column;
      float total = totals[b * rows + m];
      const float *x = p->x + (first + m) * p->num_in;
      for (i64 k = p->whole; k < p->num_in; k++) total += load_weight(p->w, column * p->num_in + k, p->is_bf16) * x[k];
      p->out[at] = total + (p->bias ? p->bias[column] : 0) + (p->residual ? p->residual[at] : 0);
    }
}

/* Rows [row, row + num) of w, and with `count` 3 those one and two thirds further, times all rows of x. While the rows of x pass
   over one block of weights, the next block is fetched, in equal parts. */
static void multiply(const Product *p, i64 row, i64 num, i64 count) {
  vec sums[(MOST_ROWS / TILE_ROWS) * GROUP][3 * TILE_ROWS];
  i64 num_tiles = (p->R + TILE_ROWS - 1) / TILE_ROWS, step = num_tiles > 1 ? BLOCK_COLUMNS : p->whole, bytes = p->is_bf16 ? 2 : 4;
  const char *w = p->w;
  memset(sums, 0, sizeof sums[0] * (size_t)(num_tiles > 1 ? num_tiles * GROUP : num));
  for (i64 begin = 0; begin < p->whole; begin += step) {
    i64 size = begin + step < p->whole ? step : p->whole - begin, is_last = begin + size == p->whole;
    for (i64 t = 0; t < num_tiles; t++) {
      i64 first = t * TILE_ROWS, rows = rows_of_tile(p, first), stride = LANES * bytes / num_tiles;
      Tile add = TILES[p->is_bf16][count == 3][rows - 1];
      for (i64 n = 0; n < num; n++) {
        const char *here = w + ((row + n) * p->num_in + begin) * bytes, *next = here + AHEAD_BYTES;
        if (num_tiles > 1) {
          const char *block = is_last ? w + (row + n + num) * p->num_in * bytes : here + size * bytes;
          next = block + t * stride * (step / LANES);
        }
        add(p->packed + first * p->whole + begin * rows, here, p->third * p->num_in, size, next, stride, sums[t * GROUP + n]);
      }
    }
  }
  for (i64 t = 0; t < num_tiles; t++)
    for (i64 n = 0; n < num; n++) finish(p, sums[t * GROUP + n], t * TILE_ROWS, rows_of_tile(p, t * TILE_ROWS), row + n, count);
}

/* out[R][num_out] = x[R][num_in] w[num_out][num_in]' + bias[num_out] + residual[R][num_out]; bias and residual may be null, out may
   be residual. Rows of w that are taken together lie num_out / 3 apart, so that each thread reads three long streams, which
   prefetching follows. */
static void multiply_few(const float *x, const void *w, const float *bias, const float *residual, float *out, i64 R, i64 num_in,
                          i64 num_out, int is_bf16) {
  i64 third = num_out / 3, whole = num_in / LANES * LANES, group = R > TILE_ROWS ? GROUP : 1;
  float *packed = scratch_of(R * whole);
  Product p = {x, packed, bias, residual, w, out, R, num_in, num_out, whole, third, is_bf16};
  for (i64 first = 0; first < R; first += TILE_ROWS)
    pack(x + first * num_in, packed + first * whole, rows_of_tile(&p, first), num_in, whole);
  i64 num_groups = (third + group - 1) / group;
#pragma omp parallel for schedule(static)
  for (i64 block = 0; block < num_groups + num_out % 3; block++) {
    i64 row = block < num_groups ? block * group : 3 * third + block - num_groups;
    if (block < num_groups)
      multiply(&p, row, third - row < group ? third - row : group, 3);
    else
      multiply(&p, row, 1, 1);
  }
}

void dmtd_matmul(const float *x, const void *w, const float *bias, const float *residual, float *out, i64 R, i64 num_in,
                 i64 num_out, i64 is_bf16) {
  if (R <= MOST_ROWS)
    multiply_few(x, w, bias, residual, out, R, num_in, num_out, is_bf16 != 0);
  else
    dmtd_matmul_panels(x, w, bias, residual, out, R, num_in, num_out, is_bf16 != 0);
}
