// All layers of a model for a few rows at once, in one call and one parallel region: part of products.c.
// A row's numbers are the bits that norms, products, `meet` and `act` give when they are called one after the other.

typedef struct {
    const float *weight, *shift;
    double eps;
    int64_t centred; /* 1: a layer norm; 0: by the root of the mean square */
} Norm;

typedef struct {
    const Linear *qkv, *out, *into, *down;
    Norm before, between;
    int64_t kind, gated;
    int64_t H, G, D, pairs;
    double scale;
} Layer;

typedef struct {
    const float *cosines, *sines; /* (rows, pairs) */
} Angles;

typedef struct {
    const Layer *layers;
    const Angles *angles;
    const int64_t *turns; /* (depth): which of the angles */
    const Text *texts; /* (depth, count) */
    const Norm *norm;  /* of the last rows; NULL: nothing is read out */
    const Linear *head;
    const int64_t *picks; /* rows that are read out */
    float *x, *logits;
    int64_t depth, count, rows, width, picked;
    // Made here:
    Crew crew;
    char *room;
    float *normed, *flat, *heads, *inner, *rooms;
    int64_t room_floats;
    int wide, threads;
} Step;

static void norm_row(const Norm *n, const float *x, float *y, int64_t in) {
    if (n->centred)
        layer_row(x, n->weight, n->shift, n->eps, y, in);
    else
        rms_row(x, n->weight, n->eps, y, in);
}

// Rows of x, normed or as they are, become the input of a product.
typedef struct {
    const Norm *norm;
    const float *from;
    const int64_t *picks;
    float *normed;
    Input to;
    int64_t rows, needs;
} Take;

static Take take_of(const Step *s, const Norm *norm, const float *from, int64_t rows, const Linear *w) {
    const float *x = norm ? s->normed : from;
    return (Take){norm, from, NULL, s->normed, input_in(s->room, x, rows, w->in, w->needs), rows, w->needs};
}

static void take(const Take *t, int64_t r) {
    if (t->norm) norm_row(t->norm, t->from + (t->picks ? t->picks[r] : r) * t->to.in, t->normed + r * t->to.in, t->to.in);
    take_row(&t->to, r, t->needs);
}

#define FEW_ROWS 2 /* who ends a stage takes so many rows alone: less than it costs to share them */

static void share_rows(Crew *c, int64_t stage, const Take *t) {
    int64_t r;
    if (is_over(c, stage)) return;
    if (t->rows <= FEW_ROWS) {
        if (next_of(c, stage, 1) == 0) {
            for (r = 0; r < t->rows; r++) take(t, r);
            end_of(c, stage);
        }
    } else
        while ((r = next_of(c, stage, 1)) < t->rows) {
            take(t, r);
            if (is_last(c, stage, 1, t->rows)) end_of(c, stage);
        }
    wait_for(c, stage);
}

// Gate, up and what the activation makes of them: units from..to of `hidden` outputs, which are as many of the first part.
static void multiply_active(const Layer *a, const Input *x, int64_t rows, int64_t from, int64_t to, int wide, float *y) {
    const Linear *w = a->into;
    int64_t size = unit_of(w), hidden = w->outs[0];
    float gate[WIDEST * NEAR], up[WIDEST * NEAR], side[2 * WIDEST + 8], made[WIDEST + 8];
    for (int64_t u = from; u < to; u++) {
        int64_t o = u * size, count = hidden - o < size ? hidden - o : size;
        unit(w, 0, o, count, x, 0, rows, wide, gate);
        if (a->gated) unit(w, 1, o, count, x, 0, rows, wide, up);
        for (int64_t r = 0; r < rows; r++) {
            for (int64_t c = 0; c < count; c++) side[c] = gate[c * NEAR + r];
            if (a->gated)
                for (int64_t c = 0; c < count; c++) side[count + c] = up[c * NEAR + r];
            act(side, made, 1, count, a->gated, a->kind);
            memcpy(y + r * hidden + o, made, count * sizeof(float));
        }
    }
}

static void share_units(Step *s, int64_t stage, const Linear *w, const Input *x, int64_t rows, int add, const Layer *active, float *y) {
    int64_t size = unit_of(w), units = active ? (w->outs[0] + size - 1) / size : units_of(w), some = piece_of(units, s->threads), at;
    if (is_over(&s->crew, stage)) return;
    while ((at = next_of(&s->crew, stage, some)) < units) {
        int64_t stop = at + some < units ? at + some : units;
        if (active)
            multiply_active(active, x, rows, at, stop, s->wide, y);
        else
            multiply(w, x, 0, rows, at, stop, add, s->wide, y);
        if (is_last(&s->crew, stage, stop - at, units)) end_of(&s->crew, stage);
    }
    wait_for(&s->crew, stage);
}

static void share_meet(Step *s, int64_t stage, const Meeting *m, float *room) {
    Crew *c = &s->crew;
    int64_t job;
    int alone = meets_alone(m);
    if (!alone && !is_over(c, stage)) {
        while ((job = next_of(c, stage, 1)) < m->count) {
            const Text *t = m->texts + job;
            for (int64_t i = 0; i < t->tokens; i++)
                for (int64_t g = 0; g < m->a.G; g++) keep_token(m, t, i, g, room);
            if (is_last(c, stage, 1, m->count)) end_of(c, stage);
        }
        wait_for(c, stage);
    }
    stage++;
    if (is_over(c, stage)) return;
    while ((job = next_of(c, stage, 1)) < m->jobs) {
        meet_job(m, job, alone, room);
        if (is_last(c, stage, 1, m->jobs)) end_of(c, stage);
    }
    wait_for(c, stage);
}

#define STAGES 10 /* of a layer */

static void walk(Step *s, int thread) {
    Crew *c = &s->crew;
    float *room = s->rooms + thread * s->room_floats;
    int64_t rows = s->rows, at = 0;
    for (int64_t i = 0; i < s->depth; i++, at += STAGES) {
        const Layer *a = s->layers + i;
        // Who comes back late finds a whole layer over.
        if (is_over(c, at + 9)) continue;
        Take t = take_of(s, &a->before, s->x, rows, a->qkv);
        share_rows(c, at, &t);
        share_units(s, at + 1, a->qkv, &t.to, rows, 0, NULL, s->flat);
        Meeting m = meeting_of(s->flat, s->angles[s->turns[i]].cosines, s->angles[s->turns[i]].sines, s->texts + i * s->count, s->heads, s->count,
                               (Heads){a->qkv->total, a->H, a->G, a->D, a->pairs, a->scale});
        share_meet(s, at + 2, &m, room);
        t = take_of(s, NULL, s->heads, rows, a->out);
        share_rows(c, at + 4, &t);
        share_units(s, at + 5, a->out, &t.to, rows, 1, NULL, s->x);
        t = take_of(s, &a->between, s->x, rows, a->into);
        share_rows(c, at + 6, &t);
        share_units(s, at + 7, a->into, &t.to, rows, 0, a, s->inner);
        t = take_of(s, NULL, s->inner, rows, a->down);
        share_rows(c, at + 8, &t);
        share_units(s, at + 9, a->down, &t.to, rows, 1, NULL, s->x);
    }
    if (!s->norm) return;
    Take t = take_of(s, s->norm, s->x, s->picked, s->head);
    t.picks = s->picks;
    share_rows(c, at, &t);
    share_units(s, at + 1, s->head, &t.to, s->picked, 0, NULL, s->logits);
}

static int64_t more(int64_t a, int64_t b) { return a > b ? a : b; }

// x (rows, width), at most NEAR rows, goes through all layers in place; logits (picked, V) of some rows. 0, or 1: no memory.
int step(const Layer *layers, const Angles *angles, const int64_t *turns, const Text *texts, const Norm *norm, const Linear *head, const int64_t *picks, float *x, float *logits,
         int64_t depth, int64_t count, int64_t rows, int64_t width, int64_t picked, int threads) {
    Step s = {.layers = layers, .angles = angles, .turns = turns, .texts = texts, .norm = norm, .head = head, .picks = picks, .x = x, .logits = logits, .depth = depth,
              .count = count, .rows = rows, .width = width, .picked = picked, .wide = is_wide()};
    threads = s.threads = crew_size(threads);
    int64_t input = norm ? input_bytes(picked, head->in, head->needs) : 0, flat = 0, heads = 0, inner = 0;
    for (int64_t i = 0; i < depth; i++) {
        const Layer *a = layers + i;
        input = more(input, more(input_bytes(rows, a->qkv->in, a->qkv->needs), input_bytes(rows, a->out->in, a->out->needs)));
        input = more(input, more(input_bytes(rows, a->into->in, a->into->needs), input_bytes(rows, a->down->in, a->down->needs)));
        flat = more(flat, a->qkv->total);
        heads = more(heads, a->H * a->D);
        inner = more(inner, a->into->outs[0]);
        Meeting m = meeting_of(NULL, NULL, NULL, texts + i * count, NULL, count, (Heads){0, a->H, a->G, a->D, 0, 1});
        s.room_floats = more(s.room_floats, meeting_room(&m));
    }
    s.room_floats = (s.room_floats + 15) / 16 * 16;
    int64_t stages = (STAGES * depth + 2) * (int64_t)sizeof(Stage);
    int64_t sizes[] = {stages, input, rows * width * 4, rows * flat * 4, rows * heads * 4, rows * inner * 4, threads * s.room_floats * 4};
    char *parts[7];
    int64_t all = 0;
    for (int i = 0; i < 7; i++) all += (sizes[i] + 63) / 64 * 64;
    char *memory = aligned_alloc(64, all + 64);
    if (!memory) return 1;
    for (int64_t i = 0, at = 0; i < 7; at += (sizes[i++] + 63) / 64 * 64) parts[i] = memory + at;
    memset(parts[0], 0, stages);
    s.crew.stages = (Stage *)parts[0];
    s.room = parts[1];
    s.normed = (float *)parts[2];
    s.flat = (float *)parts[3];
    s.heads = (float *)parts[4];
    s.inner = (float *)parts[5];
    s.rooms = (float *)parts[6];
    int64_t since = nanoseconds();
    if (threads == 1)
        walk(&s, 0);
    else {
#pragma omp parallel num_threads(threads)
        walk(&s, omp_get_thread_num());
    }
    learn_crowding(atomic_load(&s.crew.slept), nanoseconds() - since, threads);
    free(memory);
    return 0;
}

// The first of the largest of x, or -1 where one of them is not finite.
int64_t peak(const float *x, int64_t count) {
    const __m256i exponent = _mm256_set1_epi32(0x7f800000);
    __m256 top = _mm256_set1_ps(-INFINITY);
    __m256i odd = _mm256_setzero_si256();
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        __m256 v = _mm256_loadu_ps(x + i);
        top = _mm256_max_ps(v, top);
        odd = _mm256_or_si256(odd, _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_castps_si256(v), exponent), exponent));
    }
    float tops[8], most = -INFINITY;
    _mm256_storeu_ps(tops, top);
    for (int j = 0; j < 8; j++) most = tops[j] > most ? tops[j] : most;
    int bad = !_mm256_testz_si256(odd, odd);
    for (; i < count; i++) {
        bad |= !isfinite(x[i]);
        most = x[i] > most ? x[i] : most;
    }
    if (bad) return -1;
    for (i = 0; i + 8 <= count; i += 8)
        if (_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(most), _CMP_EQ_OQ))) break;
    while (x[i] != most) i++;
    return i;
}
