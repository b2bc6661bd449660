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

INLINE vec load(const float *p) { return *(const vec *)p; }

/* Memory of one thread for one call; the next call may overwrite it. */
static __thread float *scratch = NULL;
static __thread i64 scratch_size = 0;

INLINE float *scratch_of(i64 size) {
  if (size > scratch_size) {
    free(scratch);
    scratch = malloc((size_t)size * sizeof(float));
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
