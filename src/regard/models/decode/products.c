// Products of few rows with a large matrix: every weight is read once, by one thread, in the order it lies.
// y[r][o] = sum_i W[o][i] x[r][i] (+ y[r][o] where `add`). W is (out, in), as nn.Linear keeps it.
// Shapes, types and strides are checked by native.py before anything here is called; nothing here reads or writes beyond them.
#include <immintrin.h>
#include <math.h>
#include <omp.h>
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

#include "sharing.h"
#include "whole.h"
#include "blocks.h"

// Matrices that lie anywhere and read the same rows, their outputs side by side.
typedef struct {
    const void *const *weights;
    const float *const *biases;
    const int64_t *outs, *kinds;
    const float *const *scales; /* of BYTES: one per output */
    int64_t parts, in, total, needs; /* needs: 1 << form of Input */
} Linear;

enum { AS_FLOATS = 1, AS_ROWS = 2, AS_BLOCKS = 4 };

// Outputs that are taken at a time: threes and fours of floats and bytes, tiles of blocks, or what both divide.
INLINE int64_t unit_of(const Linear *w) { return w->needs == AS_BLOCKS ? TILE : w->needs & AS_BLOCKS ? 48 : UNIT; }

static int64_t units_of(const Linear *w) {
    int64_t unit = unit_of(w), count = 0;
    for (int64_t part = 0; part < w->parts; part++) count += (w->outs[part] + unit - 1) / unit;
    return count;
}

// Pieces small enough that nobody waits long for the last one, and large enough to read on.
static int64_t piece_of(int64_t units, int threads) {
    int64_t some = units / (16 * threads);
    return some < 1 ? 1 : some > 8 ? 8 : some;
}

static void input_sizes(int64_t rows, int64_t in, int64_t needs, int64_t *bytes) {
    int64_t stride = (in / STEP + 1) * STEP, blocks = (in + SPAN - 1) / SPAN;
    bytes[0] = needs & AS_ROWS ? rows * stride * (int64_t)sizeof(int16_t) : 0;
    bytes[1] = needs & AS_ROWS ? rows * (int64_t)sizeof(double) : 0;
    bytes[2] = needs & AS_BLOCKS ? 2 * rows * stride : 0;
    bytes[3] = bytes[4] = needs & AS_BLOCKS ? rows * blocks * (int64_t)sizeof(float) : 0;
    bytes[5] = needs & AS_BLOCKS ? 2 * rows * blocks * (int64_t)sizeof(int32_t) : 0;
    for (int i = 0; i < 6; i++) bytes[i] = (bytes[i] + 63) / 64 * 64;
}

static int64_t input_bytes(int64_t rows, int64_t in, int64_t needs) {
    int64_t bytes[6], all = 0;
    input_sizes(rows, in, needs, bytes);
    for (int i = 0; i < 6; i++) all += bytes[i];
    return all;
}

// Rows x (rows, in) in the room that `input_bytes` measured.
static Input input_in(char *room, const float *x, int64_t rows, int64_t in, int64_t needs) {
    int64_t bytes[6];
    char *at[6];
    input_sizes(rows, in, needs, bytes);
    for (int i = 0; i < 6; i++) at[i] = room, room += bytes[i];
    return (Input){x, (int16_t *)at[0], (double *)at[1], (int8_t *)at[2], (float *)at[3], (float *)at[4], (int32_t *)at[5],
                   in, (in / STEP + 1) * STEP, (in + SPAN - 1) / SPAN};
}

static void take_row(const Input *to, int64_t r, int64_t needs) {
    const float *x = to->x + r * to->in;
    if (needs & AS_ROWS) {
        int16_t *q = to->q + r * to->stride;
        memset(q + to->in, 0, (to->stride - to->in) * sizeof(int16_t));
        to->steps[r] = shrink(x, q, to->in);
        if (!(to->steps[r] > 0)) memset(q, 0, to->in * sizeof(int16_t));
    }
    if (needs & AS_BLOCKS) flatten(x, to, r);
}

// Outputs o..o + count of one part for rows first..first + some, at most NEAR: y[c * NEAR + r].
static void unit(const Linear *w, int64_t part, int64_t o, int64_t count, const Input *x, int64_t first, int64_t some, int wide,
                 float *y) {
    int64_t in = w->in, kind = w->kinds[part];
    if (kind == FLOATS)
        for (int64_t c = 0; c < count; c += UNIT)
            unit_f32((const float *)w->weights[part] + (o + c) * in, count - c < UNIT ? count - c : UNIT, x->x + first * in, some, in,
                     y + c * NEAR);
    else if (kind == BYTES)
        for (int64_t c = 0; c < count; c += UNIT) {
            int64_t whole[UNIT * NEAR], these = count - c < UNIT ? count - c : UNIT;
            const int8_t *from = (const int8_t *)w->weights[part] + (o + c) * in;
            const int16_t *q = x->q + first * x->stride;
            if (some == 1)
                for (int64_t i = 0; i < these; i++) whole[i * NEAR] = dot_i8(from + i * in, q, in);
            else
                (wide ? unit_wide : unit_i8)(from, these, q, some, x->stride, in, whole);
            for (int64_t i = 0; i < these; i++)
                for (int64_t r = 0; r < some; r++)
                    y[(c + i) * NEAR + r] =
                        (float)((double)whole[i * NEAR + r] * x->steps[first + r] * w->scales[part][o + c + i]);
        }
    else
        for (int64_t c = 0; c < count; c += TILE)
            unit_blocks(kind, wide, w->weights[part], (o + c) / TILE, x, first, some, y + c * NEAR);
    const float *bias = w->biases[part];
    if (bias)
        for (int64_t c = 0; c < count; c++)
            for (int64_t r = 0; r < some; r++) y[c * NEAR + r] += bias[o + c];
}

#define WIDEST 48 /* outputs of a unit at most */

// Units from..to of a product, for at most NEAR rows from `first` on.
static void multiply(const Linear *w, const Input *x, int64_t first, int64_t some, int64_t from, int64_t to, int add, int wide,
                     float *y) {
    int64_t size = unit_of(w);
    float results[WIDEST * NEAR];
    for (int64_t part = 0, at = 0, u = 0; part < w->parts && u < to; at += w->outs[part++]) {
        int64_t units = (w->outs[part] + size - 1) / size;
        for (int64_t i = from > u ? from - u : 0; i < units && u + i < to; i++) {
            int64_t o = i * size, count = w->outs[part] - o < size ? w->outs[part] - o : size;
            unit(w, part, o, count, x, first, some, wide, results);
            for (int64_t r = 0; r < some; r++) {
                float *here = y + (first + r) * w->total + at + o;
                if (add)
                    for (int64_t c = 0; c < count; c++) here[c] += results[c * NEAR + r];
                else
                    for (int64_t c = 0; c < count; c++) here[c] = results[c * NEAR + r];
            }
        }
        u += units;
    }
}

typedef struct {
    const Linear *w;
    Input x;
    Crew crew;
    float *y;
    int64_t rows, units, some, pieces;
    int add, wide;
} Product;

static void share_product(Product *p) {
    int64_t at, stop, rounds = (p->rows + NEAR - 1) / NEAR;
    Crew *c = &p->crew;
    while ((at = next_of(c, 0, 1)) < p->rows) {
        take_row(&p->x, at, p->w->needs);
        if (is_last(c, 0, 1, p->rows)) end_of(c, 0);
    }
    wait_for(c, 0);
    // Rows that stay near while all weights pass by, and then the next.
    while ((at = next_of(c, 1, 1)) < p->pieces * rounds) {
        int64_t first = at / p->pieces * NEAR, from = at % p->pieces * p->some;
        stop = from + p->some < p->units ? from + p->some : p->units;
        multiply(p->w, &p->x, first, p->rows - first < NEAR ? p->rows - first : NEAR, from, stop, p->add, p->wide, p->y);
        if (is_last(c, 1, 1, p->pieces * rounds)) end_of(c, 1);
    }
    wait_for(c, 1);
}

// x (rows, in) with some matrices: y (rows, total), added to where `add`. 0, or 1: no memory.
int product(const float *x, const Linear *w, float *y, int64_t rows, int add, int threads) {
    if (w->in > INT64_MAX / 64 / rows || w->total < 1) return w->total > 0;
    Stage stages[2] = {0};
    Product p = {w, {0}, {stages, 0, 0, 0}, y, rows, units_of(w), 0, 0, add, is_wide()};
    char *room = aligned_alloc(64, input_bytes(rows, w->in, w->needs) + 64);
    if (!room) return 1;
    p.x = input_in(room, x, rows, w->in, w->needs);
    threads = crew_size(threads);
    p.some = piece_of(p.units, threads);
    p.pieces = (p.units + p.some - 1) / p.some;
    int64_t since = nanoseconds();
    if (threads == 1)
        share_product(&p);
    else {
#pragma omp parallel num_threads(threads)
        share_product(&p);
    }
    learn_crowding(atomic_load(&p.crew.slept), nanoseconds() - since, threads);
    free(room);
    return 0;
}

#define CHUNK 1048576

typedef struct {
    const char *data;
    int64_t bytes, chunks;
    _Atomic uint64_t sum;
    Crew crew;
} Sum;

static uint64_t chunk_sum(const char *p, int64_t size, int64_t number) {
    const uint64_t odd = 0x9E3779B97F4A7C15u;
    __m256i once[4], twice[4];
    for (int j = 0; j < 4; j++) once[j] = twice[j] = _mm256_setzero_si256();
    char last[128];
    for (int64_t i = 0; i < size; i += 128) {
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
    uint64_t mixed = (uint64_t)(number + 1), words[32];
    for (int j = 0; j < 4; j++) {
        _mm256_storeu_si256((__m256i *)(words + 8 * j), once[j]);
        _mm256_storeu_si256((__m256i *)(words + 8 * j + 4), twice[j]);
    }
    for (int j = 0; j < 32; j++) {
        mixed = (mixed ^ words[j]) * odd;
        mixed ^= mixed >> 29;
    }
    return mixed;
}

static void share_sum(Sum *s) {
    int64_t at;
    while ((at = next_of(&s->crew, 0, 1)) < s->chunks) {
        int64_t start = at * CHUNK, size = s->bytes - start < CHUNK ? s->bytes - start : CHUNK;
        atomic_fetch_add(&s->sum, chunk_sum(s->data + start, size, at));
        if (is_last(&s->crew, 0, 1, s->chunks)) end_of(&s->crew, 0);
    }
    wait_for(&s->crew, 0);
}

// A sum over all bytes that knows their order: sums of 64-bit words and sums of those sums, in 16 lanes, chunk by chunk.
uint64_t checksum(const char *data, int64_t bytes, int threads) {
    Stage stage = {0};
    Sum s = {data, bytes, (bytes + CHUNK - 1) / CHUNK, (uint64_t)bytes, {&stage, 0, 0, 0}};
    if (s.chunks == 0) return s.sum;
    threads = crew_size(s.chunks > 1 ? threads : 1);
    int64_t since = nanoseconds();
    if (threads == 1)
        share_sum(&s);
    else {
#pragma omp parallel num_threads(threads)
        share_sum(&s);
    }
    learn_crowding(atomic_load(&s.crew.slept), nanoseconds() - since, threads);
    return s.sum;
}

// y = x / rms(x) * weight, for one row.
static void rms_row(const float *x, const float *weight, double eps, float *y, int64_t in) {
    double squares = 0;
    __m256d four = _mm256_setzero_pd();
    int64_t i = 0;
    for (; i + 4 <= in; i += 4) {
        __m256d some = _mm256_cvtps_pd(_mm_loadu_ps(x + i));
        four = _mm256_fmadd_pd(some, some, four);
    }
    for (; i < in; i++) squares += (double)x[i] * x[i];
    squares += four[0] + four[1] + four[2] + four[3];
    double c = 1.0 / sqrt(squares / in + eps);
    for (i = 0; i < in; i++) y[i] = (float)(x[i] * c * weight[i]);
}

// y = (x - mean) / sqrt(variance + eps) * weight + shift, for one row; without a shift, it is 0.
static void layer_row(const float *x, const float *weight, const float *shift, double eps, float *y, int64_t in) {
    __m256d four = _mm256_setzero_pd();
    double mean = 0, squares = 0;
    int64_t i = 0;
    for (; i + 4 <= in; i += 4) four = _mm256_add_pd(four, _mm256_cvtps_pd(_mm_loadu_ps(x + i)));
    for (; i < in; i++) mean += x[i];
    mean = (mean + four[0] + four[1] + four[2] + four[3]) / in;
    four = _mm256_setzero_pd();
    for (i = 0; i + 4 <= in; i += 4) {
        __m256d some = _mm256_sub_pd(_mm256_cvtps_pd(_mm_loadu_ps(x + i)), _mm256_set1_pd(mean));
        four = _mm256_fmadd_pd(some, some, four);
    }
    for (; i < in; i++) squares += (x[i] - mean) * (x[i] - mean);
    double c = 1.0 / sqrt((squares + four[0] + four[1] + four[2] + four[3]) / in + eps);
    for (i = 0; i < in; i++) y[i] = (float)((x[i] - mean) * c * weight[i] + (shift ? shift[i] : 0.0f));
}

void rms(const float *x, const float *weight, double eps, float *y, int64_t rows, int64_t in) {
    for (int64_t r = 0; r < rows; r++) rms_row(x + r * in, weight, eps, y + r * in, in);
}

void layer_norm(const float *x, const float *weight, const float *shift, double eps, float *y, int64_t rows, int64_t in) {
    for (int64_t r = 0; r < rows; r++) layer_row(x + r * in, weight, shift, eps, y + r * in, in);
}

#include "bytes.h"
#include "meeting.h"
#include "step.h"
