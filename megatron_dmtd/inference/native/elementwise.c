/* Norms, gates and rotations of few rows, and the storing of their K and V.
 *
 * Shapes follow the Python caller (ops/native_ops.py): R rows of a pass, H query heads, G key/value heads, D head width,
 * T entries per page, I feed-forward width. K pages are [G][D][T], V pages are [G][T][D]. T and D are multiples of 16. Integers are int64.
 */
#include "vectors.h"

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

/* One over the Euclidean norm. */
static float unit_scale(const float *x, i64 size, float eps) {
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (i64 i = 0; i < size; i++) total += x[i] * x[i];
  return 1.0f / sqrtf(total + eps);
}

/* RMSNorm; without a weight, division by the Euclidean norm. */
static void norm_row(const float *x, const float *weight, float *out, i64 size, float eps) {
  if (!weight) {
    float scale = unit_scale(x, size, eps);
#pragma omp simd
    for (i64 i = 0; i < size; i++) out[i] = x[i] * scale;
    return;
  }
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (i64 i = 0; i < size; i++) total += x[i] * x[i];
  float scale = 1.0f / sqrtf(total / (float)size + eps);
#pragma omp simd
  for (i64 i = 0; i < size; i++) out[i] = weight[i] * (x[i] * scale);
}

/* Norm of R rows; a null weight: see `norm_row`. `out` may be `x`. */
void dmtd_norm(const float *x, const float *weight, float *out, i64 R, i64 size, float eps) {
#pragma omp parallel for schedule(static) if (R * size > 16384)
  for (i64 r = 0; r < R; r++) norm_row(x + r * size, weight, out + r * size, size, eps);
}

/* x[R][X] becomes unit(a + size * (unit(y) - a)), a = unit(x): a step of length `size[X]` from x towards y. */
void dmtd_step(float *x, const float *y, const float *size, i64 R, i64 X, float eps) {
#pragma omp parallel for schedule(static) if (R * X > 16384)
  for (i64 r = 0; r < R; r++) {
    float *from = x + r * X;
    const float *to = y + r * X;
    float from_scale = unit_scale(from, X, eps), to_scale = unit_scale(to, X, eps);
#pragma omp simd
    for (i64 i = 0; i < X; i++) {
      float start = from[i] * from_scale;
      from[i] = start + size[i] * (to[i] * to_scale - start);
    }
    norm_row(from, NULL, from, X, eps);
  }
}

/* out[n][I] *= sigmoid(scale * gate), with the gate of query n in row `rows[n]` of gate[R][stride]; normed unless eps is negative. */
void dmtd_gate_heads(float *out, const float *gate, i64 stride, const float *scale, const i64 *rows, i64 num_rows, i64 I, float eps) {
#pragma omp parallel for schedule(static) if (num_rows * I > 4096)
  for (i64 n = 0; n < num_rows; n++) {
    const float *own = gate + rows[n] * stride;
    float *to = out + n * I;
    for (i64 i = 0; i < I; i += LANES) {
      vec g = load_some(own + i, I - i) * load_some(scale + i, I - i);
      store_some(to + i, load_some(to + i, I - i) / (1.0f + exp_of(-g)), I - i);
    }
    if (eps >= 0) norm_row(to, NULL, to, I, eps);
  }
}

/* out[R][I] = silu(gate) * up, of gate_up[R][2 I], times scale[2 I] unless that is null. */
void dmtd_gate(const float *gate_up, const float *scale, float *out, i64 R, i64 I) {
#pragma omp parallel for schedule(static) collapse(2) if (R * I > 4096)
  for (i64 r = 0; r < R; r++)
    for (i64 start = 0; start < I; start += 1024) {
      const float *gate = gate_up + r * 2 * I, *up = gate + I;
      i64 stop = start + 1024 < I ? start + 1024 : I;
      for (i64 i = start; i < stop; i += LANES) {
        vec g = load_some(gate + i, stop - i), u = load_some(up + i, stop - i);
        if (scale) {
          g *= load_some(scale + i, stop - i);
          u *= load_some(scale + I + i, stop - i);
        }
        store_some(out + r * I + i, g / (1.0f + exp_of(-g)) * u, stop - i);
      }
    }
}

/* What happens to a query or key head before it is rotated. */
enum { NO_NORM, RMS_NORM, UNIT_NORM };

static void norm_rotate(float *head, i64 kind, const float *weight, const float *cos_D, const float *sin_D, i64 D, float eps) {
  if (kind != NO_NORM) norm_row(head, kind == RMS_NORM ? weight : NULL, head, D, eps);
  i64 half = D / 2;
#pragma omp simd
  for (i64 i = 0; i < half; i++) {
    float first = head[i], second = head[i + half];
    head[i] = first * cos_D[i] - second * sin_D[i];
    head[i + half] = second * cos_D[i + half] + first * sin_D[i + half];
  }
}

/* Norm and rotate q and k of qkv[R][stride] in place, by each row's position, and scale q unless `q_scale` is null; store k and v at
   its entry of its request's pages, unless that is negative. */
void dmtd_rotate_and_store(float *qkv, i64 stride, i64 norm_kind, const float *q_norm, const float *k_norm, const float *q_scale,
                           const float *cos_ND, const float *sin_ND, const i64 *position, const i64 *slot, const i64 *entry,
                           const i64 *pages, i64 pages_stride, float *k_pages, float *v_pages, i64 R, i64 H, i64 G, i64 D, i64 T,
                           float eps) {
#pragma omp parallel for schedule(static) collapse(2) if (R * (H + 2 * G) * D > 16384)
  for (i64 r = 0; r < R; r++)
    for (i64 head = 0; head < H + G; head++) {
      float *row = qkv + r * stride, *own = row + head * D;
      const float *cos_D = cos_ND + position[r] * D, *sin_D = sin_ND + position[r] * D;
      norm_rotate(own, norm_kind, head < H ? q_norm : k_norm, cos_D, sin_D, D, eps);
      if (head < H && q_scale)
        for (i64 d = 0; d < D; d++) own[d] *= q_scale[head * D + d];
      if (head < H || entry[r] < 0) continue;
      i64 group = head - H, page = pages[slot[r] * pages_stride + entry[r] / T], offset = entry[r] % T;
      float *k_page = k_pages + (page * G + group) * D * T, *v_page = v_pages + (page * G + group) * T * D;
      const float *v = row + (head + G) * D;
      for (i64 d = 0; d < D; d++) k_page[d * T + offset] = own[d];
      memcpy(v_page + offset * D, v, (size_t)D * sizeof(float));
    }
}
