// One vector of LANES floats, by the processor's own instructions: part of rows.c, read once for each width.
// M is a set of lanes; NAME gives each function the width in its name.
#define GLUE_(a, b) a##b
#define GLUE(a, b) GLUE_(a, b)
#define NAME(x) GLUE(x, LANES)
#define INLINE static inline __attribute__((always_inline, unused))

#if LANES == 16
#define V __m512
#define M __mmask16
#define set1(x) _mm512_set1_ps(x)
#define load(p) _mm512_loadu_ps(p)
#define store(p, x) _mm512_storeu_ps(p, x)
#define load_part(m, p) _mm512_maskz_loadu_ps(m, p)
#define store_part(p, m, x) _mm512_mask_storeu_ps(p, m, x)
#define fma(a, b, c) _mm512_fmadd_ps(a, b, c)
#define add(a, b) _mm512_add_ps(a, b)
#define sub(a, b) _mm512_sub_ps(a, b)
#define mul(a, b) _mm512_mul_ps(a, b)
#define divide(a, b) _mm512_div_ps(a, b)
#define root(a) _mm512_sqrt_ps(a)
#define largest(a, b) _mm512_max_ps(a, b)
#define smallest(a, b) _mm512_min_ps(a, b)
#define above(a, b) _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ)
#define at_least(a, b) _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ)
#define no_number(a) _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q)
#define bits(m) ((unsigned)(m))
#define both(a, b) ((M)((a) & (b)))
#define either(a, b) ((M)((a) | (b)))
#define none() ((M)0)
#define pick(m, a, b) _mm512_mask_blend_ps(m, b, a)
#define keep(m, a) _mm512_maskz_mov_ps(m, a)
#define total(a) _mm512_reduce_add_ps(a)
#define first_lanes(n) ((M)((n) >= 16 ? 0xffff : (1u << (n)) - 1))
#define round_even(a) _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define times_two_to(a, n) \
    _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23)))
#define exponent(a) _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_srli_epi32(_mm512_castps_si512(a), 23), _mm512_set1_epi32(127)))
#define mantissa(a) \
    _mm512_castsi512_ps(_mm512_or_si512(_mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffff)), \
                                        _mm512_set1_epi32(0x3f800000)))
#else
#define V __m256
#define M __m256
#define set1(x) _mm256_set1_ps(x)
#define load(p) _mm256_loadu_ps(p)
#define store(p, x) _mm256_storeu_ps(p, x)
#define load_part(m, p) _mm256_maskload_ps(p, _mm256_castps_si256(m))
#define store_part(p, m, x) _mm256_maskstore_ps(p, _mm256_castps_si256(m), x)
#define fma(a, b, c) _mm256_fmadd_ps(a, b, c)
#define add(a, b) _mm256_add_ps(a, b)
#define sub(a, b) _mm256_sub_ps(a, b)
#define mul(a, b) _mm256_mul_ps(a, b)
#define divide(a, b) _mm256_div_ps(a, b)
#define root(a) _mm256_sqrt_ps(a)
#define largest(a, b) _mm256_max_ps(a, b)
#define smallest(a, b) _mm256_min_ps(a, b)
#define above(a, b) _mm256_cmp_ps(a, b, _CMP_GT_OQ)
#define at_least(a, b) _mm256_cmp_ps(a, b, _CMP_GE_OQ)
#define no_number(a) _mm256_cmp_ps(a, a, _CMP_UNORD_Q)
#define bits(m) ((unsigned)_mm256_movemask_ps(m))
#define both(a, b) _mm256_and_ps(a, b)
#define either(a, b) _mm256_or_ps(a, b)
#define none() _mm256_setzero_ps()
#define pick(m, a, b) _mm256_blendv_ps(b, a, m)
#define keep(m, a) _mm256_and_ps(m, a)
#define total(a) sum_of_eight(a)
#define first_lanes(n) \
    _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32((int)((n) < 8 ? (n) : 8)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)))
#define round_even(a) _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define times_two_to(a, n) \
    _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)))
#define exponent(a) _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(_mm256_castps_si256(a), 23), _mm256_set1_epi32(127)))
#define mantissa(a) \
    _mm256_castsi256_ps(_mm256_or_si256(_mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(0x7fffff)), \
                                        _mm256_set1_epi32(0x3f800000)))

INLINE float sum_of_eight(V v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
#endif

// e^x for x < 88, to an ulp or two; 0 below -87.
INLINE V NAME(exponential)(V x) {
    M there = at_least(x, set1(-87.0f));
    x = largest(x, set1(-87.0f));
    V n = round_even(mul(x, set1(1.44269504f)));
    V r = fma(n, set1(-1.42860677e-6f), fma(n, set1(-0.693145752f), x)); /* ln 2 in two parts */
    V p = set1(1.0f / 5040);
    p = fma(p, r, set1(1.0f / 720));
    p = fma(p, r, set1(1.0f / 120));
    p = fma(p, r, set1(1.0f / 24));
    p = fma(p, r, set1(1.0f / 6));
    p = fma(p, r, set1(0.5f));
    p = fma(p, r, set1(1.0f));
    p = fma(p, r, set1(1.0f));
    return keep(there, times_two_to(p, n));
}

// log x for normal x > 0: x = m 2^n with m near 1, and log m = 2 artanh((m - 1) / (m + 1)) by its series.
INLINE V NAME(logarithm)(V x) {
    V n = exponent(x), m = mantissa(x);
    M high = above(m, set1(1.41421356f));
    m = pick(high, mul(m, set1(0.5f)), m);
    n = pick(high, add(n, set1(1.0f)), n);
    V s = divide(sub(m, set1(1.0f)), add(m, set1(1.0f))), q = mul(s, s);
    V p = set1(2.0f / 9);
    p = fma(p, q, set1(2.0f / 7));
    p = fma(p, q, set1(2.0f / 5));
    p = fma(p, q, set1(2.0f / 3));
    p = fma(mul(p, q), s, mul(s, set1(2.0f)));
    return fma(n, set1(0.693145752f), fma(n, set1(1.42860677e-6f), p));
}

// u^e for u > 0; zero stays zero, what would be denormal is nearly so, and many of the largest can still be summed.
INLINE V NAME(power)(V u, V e) {
    M there = above(u, set1(0));
    V p = NAME(exponential)(smallest(largest(mul(e, NAME(logarithm)(largest(u, set1(1e-30f)))), set1(-85.0f)), set1(60.0f)));
    return keep(there, p);
}
