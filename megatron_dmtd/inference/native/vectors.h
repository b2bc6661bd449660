/* What all kernels share: vectors as wide as the hardware's, e^x, and memory for a call.
 *
 * Plain C with GCC's vector types. Of vectors wider than the hardware's, compilers make slow code.
 */
#ifndef DMTD_VECTORS_H
#define DMTD_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float quad __attribute__((vector_size(16), aligned(4), may_alias));
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int64_t i64;

INLINE float sum_of(vec v) {
  const quad *parts = (const quad *)&v;
  quad total = parts[0];
  for (int part = 1; part < LANES / 4; part++) total += parts[part];
  return (total[0] + total[2]) + (total[1] + total[3]);
}

typedef int32_t lane_vec __attribute__((vector_size(4 * LANES)));

/* Of two vectors that hold sums in runs of lanes, one that holds all of these sums in runs half as long, in order. */
INLINE vec fold(vec a, vec b, lane_vec lower, lane_vec upper) { return __builtin_shuffle(a, b, lower) + __builtin_shuffle(a, b, upper); }

/* The sums of LANES vectors, each over its own lanes. */
INLINE vec sums_of(const vec *v) {
#if LANES == 16
  const lane_vec by_8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
  const lane_vec by_4 = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
  const lane_vec by_2 = {0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29};
  const lane_vec by_1 = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
#else
  const lane_vec by_4 = {0, 1, 2, 3, 8, 9, 10, 11}, by_2 = {0, 1, 4, 5, 8, 9, 12, 13}, by_1 = {0, 2, 4, 6, 8, 10, 12, 14};
#endif
  vec parts[8];
#pragma GCC unroll 8
  for (i64 i = 0; i < 8; i++)
#if LANES == 16
    parts[i] = fold(v[2 * i], v[2 * i + 1], by_8, by_8 + 8);
#else
    parts[i] = v[i];
#endif
#pragma GCC unroll 4
  for (i64 i = 0; i < 4; i++) parts[i] = fold(parts[2 * i], parts[2 * i + 1], by_4, by_4 + 4);
#pragma GCC unroll 2
  for (i64 i = 0; i < 2; i++) parts[i] = fold(parts[2 * i], parts[2 * i + 1], by_2, by_2 + 2);
  return fold(parts[0], parts[1], by_1, by_1 + 1);
}

INLINE vec load(const float *p) { return *(const vec *)p; }

/* What stays in registers: sums of three rows of w times TILE_ROWS of x. */
#ifdef __AVX512F__
#define TILE_ROWS 8
#else
#define TILE_ROWS 4
#endif

typedef uint16_t half_vec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint32_t bits_vec __attribute__((vector_size(4 * LANES)));

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

/* Keeps a vector in a register: compilers would rather load it again for every product, and run out of loads. */
#if defined(__AVX512F__)
#define KEEP(v) __asm__ volatile("" : "+v"(v))
#elif defined(__AVX__)
#define KEEP(v) __asm__ volatile("" : "+x"(v))
#else
#define KEEP(v)
#endif

#define CACHE_LINE 64

/* Memory of one thread for one call; the next call may overwrite it. */
static __thread float *scratch = NULL;
static __thread i64 scratch_size = 0;

INLINE float *scratch_of(i64 size) {
  if (size > scratch_size) {
    free(scratch);
    size_t lines = ((size_t)size * sizeof(float) + CACHE_LINE - 1) / CACHE_LINE;
    scratch = aligned_alloc(CACHE_LINE, lines * CACHE_LINE); /* a vector that crosses lines takes two loads */
    if (!scratch) abort();
    scratch_size = size;
  }
  return scratch;
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

#endif
