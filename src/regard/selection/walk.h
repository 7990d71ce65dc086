/* One type of scores: REAL and NAME(x) are defined by whoever includes this. */

/* Of a row. */
static void NAME(split)(const REAL *s, double *p, double *g, int64_t C) {
    int64_t j = 0;
    __m256d a, b;
    for (; j + LANES <= C; j += LANES) {
        sigmoids(NAME(read)(s + j), &a, &b);
        _mm256_storeu_pd(p + j, a);
        _mm256_storeu_pd(g + j, b);
    }
    if (j < C) {
        REAL rest[LANES] = {0};
        double made[2 * LANES];
        memcpy(rest, s + j, (size_t)(C - j) * sizeof(REAL));
        sigmoids(NAME(read)(rest), &a, &b);
        _mm256_storeu_pd(made, a);
        _mm256_storeu_pd(made + LANES, b);
        memcpy(p + j, made, (size_t)(C - j) * sizeof(double));
        memcpy(g + j, made + LANES, (size_t)(C - j) * sizeof(double));
    }
}

/* weights (C) of one row from where the last one stopped; `stop` becomes where this one stops, `reach` (if any) the chance to come by. */
static void NAME(one)(const double *p, const double *g, double *stop, double *reach, REAL *weights, int64_t C) {
    double r = 0;
    for (int64_t j = 0; j < C; j++) {
        r = j ? r * g[j - 1] + stop[j] : stop[j];
        if (reach) reach[j] = r;
        stop[j] = r * p[j];
        if (weights) weights[j] = (REAL)stop[j];
    }
}

/* scores, weights (N, R, C); before, after (N, C); gone (N, R): rows that are not there, whose weights are nothing. */
int NAME(walk)(
    const REAL *scores, const REAL *before, const uint8_t *gone, REAL *weights, REAL *after, int64_t N, int64_t R, int64_t C,
    int threads
) {
    int failed = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(| : failed) if (threads > 1 && N > 1)
    for (int64_t n = 0; n < N; n++) {
        double *p = malloc((size_t)C * 3 * sizeof(double)), *g = p + C, *stop = g + C;
        if (!p) {
            failed = 1;
            continue;
        }
        for (int64_t j = 0; j < C; j++) stop[j] = (double)before[n * C + j];
        for (int64_t i = 0; i < R; i++) {
            int64_t row = n * R + i;
            if (gone[row]) {
                memset(weights + row * C, 0, (size_t)C * sizeof(REAL));
                continue;
            }
            NAME(split)(scores + row * C, p, g, C);
            NAME(one)(p, g, stop, NULL, weights + row * C, C);
        }
        for (int64_t j = 0; j < C; j++) after[n * C + j] = (REAL)stop[j];
        free(p);
    }
    return failed;
}

/* The gradients of scores and before, from those of weights and after. With α = r p, r_j = r_{j-1} g_{j-1} + b_j:
 *     dr_j = dα_j p_j + dr_{j+1} g_j     db_j = dr_j     ds_j = p_j g_j r_j (dα_j - dr_{j+1})                            */
int NAME(walk_back)(
    const REAL *scores, const REAL *before, const uint8_t *gone, const REAL *d_weights, const REAL *d_after, REAL *d_scores,
    REAL *d_before, int64_t N, int64_t R, int64_t C, int threads
) {
    int failed = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(| : failed) if (threads > 1 && N > 1)
    for (int64_t n = 0; n < N; n++) {
        /* Where each row began, and room for one row. */
        double *starts = malloc((size_t)C * (size_t)(R + 5) * sizeof(double));
        if (!starts) {
            failed = 1;
            continue;
        }
        double *p = starts + R * C, *g = p + C, *stop = g + C, *reach = stop + C, *d = reach + C;
        for (int64_t j = 0; j < C; j++) stop[j] = (double)before[n * C + j], d[j] = (double)d_after[n * C + j];
        for (int64_t i = 0; i < R; i++) {
            int64_t row = n * R + i;
            memcpy(starts + i * C, stop, (size_t)C * sizeof(double));
            if (gone[row]) continue;
            NAME(split)(scores + row * C, p, g, C);
            NAME(one)(p, g, stop, NULL, NULL, C);
        }
        for (int64_t i = R - 1; i >= 0; i--) {
            int64_t row = n * R + i;
            REAL *out = d_scores + row * C;
            if (gone[row]) {
                memset(out, 0, (size_t)C * sizeof(REAL));
                continue;
            }
            NAME(split)(scores + row * C, p, g, C);
            memcpy(stop, starts + i * C, (size_t)C * sizeof(double));
            NAME(one)(p, g, stop, reach, NULL, C);
            double next = 0;
            for (int64_t j = C - 1; j >= 0; j--) {
                double da = (double)d_weights[row * C + j] + d[j];
                out[j] = (REAL)(p[j] * g[j] * reach[j] * (da - next));
                next = da * p[j] + next * g[j];
                d[j] = next;
            }
        }
        for (int64_t j = 0; j < C; j++) d_before[n * C + j] = (REAL)d[j];
        free(starts);
    }
    return failed;
}

#undef REAL
#undef NAME
