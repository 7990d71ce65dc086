// Products of few rows with a large matrix: every weight is read once, by one thread, in the order it lies.
// y[r][o] = sum_i W[o][i] x[r][i] (+ y[r][o] where `add`). W is (out, in), as nn.Linear keeps it.
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ROWS 8
#define MOST 8191 /* 14 bits with the sign: 127 * 8191 * 2 * (in / 16) stays below 2^31 up to in = 16384 */

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

static inline void dots_f32(const float *w, const float *x, long rows, long in, float *out) {
    if (rows == 1) {
        __m256 a = _mm256_setzero_ps(), b = a, c = a, d = a;
        for (long i = 0; i < in; i += 32) {
            _mm_prefetch((const char *)(w + i + 256), _MM_HINT_T0);
            _mm_prefetch((const char *)(w + i + 272), _MM_HINT_T0);
            a = _mm256_fmadd_ps(_mm256_loadu_ps(w + i), _mm256_loadu_ps(x + i), a);
            b = _mm256_fmadd_ps(_mm256_loadu_ps(w + i + 8), _mm256_loadu_ps(x + i + 8), b);
            c = _mm256_fmadd_ps(_mm256_loadu_ps(w + i + 16), _mm256_loadu_ps(x + i + 16), c);
            d = _mm256_fmadd_ps(_mm256_loadu_ps(w + i + 24), _mm256_loadu_ps(x + i + 24), d);
        }
        out[0] = sum8(_mm256_add_ps(_mm256_add_ps(a, b), _mm256_add_ps(c, d)));
        return;
    }
    __m256 acc[ROWS];
    for (long r = 0; r < ROWS; r++) acc[r] = _mm256_setzero_ps();
    // x has ROWS rows here, the missing ones zero, so that the compiler keeps all sums in registers.
    for (long i = 0; i < in; i += 8) {
        __m256 v = _mm256_loadu_ps(w + i);
        for (long r = 0; r < ROWS; r++) acc[r] = _mm256_fmadd_ps(v, _mm256_loadu_ps(x + r * in + i), acc[r]);
    }
    for (long r = 0; r < rows; r++) out[r] = sum8(acc[r]);
}

static inline void dots_i8(const int8_t *w, const int16_t *x, long rows, long in, int32_t *out) {
    if (rows == 1) {
        __m256i a = _mm256_setzero_si256(), b = a;
        for (long i = 0; i < in; i += 32) {
            _mm_prefetch((const char *)(w + i + 512), _MM_HINT_T0);
            __m256i u = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + i)));
            __m256i v = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + i + 16)));
            a = _mm256_add_epi32(a, _mm256_madd_epi16(u, _mm256_loadu_si256((const __m256i *)(x + i))));
            b = _mm256_add_epi32(b, _mm256_madd_epi16(v, _mm256_loadu_si256((const __m256i *)(x + i + 16))));
        }
        out[0] = sum8i(_mm256_add_epi32(a, b));
        return;
    }
    __m256i acc[ROWS];
    for (long r = 0; r < ROWS; r++) acc[r] = _mm256_setzero_si256();
    for (long i = 0; i < in; i += 16) {
        __m256i u = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + i)));
        for (long r = 0; r < ROWS; r++)
            acc[r] = _mm256_add_epi32(acc[r], _mm256_madd_epi16(u, _mm256_loadu_si256((const __m256i *)(x + r * in + i))));
    }
    for (long r = 0; r < rows; r++) out[r] = sum8i(acc[r]);
}

static float shrink(const float *x, int16_t *q, long in) {
    float most = 1e-30f;
    int broken = 0;
    for (long i = 0; i < in; i++) {
        most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
        broken |= !isfinite(x[i]);
    }
    if (broken) return NAN; /* integers know no NaN: the scale carries it on */
    float up = MOST / most;
    for (long i = 0; i < in; i++) q[i] = (int16_t)lrintf(x[i] * up);
    return most / MOST;
}

// scale == NULL: W is float. Otherwise W is int8 with one scale per output. rows <= ROWS; in is a multiple of 32.
void product(const float *x, const void *W, const float *scale, const float *bias, float *y, long rows, long in, long out,
             int add, int threads) {
    long padded = rows == 1 ? 1 : ROWS;
    float steps[ROWS];
    void *copy = NULL;
    const float *xf = x;
    const int16_t *xi = NULL;
    if (scale) {
        copy = calloc(padded * in, sizeof(int16_t));
        for (long r = 0; r < rows; r++) steps[r] = shrink(x + r * in, (int16_t *)copy + r * in, in);
        xi = copy;
    } else if (rows > 1 && rows < ROWS) {
        copy = calloc(padded * in, sizeof(float));
        memcpy(copy, x, rows * in * sizeof(float));
        xf = copy;
    }
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long o = 0; o < out; o++) {
        float found[ROWS];
        if (scale) {
            int32_t whole[ROWS];
            dots_i8((const int8_t *)W + o * in, xi, rows, in, whole);
            for (long r = 0; r < rows; r++) found[r] = whole[r] * steps[r] * scale[o];
        } else {
            dots_f32((const float *)W + o * in, xf, rows, in, found);
        }
        for (long r = 0; r < rows; r++) {
            float v = found[r] + (bias ? bias[o] : 0.0f);
            y[r * out + o] = add ? y[r * out + o] + v : v;
        }
    }
    free(copy);
}

// y = x / rms(x) * weight, row by row.
void rms(const float *x, const float *weight, float eps, float *y, long rows, long in) {
    for (long r = 0; r < rows; r++) {
        double squares = 0;
        for (long i = 0; i < in; i++) squares += (double)x[r * in + i] * x[r * in + i];
        float c = (float)(1.0 / sqrt(squares / in + eps));
        for (long i = 0; i < in; i++) y[r * in + i] = x[r * in + i] * c * weight[i];
    }
}

// y[j] = silu(x[j]) * x[hidden + j], row by row.
void swiglu(const float *x, float *y, long rows, long hidden) {
    for (long r = 0; r < rows; r++)
        for (long j = 0; j < hidden; j++) {
            float g = x[r * 2 * hidden + j];
            y[r * hidden + j] = g / (1.0f + expf(-g)) * x[r * 2 * hidden + hidden + j];
        }
}

// The first `heads` heads of each row turn in place; dimension i is paired with i + half (RoPE, layout "half").
void turn(float *x, const float *cos, const float *sin, long rows, long stride, long heads, long width, long half) {
    for (long r = 0; r < rows; r++)
        for (long h = 0; h < heads; h++) {
            float *a = x + r * stride + h * width, *b = a + half;
            for (long i = 0; i < half; i++) {
                float u = a[i], v = b[i];
                a[i] = u * cos[i] - v * sin[i];
                b[i] = v * cos[i] + u * sin[i];
            }
        }
}

// One token's heads under an identity: turned, and with the columns that carry what it reads. x is (rows, stride): H queries, G keys
// and G values of width D; left is (G, R, D). q, k and v come out W wide, what is beyond their columns zero.
void bend(const float *x, const float *cosines, const float *sines, const float *left, const float *signs, const float *bias,
          float scale, float *q, float *k, float *v, long rows, long stride, long H, long G, long D, long pairs, long R, long W) {
    for (long row = 0; row < rows; row++) {
        for (long h = 0; h < H + 2 * G; h++) {
            const float *from = x + row * stride + h * D;
            float *to = h < H ? q + (row * H + h) * W : h < H + G ? k + (row * G + h - H) * W : v + (row * G + h - H - G) * W;
            for (long i = D; i < W; i++) to[i] = 0;
            if (h >= H + G) {
                for (long i = 0; i < D; i++) to[i] = from[i];
                continue;
            }
            long g = h < H ? h / (H / G) : h - H;
            float square = 0, own = 0;
            for (long i = 0; i < D; i++) square += from[i] * from[i];
            float length = sqrtf(square);
            float unit = 1.0f / (length > 1e-12f ? length : 1e-12f);
            for (long i = 0; i < pairs; i++) {
                float a = from[i], b = from[i + pairs];
                to[i] = a * cosines[i] - b * sines[i];
                to[i + pairs] = b * cosines[i] + a * sines[i];
            }
            for (long i = 2 * pairs; i < D; i++) to[i] = from[i];
            for (long r = 0; r < R; r++) {
                const float *direction = left + (g * R + r) * D;
                float near = 0;
                for (long i = 0; i < D; i++) near += direction[i] * from[i];
                near *= unit;
                own -= near * near * signs[r];
                to[D + r] = h < H ? near * signs[r] * 2 / scale : near;
            }
            if (h >= H && bias)
                for (long i = 0; i < D; i++) own += bias[g * D + i] * from[i];
            to[D + R] = h < H ? 1 / scale : own;
        }
    }
}
