// Keys and values in a byte a number, x = s * q with one s in bfloat16 for every GROUP columns: part of products.c.
// s * q has 15 bits, so float32 holds it without rounding, and whatever is made of bytes here is the bits that their numbers would give.

#define GROUP 32 /* as int8_cache.py has it */

INLINE int64_t groups_of(int64_t W) { return (W + GROUP - 1) / GROUP; }

INLINE float from_bfloat16(uint16_t s) {
    uint32_t bits = (uint32_t)s << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint16_t to_bfloat16(float x) {
    uint32_t bits;
    if (x != x) return 0x7fc0;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Eight bytes as numbers; of fewer than eight, the rest is zero and not read.
INLINE __m256 numbers8(const int8_t *q, int64_t count, __m256 scale) {
    __m128i some;
    if (count >= 8)
        some = _mm_loadl_epi64((const __m128i *)q);
    else {
        int64_t last = 0;
        memcpy(&last, q, count);
        some = _mm_cvtsi64_si128(last);
    }
    return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(some)), scale);
}

// `Bytes.of` of one row: the same bytes and scales.
static void to_bytes(const float *x, int64_t W, int8_t *q, uint16_t *scales) {
    const __m256i unsigned_ = _mm256_set1_epi32(INT32_MAX);
    for (int64_t start = 0; start < W; start += GROUP) {
        int64_t stop = W - start < GROUP ? W : start + GROUP;
        // Without their sign, floats are ordered as their bits are, and what is not finite comes after all others.
        __m256i tops = _mm256_setzero_si256();
        for (int64_t i = start; i < stop; i += 8)
            tops = _mm256_max_epi32(tops, _mm256_and_si256(unsigned_, _mm256_maskload_epi32((const int *)x + i, mask8(stop - i))));
        int32_t bits[8], top = 0;
        _mm256_storeu_si256((__m256i *)bits, tops);
        for (int i = 0; i < 8; i++) top = bits[i] > top ? bits[i] : top;
        float most;
        memcpy(&most, &top, sizeof most);
        most /= 127;
        uint16_t kept = to_bfloat16(most < 1e-30f ? 1e-30f : most);
        scales[start / GROUP] = kept;
        if (top >= 0x7f800000) {
            // 0 times what is not finite is NaN, in this group alone.
            memset(q + start, 0, stop - start);
            continue;
        }
        __m256 scale = _mm256_set1_ps(from_bfloat16(kept));
        for (int64_t i = start; i < stop; i += 8) {
            __m256i whole = _mm256_cvtps_epi32(_mm256_div_ps(_mm256_maskload_ps(x + i, mask8(stop - i)), scale));
            whole = _mm256_max_epi32(_mm256_set1_epi32(-127), _mm256_min_epi32(_mm256_set1_epi32(127), whole));
            __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
            int64_t eight = _mm_cvtsi128_si64(_mm_packs_epi16(half, half));
            memcpy(q + i, &eight, stop - i < 8 ? stop - i : 8);
        }
    }
}

// `tile_f32` of rows x with few keys, W wide and one after the other.
INLINE void tile_kept(const int outs, const int rows, const int8_t *k, const uint16_t *scales, int64_t W, const float *x, float *y,
                       int64_t wide) {
    __m256 sums[3][4], v[3], scale[3];
    int64_t groups = groups_of(W);
    for (int o = 0; o < outs; o++)
        for (int r = 0; r < rows; r++) sums[o][r] = _mm256_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        int64_t i = g * GROUP, stop = W - i < GROUP ? W : i + GROUP;
        for (int o = 0; o < outs; o++) scale[o] = _mm256_set1_ps(from_bfloat16(scales[o * groups + g]));
        for (; i + 8 <= stop; i += 8) {
            for (int o = 0; o < outs; o++) v[o] = numbers8(k + o * W + i, 8, scale[o]);
            for (int r = 0; r < rows; r++) {
                __m256 u = _mm256_loadu_ps(x + r * W + i);
                for (int o = 0; o < outs; o++) sums[o][r] = _mm256_fmadd_ps(v[o], u, sums[o][r]);
            }
        }
        if (i < stop) {
            __m256i mask = mask8(stop - i);
            for (int o = 0; o < outs; o++) v[o] = numbers8(k + o * W + i, stop - i, scale[o]);
            for (int r = 0; r < rows; r++) {
                __m256 u = _mm256_maskload_ps(x + r * W + i, mask);
                for (int o = 0; o < outs; o++) sums[o][r] = _mm256_fmadd_ps(v[o], u, sums[o][r]);
            }
        }
    }
    for (int o = 0; o < outs; o++)
        for (int r = 0; r < rows; r++) y[o * wide + r] = sum8(sums[o][r]);
}

static void tiles_kept(int64_t outs, int64_t rows, const int8_t *k, const uint16_t *scales, int64_t W, const float *x, float *y,
                        int64_t wide) {
    switch (outs * 8 + rows) {
#define CASE(o, r) \
    case o * 8 + r: tile_kept(o, r, k, scales, W, x, y, wide); break;
        TILES(CASE)
#undef CASE
    }
}
