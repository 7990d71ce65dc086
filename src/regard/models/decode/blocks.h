// Products of small codes with activations of 14 bits, block by block of 32: part of products.c.
//
// Sixteen outputs make a tile, one lane each. A block is eight groups of four inputs; of a group, byte 4 o + i belongs to output o
// and input i. Codes below 8 bits lie in planes of 64 bytes: in plane p of the low four bits, groups 2p and 2p + 1; in the plane of
// the fifth bit, group g at bit g; in plane p of bits five and six, group g of 4p..4p + 3 at bits 2 (g % 4) and above.
// A tile is what is kept for 8 blocks each, then block by block its codes and its scales: one stream, which is what memory is
// fastest with. tiles.py writes it and says the formulas.
//
// An activation is q = 128 h + l with |h|, |l| <= 64: bytes both, of which no pair of products overflows 16 bits.

enum { FLOATS, BYTES, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };
#define TILE 16  /* outputs */
#define SPAN 32  /* inputs of a block */
#define SUPER 8  /* blocks that share what is kept once */

#define IS_K(kind) ((kind) >= Q4_K)
#define BITS(kind) ((kind) == Q8_0 ? 8 : (kind) == Q6_K ? 6 : (kind) == Q5_0 || (kind) == Q5_1 || (kind) == Q5_K ? 5 : 4)
#define MIDDLE(kind) ((kind) == Q4_0 ? 8 : (kind) == Q5_0 ? 16 : (kind) == Q8_0 ? 128 : (kind) == Q6_K ? 32 : 0)
#define SCALES(kind) ((kind) == Q4_0 || (kind) == Q5_0 || (kind) == Q8_0 || IS_K(kind) ? 32 : 64)
#define STRIDE(kind) (64 * BITS(kind) + SCALES(kind)) /* bytes of a block of a tile */
#define SHARED(kind) (!IS_K(kind) ? 0 : (kind) == Q6_K ? 32 : 64)
#define HAS_LEAST(kind) ((kind) == Q4_1 || (kind) == Q5_1 || (kind) == Q4_K || (kind) == Q5_K)

static int64_t tile_bytes(int kind, int64_t blocks) {
    int64_t bytes = blocks * (64 * BITS(kind) + SCALES(kind)) + (blocks + SUPER - 1) / SUPER * SHARED(kind);
    return (bytes + 63) / 64 * 64;
}

// Rows of activations as products read them: floats, 14 bits a row (`whole.h`), 14 bits a block.
typedef struct {
    const float *x;
    int16_t *q;     /* (rows, stride), zero behind a row's end */
    double *steps;  /* (rows) */
    int8_t *planes; /* (rows, 2, stride): h, then l */
    float *sizes;   /* (rows, blocks): what one unit of q is */
    float *totals;  /* (rows, blocks): sizes times the sum of q */
    int32_t *sums;  /* (rows, 2 blocks): of q, over sixteen inputs each */
    int64_t in, stride, blocks;
} Input;

// A row of x in blocks of 14 bits. What is not finite makes its block NaN.
static void flatten(const float *x, const Input *to, int64_t r) {
    int8_t *high = to->planes + 2 * r * to->stride, *low = high + to->stride;
    const __m256i unsigned_ = _mm256_set1_epi32(INT32_MAX);
    for (int64_t b = 0; b < to->blocks; b++) {
        float last[SPAN] = {0};
        const float *from = x + b * SPAN;
        if (to->in - b * SPAN < SPAN) from = memcpy(last, from, (to->in - b * SPAN) * sizeof(float));
        __m256 v[4];
        __m256i tops = _mm256_setzero_si256();
        for (int j = 0; j < 4; j++) {
            v[j] = _mm256_loadu_ps(from + 8 * j);
            tops = _mm256_max_epi32(tops, _mm256_and_si256(unsigned_, _mm256_castps_si256(v[j])));
        }
        __m128i half = _mm_max_epi32(_mm256_castsi256_si128(tops), _mm256_extracti128_si256(tops, 1));
        half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
        int32_t top = _mm_cvtsi128_si32(_mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
        int bad = top >= 0x7f800000;
        float most, lift, up;
        memcpy(&most, &top, sizeof most);
        // Lifting the smallest keeps MOST / most finite.
        lift = most < 1e-30f ? 0x1p96f : 1.0f;
        up = bad || top == 0 ? 0.0f : MOST / (most * lift);
        __m256i q[4], h[4], l[4];
        for (int j = 0; j < 4; j++) {
            __m256 scaled = _mm256_mul_ps(_mm256_mul_ps(v[j], _mm256_set1_ps(lift)), _mm256_set1_ps(up));
            q[j] = bad ? _mm256_setzero_si256() : _mm256_cvtps_epi32(scaled);
            h[j] = _mm256_srai_epi32(_mm256_add_epi32(q[j], _mm256_set1_epi32(64)), 7);
            l[j] = _mm256_sub_epi32(q[j], _mm256_slli_epi32(h[j], 7));
        }
        // Packing goes by halves of 128 bits; this puts the fours back in order.
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
#define PACKED(p) _mm256_permutevar8x32_epi32(_mm256_packs_epi16(_mm256_packs_epi32(p[0], p[1]), _mm256_packs_epi32(p[2], p[3])), order)
        _mm256_storeu_si256((__m256i *)(high + b * SPAN), PACKED(h));
        _mm256_storeu_si256((__m256i *)(low + b * SPAN), PACKED(l));
#undef PACKED
        int32_t first = sum8i(_mm256_add_epi32(q[0], q[1])), second = sum8i(_mm256_add_epi32(q[2], q[3]));
        float size = bad ? NAN : most / MOST;
        int64_t at = r * to->blocks + b;
        to->sums[2 * at] = first;
        to->sums[2 * at + 1] = second;
        to->sizes[at] = size;
        to->totals[at] = size * (float)(first + second);
    }
}

// Four bytes of a row, as they lie.
INLINE int32_t four(const int8_t *x) {
    int32_t bytes;
    memcpy(&bytes, x, sizeof bytes);
    return bytes;
}

typedef struct {
    const uint8_t *codes, *scales, *shared;
} Tile;

INLINE Tile tile_at(const int kind, const uint8_t *w, int64_t tile, int64_t blocks) {
    w += tile * tile_bytes(kind, blocks);
    const uint8_t *codes = w + (blocks + SUPER - 1) / SUPER * SHARED(kind);
    return (Tile){codes, codes + 64 * BITS(kind), w};
}

// Eight outputs (`half` of a tile) by few rows, on AVX2.
#define AHEAD 2048 /* bytes by which codes are fetched before they are used */
#define NARROW __attribute__((target("avx2,fma,f16c")))

INLINE NARROW __m256i group_near(const int kind, const uint8_t *codes, const int g, const int half) {
    const __m256i *at = (const __m256i *)(codes + 32 * half);
    const __m256i low = _mm256_set1_epi8(15);
    if (BITS(kind) == 8) return _mm256_loadu_si256(at + 2 * g);
    __m256i v = _mm256_loadu_si256(at + 2 * (g / 2));
    v = _mm256_and_si256(g % 2 ? _mm256_srli_epi16(v, 4) : v, low);
    if (BITS(kind) == 5) {
        __m256i bit = _mm256_loadu_si256(at + 8);
        bit = g < 4 ? _mm256_slli_epi16(bit, 4 - g) : _mm256_srli_epi16(bit, g - 4);
        v = _mm256_or_si256(v, _mm256_and_si256(bit, _mm256_set1_epi8(16)));
    }
    if (BITS(kind) == 6) {
        __m256i two = _mm256_loadu_si256(at + 8 + 2 * (g / 4));
        two = g % 4 < 2 ? _mm256_slli_epi16(two, 4 - 2 * (g % 4)) : _mm256_srli_epi16(two, 2 * (g % 4) - 4);
        v = _mm256_or_si256(v, _mm256_and_si256(two, _mm256_set1_epi8(48)));
    }
    return v;
}

INLINE NARROW __m256 halves8(const uint8_t *at) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at)); }
INLINE NARROW __m256 bytes8(const uint8_t *at) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)at))); }
INLINE NARROW __m256 signed8(const uint8_t *at) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at))); }

INLINE NARROW void tile_near(const int kind, const int rows, const int half, Tile t, const Input *x, int64_t first, float *y) {
    const int parts = kind == Q6_K ? 2 : 1, groups = 8 / parts;
    __m256 acc[2], d = _mm256_setzero_ps(), m = _mm256_setzero_ps();
    for (int r = 0; r < rows; r++) acc[r] = _mm256_setzero_ps();
    for (int64_t b = 0; b < x->blocks; b++, t.codes += STRIDE(kind), t.scales += STRIDE(kind)) {
        if (IS_K(kind) && b % SUPER == 0) {
            d = halves8(t.shared + 16 * half);
            if (HAS_LEAST(kind)) m = halves8(t.shared + 32 + 16 * half);
            t.shared += SHARED(kind);
        }
        if (half == 0)
            for (int j = 0; j < (STRIDE(kind) + 63) / 64; j++) _mm_prefetch((const char *)((uintptr_t)t.codes + AHEAD + 64 * j), _MM_HINT_T0);
        for (int part = 0; part < parts; part++) {
            __m256i h[2], l[2];
            const __m256i ones = _mm256_set1_epi16(1);
            for (int r = 0; r < rows; r++) h[r] = l[r] = _mm256_setzero_si256();
            for (int g = part * groups; g < (part + 1) * groups; g++) {
                __m256i v = group_near(kind, t.codes, g, half);
                for (int r = 0; r < rows; r++) {
                    const int8_t *with = x->planes + 2 * (first + r) * x->stride + b * SPAN + 4 * g;
                    __m256i a = _mm256_maddubs_epi16(v, _mm256_set1_epi32(four(with)));
                    __m256i c = _mm256_maddubs_epi16(v, _mm256_set1_epi32(four(with + x->stride)));
                    // Below 8 bits the pairs of a whole block (of 6 bits, of half a one) are added in 16 bits:
                    // 8 groups * 2 * 31 * 64 and 4 * 2 * 63 * 64 are below 2^15.
                    if (BITS(kind) == 8) {
                        h[r] = _mm256_add_epi32(h[r], _mm256_madd_epi16(a, ones));
                        l[r] = _mm256_add_epi32(l[r], _mm256_madd_epi16(c, ones));
                    } else {
                        h[r] = _mm256_add_epi16(h[r], a);
                        l[r] = _mm256_add_epi16(l[r], c);
                    }
                }
            }
            __m256 by = d, least = m;
            if (kind == Q6_K)
                by = _mm256_mul_ps(d, signed8(t.scales + 16 * part + 8 * half));
            else if (IS_K(kind)) {
                by = _mm256_mul_ps(d, bytes8(t.scales + 8 * half));
                least = _mm256_mul_ps(m, bytes8(t.scales + 16 + 8 * half));
            } else {
                by = halves8(t.scales + 16 * half);
                if (HAS_LEAST(kind)) least = halves8(t.scales + 32 + 16 * half);
            }
            for (int r = 0; r < rows; r++) {
                if (BITS(kind) < 8) {
                    h[r] = _mm256_madd_epi16(h[r], ones);
                    l[r] = _mm256_madd_epi16(l[r], ones);
                }
                int64_t at = (first + r) * x->blocks + b;
                __m256i sum = _mm256_add_epi32(_mm256_slli_epi32(h[r], 7), l[r]);
                if (MIDDLE(kind)) {
                    int32_t mine = parts == 2 ? x->sums[2 * at + part] : x->sums[2 * at] + x->sums[2 * at + 1];
                    sum = _mm256_sub_epi32(sum, _mm256_set1_epi32(MIDDLE(kind) * mine));
                }
                acc[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(by, _mm256_set1_ps(x->sizes[at])), acc[r]);
                if (HAS_LEAST(kind)) {
                    __m256 total = _mm256_set1_ps(x->totals[at]);
                    acc[r] = IS_K(kind) ? _mm256_fnmadd_ps(least, total, acc[r]) : _mm256_fmadd_ps(least, total, acc[r]);
                }
            }
        }
    }
    for (int r = 0; r < rows; r++) {
        float some[8];
        _mm256_storeu_ps(some, acc[r]);
        for (int o = 0; o < 8; o++) y[(8 * half + o) * NEAR + r] = some[o];
    }
}

#define KINDS(CASE) CASE(Q4_0) CASE(Q4_1) CASE(Q5_0) CASE(Q5_1) CASE(Q8_0) CASE(Q4_K) CASE(Q5_K) CASE(Q6_K)

// One tile by `rows` rows from `first` on: y[o * NEAR + r].
#define CASE(kind) \
    static NARROW __attribute__((noinline)) void near_##kind(const uint8_t *w, int64_t tile, const Input *x, int64_t first, int64_t rows, float *y) { \
        Tile t = tile_at(kind, w, tile, x->blocks); \
        int64_t r = 0; \
        for (; r + 2 <= rows; r += 2) { \
            tile_near(kind, 2, 0, t, x, first + r, y + r); \
            tile_near(kind, 2, 1, t, x, first + r, y + r); \
        } \
        if (r < rows) { \
            tile_near(kind, 1, 0, t, x, first + r, y + r); \
            tile_near(kind, 1, 1, t, x, first + r, y + r); \
        } \
    }
KINDS(CASE)
#undef CASE

#if HAS_WIDE
INLINE WIDE __m512i group_wide(const int kind, const uint8_t *codes, const int g) {
    const __m512i low = _mm512_set1_epi8(15);
    if (BITS(kind) == 8) return _mm512_loadu_si512(codes + 64 * g);
    __m512i v = _mm512_loadu_si512(codes + 64 * (g / 2));
    v = _mm512_and_si512(g % 2 ? _mm512_srli_epi16(v, 4) : v, low);
    if (BITS(kind) == 5) {
        __m512i bit = _mm512_loadu_si512(codes + 256);
        bit = g < 4 ? _mm512_slli_epi16(bit, 4 - g) : _mm512_srli_epi16(bit, g - 4);
        v = _mm512_or_si512(v, _mm512_and_si512(bit, _mm512_set1_epi8(16)));
    }
    if (BITS(kind) == 6) {
        __m512i two = _mm512_loadu_si512(codes + 256 + 64 * (g / 4));
        two = g % 4 < 2 ? _mm512_slli_epi16(two, 4 - 2 * (g % 4)) : _mm512_srli_epi16(two, 2 * (g % 4) - 4);
        v = _mm512_or_si512(v, _mm512_and_si512(two, _mm512_set1_epi8(48)));
    }
    return v;
}

INLINE WIDE __m512 halves16(const uint8_t *at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at)); }
INLINE WIDE __m512 bytes16(const uint8_t *at) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at))); }
INLINE WIDE __m512 signed16(const uint8_t *at) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at))); }

INLINE WIDE void tile_far(const int kind, const int rows, const int ahead, Tile t, const Input *x, int64_t first, float *y) {
    const int parts = kind == Q6_K ? 2 : 1, groups = 8 / parts;
    __m512 acc[8], d = _mm512_setzero_ps(), m = _mm512_setzero_ps();
    for (int r = 0; r < rows; r++) acc[r] = _mm512_setzero_ps();
    for (int64_t b = 0; b < x->blocks; b++, t.codes += STRIDE(kind), t.scales += STRIDE(kind)) {
        if (IS_K(kind) && b % SUPER == 0) {
            d = halves16(t.shared);
            if (HAS_LEAST(kind)) m = halves16(t.shared + 32);
            t.shared += SHARED(kind);
        }
        if (ahead)
            for (int j = 0; j < (STRIDE(kind) + 63) / 64; j++) _mm_prefetch((const char *)((uintptr_t)t.codes + AHEAD + 64 * j), _MM_HINT_T0);
        for (int part = 0; part < parts; part++) {
            __m512i h[8], l[8];
            for (int r = 0; r < rows; r++) h[r] = l[r] = _mm512_setzero_si512();
#pragma GCC unroll 8
            for (int g = part * groups; g < (part + 1) * groups; g++) {
                __m512i v = group_wide(kind, t.codes, g);
                for (int r = 0; r < rows; r++) {
                    const int8_t *with = x->planes + 2 * (first + r) * x->stride + b * SPAN + 4 * g;
                    h[r] = _mm512_dpbusd_epi32(h[r], v, _mm512_set1_epi32(four(with)));
                    l[r] = _mm512_dpbusd_epi32(l[r], v, _mm512_set1_epi32(four(with + x->stride)));
                }
            }
            __m512 by = d, least = m;
            if (kind == Q6_K)
                by = _mm512_mul_ps(d, signed16(t.scales + 16 * part));
            else if (IS_K(kind)) {
                by = _mm512_mul_ps(d, bytes16(t.scales));
                least = _mm512_mul_ps(m, bytes16(t.scales + 16));
            } else {
                by = halves16(t.scales);
                if (HAS_LEAST(kind)) least = halves16(t.scales + 32);
            }
            for (int r = 0; r < rows; r++) {
                int64_t at = (first + r) * x->blocks + b;
                __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(h[r], 7), l[r]);
                if (MIDDLE(kind)) {
                    int32_t mine = parts == 2 ? x->sums[2 * at + part] : x->sums[2 * at] + x->sums[2 * at + 1];
                    sum = _mm512_sub_epi32(sum, _mm512_set1_epi32(MIDDLE(kind) * mine));
                }
                acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(by, _mm512_set1_ps(x->sizes[at])), acc[r]);
                if (HAS_LEAST(kind)) {
                    __m512 total = _mm512_set1_ps(x->totals[at]);
                    acc[r] = IS_K(kind) ? _mm512_fnmadd_ps(least, total, acc[r]) : _mm512_fmadd_ps(least, total, acc[r]);
                }
            }
        }
    }
    for (int r = 0; r < rows; r++) {
        float some[TILE];
        _mm512_storeu_ps(some, acc[r]);
        for (int o = 0; o < TILE; o++) y[o * NEAR + r] = some[o];
    }
}

#define CASE(kind) \
    static WIDE __attribute__((noinline)) void far_##kind(const uint8_t *w, int64_t tile, const Input *x, int64_t first, int64_t rows, float *y) { \
        Tile t = tile_at(kind, w, tile, x->blocks); \
        int64_t r = 0; \
        for (; r + 8 <= rows; r += 8) tile_far(kind, 8, r == 0, t, x, first + r, y + r); \
        for (; r + 4 <= rows; r += 4) tile_far(kind, 4, 1, t, x, first + r, y + r); \
        for (; r < rows; r++) tile_far(kind, 1, r == 0, t, x, first + r, y + r); \
    }
KINDS(CASE)
#undef CASE
#endif

static void unit_blocks(int kind, int wide, const uint8_t *w, int64_t tile, const Input *x, int64_t first, int64_t rows, float *y) {
    switch (kind + 64 * wide) {
#define CASE(kind) \
    case kind: near_##kind(w, tile, x, first, rows, y); break;
        KINDS(CASE)
#undef CASE
#if HAS_WIDE
#define CASE(kind) \
    case kind + 64: far_##kind(w, tile, x, first, rows, y); break;
        KINDS(CASE)
#undef CASE
#endif
    }
}
