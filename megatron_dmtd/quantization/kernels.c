// Quantise and dequantise blocks of four- and eight-bit numbers. The same arithmetic as reference.py, operation for operation, and equal
// to it bit for bit: compile without fused multiply-adds and without reordering (infra/native.py, EXACT_FLAGS).
//
// `x` holds `blocks` blocks one after another: float32, or bfloat16 where `bf16` is not 0. Loops over one block have constant length and no
// branches, so that compilers vectorise them, for AVX2 as for AVX-512.

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE void load(const void *x, int64_t first, int width, int bf16, float *block) {
    if (bf16) {
        const uint16_t *source = (const uint16_t *)x + first;
        for (int i = 0; i < width; i++) block[i] = float_of((uint32_t)source[i] << 16);
    } else {
        memcpy(block, (const float *)x + first, (size_t)width * 4);
    }
}

// Magnitudes of floats are ordered as their bits are, and NaN and infinity are the largest of all.
INLINE uint32_t largest_bits(const float *block, int width) {
    uint32_t largest = 0;
    for (int i = 0; i < width; i++) {
        uint32_t bits = bits_of(block[i]) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

// The number of thresholds below |z|; a tie goes to the even code.
INLINE uint32_t e2m1_of(float z) {
    float a = fabsf(z);
    uint32_t code = (uint32_t)((a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f));
    return code | ((bits_of(z) >> 28) & 8u);
}

// Twice a magnitude is 0, 1, 2, 3, 4, 6, 8, 12.
INLINE float magnitude_of_e2m1(uint32_t code) {
    int32_t c = (int32_t)(code & 7u);
    return 0.5f * (float)(c + (c > 4 ? c - 4 : 0) + (c > 6 ? 2 : 0));
}

// To e4m3, nearest, ties to even; |v| at most 448.
INLINE uint32_t e4m3_of(float v) {
    uint32_t bits = bits_of(v) & 0x7fffffffu;
    uint32_t normal = ((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
    uint32_t subnormal = (uint32_t)(int32_t)rintf(float_of(bits) * 512.0f);
    return (bits < 0x3c800000u ? subnormal : normal) | ((bits_of(v) >> 24) & 0x80u);
}

INLINE float value_of_e4m3(uint32_t code) {
    uint32_t magnitude = code & 0x7fu;
    return magnitude < 8u ? (float)(int32_t)magnitude * 0x1p-9f : float_of((magnitude << 20) + (120u << 23));
}

INLINE void pack(const uint32_t *codes, int width, uint8_t *packed) {
    for (int i = 0; i < width / 2; i++) packed[i] = (uint8_t)(codes[2 * i] | (codes[2 * i + 1] << 4));
}

INLINE void encode16(const float *block, float divisor, uint32_t *codes) {
    uint32_t keep = divisor > 0.0f ? 15u : 0u;
    for (int i = 0; i < 16; i++) codes[i] = e2m1_of(block[i] / divisor) & keep;
}

// By how much the squared error of `codes4` exceeds that of `codes6`. Squares are exact in float64; the sum takes halves onto each other: 16
// terms, 8, 4, 2, 1. GCC 12 vectorises these loops badly if it unrolls them first.
INLINE double excess(const float *block, const uint32_t *codes4, float scale4, const uint32_t *codes6, float scale6, float global) {
    double terms[16], sum8[8], sum4[4];
#pragma GCC unroll 1
    for (int i = 0; i < 16; i++) {
        double error4 = (double)(fabsf(block[i]) - magnitude_of_e2m1(codes4[i]) * scale4 * global);
        double error6 = (double)(fabsf(block[i]) - magnitude_of_e2m1(codes6[i]) * scale6 * global);
        terms[i] = error4 * error4 - error6 * error6;
    }
#pragma GCC unroll 1
    for (int i = 0; i < 8; i++) sum8[i] = terms[i] + terms[i + 8];
#pragma GCC unroll 1
    for (int i = 0; i < 4; i++) sum4[i] = sum8[i] + sum8[i + 4];
    return (sum4[0] + sum4[2]) + (sum4[1] + sum4[3]);
}

// Scales of many blocks first, then their codes: one after the other, a block would wait for each step of its own long chain.
#define BATCH 16

INLINE void nvfp4_batch(const void *x, int64_t first, int count, float global, int bf16, int four_over_six, uint8_t *packed,
                        uint8_t *scales) {
    float block[BATCH][16], ratio[BATCH] = {0}, more4[BATCH];
    uint32_t scale[BATCH], scale4[BATCH], codes[BATCH][16], codes4[BATCH][16];
    double more[BATCH];
    for (int b = 0; b < count; b++) {
        load(x, 16 * (first + b), 16, bf16, block[b]);
        ratio[b] = float_of(largest_bits(block[b], 16));
    }
    for (int b = 0; b < BATCH; b++) {
        ratio[b] = global > 0.0f ? ratio[b] / 6.0f / global : 0.0f;
        more4[b] = ratio[b] * 1.5f;
        scale[b] = e4m3_of(ratio[b] > 448.0f ? 448.0f : ratio[b]);
        scale4[b] = e4m3_of(more4[b] > 448.0f ? 448.0f : more4[b]);
    }
    for (int b = 0; b < count; b++) encode16(block[b], value_of_e4m3(scale[b]) * global, codes[b]);
    if (four_over_six) {
        for (int b = 0; b < count; b++) encode16(block[b], value_of_e4m3(scale4[b]) * global, codes4[b]);
        for (int b = 0; b < count; b++)
            more[b] = excess(block[b], codes4[b], value_of_e4m3(scale4[b]), codes[b], value_of_e4m3(scale[b]), global);
        for (int b = 0; b < count; b++) {
            // no branch: which of the two wins cannot be predicted
            uint32_t four = more[b] < 0.0 ? ~0u : 0u;
            scale[b] ^= (scale[b] ^ scale4[b]) & four;
            for (int i = 0; i < 16; i++) codes[b][i] ^= (codes[b][i] ^ codes4[b][i]) & four;
        }
    }
    for (int b = 0; b < count; b++) {
        scales[first + b] = (uint8_t)scale[b];
        pack(codes[b], 16, packed + 8 * (first + b));
    }
}

INLINE void nvfp4(const void *x, int64_t blocks, float global, int bf16, int four_over_six, uint8_t *packed, uint8_t *scales) {
    int64_t first = 0;
    for (; first + BATCH <= blocks; first += BATCH) nvfp4_batch(x, first, BATCH, global, bf16, four_over_six, packed, scales);
    nvfp4_batch(x, first, (int)(blocks - first), global, bf16, four_over_six, packed, scales);
}

// Biased exponent of the power of two by which a block is divided. `most` is the largest finite value of the elements' format, as the bits
// of its significand and its exponent. Up: the smallest power that lets the block's largest value fit. Down: the exponents' difference.
INLINE uint32_t e8m0_of(uint32_t largest, uint32_t significand, uint32_t exponent, int up) {
    uint32_t biased = (largest >> 23) + (up && (largest & 0x7fffffu) > significand);
    return biased > exponent ? biased - exponent : 0;
}

// 2^-(byte - 127), exactly; a byte is at most 254 - 2 here.
INLINE float reciprocal_of_e8m0(uint32_t byte) { return float_of((254u - byte) << 23); }

INLINE void mxfp4(const void *x, int64_t blocks, int bf16, int up, uint8_t *packed, uint8_t *scales) {
    for (int64_t j = 0; j < blocks; j++) {
        float block[32];
        uint32_t codes[32];
        load(x, 32 * j, 32, bf16, block);
        uint32_t byte = e8m0_of(largest_bits(block, 32), 0x400000u, 2, up);
        float reciprocal = reciprocal_of_e8m0(byte);
        for (int i = 0; i < 32; i++) codes[i] = e2m1_of(block[i] * reciprocal);
        scales[j] = (uint8_t)byte;
        pack(codes, 32, packed + 16 * j);
    }
}

INLINE void mxfp8(const void *x, int64_t blocks, int bf16, int up, uint8_t *values, uint8_t *scales) {
    for (int64_t j = 0; j < blocks; j++) {
        float block[32];
        load(x, 32 * j, 32, bf16, block);
        uint32_t byte = e8m0_of(largest_bits(block, 32), 0x600000u, 8, up);
        float reciprocal = reciprocal_of_e8m0(byte);
        for (int i = 0; i < 32; i++) {
            float v = block[i] * reciprocal;
            v = v > 448.0f ? 448.0f : v;
            v = v < -448.0f ? -448.0f : v;
            values[32 * j + i] = (uint8_t)e4m3_of(v);
        }
        scales[j] = (uint8_t)byte;
    }
}

uint32_t dmtd_largest_bits(const void *x, int64_t count, int bf16) {
    uint32_t largest = 0;
    if (bf16) {
        const uint16_t *source = x;
        uint16_t most = 0;
        for (int64_t i = 0; i < count; i++) {
            uint16_t bits = source[i] & 0x7fffu;
            most = bits > most ? bits : most;
        }
        largest = (uint32_t)most << 16;
    } else {
        const uint32_t *source = x;
        for (int64_t i = 0; i < count; i++) {
            uint32_t bits = source[i] & 0x7fffffffu;
            largest = bits > largest ? bits : largest;
        }
    }
    return largest;
}

void dmtd_quantize_nvfp4(const void *x, int64_t blocks, float global, int bf16, int four_over_six, uint8_t *packed, uint8_t *scales) {
    if (bf16 && four_over_six)
        nvfp4(x, blocks, global, 1, 1, packed, scales);
    else if (bf16)
        nvfp4(x, blocks, global, 1, 0, packed, scales);
    else if (four_over_six)
        nvfp4(x, blocks, global, 0, 1, packed, scales);
    else
        nvfp4(x, blocks, global, 0, 0, packed, scales);
}

void dmtd_quantize_mxfp4(const void *x, int64_t blocks, int bf16, int up, uint8_t *packed, uint8_t *scales) {
    if (bf16)
        mxfp4(x, blocks, 1, up, packed, scales);
    else
        mxfp4(x, blocks, 0, up, packed, scales);
}

void dmtd_quantize_mxfp8(const void *x, int64_t blocks, int bf16, int up, uint8_t *values, uint8_t *scales) {
    if (bf16)
        mxfp8(x, blocks, 1, up, values, scales);
    else
        mxfp8(x, blocks, 0, up, values, scales);
}

// Tables of this file's numbers by code: two values for each byte of four-bit codes. They come from the caller.
void dmtd_dequantize_nvfp4(const uint8_t *packed, const uint8_t *scales, float global, int64_t blocks, const float *pairs,
                           const float *e4m3, float *out) {
    for (int64_t j = 0; j < blocks; j++) {
        float block[16], scale = e4m3[scales[j]];
        for (int i = 0; i < 8; i++) memcpy(block + 2 * i, pairs + 2 * packed[8 * j + i], 8);
        for (int i = 0; i < 16; i++) out[16 * j + i] = block[i] * scale * global;
    }
}

void dmtd_dequantize_mxfp4(const uint8_t *packed, const uint8_t *scales, int64_t blocks, const float *pairs, const float *e8m0,
                           float *out) {
    for (int64_t j = 0; j < blocks; j++) {
        float block[32], scale = e8m0[scales[j]];
        for (int i = 0; i < 16; i++) memcpy(block + 2 * i, pairs + 2 * packed[16 * j + i], 8);
        for (int i = 0; i < 32; i++) out[32 * j + i] = block[i] * scale;
    }
}

void dmtd_dequantize_mxfp8(const uint8_t *values, const uint8_t *scales, int64_t blocks, const float *e4m3, const float *e8m0,
                           float *out) {
    for (int64_t j = 0; j < blocks; j++) {
        float block[32], scale = e8m0[scales[j]];
        for (int i = 0; i < 32; i++) block[i] = e4m3[values[32 * j + i]];
        for (int i = 0; i < 32; i++) out[32 * j + i] = block[i] * scale;
    }
}
