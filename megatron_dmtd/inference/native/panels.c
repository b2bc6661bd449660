/* Products of more rows than one tile, for the matrix as it is stored.
 *
 * Shapes follow the Python caller (ops/matmul.py): R rows of a pass.
 *
 * Rows of a matrix lie a power of two apart as a rule, so that a few of them fill the same sets of a cache. So of PANEL rows of w at
 * a time a thread makes a copy, interleaved and widened to fp32: the first tile of x multiplies with w as it is stored and leaves the
 * copy, all others multiply with that, and fetch the next PANEL rows from memory meanwhile. Vectors run along the inputs: nothing is
 * transposed.
 */
#include <omp.h>

#include "vectors.h"

/* Rows of w that are copied at once: whole triples. */
#define PANEL 48
/* Columns whose products are summed in registers; as many columns of a tile of x stay in the first cache. */
#define COLUMNS 1024
/* Rows of x for which a panel is copied once: these rows stay in the second cache. */
#define MOST_ROWS 128
/* How far ahead of its use a weight is fetched if it is read as it is stored. */
#define AHEAD_BYTES 1536

/* Three rows of w: their copy, and where they are stored, of which the first tile makes it. */
typedef struct {
  float *copy;
  const void *rows[3];
} Triple;

/* Adds the products of M rows of x and three of w over `num` columns to out[m][0..3), whose rows lie PANEL apart. Both are interleaved:
   the first vector of every row, then the second of every row. With each vector, what lies at `next` is fetched, which then moves on
   by `stride` bytes. */
INLINE void multiply_triple(const float *x, const Triple *w, i64 num, const char *next, i64 stride, float *out, const int M,
                            const int is_first, const int is_bf16) {
  const int bytes = is_bf16 ? 2 : 4;
  vec acc[TILE_ROWS][3], done[3 * TILE_ROWS + LANES];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 3
    for (int b = 0; b < 3; b++) acc[m][b] = (vec){0};
  float *copy = w->copy;
  for (i64 k = 0; k < num; k += LANES, next += stride, copy += 3 * LANES) {
    vec wv[3];
#pragma GCC unroll 3
    for (int b = 0; b < 3; b++) {
      wv[b] = is_first ? load_weights(w->rows[b], k, is_bf16) : load(copy + b * LANES);
      KEEP(wv[b]);
      if (is_first) {
        __builtin_prefetch((const char *)w->rows[b] + k * bytes + AHEAD_BYTES);
        *(vec *)(copy + b * LANES) = wv[b];
      }
    }
    if (!is_first) __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      vec xv = load(x + k * M + m * LANES);
      KEEP(xv);
#pragma GCC unroll 3
      for (int b = 0; b < 3; b++) {
        acc[m][b] += wv[b] * xv;
        KEEP(acc[m][b]);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 3
    for (int b = 0; b < 3; b++) done[3 * m + b] = acc[m][b];
  for (int i = 3 * M; i % LANES; i++) done[i] = (vec){0};
  float totals[3 * TILE_ROWS + LANES];
#pragma GCC unroll 3
  for (int i = 0; i < 3 * M; i += LANES) *(vec *)(totals + i) = sums_of(done + i);
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 3
    for (int b = 0; b < 3; b++) out[m * PANEL + b] += totals[3 * m + b];
}

typedef void (*MultiplyTriple)(const float *, const Triple *, i64, const char *, i64, float *);

#define DEFINE(NAME, M, IS_FIRST, IS_BF16) \
  static void NAME##_##M(const float *x, const Triple *w, i64 num, const char *next, i64 stride, float *out) { \
    multiply_triple(x, w, num, next, stride, out, M, IS_FIRST, IS_BF16); \
  }
#define DEFINE_ALL(M) DEFINE(copied, M, 0, 0) DEFINE(stored, M, 1, 0) DEFINE(stored_half, M, 1, 1)
#define COPIED(M) copied_##M,
#define STORED(M) stored_##M,
#define STORED_HALF(M) stored_half_##M,
#if TILE_ROWS == 8
#define EACH(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8)
#else
#define EACH(DO) DO(1) DO(2) DO(3) DO(4)
#endif
EACH(DEFINE_ALL)
/* By rows of x: with the copy; with w as it is stored, in fp32 and in bfloat16. */
static const MultiplyTriple FROM_COPY[TILE_ROWS] = {EACH(COPIED)};
static const MultiplyTriple AS_STORED[2][TILE_ROWS] = {{EACH(STORED)}, {EACH(STORED_HALF)}};

/* One product. Tile t has rows [t R / tiles, (t + 1) R / tiles) of x, interleaved in `packed`. */
typedef struct {
  const float *x, *packed, *bias, *residual;
  const void *w;
  float *out;
  i64 R, num_in, num_out, whole, tiles;
  int is_bf16;
} Product;

static i64 first_of(const Product *p, i64 tile) { return tile * p->R / p->tiles; }

static void pack_tile(const Product *p, i64 tile, float *packed) {
  i64 first = first_of(p, tile), rows = first_of(p, tile + 1) - first;
  const float *x = p->x + first * p->num_in;
  packed += first * p->whole;
  for (i64 k = 0; k < p->whole; k += LANES)
    for (i64 m = 0; m < rows; m++) *(vec *)(packed + k * rows + m * LANES) = load(x + m * p->num_in + k);
}

/* Adds `num` numbers to others. */
INLINE void add(float *to, const float *from, i64 num) {
#pragma omp simd
  for (i64 i = 0; i < num; i++) to[i] += from[i];
}

/* Sums of one tile to outputs, with the columns after the last whole vector. */
static void finish(const Product *p, float *sums, i64 first, i64 rows, i64 row, i64 num) {
  for (i64 m = 0; m < rows; m++, sums += PANEL) {
    i64 at = (first + m) * p->num_out + row;
    const float *x = p->x + (first + m) * p->num_in;
    for (i64 r = 0; r < num && p->whole < p->num_in; r++)
      for (i64 k = p->whole; k < p->num_in; k++) sums[r] += load_weight(p->w, (row + r) * p->num_in + k, p->is_bf16) * x[k];
    if (p->bias) add(sums, p->bias + row, num);
    if (p->residual) add(sums, p->residual + at, num);
    memcpy(p->out + at, sums, (size_t)num * sizeof(float));
  }
}

/* All rows of x times rows [row, row + num) of w, whose copy is made in `panel`: [block of columns][triple][vector][3][LANES]. */
static void multiply(const Product *p, i64 row, i64 num, float *panel) {
  const i64 bytes = p->is_bf16 ? 2 : 4, panel_bytes = PANEL * p->num_in * bytes;
  const char *w = p->w, *next = w + (row + num) * p->num_in * bytes, *end = w + p->num_out * p->num_in * bytes;
  if (end > next + panel_bytes) end = next + panel_bytes;
  /* Each tile but the first fetches an equal part. */
  i64 stride = p->tiles > 1 ? (3 * LANES * bytes + p->tiles - 2) / (p->tiles - 1) : 0;
  for (i64 tile = 0; tile < p->tiles; tile++) {
    float sums[TILE_ROWS * PANEL] = {0};
    i64 first = first_of(p, tile), rows = first_of(p, tile + 1) - first;
    MultiplyTriple multiply_with = tile ? FROM_COPY[rows - 1] : AS_STORED[p->is_bf16][rows - 1];
    for (i64 begin = 0; begin < p->whole; begin += COLUMNS) {
      i64 size = begin + COLUMNS < p->whole ? COLUMNS : p->whole - begin;
      for (i64 r = 0; r < num; r += 3) {
        Triple triple = {panel + begin * PANEL + r * size, {NULL}};
        /* Of an incomplete triple the last row is taken again. */
        for (i64 b = 0; b < 3; b++)
          triple.rows[b] = w + ((row + (r + b < num ? r + b : num - 1)) * p->num_in + begin) * bytes;
        i64 step = next < end ? stride : 0;
        multiply_with(p->packed + first * p->whole + begin * rows, &triple, size, next, step, sums + r);
        if (tile) next += step * (size / LANES);
      }
    }
    finish(p, sums, first, rows, row, num);
  }
}

static void multiply_some(Product p) {
  p.tiles = (p.R + TILE_ROWS - 1) / TILE_ROWS;
  float *packed = scratch_of(p.R * p.whole + PANEL * p.whole), *own_panel = packed + p.R * p.whole;
  p.packed = packed;
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (i64 tile = 0; tile < p.tiles; tile++) pack_tile(&p, tile, packed);
    float *panel = omp_get_thread_num() ? scratch_of(PANEL * p.whole) : own_panel;
#pragma omp for schedule(static)
    for (i64 row = 0; row < p.num_out; row += PANEL) {
      i64 num = p.num_out - row < PANEL ? p.num_out - row : PANEL;
      multiply(&p, row, num, panel);
    }
  }
}

/* `dmtd_matmul`, for any number of rows. */
void dmtd_matmul_panels(const float *x, const void *w, const float *bias, const float *residual, float *out, i64 R, i64 num_in,
                        i64 num_out, int is_bf16) {
  for (i64 first = 0; first < R; first += MOST_ROWS) {
    const float *own_residual = residual ? residual + first * num_out : NULL;
    i64 rows = R - first < MOST_ROWS ? R - first : MOST_ROWS;
    multiply_some((Product){.x = x + first * num_in, .bias = bias, .residual = own_residual, .w = w, .out = out + first * num_out,
                            .R = rows, .num_in = num_in, .num_out = num_out, .whole = num_in / LANES * LANES, .is_bf16 = is_bf16});
  }
}
