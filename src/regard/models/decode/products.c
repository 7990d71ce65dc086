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

static inline int32_t sum8i(__m256i v) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

static inline int64_t sum8l(__m256i v) {
    __m256i low = _mm256_cvtepi32_epi64(_mm256_castsi256_si128(v)), high = _mm256_cvtepi32_epi64(_mm256_extracti128_si256(v, 1));
    __m256i s = _mm256_add_epi64(low, high);
    __m128i t = _mm_add_epi64(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    return _mm_cvtsi128_si64(t) + _mm_extract_epi64(t, 1);
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

// y[o * wide + r] = w_o . x_r for few outputs and rows, whose sums all stay in registers; `ahead` fetches the weights of the next tile.
INLINE void tile_f32(const int outs, const int rows, const int ahead, const float *w, int64_t w_stride, const float *x,
                     int64_t x_stride, int64_t in, float *y, int64_t wide) {
    __m256 sums[4][4], v[4];
    for (int o = 0; o < outs; o++)
        for (int r = 0; r < rows; r++) sums[o][r] = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + 8 <= in; i += 8) {
        for (int o = 0; o < outs; o++) {
            v[o] = _mm256_loadu_ps(w + o * w_stride + i);
            if (ahead) _mm_prefetch((const char *)((uintptr_t)(w + o * w_stride + i) + 4 * outs * w_stride), _MM_HINT_T0);
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

#define TILES(CASE) \
    CASE(1, 1) CASE(2, 1) CASE(3, 1) CASE(4, 1) CASE(1, 2) CASE(2, 2) CASE(3, 2) CASE(4, 2) \
    CASE(1, 3) CASE(2, 3) CASE(3, 3) CASE(4, 3) CASE(1, 4) CASE(2, 4) CASE(3, 4) CASE(4, 4)

static void tiles_f32(int64_t outs, int64_t rows, int ahead, const float *w, int64_t w_stride, const float *x,
                      int64_t x_stride, int64_t in, float *y, int64_t wide) {
    switch (outs * 8 + rows) {
#define CASE(o, r) \
    case o * 8 + r: \
        if (ahead) \
            tile_f32(o, r, 1, w, w_stride, x, x_stride, in, y, wide); \
        else \
            tile_f32(o, r, 0, w, w_stride, x, x_stride, in, y, wide); \
        break;
        TILES(CASE)
#undef CASE
    }
}

// At most UNIT outputs of at most NEAR rows: y[o * NEAR + r].
static void unit_f32(const float *w, int64_t outs, const float *x, int64_t rows, int64_t in, float *y) {
    if (rows == 1) {
        for (int64_t o = 0; o < outs; o++) y[o * NEAR] = dot_f32(w + o * in, x, in);
        return;
    }
    int64_t fours = rows / 4 * 4;
    // Three outputs by four rows are what sixteen registers hold.
    for (int64_t o = 0; fours && o < outs; o += 3)
        for (int64_t r = 0; r < fours; r += 4)
            tiles_f32(outs - o < 3 ? outs - o : 3, 4, r == 0, w + o * in, in, x + r * in, in, in, y + o * NEAR + r, NEAR);
    for (int64_t o = 0; fours < rows && o < outs; o += 4)
        tiles_f32(outs - o < 4 ? outs - o : 4, rows - fours, !fours, w + o * in, in, x + fours * in, in, in,
                  y + o * NEAR + fours, NEAR);
}

static inline __m256i pairs16(__m128i w, const int16_t *x) {
    return _mm256_madd_epi16(_mm256_cvtepi8_epi16(w), _mm256_loadu_si256((const __m256i *)x));
}

// At most BLOCK products, in eight sums of 32 bits. x is zero from `count` up to a multiple of STEP, here and below.
static inline __m256i block_i8(const int8_t *w, const int16_t *x, int64_t count) {
    __m256i a = _mm256_setzero_si256(), b = a;
    int64_t i = 0;
    for (; i + STEP <= count; i += STEP) {
        _mm_prefetch((const char *)((uintptr_t)(w + i) + 512), _MM_HINT_T0);
        a = _mm256_add_epi32(a, pairs16(_mm_loadu_si128((const __m128i *)(w + i)), x + i));
        b = _mm256_add_epi32(b, pairs16(_mm_loadu_si128((const __m128i *)(w + i + 16)), x + i + 16));
    }
    if (i < count) {
        int8_t last[STEP] = {0};
        memcpy(last, w + i, count - i);
        a = _mm256_add_epi32(a, pairs16(_mm_loadu_si128((const __m128i *)last), x + i));
        b = _mm256_add_epi32(b, pairs16(_mm_loadu_si128((const __m128i *)(last + 16)), x + i + 16));
    }
    return _mm256_add_epi32(a, b);
}

static inline int64_t dot_i8(const int8_t *w, const int16_t *x, int64_t in) {
    if (in <= SHORT) return sum8i(block_i8(w, x, in));
    int64_t whole = 0;
    for (int64_t i = 0; i < in; i += BLOCK) whole += sum8l(block_i8(w + i, x + i, in - i < BLOCK ? in - i : BLOCK));
    return whole;
}

// Sums of whole numbers are exact in any order.
INLINE void tile_i8(const int outs, const int rows, const int8_t *w, const int16_t *x, int64_t stride, int64_t in, int64_t *y) {
    for (int o = 0; o < outs; o++)
        for (int r = 0; r < rows; r++) y[o * NEAR + r] = 0;
    for (int64_t i = 0; i < in;) {
        int64_t stop = in - i > BLOCK ? i + BLOCK : in;
        __m256i sums[4][4], v[4];
        for (int o = 0; o < outs; o++)
            for (int r = 0; r < rows; r++) sums[o][r] = _mm256_setzero_si256();
        for (; i < stop; i += 16) {
            for (int o = 0; o < outs; o++) {
                int8_t last[16] = {0};
                const int8_t *from = w + o * in + i;
                if (stop - i < 16) from = memcpy(last, from, stop - i);
                v[o] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
                _mm_prefetch((const char *)((uintptr_t)(w + o * in + i) + outs * in), _MM_HINT_T0);
            }
            for (int r = 0; r < rows; r++) {
                __m256i u = _mm256_loadu_si256((const __m256i *)(x + r * stride + i));
                for (int o = 0; o < outs; o++) sums[o][r] = _mm256_add_epi32(sums[o][r], _mm256_madd_epi16(v[o], u));
            }
        }
        i = stop;
        for (int o = 0; o < outs; o++)
            for (int r = 0; r < rows; r++) y[o * NEAR + r] += in <= SHORT ? sum8i(sums[o][r]) : sum8l(sums[o][r]);
    }
}

static void unit_i8(const int8_t *w, int64_t outs, const int16_t *x, int64_t rows, int64_t stride, int64_t in, int64_t *y) {
    for (int64_t o = 0; o < outs; o += 3)
        for (int64_t r = 0; r < rows; r += 4) {
            const int8_t *from = w + o * in;
            const int16_t *with = x + r * stride;
            int64_t *to = y + o * NEAR + r;
            switch ((outs - o < 3 ? outs - o : 3) * 8 + (rows - r < 4 ? rows - r : 4)) {
#define CASE(o, r) \
    case o * 8 + r: tile_i8(o, r, from, with, stride, in, to); break;
                TILES(CASE)
#undef CASE
            }
        }
}

// The same sums where the processor multiplies and adds pairs in one instruction, sixteen lanes at a time.
#define WIDE __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512vnni")))

static inline __attribute__((always_inline)) WIDE void tile_wide(const int outs, const int rows, const int64_t ahead, const int8_t *w,
                                                                 const int16_t *x, int64_t stride, int64_t in, int64_t *y) {
    for (int o = 0; o < outs; o++)
        for (int r = 0; r < rows; r++) y[o * NEAR + r] = 0;
    for (int64_t i = 0; i < in;) {
        int64_t stop = in - i > BLOCK ? i + BLOCK : in;
        __m512i sums[4][8], v[4];
        for (int o = 0; o < outs; o++)
            for (int r = 0; r < rows; r++) sums[o][r] = _mm512_setzero_si512();
        for (; i < stop; i += 32) {
            for (int o = 0; o < outs; o++) {
                const int8_t *from = w + o * in + i;
                __m256i some = stop - i < 32 ? _mm256_maskz_loadu_epi8(((__mmask32)1 << (stop - i)) - 1, from)
                                             : _mm256_loadu_si256((const __m256i *)from);
                v[o] = _mm512_cvtepi8_epi16(some);
                if (ahead) _mm_prefetch((const char *)((uintptr_t)from + ahead), _MM_HINT_T0);
            }
            for (int r = 0; r < rows; r++) {
                __m512i u = _mm512_loadu_si512((const void *)(x + r * stride + i));
                for (int o = 0; o < outs; o++) sums[o][r] = _mm512_dpwssd_epi32(sums[o][r], v[o], u);
            }
        }
        i = stop;
        for (int o = 0; o < outs; o++)
            for (int r = 0; r < rows; r++) {
                __m256i low = _mm512_castsi512_si256(sums[o][r]), high = _mm512_extracti64x4_epi64(sums[o][r], 1);
                y[o * NEAR + r] += in <= SHORT ? sum8i(_mm256_add_epi32(low, high)) : sum8l(low) + sum8l(high);
            }
    }
}

WIDE static void unit_wide(const int8_t *w, int64_t outs, const int16_t *x, int64_t rows, int64_t stride, int64_t in, int64_t *y) {
    if (rows <= 8) {
        // One output after the other: one stream of weights is what memory is fastest with.
        for (int64_t o = 0; o < outs; o++) switch (rows) {
#define CASE(r) \
    case r: tile_wide(1, r, 2048, w + o * in, x, stride, in, y + o * NEAR); break;
                CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
            }
        return;
    }
    for (int64_t o = 0; o < outs; o += 4)
        for (int64_t r = 0; r < rows; r += 4) {
            const int8_t *from = w + o * in;
            const int16_t *with = x + r * stride;
            int64_t *to = y + o * NEAR + r;
            switch ((outs - o < 4 ? outs - o : 4) * 8 + (rows - r < 4 ? rows - r : 4)) {
#define CASE(o, r) \
    case o * 8 + r: tile_wide(o, r, 0, from, with, stride, in, to); break;
                TILES(CASE)
#undef CASE
            }
        }
}

static int wide_allowed = 1;

// Whether the wide instructions are used where the processor has them; gives what held before.
int use_wide(int allowed) {
    int before = wide_allowed;
    wide_allowed = allowed;
    return before;
}

static int is_wide(void) {
    return wide_allowed && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}

static double shrink(const float *x, int16_t *q, int64_t in) {
    // Without their sign, floats are ordered as their bits are, and what is not finite comes after all others.
    const __m256i unsigned_ = _mm256_set1_epi32(INT32_MAX);
    __m256i tops = _mm256_setzero_si256();
    int64_t i = 0;
    for (; i + 8 <= in; i += 8) {
        __m256i sizes = _mm256_and_si256(unsigned_, _mm256_loadu_si256((const __m256i *)(x + i)));
        tops = _mm256_max_epi32(tops, sizes);
    }
    int32_t bits[8], top = 0;
    _mm256_storeu_si256((__m256i *)bits, tops);
    for (int j = 0; j < 8; j++) top = bits[j] > top ? bits[j] : top;
    for (; i < in; i++) {
        int32_t one;
        memcpy(&one, x + i, sizeof one);
        one &= INT32_MAX;
        top = one > top ? one : top;
    }
    if (top >= 0x7f800000) return NAN; /* integers know no NaN: the scale carries it on */
    if (top == 0) return 0;
    float most;
    memcpy(&most, &top, sizeof most);
    // Lifting the smallest keeps MOST / most finite.
    float lift = most < 1e-30f ? 0x1p96f : 1.0f, up = MOST / (most * lift);
    const __m256 lifts = _mm256_set1_ps(lift), ups = _mm256_set1_ps(up);
    for (i = 0; i + 16 <= in; i += 16) {
        __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(x + i), lifts), ups));
        __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(x + i + 8), lifts), ups));
        _mm256_storeu_si256((__m256i *)(q + i), _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8));
    }
    for (; i < in; i++) q[i] = (int16_t)lrintf(x[i] * lift * up);
    return (double)most / MOST;
}

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
