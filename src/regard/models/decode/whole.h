// Products of bytes with activations of 14 bits, summed exactly: part of products.c.

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
        for (; i + 16 <= stop; i += 16) {
            for (int o = 0; o < outs; o++) {
                v[o] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + o * in + i)));
                _mm_prefetch((const char *)((uintptr_t)(w + o * in + i) + outs * in), _MM_HINT_T0);
            }
            for (int r = 0; r < rows; r++) {
                __m256i u = _mm256_loadu_si256((const __m256i *)(x + r * stride + i));
                for (int o = 0; o < outs; o++) sums[o][r] = _mm256_add_epi32(sums[o][r], _mm256_madd_epi16(v[o], u));
            }
        }
        if (i < stop) {
            for (int o = 0; o < outs; o++) {
                int8_t last[16] = {0};
                memcpy(last, w + o * in + i, stop - i);
                v[o] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)last));
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

#if (defined(__clang__) && __clang_major__ >= 9) || (!defined(__clang__) && __GNUC__ >= 9)
#define HAS_WIDE 1
// The same sums where the processor multiplies and adds pairs in one instruction, sixteen lanes at a time.
#define WIDE __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512vnni")))

static inline __attribute__((always_inline)) WIDE void tile_wide(const int outs, const int rows, const int ahead, const int8_t *w,
                                                                 const int16_t *x, int64_t stride, int64_t in, int64_t *y) {
    for (int o = 0; o < outs; o++)
        for (int r = 0; r < rows; r++) y[o * NEAR + r] = 0;
    for (int64_t i = 0; i < in;) {
        int64_t stop = in - i > BLOCK ? i + BLOCK : in;
        __m512i sums[4][8], v[4];
        for (int o = 0; o < outs; o++)
            for (int r = 0; r < rows; r++) sums[o][r] = _mm512_setzero_si512();
        for (; i + 32 <= stop; i += 32) {
            for (int o = 0; o < outs; o++) {
                v[o] = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(w + o * in + i)));
                if (ahead) _mm_prefetch((const char *)((uintptr_t)(w + o * in + i) + (outs > 1 ? outs * in : 2048)), _MM_HINT_T0);
            }
            for (int r = 0; r < rows; r++) {
                __m512i u = _mm512_loadu_si512((const void *)(x + r * stride + i));
                for (int o = 0; o < outs; o++) sums[o][r] = _mm512_dpwssd_epi32(sums[o][r], v[o], u);
            }
        }
        if (i < stop) {
            __mmask32 mask = ((__mmask32)1 << (stop - i)) - 1;
            for (int o = 0; o < outs; o++) v[o] = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(mask, w + o * in + i));
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
        // One output after the other, as above.
        for (int64_t o = 0; o < outs; o++) switch (rows) {
#define CASE(r) \
    case r: tile_wide(1, r, 1, w + o * in, x, stride, in, y + o * NEAR); break;
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
            // More than eight rows begin with four.
            int ahead = r == 0;
            switch (ahead * 64 + (outs - o < 4 ? outs - o : 4) * 8 + (rows - r < 4 ? rows - r : 4)) {
#define CASE(o, r) \
    case o * 8 + r: tile_wide(o, r, 0, from, with, stride, in, to); break;
                TILES(CASE) FOURS(CASE) CASE(4, 4)
#undef CASE
#define CASE(o) \
    case 64 + o * 8 + 4: tile_wide(o, 4, 1, from, with, stride, in, to); break;
                CASE(1) CASE(2) CASE(3) CASE(4)
#undef CASE
            }
        }
}
#else
#define HAS_WIDE 0
#define unit_wide unit_i8
#endif

static int wide_allowed = 1;

// Whether the wide instructions are used where the processor has them; gives what held before.
int use_wide(int allowed) {
    int before = wide_allowed;
    wide_allowed = allowed;
    return before;
}

static int is_wide(void) {
#if HAS_WIDE
    return wide_allowed && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#else
    return 0;
#endif
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
