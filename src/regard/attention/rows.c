// Selections that are no softmax, and softmax itself, in one pass over blocks of query rows: scores, weights and what they read.
//
// A block's scores stay in the cache of the core that made them. What can have a weight is then listed row by row, and threshold
// and values are a matter of these short lists. Sizes, types and strides are checked by native.py before anything here is called;
// nothing here reads or writes beyond them.
#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static void leave_room(void);
#include "../crew.h"

#define MAX_LANES 32
#define WIDE_ROWS 8192 /* keys up to which a block has two vectors of rows */
#define KEEP (16 << 20) /* bytes that a thread holds between calls */
#define SMALL (1 << 19) /* products that one thread has done before another has woken */

enum { SOFTMAX, ENTMAX, TOPK, PICK };
enum { FINE, NOTHING, ODD };
enum { NOT_FINITE = 1, NO_MEMORY = 2 };

// As native.py fills it: q (B, H, Q, W), k (B, G, K, W), v (B, G, K, E) of float32 with adjacent numbers in a row and any distance
// from row to row, head to head and batch row to batch row; everything else lies as its shape says.
typedef struct {
    const float *q, *k, *v;
    float *out;
    const float *bias;       /* (B or 1, bias_heads, K), or NULL */
    const float *alpha;      /* (H): entmax's, one per head; NULL: excess + 1 for all */
    const float *slot_score; /* (B, H, Q, slots) */
    const float *slot_value; /* (B, H, slots, E); NULL: all zero */
    const uint8_t *mask;     /* of rows from `start` on and keys from `mask_first` on; NULL: none */
    const int64_t *ids;      /* (B or 1, K): only equal ones meet; NULL: all */
    const int64_t *first, *last; /* (B): keys from first to before last; NULL: all */
    float *top, *best;           /* (B, H, Q): the largest score among keys, and with slots; or NULL */
    const float *slope;          /* (H): what a score loses for each step between its query and its key; NULL: nothing */
    int64_t B, H, G, Q, K, W, E, slots, k_kept;
    int64_t q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row;
    int64_t start, stop;      /* query rows to do */
    int64_t offset;           /* query i stands at offset + i */
    int64_t back, ahead;      /* and meets keys from so many before to so many after; -1: all */
    int64_t low, high;        /* keys from low to before high alone, whoever asks */
    int64_t bias_heads, bias_batch; /* elements from one batch row's bias to the next; 0: shared */
    int64_t mask_batch, mask_head, mask_row, mask_key, mask_first, ids_batch;
    // Of backward: the output's gradient, and where those of the inputs go, all zeros at the call. (splits, ...) are summed after.
    const float *grad;                   /* (B, H, Q, E) */
    float *dq, *dk, *dv;                 /* (B, H, Q, W), (splits, B, G, K, W), (splits, B, G, K, E) */
    float *d_bias, *d_alpha;             /* (splits, B, G where the bias is a group's, else H, K), (B, H, Q); or NULL */
    float *d_slot_score, *d_slot_value;  /* (B, H, Q, slots), (splits, B, H, slots, E); or NULL */
    int64_t splits;
    double scale_by, excess;
    int64_t kind, tie_right, threads;
    // Filled here.
    int64_t blocks, checks, checked_keys;
    float scale;
    int vectors, bias_shared;
    atomic_int found;
} Call;

typedef struct {
    int64_t group, batch, key_head, count, lo, hi;
    int64_t row[MAX_LANES], head[MAX_LANES], query[MAX_LANES], from[MAX_LANES], to[MAX_LANES];
    int some[MAX_LANES], state[MAX_LANES];
} Rows;

// A block of rows and the keys they meet: what `prepare` leaves.
typedef struct {
    Rows at;
    const float *k, *v; /* from the first key met */
    float *st, *values;
    int32_t *places;
    int64_t rows, n, columns, counts[MAX_LANES];
    float top[MAX_LANES], best[MAX_LANES], which[MAX_LANES], shift[MAX_LANES], scale[MAX_LANES];
} Block;

static int wide = -1;

// 1: vectors of 16 where the processor has them; 0: of 8. Gives what will be used.
int rows_use_wide(int asked) {
    __builtin_cpu_init();
    int there = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq");
    return wide = asked && there;
}

// A thread's scratch memory; it stays for the next call unless it is large, and goes with its thread.
typedef struct {
    int64_t size;
    char pad[56];
} Scratch;

static pthread_key_t scratch;
static int has_scratch;
static void have_scratch(void) { has_scratch = !pthread_key_create(&scratch, free); }

static void *room_for(int64_t bytes) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, have_scratch);
    if (!has_scratch) return 0;
    Scratch *mine = pthread_getspecific(scratch);
    if (!mine || mine->size < bytes) {
        int64_t size = (bytes + 8191) / 4096 * 4096;
        free(mine);
        mine = aligned_alloc(64, sizeof(Scratch) + size);
        if (mine) mine->size = size;
        if (pthread_setspecific(scratch, mine)) {
            free(mine);
            mine = 0;
        }
    }
    return mine ? mine + 1 : 0;
}

static void leave_room(void) {
    Scratch *mine = has_scratch ? pthread_getspecific(scratch) : 0;
    if (mine && mine->size > KEEP) {
        free(mine);
        pthread_setspecific(scratch, 0);
    }
}

static inline uint32_t order_of(float x) {
    uint32_t u;
    x += 0.0f; /* -0 is 0 */
    memcpy(&u, &x, sizeof u);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// The k-th largest of a list without NaN, byte by byte of its order: no order of the list is a bad one.
static float kth_largest(const float *s, int64_t count, int64_t k) {
    uint32_t known = 0, mask = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t many[256] = {0};
        for (int64_t i = 0; i < count; i++) {
            uint32_t u = order_of(s[i]);
            if ((u & mask) == known) many[(u >> shift) & 255]++;
        }
        int byte = 255;
        while (k > many[byte]) k -= many[byte--];
        known |= (uint32_t)byte << shift;
        mask |= 255u << shift;
    }
    known = known & 0x80000000u ? known & 0x7fffffffu : ~known;
    float x;
    memcpy(&x, &known, sizeof x);
    return x;
}

// The keys that query i of batch row b may meet: [from, to), before masks.
static void reach_of(const Call *c, int64_t b, int64_t i, int64_t *from, int64_t *to) {
    int64_t at = c->offset + i, lo = c->low, hi = c->high;
    if (c->back >= 0 && at - c->back > lo) lo = at - c->back;
    if (c->ahead >= 0 && at + c->ahead + 1 < hi) hi = at + c->ahead + 1;
    if (c->first && c->first[b] > lo) lo = c->first[b];
    if (c->last && c->last[b] < hi) hi = c->last[b];
    if (c->ids && hi > lo) {
        const int64_t *ids = c->ids + b * c->ids_batch, mine = ids[at];
        while (lo < hi && ids[lo] != mine) lo++;
        while (hi > lo && ids[hi - 1] != mine) hi--;
    }
    *from = lo, *to = hi > lo ? hi : lo;
}

// Rows of a block and the keys they meet; gives 0 where they meet none, and are done.
static int find_rows(const Call *c, int64_t group, int64_t number, int64_t rows, Rows *at) {
    int64_t each = c->H / c->G, span = c->stop - c->start, all = each * span;
    at->group = group;
    at->batch = group / c->G;
    int64_t first = number * rows, g = at->key_head = at->group % c->G;
    at->count = all - first < rows ? all - first : rows;
    at->lo = INT64_MAX, at->hi = 0;
    for (int64_t r = 0; r < at->count; r++) {
        int64_t h = g * each + (first + r) / span, i = c->start + (first + r) % span;
        at->head[r] = h, at->query[r] = i;
        at->row[r] = (at->batch * c->H + h) * c->Q + i;
        reach_of(c, at->batch, i, at->from + r, at->to + r);
        at->some[r] = at->to[r] > at->from[r];
        if (!at->some[r]) continue;
        if (at->from[r] < at->lo) at->lo = at->from[r];
        if (at->to[r] > at->hi) at->hi = at->to[r];
    }
    if (at->hi) return 1;
    for (int64_t r = 0; c->out && r < at->count; r++) {
        memset(c->out + at->row[r] * c->E, 0, c->E * sizeof(float));
        if (c->top) c->top[at->row[r]] = 0;
        if (c->best) c->best[at->row[r]] = 0;
    }
    return 0;
}

static const float *query_of(const Call *c, const Rows *at, int64_t r) {
    return c->q + at->batch * c->q_batch + at->head[r] * c->q_head + at->query[r] * c->q_row;
}

static int64_t bias_row(const Call *c, const Rows *at, int64_t r) {
    return at->batch * c->bias_batch + at->head[r] / (c->H / c->bias_heads) * c->K;
}

static const float *slot_of(const Call *c, const Rows *at, int64_t r) {
    return c->slot_value + (at->batch * c->H + at->head[r]) * c->slots * c->E;
}

// -inf where pairs may not meet, and which rows are left with some that may.
static void hide(const Call *c, Rows *at, int64_t rows, float *st) {
    for (int64_t r = 0; r < at->count; r++) {
        if (!at->some[r]) continue;
        for (int64_t j = at->lo; j < at->from[r]; j++) st[(j - at->lo) * rows + r] = -INFINITY;
        for (int64_t j = at->to[r]; j < at->hi; j++) st[(j - at->lo) * rows + r] = -INFINITY;
        if (!c->mask && !c->ids) continue;
        const int64_t *ids = c->ids ? c->ids + at->batch * c->ids_batch : 0, mine = ids ? ids[c->offset + at->query[r]] : 0;
        const uint8_t *mask = c->mask ? c->mask + at->batch * c->mask_batch + at->head[r] * c->mask_head +
                                            (at->query[r] - c->start) * c->mask_row
                                      : 0;
        int64_t met = 0;
        for (int64_t j = at->from[r]; j < at->to[r]; j++) {
            int meets = (!ids || ids[j] == mine) && (!mask || mask[(j - c->mask_first) * c->mask_key]);
            met += meets;
            if (!meets) st[(j - at->lo) * rows + r] = -INFINITY;
        }
        at->some[r] = met > 0;
    }
}

#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")
#define LANES 16
#include "block.h"
#pragma GCC pop_options
#define LANES 8
#include "block.h"

#define CHECKED 16384 /* values that one item looks at */

// Whether values are finite, for a few keys of a head.
static void check_values(Call *c, int64_t item) {
    int64_t group = item % (c->B * c->G), j = c->low + item / (c->B * c->G) * c->checked_keys;
    int64_t stop = j + c->checked_keys < c->high ? j + c->checked_keys : c->high;
    const float *v = c->v + group / c->G * c->v_batch + group % c->G * c->v_head;
    for (; j < stop; j++)
        if (!(wide ? finite16 : finite8)(v + j * c->v_row, c->E)) {
            atomic_fetch_or(&c->found, NOT_FINITE);
            return;
        }
}

static void one_item(void *of, int64_t item) {
    Call *c = of;
    if (item < c->checks)
        check_values(c, item);
    else if (wide)
        forward16(c, item - c->checks);
    else
        forward8(c, item - c->checks);
}

static void one_share(void *of, int64_t item) {
    if (wide)
        backward16(of, item);
    else
        backward8(of, item);
}

// What forward and backward share; gives how many threads the work is worth.
static int begin(Call *c) {
    if (wide < 0) rows_use_wide(1);
    int64_t lanes = wide ? 16 : 8, all = c->H / c->G * (c->stop - c->start);
    c->vectors = all > lanes && c->K + c->slots <= WIDE_ROWS ? 2 : 1;
    c->blocks = (all + c->vectors * lanes - 1) / (c->vectors * lanes);
    c->scale = (float)c->scale_by;
    c->bias_shared = c->bias && c->bias_heads <= c->G && c->G % c->bias_heads == 0;
    c->found = 0;
    double work = (double)c->B * c->H * (double)(c->stop - c->start) * (double)c->K * (double)(c->W + 8);
    return work < SMALL ? 1 : (int)c->threads;
}

// Fills `out` (and `top`, `best`) for the rows of a call. 0, or what was found: rows or values that are not finite, no memory.
int rows_attend(Call *c) {
    int threads = begin(c);
    // A weight of zero times a value that is not finite is not finite; nothing is multiplied where one key is picked.
    c->checked_keys = CHECKED / c->E + 1;
    c->checks = c->kind == PICK ? 0 : (c->high - c->low + c->checked_keys - 1) / c->checked_keys * c->B * c->G;
    share(one_item, c, c->checks + c->blocks * c->B * c->G, threads);
    leave_room();
    return c->found;
}

// Adds the gradients of a call's rows, for the selections that list. 0, or no memory.
int rows_backward(Call *c) {
    int threads = begin(c);
    c->out = c->top = c->best = 0;
    share(one_share, c, c->splits * c->B * c->G, threads);
    leave_room();
    return c->found & NO_MEMORY;
}

// Queries and keys less the mean of their keys, and -c |k|^2 of what is left: what a distance is made of.
typedef struct {
    const float *q, *k; /* (B, H, Q, W), (B, G, K, W), with numbers of a row adjacent */
    float *new_q, *new_k, *bias;
    int64_t B, H, G, Q, K, W, q_batch, q_head, q_row, k_batch, k_head, k_row;
    double c;
    int64_t threads;
    atomic_int found;
} Centre;

static void centre_group(void *of, int64_t group) {
    Centre *c = of;
    int64_t b = group / c->G, g = group % c->G, W = c->W, each = c->H / c->G;
    const float *k = c->k + b * c->k_batch + g * c->k_head;
    double *mean = room_for(W * (int64_t)(sizeof(double) + sizeof(float)));
    if (!mean) {
        atomic_fetch_or(&c->found, NO_MEMORY);
        return;
    }
    float *less = (float *)(mean + W), *to = c->new_k + group * c->K * W, by = (float)c->c;
    for (int64_t w = 0; w < W; w++) mean[w] = 0;
    for (int64_t j = 0; j < c->K; j++)
        for (int64_t w = 0; w < W; w++) mean[w] += k[j * c->k_row + w];
    for (int64_t w = 0; w < W; w++) less[w] = (float)(mean[w] / (double)c->K);
    for (int64_t j = 0; j < c->K; j++) {
        for (int64_t w = 0; w < W; w++) to[j * W + w] = k[j * c->k_row + w] - less[w];
        c->bias[group * c->K + j] = -by * dot8(to + j * W, to + j * W, W);
    }
    for (int64_t h = g * each; h < (g + 1) * each; h++) {
        const float *q = c->q + b * c->q_batch + h * c->q_head;
        float *into = c->new_q + (b * c->H + h) * c->Q * W;
        for (int64_t i = 0; i < c->Q; i++)
            for (int64_t w = 0; w < W; w++) into[i * W + w] = q[i * c->q_row + w] - less[w];
    }
}

int rows_centre(Centre *c) {
    double work = (double)c->B * c->H * (double)(c->Q + c->K) * (double)c->W * 4;
    c->found = 0;
    share(centre_group, c, c->B * c->G, work < SMALL ? 1 : (int)c->threads);
    return c->found;
}
