// Products of few rows with a large matrix: every weight is read once, by one thread, in the order it lies.
// y[r][o] = sum_i W[o][i] x[r][i] (+ y[r][o] where `add`). W is (out, in), as nn.Linear keeps it.
// Shapes, types and strides are checked by native.py before anything here is called; nothing here reads or writes beyond them.
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ROWS 8
#define STEP 32 /* numbers a loop takes at a time; what is left of a row is copied into zeros */
#define MOST 8191 /* activations have 14 bits with their sign */
#define BLOCK 16384 /* 128 * 8191 * 2 * (BLOCK / 16) < 2^31: so many are summed in lanes of 32 bits, and blocks of them in 64 */
#define SHORT 2048 /* 128 * 8191 * SHORT < 2^31: so many may be summed in 32 bits alone */

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

static inline void dot_f32(const float *w, const float *x, int64_t in, float *out) {
    __m256 a = _mm256_setzero_ps(), b = a, c = a, d = a;
    int64_t i = 0;
    for (; i + STEP <= in; i += STEP) {
        _mm_prefetch((const char *)((uintptr_t)(w + i) + 1024), _MM_HINT_T0);
        _mm_prefetch((const char *)((uintptr_t)(w + i) + 1088), _MM_HINT_T0);
        a = _mm256_fmadd_ps(_mm256_loadu_ps(w + i), _mm256_loadu_ps(x + i), a);
        b = _mm256_fmadd_ps(_mm256_loadu_ps(w + i + 8), _mm256_loadu_ps(x + i + 8), b);
        c = _mm256_fmadd_ps(_mm256_loadu_ps(w + i + 16), _mm256_loadu_ps(x + i + 16), c);
        d = _mm256_fmadd_ps(_mm256_loadu_ps(w + i + 24), _mm256_loadu_ps(x + i + 24), d);
    }
    float rest = 0;
    for (; i < in; i++) rest += w[i] * x[i];
    out[0] = sum8(_mm256_add_ps(_mm256_add_ps(a, b), _mm256_add_ps(c, d))) + rest;
}

// x has ROWS rows here, `stride` apart and zero from `in` up to a multiple of 8: so the compiler keeps all sums in registers.
static inline void dots_f32(const float *w, const float *x, int64_t rows, int64_t in, int64_t stride, float *out) {
    __m256 acc[ROWS];
    for (int64_t r = 0; r < ROWS; r++) acc[r] = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + 8 <= in; i += 8) {
        __m256 v = _mm256_loadu_ps(w + i);
        for (int64_t r = 0; r < ROWS; r++) acc[r] = _mm256_fmadd_ps(v, _mm256_loadu_ps(x + r * stride + i), acc[r]);
    }
    if (i < in) {
        float last[8] = {0};
        memcpy(last, w + i, (in - i) * sizeof(float));
        __m256 v = _mm256_loadu_ps(last);
        for (int64_t r = 0; r < ROWS; r++) acc[r] = _mm256_fmadd_ps(v, _mm256_loadu_ps(x + r * stride + i), acc[r]);
    }
    for (int64_t r = 0; r < rows; r++) out[r] = sum8(acc[r]);
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

static inline void dots_i8(const int8_t *w, const int16_t *x, int64_t rows, int64_t in, int64_t stride, int64_t *out) {
    for (int64_t r = 0; r < rows; r++) out[r] = 0;
    int64_t i = 0;
    while (i < in) {
        int64_t stop = in - i > BLOCK ? i + BLOCK : in;
        __m256i acc[ROWS];
        for (int64_t r = 0; r < ROWS; r++) acc[r] = _mm256_setzero_si256();
        for (; i + 16 <= stop; i += 16) {
            __m128i v = _mm_loadu_si128((const __m128i *)(w + i));
            for (int64_t r = 0; r < ROWS; r++) acc[r] = _mm256_add_epi32(acc[r], pairs16(v, x + r * stride + i));
        }
        if (i < stop) {
            int8_t last[16] = {0};
            memcpy(last, w + i, stop - i);
            __m128i v = _mm_loadu_si128((const __m128i *)last);
            for (int64_t r = 0; r < ROWS; r++) acc[r] = _mm256_add_epi32(acc[r], pairs16(v, x + r * stride + i));
            i = stop;
        }
        for (int64_t r = 0; r < rows; r++) out[r] += in <= SHORT ? sum8i(acc[r]) : sum8l(acc[r]);
    }
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
// scale == NULL: they are float. Otherwise there is one, int8, with one scale per output. rows <= ROWS. 0, or 1: no memory.
int product(const float *x, const void *const *weights, const float *const *biases, const int64_t *outs, const float *scale,
            float *y, int64_t parts, int64_t rows, int64_t in, int64_t total, int add, int threads) {
    int64_t padded = rows == 1 ? 1 : ROWS, stride = in;
    double steps[ROWS];
    void *copy = NULL;
    const float *xf = x;
    const int16_t *xi = NULL;
    if (scale || (rows > 1 && (rows < ROWS || in % 8))) {
        if (in > INT64_MAX / 64) return 1;
        stride = (in + STEP - 1) / STEP * STEP;
        copy = calloc(padded * stride, scale ? sizeof(int16_t) : sizeof(float));
        if (!copy) return 1;
        for (int64_t r = 0; r < rows; r++)
            if (scale)
                steps[r] = shrink(x + r * in, (int16_t *)copy + r * stride, in);
            else
                memcpy((float *)copy + r * stride, x + r * in, in * sizeof(float));
        if (scale)
            xi = copy;
        else
            xf = copy;
    }
#pragma omp parallel num_threads(threads)
    for (int64_t part = 0, at = 0; part < parts; at += outs[part++]) {
        const float *bias = biases[part];
#pragma omp for schedule(static) nowait
        for (int64_t o = 0; o < outs[part]; o++) {
            float results[ROWS];
            if (scale) {
                int64_t whole[ROWS];
                const int8_t *w = (const int8_t *)weights[part] + o * in;
                if (rows == 1)
                    whole[0] = dot_i8(w, xi, in);
                else
                    dots_i8(w, xi, rows, in, stride, whole);
                for (int64_t r = 0; r < rows; r++) results[r] = (float)((double)whole[r] * steps[r] * scale[o]);
            } else {
                const float *w = (const float *)weights[part] + o * in;
                if (rows == 1)
                    dot_f32(w, xf, in, results);
                else
                    dots_f32(w, xf, rows, in, stride, results);
            }
            float *to = y + at + o;
            for (int64_t r = 0; r < rows; r++) {
                float v = results[r] + (bias ? bias[o] : 0.0f);
                to[r * total] = add ? to[r * total] + v : v;
            }
        }
    }
    free(copy);
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

// y[j] = silu(x[j]) * x[hidden + j], row by row.
void swiglu(const float *x, float *y, int64_t rows, int64_t hidden) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < hidden; j++) {
            float g = x[r * 2 * hidden + j];
            y[r * hidden + j] = g / (1.0f + expf(-g)) * x[r * 2 * hidden + hidden + j];
        }
}

// The first `heads` heads of each row turn in place; dimension i is paired with i + half (RoPE, layout "half").
void turn(float *x, const float *cos, const float *sin, int64_t rows, int64_t stride, int64_t heads, int64_t width,
          int64_t half) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < heads; h++) {
            float *a = x + r * stride + h * width, *b = a + half;
            for (int64_t i = 0; i < half; i++) {
                float u = a[i], v = b[i];
                a[i] = u * cos[i] - v * sin[i];
                b[i] = v * cos[i] + u * sin[i];
            }
        }
}

// One token's heads under an identity: turned, and with the columns that carry what it reads. x is (rows, stride): H queries,
// G keys and G values of width D; left is (G, R, D). q, k and v come out W >= D + R + 1 wide, what is beyond their columns zero.
void widen(const float *x, const float *cosines, const float *sines, const float *left, const float *signs, const float *bias,
          double scale, float *q, float *k, float *v, int64_t rows, int64_t stride, int64_t H, int64_t G, int64_t D,
          int64_t pairs, int64_t R, int64_t W) {
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t h = 0; h < H + 2 * G; h++) {
            const float *from = x + row * stride + h * D;
            float *to = h < H ? q + (row * H + h) * W : h < H + G ? k + (row * G + h - H) * W : v + (row * G + h - H - G) * W;
            for (int64_t i = D; i < W; i++) to[i] = 0;
            if (h >= H + G) {
                for (int64_t i = 0; i < D; i++) to[i] = from[i];
                continue;
            }
            int64_t g = h < H ? h / (H / G) : h - H;
            double square = 0, own = 0;
            for (int64_t i = 0; i < D; i++) square += (double)from[i] * from[i];
            double length = sqrt(square), unit = 1 / (length < 1e-12 ? 1e-12 : length);
            for (int64_t i = 0; i < pairs; i++) {
                float a = from[i], b = from[i + pairs];
                to[i] = a * cosines[i] - b * sines[i];
                to[i + pairs] = b * cosines[i] + a * sines[i];
            }
            for (int64_t i = 2 * pairs; i < D; i++) to[i] = from[i];
            for (int64_t r = 0; r < R; r++) {
                const float *direction = left + (g * R + r) * D;
                double near = 0;
                for (int64_t i = 0; i < D; i++) near += (double)direction[i] * from[i];
                near *= unit;
                own -= near * near * signs[r];
                to[D + r] = (float)(h < H ? near * signs[r] * 2 / scale : near);
            }
            if (h >= H && bias)
                for (int64_t i = 0; i < D; i++) own += (double)bias[g * D + i] * from[i];
            to[D + R] = (float)(h < H ? 1 / scale : own);
        }
    }
}
