// New tokens of several texts meet the keys of their own text, each as it would alone: part of products.c.
// Whatever a token gets is made in an order that depends on its own text only, so it is the same bits in any company and any piece.

// e^x in eight lanes, within 2 units of the last place; below -87.3 it is 0, above 88.7 infinite.
INLINE __m256 exp8(__m256 x) {
    __m256 low = _mm256_set1_ps(-87.33654f), high = _mm256_set1_ps(88.72283f);
    __m256 within = _mm256_min_ps(high, _mm256_max_ps(low, x));
    __m256 n = _mm256_round_ps(_mm256_mul_ps(within, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    // n ln 2 is taken off in two parts, the first of which is exact.
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), within);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 p = _mm256_set1_ps(1.9875691500e-4f);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
    p = _mm256_add_ps(_mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1.0f));
    // 2^n in two factors: n may be 128, which no float's exponent is.
    __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), bias = _mm256_set1_epi32(127);
    __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    __m256 second = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23));
    p = _mm256_mul_ps(_mm256_mul_ps(p, first), second);
    p = _mm256_andnot_ps(_mm256_cmp_ps(x, low, _CMP_LT_OQ), p);
    p = _mm256_blendv_ps(p, _mm256_set1_ps(INFINITY), _mm256_cmp_ps(x, high, _CMP_GT_OQ));
    // min and max let go of NaN.
    return _mm256_blendv_ps(p, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

INLINE __m256 sigmoid_times(__m256 x, __m256 gate) {
    __m256 one = _mm256_set1_ps(1.0f);
    return _mm256_div_ps(x, _mm256_add_ps(one, exp8(_mm256_sub_ps(_mm256_setzero_ps(), gate))));
}

// Kinds of functions, as native.py counts them.
enum { SILU, GELU_TANH, GELU, RELU };

INLINE __m256 activated(const int kind, __m256 x) {
    switch (kind) {
        case SILU: return sigmoid_times(x, x);
        case GELU_TANH: {
            // x (1 + tanh u) / 2 is x / (1 + e^(-2u)).
            __m256 cube = _mm256_mul_ps(_mm256_mul_ps(x, x), _mm256_mul_ps(x, _mm256_set1_ps(0.044715f)));
            return sigmoid_times(x, _mm256_mul_ps(_mm256_add_ps(x, cube), _mm256_set1_ps(1.5957691216f)));
        }
        case GELU: {
            float some[8];
            _mm256_storeu_ps(some, x);
            for (int i = 0; i < 8; i++) some[i] = 0.5f * some[i] * erfcf(-0.70710678f * some[i]);
            return _mm256_loadu_ps(some);
        }
        default: return _mm256_blendv_ps(_mm256_max_ps(x, _mm256_setzero_ps()), x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    }
}

INLINE void act_rows(const int kind, const float *x, float *y, int64_t rows, int64_t hidden, int gated) {
    for (int64_t r = 0; r < rows; r++) {
        const float *gate = x + r * (gated ? 2 : 1) * hidden, *up = gate + hidden;
        for (int64_t j = 0; j < hidden; j += 8) {
            __m256i mask = mask8(hidden - j);
            __m256 v = activated(kind, _mm256_maskload_ps(gate + j, mask));
            if (gated) v = _mm256_mul_ps(v, _mm256_maskload_ps(up + j, mask));
            _mm256_maskstore_ps(y + r * hidden + j, mask, v);
        }
    }
}

// y[j] = f(x[j]), or f(x[j]) * x[hidden + j] where gated, row by row.
void act(const float *x, float *y, int64_t rows, int64_t hidden, int gated, int kind) {
    switch (kind) {
        case SILU: act_rows(SILU, x, y, rows, hidden, gated); break;
        case GELU_TANH: act_rows(GELU_TANH, x, y, rows, hidden, gated); break;
        case GELU: act_rows(GELU, x, y, rows, hidden, gated); break;
        default: act_rows(RELU, x, y, rows, hidden, gated);
    }
}

// One text and its new tokens, as one layer meets them. Its keys and values lie as (G, capacity, W); `length` places are taken.
typedef struct {
    const float *left, *signs, *bias; /* (G, R, D), (R), (G, D): what an identity adds to scores; NULL where it adds nothing */
    void *k, *v; /* floats, or bytes where they have scales */
    int64_t first, tokens; /* which tokens of the call are this text's */
    int64_t length, capacity;
    int64_t lead, head; /* slots before the first token, which the first `head` tokens do not meet */
    int64_t R, W;       /* W > D where there are columns of an identity's */
    uint16_t *k_scales, *v_scales; /* (G, capacity, groups of W): k and v are bytes; NULL where they are floats */
} Text;

// Keys or values of one head of a text, place by place.
typedef struct {
    const void *x;
    const uint16_t *scales;
    int64_t W, groups;
} Kept;

static Kept kept_of(const Text *t, const void *x, const uint16_t *scales, int64_t g) {
    int64_t groups = groups_of(t->W), first = g * t->capacity;
    if (!scales) return (Kept){(const float *)x + first * t->W, NULL, t->W, groups};
    return (Kept){(const int8_t *)x + first * t->W, scales + first * groups, t->W, groups};
}

typedef struct {
    int64_t stride, H, G, D, pairs;
    double scale;
} Heads;

// The sum of products of floats, which double holds exactly, in one order.
static double dot_double(const float *a, const float *b, int64_t count) {
    __m256d even = _mm256_setzero_pd(), odd = even;
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        even = _mm256_fmadd_pd(_mm256_cvtps_pd(_mm_loadu_ps(a + i)), _mm256_cvtps_pd(_mm_loadu_ps(b + i)), even);
        odd = _mm256_fmadd_pd(_mm256_cvtps_pd(_mm_loadu_ps(a + i + 4)), _mm256_cvtps_pd(_mm_loadu_ps(b + i + 4)), odd);
    }
    even = _mm256_add_pd(even, odd);
    double sum = (even[0] + even[2]) + (even[1] + even[3]);
    for (; i < count; i++) sum += (double)a[i] * b[i];
    return sum;
}

// What a token's head is to a text: turned, and with the columns that carry what its identity reads. W == D: turned only.
static __attribute__((noinline)) void widen_head(const float *from, float *to, int64_t g, int is_query, const float *cosines,
                                                 const float *sines, const Text *t, const Heads *a) {
    int64_t D = a->D, R = t->R, W = t->W, pairs = a->pairs;
    for (int64_t i = 0; i < pairs; i++) {
        float u = from[i], v = from[i + pairs];
        to[i] = u * cosines[i] - v * sines[i];
        to[i + pairs] = v * cosines[i] + u * sines[i];
    }
    for (int64_t i = 2 * pairs; i < D; i++) to[i] = from[i];
    if (W == D) return;
    for (int64_t i = D; i < W; i++) to[i] = 0;
    // A query without a trace has one column, and its own direction is nobody's question.
    double own = 0, length = R ? sqrt(dot_double(from, from, D)) : 1, unit = 1 / (length < 1e-12 ? 1e-12 : length);
    for (int64_t r = 0; r < R; r++) {
        double near = unit * dot_double(t->left + (g * R + r) * D, from, D);
        own -= near * near * t->signs[r];
        to[D + r] = (float)(is_query ? near * t->signs[r] * 2 / a->scale : near);
    }
    if (!is_query && t->bias) own += dot_double(t->bias + g * D, from, D);
    to[D + R] = (float)(is_query ? 1 / a->scale : own);
}

// Scores become weights in place; gives 1 / their sum. What is not a number, or overflows, makes all of it NaN.
static float softened(float *s, int64_t count, float scale) {
    const float lowest = -INFINITY;
    __m256 top = _mm256_set1_ps(lowest), by = _mm256_set1_ps(scale), total = _mm256_setzero_ps();
    for (int64_t j = 0; j < count; j += 8) {
        __m256i mask = mask8(count - j);
        __m256 v = _mm256_mul_ps(_mm256_maskload_ps(s + j, mask), by);
        _mm256_maskstore_ps(s + j, mask, v);
        top = _mm256_max_ps(_mm256_blendv_ps(_mm256_set1_ps(lowest), v, _mm256_castsi256_ps(mask)), top);
    }
    float tops[8], most = lowest;
    _mm256_storeu_ps(tops, top);
    for (int i = 0; i < 8; i++) most = tops[i] > most ? tops[i] : most;
    for (int64_t j = 0; j < count; j += 8) {
        __m256i mask = mask8(count - j);
        __m256 p = exp8(_mm256_sub_ps(_mm256_maskload_ps(s + j, mask), _mm256_set1_ps(most)));
        p = _mm256_and_ps(p, _mm256_castsi256_ps(mask));
        _mm256_maskstore_ps(s + j, mask, p);
        total = _mm256_add_ps(total, p);
    }
    return 1.0f / sum8(total);
}

// Eight columns of place j from column d on, or as many as are left.
INLINE __m256 kept8(const int bytes, const Kept *a, int64_t j, int64_t d, int64_t left, __m256i mask) {
    if (bytes)
        return numbers8((const int8_t *)a->x + j * a->W + d, left, _mm256_set1_ps(from_bfloat16(a->scales[j * a->groups + d / GROUP])));
    const float *at = (const float *)a->x + j * a->W + d;
    return left >= 8 ? _mm256_loadu_ps(at) : _mm256_maskload_ps(at, mask);
}

// Sums of values under weights, for few queries and 8 * vectors columns from d on, from the first key to the last of each.
INLINE void mix_tile(const int bytes, const int rows, const int vectors, const float *const *p, const int64_t *from, const int64_t *to,
                     const Kept *v, int64_t d, int64_t columns, const float *shares, float *const *y) {
    __m256 sums[4][3];
    int64_t last = columns - 8 * (vectors - 1), low = from[0], high = to[0];
    __m256i mask = mask8(last);
    for (int r = 0; r < rows; r++) {
        low = from[r] > low ? from[r] : low;
        high = to[r] < high ? to[r] : high;
        for (int c = 0; c < vectors; c++) sums[r][c] = _mm256_setzero_ps();
    }
#define ADD(r, j) \
    for (int c = 0; c < vectors; c++) { \
        __m256 u = kept8(bytes, v, j, d + 8 * c, c + 1 < vectors ? 8 : last, mask); \
        sums[r][c] = _mm256_fmadd_ps(_mm256_set1_ps(p[r][j]), u, sums[r][c]); \
    }
    if (high < low) high = low;
    for (int r = 0; r < rows; r++)
        for (int64_t j = from[r]; j < (low < to[r] ? low : to[r]); j++) ADD(r, j)
    for (int64_t j = low; j < high; j++) {
        __m256 u[3];
        for (int c = 0; c < vectors; c++) u[c] = kept8(bytes, v, j, d + 8 * c, c + 1 < vectors ? 8 : last, mask);
        for (int r = 0; r < rows; r++) {
            __m256 weight = _mm256_set1_ps(p[r][j]);
            for (int c = 0; c < vectors; c++) sums[r][c] = _mm256_fmadd_ps(weight, u[c], sums[r][c]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int64_t j = high > from[r] ? high : from[r]; j < to[r]; j++) ADD(r, j)
#undef ADD
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < vectors; c++) {
            __m256 out = _mm256_mul_ps(sums[r][c], _mm256_set1_ps(shares[r]));
            if (c + 1 < vectors)
                _mm256_storeu_ps(y[r] + 8 * c, out);
            else
                _mm256_maskstore_ps(y[r] + 8 * c, mask, out);
        }
}

static void mix(int64_t rows, const float *const *p, const int64_t *from, const int64_t *to, const Kept *v, int64_t D,
                const float *shares, float *const *y) {
    for (int64_t d = 0; d < D; d += 24) {
        int64_t columns = D - d < 24 ? D - d : 24;
        float *there[4] = {0};
        for (int64_t r = 0; r < rows; r++) there[r] = y[r] + d;
        switch ((v->scales ? 16 : 0) + (rows - 1) * 4 + (columns + 7) / 8) {
#define CASE(r, c) \
    case (r - 1) * 4 + c: mix_tile(0, r, c, p, from, to, v, d, columns, shares, there); break; \
    case 16 + (r - 1) * 4 + c: mix_tile(1, r, c, p, from, to, v, d, columns, shares, there); break;
            CASE(1, 1) CASE(1, 2) CASE(1, 3) CASE(2, 1) CASE(2, 2) CASE(2, 3)
            CASE(3, 1) CASE(3, 2) CASE(3, 3) CASE(4, 1) CASE(4, 2) CASE(4, 3)
#undef CASE
        }
    }
}

// At most four queries (rows of q, W apart) against the keys of one head; query n is of the text's token at[n].
static void meet_four(const Text *t, const Heads *a, int64_t g, const float *q, int64_t rows, const int64_t *at, float *scores,
                      int64_t room, float *const *y) {
    int64_t from[4], to[4], low = INT64_MAX, high = 0;
    for (int64_t r = 0; r < rows; r++) {
        // The first tokens of a text meet no slot: the very first is the sink that it is without them.
        from[r] = t->length - t->lead + at[r] < t->head ? t->lead : 0;
        to[r] = t->length + at[r] + 1;
        low = from[r] < low ? from[r] : low;
        high = to[r] > high ? to[r] : high;
    }
    Kept k = kept_of(t, t->k, t->k_scales, g), v = kept_of(t, t->v, t->v_scales, g);
    float *p[4], shares[4], some[16];
    for (int64_t r = 0; r < rows; r++) p[r] = scores + r * room;
    for (int64_t j = low; j < high; j += 3) {
        int64_t count = high - j < 3 ? high - j : 3;
        if (k.scales)
            tiles_kept(count, rows, (const int8_t *)k.x + j * t->W, k.scales + j * k.groups, t->W, q, some, 4);
        else
            tiles_f32(count, rows, 0, (const float *)k.x + j * t->W, t->W, q, t->W, t->W, some, 4);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < count; c++) p[r][j + c] = some[c * 4 + r];
    }
    for (int64_t r = 0; r < rows; r++) shares[r] = softened(p[r] + from[r], to[r] - from[r], (float)a->scale);
    mix(rows, (const float *const *)p, from, to, &v, a->D, shares, y);
}

#define SOME 16 /* tokens of a text that a thread takes at a time */

// What new tokens of all texts bring, and what they get.
typedef struct {
    const float *qkv, *cosines, *sines;
    const Text *texts;
    float *y;
    int64_t count, longest, wide, jobs, tokens;
    Heads a;
} Meeting;

static Meeting meeting_of(const float *qkv, const float *cosines, const float *sines, const Text *texts, float *y, int64_t count,
                          Heads a) {
    Meeting m = {qkv, cosines, sines, texts, y, count, 0, 0, 0, 0, a};
    for (int64_t n = 0; n < count; n++) {
        const Text *t = texts + n;
        m.wide = t->W > m.wide ? t->W : m.wide;
        m.longest = t->length + t->tokens > m.longest ? t->length + t->tokens : m.longest;
        m.jobs += (t->tokens + SOME - 1) / SOME * a.G;
        m.tokens += t->tokens;
    }
    return m;
}

// Floats that one thread needs: scores of four queries, and the queries of some tokens.
static int64_t meeting_room(const Meeting *m) { return 4 * m->longest + SOME * (m->a.H / m->a.G) * m->wide; }

// Key and value of one token go where its text keeps them; `room` is for W floats.
static void keep_token(const Meeting *m, const Text *t, int64_t i, int64_t g, float *room) {
    const Heads *a = &m->a;
    const float *from = m->qkv + (t->first + i) * a->stride, *value = from + (a->H + a->G + g) * a->D;
    int64_t place = g * t->capacity + t->length + i, W = t->W, D = a->D, groups = groups_of(W);
    float *k = t->k_scales ? room : (float *)t->k + place * W, *v = t->v_scales ? room : (float *)t->v + place * W;
    widen_head(from + (a->H + g) * D, k, g, 0, m->cosines + (t->first + i) * a->pairs, m->sines + (t->first + i) * a->pairs, t, a);
    if (t->k_scales) to_bytes(k, W, (int8_t *)t->k + place * W, t->k_scales + place * groups);
    memcpy(v, value, D * sizeof(float));
    memset(v + D, 0, (W - D) * sizeof(float));
    if (t->v_scales) to_bytes(v, W, (int8_t *)t->v + place * W, t->v_scales + place * groups);
}

// One key head of some tokens of one text; `alone` keeps their keys first, which nobody else waits for.
static void meet_job(const Meeting *m, int64_t job, int alone, float *room) {
    const Heads *a = &m->a;
    int64_t n = 0, rest = job, some, G = a->G, H = a->H, D = a->D, each = H / G;
    while (rest >= (some = (m->texts[n].tokens + SOME - 1) / SOME * G)) rest -= some, n++;
    const Text *t = m->texts + n;
    int64_t g = rest % G, start = rest / G * SOME, stop = t->tokens - start < SOME ? t->tokens : start + SOME;
    float *scores = room, *q = room + 4 * m->longest;
    if (alone)
        for (int64_t i = start; i < stop; i++) keep_token(m, t, i, g, room);
    for (int64_t i = start; i < stop; i++)
        for (int64_t h = 0; h < each; h++)
            widen_head(m->qkv + (t->first + i) * a->stride + (g * each + h) * D, q + ((i - start) * each + h) * t->W, g, 1,
                       m->cosines + (t->first + i) * a->pairs, m->sines + (t->first + i) * a->pairs, t, a);
    for (int64_t j = 0; j < (stop - start) * each; j += 4) {
        int64_t rows = (stop - start) * each - j < 4 ? (stop - start) * each - j : 4, at[4];
        float *to[4];
        for (int64_t r = 0; r < rows; r++) {
            at[r] = start + (j + r) / each;
            to[r] = m->y + (t->first + at[r]) * H * D + (g * each + (j + r) % each) * D;
        }
        meet_four(t, a, g, q + j * t->W, rows, at, scores, m->longest, to);
    }
}

// True where every job has all new tokens of its text.
static int meets_alone(const Meeting *m) {
    for (int64_t n = 0; n < m->count; n++)
        if (m->texts[n].tokens > SOME) return 0;
    return 1;
}

static void share_meeting(Crew *c, const Meeting *m, float *room) {
    int64_t job;
    while ((job = next_of(c, 0, 1)) < m->jobs) {
        meet_job(m, job, 0, room);
        if (is_last(c, 0, 1, m->jobs)) end_of(c, 0);
    }
    wait_for(c, 0);
}

// qkv (tokens, stride): H queries, G keys and G values of width D each, not turned. Keys and values go where each text keeps them,
// and y (tokens, H * D) gets what every head makes of its text. 0, or 1: no memory.
int meet(const float *qkv, const float *cosines, const float *sines, const Text *texts, float *y, int64_t count, int64_t stride,
         int64_t H, int64_t G, int64_t D, int64_t pairs, double scale, int threads) {
    Meeting m = meeting_of(qkv, cosines, sines, texts, y, count, (Heads){stride, H, G, D, pairs, scale});
    int64_t work = 0, room = meeting_room(&m);
    for (int64_t n = 0; n < count; n++) work += texts[n].tokens * (texts[n].length + texts[n].tokens) * H * texts[n].W;
    // Threads that wait for each other cost more than little work takes.
    threads = crew_size(work < 1 << 21 ? 1 : threads);
    float *rooms = malloc(threads * room * sizeof(float));
    if (!rooms) return 1;
    for (int64_t n = 0; n < count; n++) {
        const Text *t = texts + n;
        for (int64_t i = 0; i < t->tokens; i++)
            for (int64_t g = 0; g < G; g++) keep_token(&m, t, i, g, rooms);
    }
    Stage stage = {0};
    Crew crew = {&stage, 0, 0, 0};
    int64_t since = nanoseconds();
    if (threads == 1)
        share_meeting(&crew, &m, rooms);
    else {
#pragma omp parallel num_threads(threads)
        share_meeting(&crew, &m, rooms + omp_get_thread_num() * room);
    }
    learn_crowding(atomic_load(&crew.slept), nanoseconds() - since, threads);
    free(rooms);
    return 0;
}
