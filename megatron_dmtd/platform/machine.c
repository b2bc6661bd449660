/* What this processor can do at most: multiply-adds without memory, and reading without arithmetic, on several threads at once.
 *
 * Each function gives the sum of its threads' rates, per second of their own CPU time: what other programs take of the cores does
 * not count. Written in GCC's vector extensions, so that one source serves every instruction set; bf16 exists with AVX-512 only. */

#include <stdint.h>
#include <time.h>

#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
#define FLOATS (BYTES / 4)
/* Enough independent sums to hide the latency of a multiply-add, few enough for 16 registers. */
#define CHAINS 12

typedef float vector __attribute__((vector_size(BYTES)));
typedef int32_t words __attribute__((vector_size(BYTES), aligned(4)));

/* Results go here, or the compiler would leave the work out. */
volatile double dmtd_sink;

static double own_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Operations in fp32 per second, a multiply-add being two. */
double dmtd_fp32(int64_t repeats, int64_t threads) {
    double rate = 0;
#pragma omp parallel num_threads(threads) reduction(+ : rate)
    {
        vector sum[CHAINS], x, y;
        for (int lane = 0; lane < FLOATS; lane++) x[lane] = 0.5f, y[lane] = 1.0f + (float)lane;
        for (int chain = 0; chain < CHAINS; chain++) sum[chain] = y;
        const double start = own_seconds();
        for (int64_t repeat = 0; repeat < repeats; repeat++)
#pragma GCC unroll 12
            for (int chain = 0; chain < CHAINS; chain++) sum[chain] = sum[chain] * x + y;
        const double seconds = own_seconds() - start;
        for (int chain = 0; chain < CHAINS; chain++) dmtd_sink = sum[chain][0];
        rate += 2.0 * CHAINS * FLOATS * (double)repeats / seconds;
    }
    return rate;
}

#if defined(__AVX512BF16__)
#include <immintrin.h>

/* The same in bf16, with sums in fp32. */
double dmtd_bf16(int64_t repeats, int64_t threads) {
    double rate = 0;
#pragma omp parallel num_threads(threads) reduction(+ : rate)
    {
        __m512 sum[CHAINS];
        const __m512bh x = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.25f), _mm512_set1_ps(0.5f));
        for (int chain = 0; chain < CHAINS; chain++) sum[chain] = _mm512_set1_ps((float)chain);
        const double start = own_seconds();
        for (int64_t repeat = 0; repeat < repeats; repeat++)
#pragma GCC unroll 12
            for (int chain = 0; chain < CHAINS; chain++) sum[chain] = _mm512_dpbf16_ps(sum[chain], x, x);
        const double seconds = own_seconds() - start;
        for (int chain = 0; chain < CHAINS; chain++) dmtd_sink = _mm512_reduce_add_ps(sum[chain]);
        rate += 2.0 * CHAINS * 32 * (double)repeats / seconds;
    }
    return rate;
}
#else
double dmtd_bf16(int64_t repeats, int64_t threads) { return 0; }
#endif

/* Bytes read per second, each thread in a stretch of its own. */
double dmtd_read(const int32_t *numbers, int64_t count, int64_t threads) {
    const int64_t block = 8 * FLOATS, blocks = count / block;
    double rate = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : rate) schedule(static, 1)
    for (int64_t stretch = 0; stretch < threads; stretch++) {
        const int32_t *first = numbers + blocks * stretch / threads * block;
        const int32_t *const last = numbers + blocks * (stretch + 1) / threads * block;
        const double num_bytes = 4.0 * (double)(last - first);
        words sum[8] = {{0}};
        const double start = own_seconds();
        for (; first < last; first += block)
#pragma GCC unroll 8
            for (int part = 0; part < 8; part++) {
                sum[part] += *(const words *)(first + part * FLOATS);
                __builtin_prefetch(first + part * FLOATS + 2048);
            }
        const double seconds = own_seconds() - start;
        for (int part = 0; part < 8; part++) dmtd_sink = sum[part][0];
        rate += num_bytes / seconds;
    }
    return rate;
}
