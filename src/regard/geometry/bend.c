/* y = x M for rows x of width D and one small matrix M a head, with what a metric makes of y in the same pass:
 *
 *     out = x + y   (or y alone)        bias = half * <x, y>
 *
 * Sums run along D in one order, so that a row's numbers do not depend on how many rows or threads there are.
 */
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static void leave_room(void) {} /* no scratch is held here */
#include "../crew.h"

enum { LANES = 8, BLOCK = 2 * LANES, ROWS = 6, PIECE = 96 };
#define ALONE (1 << 22) /* products that one thread has done before a second one would have paid for being woken */

/* Up to ROWS rows against all columns. m: (D, P), P a multiple of BLOCK, zeros past D. */
static inline __attribute__((always_inline)) void rows(
    const float *x, int64_t stride, const float *m, float *out, float *bias, int64_t D, int64_t P, float half, int onto, int count
) {
    __m256 dots[ROWS];
#pragma GCC unroll 6
    for (int r = 0; r < count; r++) dots[r] = _mm256_setzero_ps();
    for (int64_t c = 0; c < D; c += BLOCK) {
        __m256 a[ROWS], b[ROWS];
#pragma GCC unroll 6
        for (int r = 0; r < count; r++) a[r] = b[r] = _mm256_setzero_ps();
        for (int64_t e = 0; e < D; e++) {
            __m256 left = _mm256_loadu_ps(m + e * P + c), right = _mm256_loadu_ps(m + e * P + c + LANES);
#pragma GCC unroll 6
            for (int r = 0; r < count; r++) {
                __m256 one = _mm256_broadcast_ss(x + r * stride + e);
                a[r] = _mm256_fmadd_ps(one, left, a[r]);
                b[r] = _mm256_fmadd_ps(one, right, b[r]);
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < count; r++) {
            if (c + BLOCK <= D) {
                __m256 x0 = _mm256_loadu_ps(x + r * stride + c), x1 = _mm256_loadu_ps(x + r * stride + c + LANES);
                dots[r] = _mm256_fmadd_ps(x0, a[r], _mm256_fmadd_ps(x1, b[r], dots[r]));
                _mm256_storeu_ps(out + r * D + c, onto ? _mm256_add_ps(x0, a[r]) : a[r]);
                _mm256_storeu_ps(out + r * D + c + LANES, onto ? _mm256_add_ps(x1, b[r]) : b[r]);
            } else {
                float seen[BLOCK] = {0}, made[BLOCK];
                memcpy(seen, x + r * stride + c, (size_t)(D - c) * sizeof(float));
                __m256 x0 = _mm256_loadu_ps(seen), x1 = _mm256_loadu_ps(seen + LANES);
                dots[r] = _mm256_fmadd_ps(x0, a[r], _mm256_fmadd_ps(x1, b[r], dots[r]));
                _mm256_storeu_ps(made, onto ? _mm256_add_ps(x0, a[r]) : a[r]);
                _mm256_storeu_ps(made + LANES, onto ? _mm256_add_ps(x1, b[r]) : b[r]);
                memcpy(out + r * D + c, made, (size_t)(D - c) * sizeof(float));
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < count; r++) {
        __m128 sum = _mm_add_ps(_mm256_castps256_ps128(dots[r]), _mm256_extractf128_ps(dots[r], 1));
        sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
        sum = _mm_add_ss(sum, _mm_shuffle_ps(sum, sum, 1));
        bias[r] = half * _mm_cvtss_f32(sum);
    }
}

typedef struct {
    const float *x, *m;
    const int64_t *strides;
    float *out, *bias;
    int64_t batches, G, K, D, P, pieces;
    float half;
    int onto;
} Bend;

static void one_piece(void *of, int64_t job) {
    const Bend *c = of;
    int64_t D = c->D, P = c->P, K = c->K, head = job / c->pieces, b = head / c->G, g = head % c->G, i = job % c->pieces * PIECE;
    int64_t last = i + PIECE < K ? i + PIECE : K, row = c->strides[2];
    const float *matrix = c->m + ((c->batches == 1 ? 0 : b) * c->G + g) * D * P;
    const float *source = c->x + b * c->strides[0] + g * c->strides[1];
    for (; i + ROWS <= last; i += ROWS)
        rows(source + i * row, row, matrix, c->out + (head * K + i) * D, c->bias + head * K + i, D, P, c->half, c->onto, ROWS);
    for (; i < last; i++)
        rows(source + i * row, row, matrix, c->out + (head * K + i) * D, c->bias + head * K + i, D, P, c->half, c->onto, 1);
}

/* x: B × G heads of K rows, at strides of batch, heads and rows; m (batches, G, D, D) with batches 1 or B, each symmetric;
 * out (B, G, K, D) and bias (B, G, K), contiguous. Returns 1 where no memory is left. */
int bend(
    const float *x, const int64_t *strides, const float *m, int64_t batches, float *out, float *bias,
    int64_t B, int64_t G, int64_t K, int64_t D, float half, int onto, int threads
) {
    int64_t P = (D + BLOCK - 1) / BLOCK * BLOCK, matrices = batches * G;
    float *padded = NULL;
    if (P != D) {
        padded = calloc((size_t)(matrices * D * P), sizeof(float));
        if (!padded) return 1;
        for (int64_t i = 0; i < matrices * D; i++) memcpy(padded + i * P, m + i * D, (size_t)D * sizeof(float));
        m = padded;
    }
    Bend c = {x, m, strides, out, bias, batches, G, K, D, P, (K + PIECE - 1) / PIECE, half, onto};
    /* OpenMP's threads would spin for milliseconds afterwards, on the core that the scores' own helper waits for. */
    share(one_piece, &c, B * G * c.pieces, (double)B * (double)(G * K * D) * (double)D < ALONE ? 1 : threads);
    free(padded);
    return 0;
}
