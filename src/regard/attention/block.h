// A block of query rows against their keys: part of rows.c, read once for each width of vectors.
//
// Rows lie in lanes: scores are [key][row], so that keys are read as they lie, a row's largest score is a vertical maximum, and
// each pair is one chain of products from its first number to its last, wherever its key lies: equal keys have equal bits.
#include "lanes.h"

#if LANES == 16
#define KEYS 12 /* keys of a tile of scores: with two vectors of rows as many sums as fit the registers */
#define COLUMNS 4 /* vectors of values that a row adds up at a time */
#else
#define KEYS 6
#define COLUMNS 3
#endif
#define MAX_VECTORS 2

// st[j][row] = sum_w qt[w][row] k[j][w] + bias[j], for `count` keys.
INLINE void NAME(score_tile)(const int count, const int vectors, const float *qt, const float *k, int64_t W, int64_t apart,
                             const float *bias, float *st) {
    V sums[KEYS][MAX_VECTORS];
#pragma GCC unroll 12
    for (int j = 0; j < count; j++)
#pragma GCC unroll 2
        for (int n = 0; n < vectors; n++) sums[j][n] = set1(0);
    for (int64_t w = 0; w < W; w++) {
        V q[MAX_VECTORS];
#pragma GCC unroll 2
        for (int n = 0; n < vectors; n++) q[n] = load(qt + (w * vectors + n) * LANES);
#pragma GCC unroll 12
        for (int j = 0; j < count; j++) {
            V x = set1(k[j * apart + w]);
#pragma GCC unroll 2
            for (int n = 0; n < vectors; n++) sums[j][n] = fma(q[n], x, sums[j][n]);
        }
    }
#pragma GCC unroll 12
    for (int j = 0; j < count; j++)
#pragma GCC unroll 2
        for (int n = 0; n < vectors; n++)
            store(st + (j * vectors + n) * LANES, bias ? add(sums[j][n], set1(bias[j])) : sums[j][n]);
}

INLINE void NAME(score_all)(const int vectors, const float *qt, const float *k, int64_t W, int64_t apart, const float *bias,
                            int64_t count, float *st) {
    int64_t j = 0;
#define TILES(n) \
    for (; j + n <= count; j += n) \
        NAME(score_tile)(n, vectors, qt, k + j * apart, W, apart, bias ? bias + j : 0, st + j * vectors * LANES);
    TILES(KEYS) TILES(3) TILES(1)
#undef TILES
}

// y[row] (+)= sum_j p[j][row] v[j], for four rows and some columns.
INLINE void NAME(blend_tile)(const int columns, const float *p, int64_t rows, const float *v, int64_t apart, M last, int64_t count,
                             const float *by, float *const *y) {
    V sums[4][COLUMNS];
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) sums[r][c] = set1(0);
    for (int64_t j = 0; j < count; j++) {
        V u[COLUMNS];
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++)
            u[c] = c + 1 < columns ? load(v + j * apart + c * LANES) : load_part(last, v + j * apart + c * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            V x = set1(p[j * rows + r]);
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) sums[r][c] = fma(x, u[c], sums[r][c]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++)
        if (y[r])
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) {
                V out = mul(sums[r][c], set1(by[r]));
                if (c + 1 < columns)
                    store(y[r] + c * LANES, out);
                else
                    store_part(y[r] + c * LANES, last, out);
            }
}

// y = sum_i p[i] v[at[i]]; places at `keys` and after are slots.
INLINE void NAME(gather_tile)(const int columns, const float *p, const int32_t *at, int64_t count, const float *v, int64_t apart,
                              int64_t keys, const float *slots, int64_t E, M last, float *y) {
    V sums[COLUMNS];
#pragma GCC unroll 4
    for (int c = 0; c < columns; c++) sums[c] = set1(0);
    for (int64_t i = 0; i < count; i++) {
        const float *from = at[i] < keys ? v + at[i] * apart : slots ? slots + (at[i] - keys) * E : 0;
        if (!from) continue;
        V x = set1(p[i]);
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++)
            sums[c] = fma(x, c + 1 < columns ? load(from + c * LANES) : load_part(last, from + c * LANES), sums[c]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < columns; c++) {
        if (c + 1 < columns)
            store(y + c * LANES, sums[c]);
        else
            store_part(y + c * LANES, last, sums[c]);
    }
}

// Columns in groups of COLUMNS vectors; the last vector of a group is read through a mask.
#define OVER_COLUMNS(E, CALL) \
    for (int64_t d = 0; d < (E); d += COLUMNS * LANES) { \
        int64_t wide = (E) - d < COLUMNS * LANES ? (E) - d : COLUMNS * LANES; \
        M last = first_lanes((wide - 1) % LANES + 1); \
        switch ((wide + LANES - 1) / LANES) { \
            case 1: CALL(1); break; \
            case 2: CALL(2); break; \
            case 3: CALL(3); break; \
            OVER_COLUMNS_FOURTH(CALL) \
        } \
    }
#if LANES == 16
#define OVER_COLUMNS_FOURTH(CALL) case 4: CALL(4); break;
#else
#define OVER_COLUMNS_FOURTH(CALL)
#endif

static void NAME(gather)(const float *p, const int32_t *at, int64_t count, const float *v, int64_t apart, int64_t E,
                         int64_t keys, const float *slots, float *y) {
#define CALL(n) NAME(gather_tile)(n, p, at, count, v + d, apart, keys, slots ? slots + d : 0, E, last, y + d)
    OVER_COLUMNS(E, CALL)
#undef CALL
}

static void NAME(blend)(const float *p, int64_t rows, const float *v, int64_t apart, int64_t E, int64_t count, const float *by,
                        float *const *y) {
#define CALL(n) NAME(blend_tile)(n, p, rows, v + d, apart, last, count, by, there)
    float *there[4];
#define OFFSET for (int r = 0; r < 4; r++) there[r] = y[r] ? y[r] + d : 0;
    for (int64_t d = 0; d < E; d += COLUMNS * LANES) {
        int64_t wide = E - d < COLUMNS * LANES ? E - d : COLUMNS * LANES;
        M last = first_lanes((wide - 1) % LANES + 1);
        OFFSET
        switch ((wide + LANES - 1) / LANES) {
            case 1: CALL(1); break;
            case 2: CALL(2); break;
            case 3: CALL(3); break;
            OVER_COLUMNS_FOURTH(CALL)
        }
    }
#undef OFFSET
#undef CALL
}

static int NAME(finite)(const float *x, int64_t count) {
    // x - x is 0 for what is finite, and NaN for everything else.
    V some = set1(0);
    for (int64_t i = 0; i < count; i += LANES) {
        V u = load_part(first_lanes(count - i), x + i);
        some = add(some, sub(u, u));
    }
    return total(some) == 0;
}

// How far the norm of [x - tau]+ is above 1, and how fast it falls with tau, for exponents 1, 2 and any other.
INLINE void NAME(norm_and_slope)(const int kind, const float *x, int64_t count, float tau, float e, float *norm, float *slope) {
    V a = set1(0), b = set1(0), t = set1(tau), zero = set1(0);
    for (int64_t i = 0; i < count; i += LANES) {
        M there = first_lanes(count - i);
        V u = keep(there, largest(sub(load_part(there, x + i), t), zero));
        if (kind == 1) {
            a = add(a, u);
            b = add(b, keep(above(u, zero), set1(1.0f)));
        } else if (kind == 2) {
            a = fma(u, u, a);
            b = add(b, u);
        } else {
            V p = NAME(power)(u, set1(e));
            a = add(a, p);
            b = add(b, divide(p, largest(u, set1(1e-30f))));
        }
    }
    float sum = total(a), other = total(b);
    if (kind == 1)
        *norm = sum, *slope = other;
    else if (kind == 2)
        *norm = sqrtf(sum), *slope = other / *norm;
    else
        *norm = powf(sum, 1 / e), *slope = other * *norm / sum;
}

INLINE float NAME(threshold_of)(const int kind, const float *x, int64_t count, float e) {
    float tau = -1, low = -1, high = 0, norm, slope;
    for (int n = 0; n < 100; n++) {
        NAME(norm_and_slope)(kind, x, count, tau, e, &norm, &slope);
        float over = norm - 1, step = over / slope;
        if (kind || e >= 1) {
            tau += step;
            if (over <= 1e-6f) break;
        } else {
            // The norm is not convex, so every other step halves the bracket.
            if (over > 0)
                low = tau;
            else
                high = tau;
            if (fabsf(over) <= 1e-6f || high - low <= 1e-7f) break;
            tau += step;
            if (!(tau > low && tau < high && n % 2 == 0)) tau = (low + high) / 2;
        }
    }
    return tau;
}

// x (scores above the largest, times alpha - 1) become weights that sum to 1; zeros are taken out. Gives how many are left.
static int64_t NAME(sparse_weights)(float *x, int32_t *at, int64_t count, float excess) {
    float e = 1 / excess;
    int kind = e == 1 ? 1 : e == 2 ? 2 : 0;
    float t = kind == 1   ? NAME(threshold_of)(1, x, count, e)
              : kind == 2 ? NAME(threshold_of)(2, x, count, e)
                          : NAME(threshold_of)(0, x, count, e);
    V sum = set1(0), zero = set1(0);
    int64_t left = 0;
    for (int64_t i = 0; i < count; i++) {
        x[left] = x[i] - t;
        at[left] = at[i];
        left += x[i] - t > 0;
    }
    for (int64_t i = 0; i < left; i += LANES) {
        M there = first_lanes(left - i);
        V u = largest(load_part(there, x + i), zero);
        u = kind == 1 ? u : kind == 2 ? mul(u, u) : NAME(power)(u, set1(e));
        store_part(x + i, there, u);
        sum = add(sum, u);
    }
    float share = total(sum);
    for (int64_t i = 0; i < left; i += LANES) {
        M there = first_lanes(left - i);
        store_part(x + i, there, divide(load_part(there, x + i), set1(share)));
    }
    return left;
}

// The k largest of a list, leftmost first among equals, as softmax weights. Gives how many there are.
static int64_t NAME(largest_weights)(float *s, int32_t *at, int64_t count, int64_t k, float top) {
    if (count > k) {
        int64_t ties = 0, left = 0;
        float last = kth_largest(s, count, k);
        for (int64_t i = 0; i < count; i++) ties += s[i] > last;
        ties = k - ties;
        for (int64_t i = 0; i < count; i++)
            if (s[i] > last || (s[i] == last && ties-- > 0)) {
                s[left] = s[i];
                at[left++] = at[i];
            }
        count = left;
    }
    V sum = set1(0);
    for (int64_t i = 0; i < count; i += LANES) {
        M there = first_lanes(count - i);
        V p = keep(there, NAME(exponential)(sub(load_part(there, s + i), set1(top))));
        store_part(s + i, there, p);
        sum = add(sum, p);
    }
    float share = total(sum);
    for (int64_t i = 0; i < count; i += LANES) {
        M there = first_lanes(count - i);
        store_part(s + i, there, divide(load_part(there, s + i), set1(share)));
    }
    return count;
}

// For each row a score that at least k of its columns reach: the k-th largest among the largest of groups of columns.
static void NAME(lower_bound)(const float *st, int64_t columns, int vectors, int64_t k, float *room, float *bound) {
    int64_t rows = vectors * LANES, size = columns / (4 * k);
    for (int n = 0; n < vectors; n++) {
        V low = set1(-INFINITY);
        for (int64_t i = 0; i < k; i++) store(room + i * LANES, low);
        for (int64_t start = 0; start < columns; start += size) {
            V x = low;
            int64_t stop = start + size < columns ? start + size : columns;
            for (int64_t j = start; j < stop; j++) x = largest(x, load(st + j * rows + n * LANES));
            for (int64_t i = 0; i < k; i++) {
                V t = load(room + i * LANES);
                store(room + i * LANES, largest(t, x));
                x = smallest(t, x);
            }
        }
        store(bound + n * LANES, load(room + (k - 1) * LANES));
    }
}

// Lists of what is above (or at) each row's bound: its number (shifted and scaled) and its column.
INLINE void NAME(list)(const int vectors, const int reaching, const float *st, int64_t columns, const float *shift,
                       const float *scale, const float *bound, float *values, int32_t *places, int64_t *counts) {
    int64_t rows = vectors * LANES;
    V by[MAX_VECTORS], less[MAX_VECTORS], low[MAX_VECTORS];
    for (int n = 0; n < vectors; n++) {
        by[n] = load(scale + n * LANES);
        less[n] = load(shift + n * LANES);
        low[n] = load(bound + n * LANES);
    }
    for (int64_t j = 0; j < columns; j++)
#pragma GCC unroll 2
        for (int n = 0; n < vectors; n++) {
            V x = mul(sub(load(st + j * rows + n * LANES), less[n]), by[n]);
            unsigned there = bits(reaching ? at_least(x, low[n]) : above(x, low[n]));
            if (!there) continue;
            float some[LANES];
            store(some, x);
            do {
                int lane = __builtin_ctz(there), r = n * LANES + lane;
                values[r * columns + counts[r]] = some[lane];
                places[r * columns + counts[r]++] = (int32_t)j;
                there &= there - 1;
            } while (there);
        }
}

// Less the slope of its head for each step between a row's query and a key: st[j][r] -= slope[r] |place[r] - j|.
static void NAME(lean)(const Call *c, const Rows *at, int vectors, int64_t n, float *st) {
    float slope[MAX_LANES] = {0}, place[MAX_LANES] = {0};
    for (int64_t r = 0; r < at->count; r++) {
        slope[r] = -c->slope[at->head[r]];
        place[r] = (float)(c->offset + at->query[r] - at->lo);
    }
    for (int64_t j = 0; j < n; j++)
        for (int m = 0; m < vectors; m++) {
            float *to = st + (j * vectors + m) * LANES;
            V apart = sub(load(place + m * LANES), set1((float)j));
            store(to, fma(load(slope + m * LANES), largest(apart, sub(set1(0), apart)), load(to)));
        }
}

// Scores of a block and, of the selections that list, what each row lists. Gives 0 where its rows meet no key, or memory is out.
static int NAME(prepare)(const Call *c, int64_t group, int64_t number, Block *b) {
    const int vectors = c->vectors;
    const int64_t rows = b->rows = (int64_t)vectors * LANES, W = c->W;
    Rows *at = &b->at;
    if (!find_rows(c, group, number, rows, at)) return 0;
    const int64_t n = b->n = at->hi - at->lo, columns = b->columns = n + c->slots;
    const int lists = c->kind == ENTMAX || c->kind == TOPK;
    float *qt = room_for((W + columns * (lists ? 3 : 1) + 64) * rows * (int64_t)sizeof(float));
    if (!qt) {
        atomic_fetch_or(&((Call *)c)->found, NO_MEMORY);
        return 0;
    }
    float *st = b->st = qt + W * rows, *spare = st + columns * rows, *values = b->values = spare + 64 * rows;
    int32_t *places = b->places = (int32_t *)(values + columns * rows);
    for (int64_t r = 0; r < rows; r++) {
        const float *q = r < at->count ? query_of(c, at, r) : 0;
        for (int64_t w = 0; w < W; w++) qt[w * rows + r] = q ? q[w] * c->scale : 0;
    }
    const float *k = b->k = c->k + at->batch * c->k_batch + at->key_head * c->k_head + at->lo * c->k_row;
    b->v = c->v + at->batch * c->v_batch + at->key_head * c->v_head + at->lo * c->v_row;
    const float *shared = c->bias_shared ? c->bias + bias_row(c, at, 0) + at->lo : 0;
    if (vectors == 2)
        NAME(score_all)(2, qt, k, W, c->k_row, shared, n, st);
    else
        NAME(score_all)(1, qt, k, W, c->k_row, shared, n, st);
    for (int64_t r = 0; c->bias && !shared && r < at->count; r++) {
        const float *bias = c->bias + bias_row(c, at, r) + at->lo;
        for (int64_t j = 0; j < n; j++) st[j * rows + r] += bias[j];
    }
    if (c->slope) NAME(lean)(c, at, vectors, n, st);
    hide(c, at, rows, st);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t s = 0; s < c->slots; s++)
            st[(n + s) * rows + r] = r < at->count ? c->slot_score[at->row[r] * c->slots + s] : -INFINITY;
    for (int m = 0; m < vectors; m++) {
        V most = set1(-INFINITY), where = set1(0), real = most;
        M odd = none();
        const int right = c->tie_right, picks = c->kind == PICK;
        for (int64_t j = 0; j < columns; j++) {
            if (j == n) real = most;
            V x = load(st + j * rows + m * LANES);
            odd = either(odd, no_number(x));
            if (picks) where = pick(right ? at_least(x, most) : above(x, most), set1((float)j), where);
            most = largest(x, most);
        }
        if (!c->slots) real = most;
        V bad = set1(NAN);
        store(b->top + m * LANES, pick(odd, bad, real));
        store(b->best + m * LANES, pick(odd, bad, most));
        store(b->which + m * LANES, where);
    }
    float *shift = b->shift, *scale = b->scale, bound[MAX_LANES];
    for (int64_t r = 0; r < rows; r++) {
        at->state[r] = r >= at->count || !at->some[r] ? NOTHING : fabsf(b->best[r]) <= FLT_MAX ? FINE : ODD;
        // Rows that are not to be read find nothing above this.
        shift[r] = at->state[r] == FINE ? b->best[r] : INFINITY;
        scale[r] = c->alpha && r < at->count ? c->alpha[at->head[r]] - 1 : (float)c->excess;
        bound[r] = -1;
        b->counts[r] = 0;
    }
    if (c->kind == TOPK) {
        for (int64_t r = 0; r < rows; r++) bound[r] = -FLT_MAX;
        if (c->k_kept <= 64 && columns >= 8 * c->k_kept) NAME(lower_bound)(st, columns, vectors, c->k_kept, spare, bound);
        for (int64_t r = 0; r < rows; r++) {
            shift[r] = 0, scale[r] = 1;
            bound[r] = at->state[r] != FINE ? INFINITY : bound[r] > -FLT_MAX ? bound[r] : -FLT_MAX;
        }
    }
    const int reaching = c->kind == TOPK;
    if (lists && vectors == 2)
        NAME(list)(2, reaching, st, columns, shift, scale, bound, values, places, b->counts);
    else if (lists)
        NAME(list)(1, reaching, st, columns, shift, scale, bound, values, places, b->counts);
    return 1;
}

// The weights of a row that lists, and where they are. Gives how many.
INLINE int64_t NAME(weights)(const Call *c, Block *b, int64_t r, float **p, int32_t **places) {
    *p = b->values + r * b->columns, *places = b->places + r * b->columns;
    if (c->kind == ENTMAX) return NAME(sparse_weights)(*p, *places, b->counts[r], b->scale[r]);
    return NAME(largest_weights)(*p, *places, b->counts[r], c->k_kept, b->best[r]);
}

static void NAME(soft_rows)(const Call *c, Block *b) {
    const int64_t rows = b->rows, E = c->E;
    Rows *at = &b->at;
    float sums[MAX_LANES];
    for (int m = 0; m < c->vectors; m++) {
        V sum = set1(0), most = load(b->shift + m * LANES);
        for (int64_t j = 0; j < b->columns; j++) {
            float *x = b->st + j * rows + m * LANES;
            V p = NAME(exponential)(sub(load(x), most));
            store(x, p);
            sum = add(sum, p);
        }
        store(sums + m * LANES, sum);
    }
    for (int64_t r = 0; r < at->count; r += 4) {
        float by[4], *y[4];
        for (int i = 0; i < 4; i++) {
            int there = r + i < at->count && at->state[r + i] == FINE;
            by[i] = there ? 1 / sums[r + i] : 0;
            y[i] = there ? c->out + at->row[r + i] * E : 0;
        }
        NAME(blend)(b->st + r, rows, b->v, c->v_row, E, b->n, by, y);
        for (int i = 0; i < 4 && c->slot_value; i++)
            for (int64_t s = 0; s < c->slots && y[i]; s++) {
                const float *value = slot_of(c, at, r + i) + s * E;
                for (int64_t e = 0; e < E; e++) y[i][e] += b->st[(b->n + s) * rows + r + i] * by[i] * value[e];
            }
    }
}

static void NAME(forward)(const Call *c, int64_t item) {
    Block b;
    // The last rows meet the most keys under causality, and are begun first.
    if (!NAME(prepare)(c, item % (c->B * c->G), c->blocks - 1 - item / (c->B * c->G), &b)) return;
    const int64_t E = c->E, n = b.n;
    Rows *at = &b.at;
    int odd = 0;
    if (c->kind == SOFTMAX) NAME(soft_rows)(c, &b);
    for (int64_t r = 0; r < at->count; r++) {
        float *y = c->out + at->row[r] * E, *p;
        int32_t *places;
        if (c->top) c->top[at->row[r]] = at->some[r] ? b.top[r] : 0;
        if (c->best) c->best[at->row[r]] = at->some[r] ? b.best[r] : 0;
        if (at->state[r] != FINE) {
            odd |= at->state[r] == ODD;
            for (int64_t e = 0; e < E; e++) y[e] = at->state[r] == ODD ? NAN : 0;
            continue;
        }
        const float *slots = c->slot_value ? slot_of(c, at, r) : 0;
        if (c->kind == PICK) {
            int64_t j = (int64_t)b.which[r];
            const float *from = j < n ? b.v + j * c->v_row : slots ? slots + (j - n) * E : 0;
            if (from)
                memcpy(y, from, E * sizeof(float));
            else
                memset(y, 0, E * sizeof(float));
        } else if (c->kind != SOFTMAX) {
            int64_t count = NAME(weights)(c, &b, r, &p, &places);
            NAME(gather)(p, places, count, b.v, c->v_row, E, n, slots, y);
        }
        odd |= !NAME(finite)(y, E);
    }
    if (odd) atomic_fetch_or(&((Call *)c)->found, NOT_FINITE);
}

INLINE float NAME(dot)(const float *a, const float *b, int64_t count) {
    V sum = set1(0);
    for (int64_t i = 0; i < count; i += LANES) {
        M there = first_lanes(count - i);
        sum = fma(load_part(there, a + i), load_part(there, b + i), sum);
    }
    return total(sum);
}

// y += a x
INLINE void NAME(increase)(float *y, float a, const float *x, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) {
        M there = first_lanes(count - i);
        store_part(y + i, there, fma(set1(a), load_part(there, x + i), load_part(there, y + i)));
    }
}

// One row: its weights p with Jacobian diag(w) - w w^T / sum w, and all that they were made of. `some` has room for 2 * count.
static void NAME(row_backward)(const Call *c, Block *b, int64_t r, int64_t split, float *some) {
    const Rows *at = &b->at;
    const int64_t E = c->E, W = c->W, n = b->n, heads = c->B * c->H, groups = c->B * c->G;
    const int64_t head = at->batch * c->H + at->head[r], biased = c->bias_shared ? at->group : head;
    const float *grad = c->grad + at->row[r] * E, *q = query_of(c, at, r), *slots = c->slot_value ? slot_of(c, at, r) : 0;
    float *p, *d = some, *w = some + b->columns, alpha = b->scale[r] + 1;
    int32_t *places;
    int64_t count = NAME(weights)(c, b, r, &p, &places);
    float *dk = c->dk + ((split * groups + at->group) * c->K + at->lo) * W, *dv = c->dv + ((split * groups + at->group) * c->K + at->lo) * E;
    float *d_slot = c->d_slot_value ? c->d_slot_value + (split * heads + head) * c->slots * E : 0;
    float *d_bias = c->d_bias ? c->d_bias + (split * (c->bias_shared ? groups : heads) + biased) * c->K + at->lo : 0;
    for (int64_t i = 0; i < count; i += LANES) {
        M there = first_lanes(count - i);
        V x = load_part(there, p + i);
        x = c->kind == TOPK ? x : alpha == 2 ? keep(above(x, set1(0)), set1(1)) : alpha == 1.5f ? root(x) : NAME(power)(x, set1(2 - alpha));
        store_part(w + i, there, x);
    }
    int64_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        const float *from = places[i] < n ? b->v + places[i] * c->v_row : slots ? slots + (places[i] - n) * E : 0;
        d[i] = from ? NAME(dot)(grad, from, E) : 0;
        if (w[i] > w[most]) most = i;
    }
    // Above alpha = 2 one w can outweigh all others, and its own d is nearly the mean: measured from there, nothing is lost.
    float all = 0, mean = 0, origin = d[most];
    for (int64_t i = 0; i < count; i++) {
        d[i] -= origin;
        all += w[i];
        mean += w[i] * d[i];
    }
    mean /= all;
    if (c->d_alpha) {
        float logs = 0, sum = 0;
        for (int64_t i = 0; i < count; i++) logs += p[i] > 0 ? p[i] * logf(p[i]) : 0;
        for (int64_t i = 0; i < count; i++) {
            float share = w[i] / all, entropy = p[i] > 0 ? p[i] * logf(p[i]) : 0;
            sum += d[i] * ((p[i] - share) / ((alpha - 1) * (alpha - 1)) - (entropy - share * logs) / (alpha - 1));
        }
        c->d_alpha[at->row[r]] = sum;
    }
    for (int64_t i = 0; i < count; i++) {
        int64_t j = places[i];
        d[i] = w[i] * (d[i] - mean);
        if (j < n) {
            NAME(increase)(dv + j * E, p[i], grad, E);
            NAME(increase)(dk + j * W, d[i] * c->scale, q, W);
            if (d_bias) d_bias[j] += d[i];
        } else {
            if (c->d_slot_score) c->d_slot_score[at->row[r] * c->slots + j - n] = d[i];
            if (d_slot) NAME(increase)(d_slot + (j - n) * E, p[i], grad, E);
        }
        d[i] *= c->scale;
    }
    NAME(gather)(d, places, count, b->k, c->k_row, W, n, 0, c->dq + at->row[r] * W);
}

// All rows of one group's share: a group's keys are one thread's alone, in one order, whatever the number of threads.
static void NAME(backward)(const Call *c, int64_t item) {
    int64_t groups = c->B * c->G, group = item % groups, split = item / groups;
    for (int64_t number = c->blocks * split / c->splits; number < c->blocks * (split + 1) / c->splits; number++) {
        Block b;
        if (!NAME(prepare)(c, group, number, &b)) continue;
        for (int64_t r = 0; r < b.at.count; r++)
            // Scores are no longer read, and there are as many of them as there is to hold.
            if (b.at.state[r] == FINE)
                NAME(row_backward)(c, &b, r, split, b.st);
            else
                for (int64_t w = 0; b.at.state[r] == ODD && w < c->W; w++) c->dq[b.at.row[r] * c->W + w] = NAN;
    }
}

#include "unlanes.h"
