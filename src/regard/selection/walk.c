/* The expected walk of monotonic attention, row by row along the keys, and its gradient. All sums and products are double: a row
 * multiplies as many numbers as there are keys. */
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { LANES = 4 };

/* exp of x <= 0 (0 below -708; NaN stays), to the last digits of double. */
static inline __m256d small_exp(__m256d x) {
    static const double terms[] = {
        1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0,
        1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0,
    };
    const __m256d magic = _mm256_set1_pd(6755399441055744.0); /* 1.5 * 2^52: adding it rounds, and the low bits hold the number */
    const __m256d least = _mm256_set1_pd(-708);
    __m256d safe = _mm256_max_pd(least, x); /* of two numbers of which one is NaN it gives the second */
    __m256d shifted = _mm256_fmadd_pd(safe, _mm256_set1_pd(1.4426950408889634), magic), n = _mm256_sub_pd(shifted, magic);
    __m256d r = _mm256_fnmadd_pd(n, _mm256_set1_pd(0.6931471803691238), safe);
    r = _mm256_fnmadd_pd(n, _mm256_set1_pd(1.9082149292705877e-10), r);
    __m256d sum = _mm256_set1_pd(terms[0]);
    for (int i = 1; i < 14; i++) sum = _mm256_fmadd_pd(sum, r, _mm256_set1_pd(terms[i]));
    __m256i bits = _mm256_add_epi64(_mm256_castpd_si256(shifted), _mm256_set1_epi64x(1023));
    __m256d power = _mm256_castsi256_pd(_mm256_slli_epi64(bits, 52));
    return _mm256_andnot_pd(_mm256_cmp_pd(x, least, _CMP_LT_OQ), _mm256_mul_pd(sum, power));
}

/* p = sigmoid(s) and g = sigmoid(-s). Both come of exp(-|s|), so that neither is 1 minus the other. */
static inline void sigmoids(__m256d s, __m256d *p, __m256d *g) {
    const __m256d one = _mm256_set1_pd(1), sign = _mm256_set1_pd(-0.0);
    __m256d e = small_exp(_mm256_or_pd(s, sign)), near = _mm256_div_pd(one, _mm256_add_pd(one, e)), far = _mm256_mul_pd(e, near);
    *p = _mm256_blendv_pd(near, far, s);
    *g = _mm256_blendv_pd(far, near, s);
}

static inline __m256d read_float(const float *x) { return _mm256_cvtps_pd(_mm_loadu_ps(x)); }
static inline __m256d read_double(const double *x) { return _mm256_loadu_pd(x); }

#define REAL float
#define NAME(x) x##_float
#include "walk.h"

#define REAL double
#define NAME(x) x##_double
#include "walk.h"
