// Products of few rows with a large matrix: every weight is read once, by one thread, in the order it lies.
// y[r][o] = sum_i W[o][i] x[r][i] (+ y[r][o] where `add`). W is (out, in), as nn.Linear keeps it.
// Shapes, types and strides are checked by native.py before anything here is called; nothing here reads or writes beyond them.
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define UNIT 12 /* outputs that a thread takes at a time: tiles of three or of four */
#define NEAR 64 /* rows that stay near the processor while all weights pass by */
#define STEP 32 /* numbers a loop takes at a time; what is left of a row is read through a mask or copied into zeros */
#define MOST 8191 /* activations have 14 bits with their sign */
#define BLOCK 16384 /* 128 * 8191 * 2 * (BLOCK / 16) < 2^31: so many are summed in lanes of 32 bits, and blocks of them in 64 */
#define SHORT 2048 /* 128 * 8191 * SHORT < 2^31: so many may be summed in 32 bits alone */
#define INLINE static inline __attribute__((always_inline))

static inline float sum8(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

INLINE __m256i mask8(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(count < 8 ? count : 8)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

// Every sum of floats here is made in one order: eight lanes, each from the first number to the last, then the lanes. So a row's
// numbers are the same bits whoever else is multiplied beside it, and however many they are.
static inline float dot_f32(const float *w, const float *x, int64_t in) {
    __m256 sum = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + STEP <= in; i += STEP) {
        _mm_prefetch((const char *)((uintptr_t)(w + i) + 1024), _MM_HINT_T0);
        _mm_prefetch((const char *)((uintptr_t)(w + i) + 1088), _MM_HINT_T0);
        sum = _mm256_fmadd_ps(_mm256_loadu_ps(w + i), _mm256_loadu_ps(x + i), sum);
        sum = _mm256_fmadd_ps(_mm256_loadu_ps(w + i + 8), _mm256_loadu_ps(x + i + 8), sum);
        sum = _mm256_fmadd_ps(_mm256_loadu_ps(w + i + 16), _mm256_loadu_ps(x + i + 16), sum);
        sum = _mm256_fmadd_ps(_mm256_loadu_ps(w + i + 24), _mm256_loadu_ps(x + i + 24), sum);
    }
    for (; i + 8 <= in; i += 8) sum = _mm256_fmadd_ps(_mm256_loadu_ps(w + i), _mm256_loadu_ps(x + i), sum);
    if (i < in) {
        __m256i mask = mask8(in - i);
        sum = _mm256_fmadd_ps(_mm256_maskload_ps(w + i, mask), _mm256_maskload_ps(x + i, mask), sum);
    }
    return sum8(sum);
}

// y[o * wide + r] = w_o . x_r for few outputs and rows, whose sums all stay in registers; `ahead` fetches weights of
// which nobody has been near yet.
INLINE void tile_f32(const int outs, const int rows, const int ahead, const float *w, int64_t w_stride, const float *x,
                     int64_t x_stride, int64_t in, float *y, int64_t wide) {
    __m256 sums[4][4], v[4];
    for (int o = 0; o < outs; o++)
        for (int r = 0; r < rows; r++) sums[o][r] = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + 8 <= in; i += 8) {
        for (int o = 0; o < outs; o++) {
            v[o] = _mm256_loadu_ps(w + o * w_stride + i);
            if (ahead)
                _mm_prefetch((const char *)((uintptr_t)(w + o * w_stride + i) + (outs > 1 ? 4 * outs * w_stride : 1024)), _MM_HINT_T0);
        }
        for (int r = 0; r < rows; r++) {
            __m256 u = _mm256_loadu_ps(x + r * x_stride + i);
            for (int o = 0; o < outs; o++) sums[o][r] = _mm256_fmadd_ps(v[o], u, sums[o][r]);
        }
    }
    if (i < in) {
        __m256i mask = mask8(in - i);
        for (int o = 0; o < outs; o++) v[o] = _mm256_maskload_ps(w + o * w_stride + i, mask);
        for (int r = 0; r < rows; r++) {
            __m256 u = _mm256_maskload_ps(x + r * x_stride + i, mask);
            for (int o = 0; o < outs; o++) sums[o][r] = _mm256_fmadd_ps(v[o], u, sums[o][r]);
        }
    }
    for (int o = 0; o < outs; o++)
        for (int r = 0; r < rows; r++) y[o * wide + r] = sum8(sums[o][r]);
}

// Every tile is code of its own, and compiling takes its time: only those that are used are made.
#define TILES(CASE) \
    CASE(1, 1) CASE(2, 1) CASE(3, 1) CASE(1, 2) CASE(2, 2) CASE(3, 2) CASE(1, 3) CASE(2, 3) CASE(3, 3) CASE(1, 4) CASE(2, 4) CASE(3, 4)
#define FOURS(CASE) CASE(4, 1) CASE(4, 2) CASE(4, 3)
#define FIRSTS(CASE) CASE(1, 1) CASE(1, 2) CASE(1, 3) CASE(1, 4) CASE(2, 4) CASE(3, 4)

static void tiles_f32(int64_t outs, int64_t rows, int ahead, const float *w, int64_t w_stride, const float *x,
                      int64_t x_stride, int64_t in, float *y, int64_t wide) {
    switch (ahead * 64 + outs * 8 + rows) {
#define CASE(o, r) \
    case o * 8 + r: tile_f32(o, r, 0, w, w_stride, x, x_stride, in, y, wide); break;
        TILES(CASE) FOURS(CASE)
#undef CASE
#define CASE(o, r) \
    case 64 + o * 8 + r: tile_f32(o, r, 1, w, w_stride, x, x_stride, in, y, wide); break;
        FIRSTS(CASE)
#undef CASE
    }
}

// At most UNIT outputs of at most NEAR rows: y[o * NEAR + r].
static void unit_f32(const float *w, int64_t outs, const float *x, int64_t rows, int64_t in, float *y) {
    if (rows == 1) {
        for (int64_t o = 0; o < outs; o++) y[o * NEAR] = dot_f32(w + o * in, x, in);
        return;
    }
    if (rows <= 4) {
        // One stream of weights is what memory is fastest with.
        for (int64_t o = 0; o < outs; o++) tiles_f32(1, rows, 1, w + o * in, in, x, in, in, y + o * NEAR, NEAR);
        return;
    }
    // Three outputs by four rows are what sixteen registers hold.
    int64_t fours = rows / 4 * 4;
    for (int64_t o = 0; o < outs; o += 3)
        for (int64_t r = 0; r < fours; r += 4)
            tiles_f32(outs - o < 3 ? outs - o : 3, 4, r == 0, w + o * in, in, x + r * in, in, in, y + o * NEAR + r, NEAR);
    for (int64_t o = 0; fours < rows && o < outs; o += 4)
        tiles_f32(outs - o < 4 ? outs - o : 4, rows - fours, 0, w + o * in, in, x + fours * in, in, in,
                  y + o * NEAR + fours, NEAR);
}

#include "whole.h"

// The product of one x with `parts` matrices that lie anywhere, their outputs side by side in y (rows, sum of outs).
// scale == NULL: they are float. Otherwise there is one, int8, with one scale per output. 0, or 1: no memory.
int product(const float *x, const void *const *weights, const float *const *biases, const int64_t *outs, const float *scale,
            float *y, int64_t parts, int64_t rows, int64_t in, int64_t total, int add, int threads) {
    int64_t stride = (in / STEP + 1) * STEP;
    double *steps = NULL;
    int16_t *q = NULL;
    int wide = scale && rows > 1 && is_wide();
    if (in > INT64_MAX / 64 / rows) return 1;
    if (scale) {
        q = calloc(rows * stride, sizeof(int16_t));
        steps = malloc(rows * sizeof(double));
        if (!q || !steps) {
            free(q);
            free(steps);
            return 1;
        }
        for (int64_t r = 0; r < rows; r++) steps[r] = shrink(x + r * in, q + r * stride, in);
    }
#pragma omp parallel num_threads(threads)
    for (int64_t first = 0; first < rows; first += NEAR) {
        int64_t some = rows - first < NEAR ? rows - first : NEAR;
        for (int64_t part = 0, at = 0; part < parts; at += outs[part++]) {
            const float *bias = biases[part];
#pragma omp for schedule(static) nowait
            for (int64_t o = 0; o < outs[part]; o += UNIT) {
                int64_t count = outs[part] - o < UNIT ? outs[part] - o : UNIT;
                float results[UNIT * NEAR];
                if (scale) {
                    int64_t whole[UNIT * NEAR];
                    const int8_t *w = (const int8_t *)weights[part] + o * in;
                    if (rows == 1)
                        for (int64_t c = 0; c < count; c++) whole[c * NEAR] = dot_i8(w + c * in, q, in);
                    else
                        (wide ? unit_wide : unit_i8)(w, count, q + first * stride, some, stride, in, whole);
                    for (int64_t c = 0; c < count; c++)
                        for (int64_t r = 0; r < some; r++)
                            results[c * NEAR + r] = (float)((double)whole[c * NEAR + r] * steps[first + r] * scale[o + c]);
                } else
                    unit_f32((const float *)weights[part] + o * in, count, x + first * in, some, in, results);
                for (int64_t r = 0; r < some; r++) {
                    float *to = y + (first + r) * total + at + o;
                    for (int64_t c = 0; c < count; c++) {
                        float v = results[c * NEAR + r] + (bias ? bias[o + c] : 0.0f);
                        to[c] = add ? to[c] + v : v;
                    }
                }
            }
        }
    }
    free(q);
    free(steps);
    return 0;
}

#define CHUNK 1048576

// A sum over all bytes that knows their order: sums of 64-bit words and sums of those sums, in 16 lanes, chunk by chunk.
uint64_t checksum(const char *data, int64_t bytes, int threads) {
    const uint64_t odd = 0x9E3779B97F4A7C15u;
    uint64_t result = (uint64_t)bytes;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : result)
    for (int64_t start = 0; start < bytes; start += CHUNK) {
        int64_t size = bytes - start < CHUNK ? bytes - start : CHUNK, i = 0;
        const char *p = data + start;
        __m256i once[4], twice[4];
        for (int j = 0; j < 4; j++) once[j] = twice[j] = _mm256_setzero_si256();
        char last[128];
        for (; i < size; i += 128) {
            const char *from = p + i;
            if (size - i < 128) {
                memset(last, 0, sizeof last);
                from = memcpy(last, p + i, size - i);
            }
            for (int j = 0; j < 4; j++) {
                once[j] = _mm256_add_epi64(once[j], _mm256_loadu_si256((const __m256i *)(from + 32 * j)));
                twice[j] = _mm256_add_epi64(twice[j], once[j]);
            }
        }
        uint64_t mixed = (uint64_t)(start / CHUNK + 1), words[32];
        for (int j = 0; j < 4; j++) {
            _mm256_storeu_si256((__m256i *)(words + 8 * j), once[j]);
            _mm256_storeu_si256((__m256i *)(words + 8 * j + 4), twice[j]);
        }
        for (int j = 0; j < 32; j++) {
            mixed = (mixed ^ words[j]) * odd;
            mixed ^= mixed >> 29;
        }
        result += mixed;
    }
    return result;
}

// y = x / rms(x) * weight, row by row.
void rms(const float *x, const float *weight, double eps, float *y, int64_t rows, int64_t in) {
    for (int64_t r = 0; r < rows; r++) {
        double squares = 0;
        __m256d four = _mm256_setzero_pd();
        int64_t i = 0;
        for (; i + 4 <= in; i += 4) {
            __m256d some = _mm256_cvtps_pd(_mm_loadu_ps(x + r * in + i));
            four = _mm256_fmadd_pd(some, some, four);
        }
        for (; i < in; i++) squares += (double)x[r * in + i] * x[r * in + i];
        squares += four[0] + four[1] + four[2] + four[3];
        double c = 1.0 / sqrt(squares / in + eps);
        for (i = 0; i < in; i++) y[r * in + i] = (float)(x[r * in + i] * c * weight[i]);
    }
}

#include "meeting.h"
