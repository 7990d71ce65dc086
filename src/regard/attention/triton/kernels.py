"""Triton kernels of the selections that are no softmax: online over blocks of keys, forward and backward, nothing of Q × K.

Scores of a block are made, used and made again when they are needed again, in float32 (float64 for float64):

    entmax    a pass for the row's largest score, Newton's steps on ‖[x − τ]₊‖_e − 1 (a pass each), a pass for the result
    picks     one pass that keeps the largest score, its key and the log-sum-exp of the relaxed choice
    relaxed   softmax among the scores at or above a floor of their row
    topk      one pass that keeps the k largest and their keys, then a gather; backward reads those keys alone

Backward of the first three is one formula, d_scores = w (dp − Σ w dp / Σ w): w = p^{2−α} on the support of entmax, p of a softmax.

A program works on one block of query rows of one head, or on one block of keys of one key head. Rows that may meet nothing give
zeros. A row whose scores are NaN or overflow gives NaN.
"""

from ...errors import needs_extra

with needs_extra("triton"):
    import triton
    import triton.language as tl

SOFTMAX, SPARSEMAX, ENTMAX15, ENTMAX = (tl.constexpr(n) for n in range(4))
FAR = tl.constexpr(1 << 30)
"""Beyond every key."""


@triton.jit
def dot(a, b, WIDEN: tl.constexpr):
    """A product summed in float32 or float64. Triton's interpreter multiplies no bfloat16, so it is widened there: the same numbers."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def load_rows(pointer, head, rows, count, width, BLOCK: tl.constexpr):
    """Rows of a (heads, count, width) tensor, zeros outside of it."""
    d = tl.arange(0, BLOCK)
    inside = (rows < count)[:, None] & (d < width)[None, :]
    return tl.load(pointer + (head.to(tl.int64) * count + rows[:, None]) * width + d[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(pointer, x, head, rows, count, width, BLOCK: tl.constexpr):
    d = tl.arange(0, BLOCK)
    inside = (rows < count)[:, None] & (d < width)[None, :]
    at = pointer + (head.to(tl.int64) * count + rows[:, None]) * width + d[None, :]
    tl.store(at, x.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def load_row(pointer, head, rows, count, other):
    return tl.load(pointer + head.to(tl.int64) * count + rows, mask=rows < count, other=other)


@triton.jit
def interval(lo, hi, batch, rows, Q, step):
    """Which keys [lo, hi) each row may meet; rows outside of the problem meet none."""
    inside = rows < Q
    at = batch.to(tl.int64) * step + rows
    first = tl.load(lo + at, mask=inside, other=FAR)
    last = tl.load(hi + at, mask=inside, other=0)
    return first, last


@triton.jit
def scores(
    q, k, rows, columns, first, last, batch, head,
    bias, position, mask, ids, floor,
    scale, Q, K, H, offset, bias_heads, bias_step, id_step, mask_b, mask_h, mask_q, mask_k,
    BIAS: tl.constexpr, POSITION: tl.constexpr, MASK: tl.constexpr, IDS: tl.constexpr, FLOOR: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Scores of a block (rows × columns), −inf where a pair may not meet, and which pairs may."""
    s = dot(q, tl.trans(k), WIDEN) * scale
    inside = columns < K
    if BIAS:
        mine = head * bias_heads // H
        b = tl.load(bias + batch.to(tl.int64) * bias_step + mine * K + columns, mask=inside, other=0.0)
        s += b[None, :]
    if POSITION:
        both = (rows < Q)[:, None] & inside[None, :]
        apart = rows[:, None] - columns[None, :] + K - 1
        s += tl.load(position + head * (Q + K - 1) + apart, mask=both, other=0.0)
    ok = (columns[None, :] >= first[:, None]) & (columns[None, :] < last[:, None])
    if MASK:
        at = (
            mask
            + batch.to(tl.int64) * mask_b
            + head.to(tl.int64) * mask_h
            + rows[:, None].to(tl.int64) * mask_q
            + columns[None, :] * mask_k
        )
        ok = ok & (tl.load(at, mask=ok, other=0) != 0)
    if IDS:
        mine_id = tl.load(ids + batch.to(tl.int64) * id_step + rows + offset, mask=rows < Q, other=0)
        key_id = tl.load(ids + batch.to(tl.int64) * id_step + columns, mask=inside, other=0)
        ok = ok & (mine_id[:, None] == key_id[None, :])
    if FLOOR:
        least = load_row(floor, batch * H + head, rows, Q, 0.0)
        # NaN stays, so that it is seen.
        ok = ok & ((s >= least[:, None]) | (s != s))
    return tl.where(ok, s, float("-inf")), ok


@triton.jit
def power(u, e):
    """u^e for u ≥ 0, with 0^e = 0."""
    there = u > 0
    return tl.where(there, tl.exp(tl.log(tl.where(there, u, 1.0)) * e), 0.0)


@triton.jit
def weigh(s, most, tau, total, alpha, KIND: tl.constexpr):
    """p of a block, and w with d_scores = w (dp − mean). `alpha` is the inverse temperature of a softmax."""
    if KIND == SOFTMAX:
        p = tl.exp((s - most[:, None]) * alpha - tau[:, None])
        p = tl.where(s == float("-inf"), 0.0, p)
        return p, p * alpha
    u = tl.maximum((s - most[:, None]) * (alpha - 1) - tau[:, None], 0.0)
    u = tl.where(s == float("-inf"), 0.0, u)
    if KIND == SPARSEMAX:
        return u / total[:, None], tl.where(u > 0, 1.0, 0.0).to(u.dtype)
    if KIND == ENTMAX15:
        p = u * u / total[:, None]
        return p, tl.sqrt(p)
    p = power(u, 1 / (alpha - 1)) / total[:, None]
    return p, tl.where(p > 0, power(p, 2 - alpha), 0.0)


@triton.jit
def entmax_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, most_ptr, tau_ptr, total_ptr, alpha_ptr, lo_ptr, hi_ptr,
    bias, position, mask, ids, floor,
    scale, Q, K, H, G, D, E, offset, row_step, bias_heads, bias_step, id_step, mask_b, mask_h, mask_q, mask_k,
    narrow, steps,
    BIAS: tl.constexpr, POSITION: tl.constexpr, MASK: tl.constexpr, IDS: tl.constexpr, FLOOR: tl.constexpr,
    KIND: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr, VALUE: tl.constexpr, REAL: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    head, batch = tl.program_id(0) % H, tl.program_id(0) // H
    group = batch * G + head * G // H
    rows = tl.program_id(1) * M + tl.arange(0, M)
    q = load_rows(q_ptr, batch * H + head, rows, Q, D, WIDE)
    first, last = interval(lo_ptr, hi_ptr, batch, rows, Q, row_step)
    start, stop = tl.min(first, 0) // N * N, tl.max(last, 0)
    alpha = tl.load(alpha_ptr + head).to(REAL)
    e = 1 / (alpha - 1)

    most = tl.full([M], float("-inf"), REAL)
    met = tl.zeros([M], tl.int32)
    bad = tl.zeros([M], tl.int32)
    for at in range(start, stop, N):
        columns = at + tl.arange(0, N)
        k = load_rows(k_ptr, group, columns, K, D, WIDE)
        s, ok = scores(
            q, k, rows, columns, first, last, batch, head, bias, position, mask, ids, floor,
            scale, Q, K, H, offset, bias_heads, bias_step, id_step, mask_b, mask_h, mask_q, mask_k,
            BIAS, POSITION, MASK, IDS, FLOOR, WIDEN,
        )  # fmt: skip
        bad = bad | tl.max((ok & (s != s)).to(tl.int32), 1)
        met = met | tl.max(ok.to(tl.int32), 1)
        most = tl.maximum(most, tl.max(tl.where(s == s, s, float("-inf")), 1))
    bad = bad | ((met != 0) & ((most == float("-inf")) | (most == float("inf")))).to(tl.int32)
    works = (met != 0) & (bad == 0)
    most = tl.where(works, most, 0.0)

    tau = tl.full([M], -1.0, REAL)
    low = tau
    high = tl.zeros([M], REAL)
    n = 0
    going = tl.max(works.to(tl.int32), 0)
    while going > 0:
        total = tl.zeros([M], REAL)
        slope = tl.zeros([M], REAL)
        for at in range(start, stop, N):
            columns = at + tl.arange(0, N)
            k = load_rows(k_ptr, group, columns, K, D, WIDE)
            s, _ = scores(
                q, k, rows, columns, first, last, batch, head, bias, position, mask, ids, floor,
                scale, Q, K, H, offset, bias_heads, bias_step, id_step, mask_b, mask_h, mask_q, mask_k,
                BIAS, POSITION, MASK, IDS, FLOOR, WIDEN,
            )  # fmt: skip
            u = tl.maximum((s - most[:, None]) * (alpha - 1) - tau[:, None], 0.0)
            if KIND == SPARSEMAX:
                total += tl.sum(u, 1)
                slope += tl.sum(tl.where(u > 0, 1.0, 0.0), 1)
            elif KIND == ENTMAX15:
                total += tl.sum(u * u, 1)
                slope += tl.sum(u, 1)
            else:
                total += tl.sum(power(u, e), 1)
                slope += tl.sum(tl.where(u > 0, power(u, e - 1), 0.0), 1)
        if KIND == SPARSEMAX:
            norm = total
        elif KIND == ENTMAX15:
            norm = tl.sqrt(total)
        else:
            norm = power(total, alpha - 1)
        above = norm - 1
        step = tl.where(slope > 0, above * total / (slope * norm), 0.0)
        low = tl.where(above > 0, tau, low)
        high = tl.where(above > 0, high, tau)
        if KIND == ENTMAX:
            # Above α = 2 the norm is not convex: Newton's steps take turns with halving the bracket.
            ahead = tau + step
            fits = (ahead > low) & (ahead < high) & (n % 2 == 0)
            over = works & (tl.abs(above) > narrow) & (high - low > narrow * 0.1)
            halved = tl.where(fits, ahead, (low + high) / 2)
            convex = e >= 1
            over = tl.where(convex, works & (above > narrow), over)
            tau = tl.where(works, tl.where(convex, ahead, tl.where(over, halved, tau)), tau)
        else:
            tau = tl.where(works, tau + step, tau)
            over = works & (above > narrow)
        n += 1
        going = tl.where(n < steps, tl.max(over.to(tl.int32), 0), 0)

    total = tl.zeros([M], REAL)
    out = tl.zeros([M, VALUE], REAL)
    one = tl.full([M], 1.0, REAL)
    for at in range(start, stop, N):
        columns = at + tl.arange(0, N)
        k = load_rows(k_ptr, group, columns, K, D, WIDE)
        s, _ = scores(
            q, k, rows, columns, first, last, batch, head, bias, position, mask, ids, floor,
            scale, Q, K, H, offset, bias_heads, bias_step, id_step, mask_b, mask_h, mask_q, mask_k,
            BIAS, POSITION, MASK, IDS, FLOOR, WIDEN,
        )  # fmt: skip
        p, _ = weigh(s, most, tau, one, alpha, KIND)
        total += tl.sum(p, 1)
        if tl.max(tl.max(p, 1), 0) > 0:
            v = load_rows(v_ptr, group, columns, K, E, VALUE)
            out += dot(p.to(v.dtype), v, WIDEN)
    total = tl.where(works, total, 1.0)
    out = tl.where(works[:, None], out / total[:, None], 0.0)
    out = tl.where((bad != 0)[:, None], float("nan"), out)
    store_rows(out_ptr, out, batch * H + head, rows, Q, E, VALUE)
    at = (batch * H + head).to(tl.int64) * Q + rows
    # NaN is below no threshold, so that whoever refuses rows by this number does not hide it.
    tl.store(most_ptr + at, tl.where(bad != 0, float("nan"), most), mask=rows < Q)
    tl.store(tau_ptr + at, tau, mask=rows < Q)
    tl.store(total_ptr + at, total, mask=rows < Q)


@triton.jit
def softmax_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, most_ptr, tau_ptr, index_ptr, alpha_ptr, lo_ptr, hi_ptr,
    bias, position, mask, ids, floor,
    scale, Q, K, H, G, D, E, offset, row_step, bias_heads, bias_step, id_step, mask_b, mask_h, mask_q, mask_k,
    BIAS: tl.constexpr, POSITION: tl.constexpr, MASK: tl.constexpr, IDS: tl.constexpr, FLOOR: tl.constexpr,
    PICKS: tl.constexpr, RIGHT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr, VALUE: tl.constexpr, REAL: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Softmax with its log-sum-exp; or the value of the largest score instead, the leftmost among equals or the rightmost."""
    head, batch = tl.program_id(0) % H, tl.program_id(0) // H
    group = batch * G + head * G // H
    rows = tl.program_id(1) * M + tl.arange(0, M)
    q = load_rows(q_ptr, batch * H + head, rows, Q, D, WIDE)
    first, last = interval(lo_ptr, hi_ptr, batch, rows, Q, row_step)
    start, stop = tl.min(first, 0) // N * N, tl.max(last, 0)
    alpha = tl.load(alpha_ptr + head).to(REAL)

    most = tl.full([M], float("-inf"), REAL)
    total = tl.zeros([M], REAL)
    index = tl.full([M], -1, tl.int32)
    met = tl.zeros([M], tl.int32)
    bad = tl.zeros([M], tl.int32)
    out = tl.zeros([M, VALUE], REAL)
    for at in range(start, stop, N):
        columns = at + tl.arange(0, N)
        k = load_rows(k_ptr, group, columns, K, D, WIDE)
        s, ok = scores(
            q, k, rows, columns, first, last, batch, head, bias, position, mask, ids, floor,
            scale, Q, K, H, offset, bias_heads, bias_step, id_step, mask_b, mask_h, mask_q, mask_k,
            BIAS, POSITION, MASK, IDS, FLOOR, WIDEN,
        )  # fmt: skip
        bad = bad | tl.max((ok & (s != s)).to(tl.int32), 1)
        met = met | tl.max(ok.to(tl.int32), 1)
        s = tl.where(s == s, s, float("-inf"))
        here = tl.max(s, 1)
        largest = ok & (s == here[:, None])
        if RIGHT:
            place = tl.max(tl.where(largest, columns[None, :], -1), 1)
            index = tl.where((here >= most) & (place >= 0), place, index)
        else:
            place = tl.min(tl.where(largest, columns[None, :], FAR), 1)
            index = tl.where((here > most) & (place < FAR), place, index)
        now = tl.maximum(most, here)
        safe = tl.where(now == float("-inf"), 0.0, now)
        fade = tl.exp((most - safe) * alpha)
        p = tl.exp((s - safe[:, None]) * alpha)
        total = total * fade + tl.sum(p, 1)
        if not PICKS:
            v = load_rows(v_ptr, group, columns, K, E, VALUE)
            out = out * fade[:, None] + dot(p.to(v.dtype), v, WIDEN)
        most = now
    bad = bad | ((met != 0) & ((most == float("-inf")) | (most == float("inf")))).to(tl.int32)
    works = (met != 0) & (bad == 0)
    index = tl.where(works, index, -1)
    if PICKS:
        d = tl.arange(0, VALUE)
        there = works[:, None] & (d < E)[None, :]
        picked = (group.to(tl.int64) * K + index)[:, None] * E + d[None, :]
        out = tl.load(v_ptr + picked, mask=there, other=0.0).to(REAL)
    else:
        out = tl.where(works[:, None], out / tl.where(works, total, 1.0)[:, None], 0.0)
    out = tl.where((bad != 0)[:, None], float("nan"), out)
    store_rows(out_ptr, out, batch * H + head, rows, Q, E, VALUE)
    at = (batch * H + head).to(tl.int64) * Q + rows
    tl.store(most_ptr + at, tl.where(bad != 0, float("nan"), tl.where(works, most, 0.0)), mask=rows < Q)
    # exp(s − ∞) = 0: a row that met nothing has no weights in backward either.
    tl.store(tau_ptr + at, tl.where(works, tl.log(tl.where(works, total, 1.0)), float("inf")), mask=rows < Q)
    tl.store(index_ptr + at, index, mask=rows < Q)


@triton.jit
def backward_rows(
    q_ptr, k_ptr, v_ptr, grad_ptr, most_ptr, tau_ptr, total_ptr, alpha_ptr, lo_ptr, hi_ptr,
    dq_ptr, mean_ptr, dalpha_ptr,
    bias, position, mask, ids, floor,
    scale, Q, K, H, G, D, E, offset, row_step, bias_heads, bias_step, id_step, mask_b, mask_h, mask_q, mask_k,
    BIAS: tl.constexpr, POSITION: tl.constexpr, MASK: tl.constexpr, IDS: tl.constexpr, FLOOR: tl.constexpr,
    KIND: tl.constexpr, LEARNED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr, VALUE: tl.constexpr, REAL: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """The gradient of q, the mean of dp that the gradient of k needs too, and each row's share of α's gradient."""
    head, batch = tl.program_id(0) % H, tl.program_id(0) // H
    group = batch * G + head * G // H
    rows = tl.program_id(1) * M + tl.arange(0, M)
    q = load_rows(q_ptr, batch * H + head, rows, Q, D, WIDE)
    grad = load_rows(grad_ptr, batch * H + head, rows, Q, E, VALUE)
    first, last = interval(lo_ptr, hi_ptr, batch, rows, Q, row_step)
    start, stop = tl.min(first, 0) // N * N, tl.max(last, 0)
    alpha = tl.load(alpha_ptr + head).to(REAL)
    most = load_row(most_ptr, batch * H + head, rows, Q, 0.0)
    tau = load_row(tau_ptr, batch * H + head, rows, Q, 0.0)
    total = load_row(total_ptr, batch * H + head, rows, Q, 1.0)

    weight = tl.zeros([M], REAL)
    mean = tl.zeros([M], REAL)
    blend, skew, entropy = weight, weight, weight
    for at in range(start, stop, N):
        columns = at + tl.arange(0, N)
        k = load_rows(k_ptr, group, columns, K, D, WIDE)
        s, _ = scores(
            q, k, rows, columns, first, last, batch, head, bias, position, mask, ids, floor,
            scale, Q, K, H, offset, bias_heads, bias_step, id_step, mask_b, mask_h, mask_q, mask_k,
            BIAS, POSITION, MASK, IDS, FLOOR, WIDEN,
        )  # fmt: skip
        p, w = weigh(s, most, tau, total, alpha, KIND)
        if tl.max(tl.max(w, 1), 0) > 0:
            v = load_rows(v_ptr, group, columns, K, E, VALUE)
            dp = dot(grad, tl.trans(v), WIDEN)
            weight += tl.sum(w, 1)
            mean += tl.sum(w * dp, 1)
            if LEARNED:
                plogp = p * tl.log(tl.where(p > 0, p, 1.0))
                blend += tl.sum(p * dp, 1)
                skew += tl.sum(plogp * dp, 1)
                entropy += tl.sum(plogp, 1)
    mean = tl.where(weight > 0, mean / tl.where(weight > 0, weight, 1.0), 0.0)
    row_at = (batch * H + head).to(tl.int64) * Q + rows
    tl.store(mean_ptr + row_at, mean, mask=rows < Q)
    if LEARNED:
        power = alpha - 1
        tl.store(dalpha_ptr + row_at, (blend - mean) / (power * power) - (skew - mean * entropy) / power, mask=rows < Q)

    dq = tl.zeros([M, WIDE], REAL)
    for at in range(start, stop, N):
        columns = at + tl.arange(0, N)
        k = load_rows(k_ptr, group, columns, K, D, WIDE)
        s, _ = scores(
            q, k, rows, columns, first, last, batch, head, bias, position, mask, ids, floor,
            scale, Q, K, H, offset, bias_heads, bias_step, id_step, mask_b, mask_h, mask_q, mask_k,
            BIAS, POSITION, MASK, IDS, FLOOR, WIDEN,
        )  # fmt: skip
        p, w = weigh(s, most, tau, total, alpha, KIND)
        if tl.max(tl.max(w, 1), 0) > 0:
            v = load_rows(v_ptr, group, columns, K, E, VALUE)
            ds = w * (dot(grad, tl.trans(v), WIDEN) - mean[:, None])
            dq += dot(ds.to(k.dtype), k, WIDEN)
    store_rows(dq_ptr, dq * scale, batch * H + head, rows, Q, D, WIDE)


@triton.jit
def backward_keys(
    q_ptr, k_ptr, v_ptr, grad_ptr, most_ptr, tau_ptr, total_ptr, alpha_ptr, lo_ptr, hi_ptr,
    mean_ptr, dk_ptr, dv_ptr, dbias_ptr,
    bias, position, mask, ids, floor,
    scale, Q, K, H, G, D, E, offset, row_step, bias_heads, bias_step, id_step, mask_b, mask_h, mask_q, mask_k,
    BIAS: tl.constexpr, POSITION: tl.constexpr, MASK: tl.constexpr, IDS: tl.constexpr, FLOOR: tl.constexpr,
    KIND: tl.constexpr, PICKS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr, VALUE: tl.constexpr, REAL: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """The gradients of k, v and the bias, for one block of keys of one key head, over all rows of its query heads."""
    group, batch = tl.program_id(0) % G, tl.program_id(0) // G
    columns = tl.program_id(1) * N + tl.arange(0, N)
    k = load_rows(k_ptr, batch * G + group, columns, K, D, WIDE)
    v = load_rows(v_ptr, batch * G + group, columns, K, E, VALUE)
    dk = tl.zeros([N, WIDE], REAL)
    dv = tl.zeros([N, VALUE], REAL)
    each = H // G
    for member in range(each):
        head = group * each + member
        alpha = tl.load(alpha_ptr + head).to(REAL)
        db = tl.zeros([N], REAL)
        for at in range(0, Q, M):
            rows = at + tl.arange(0, M)
            first, last = interval(lo_ptr, hi_ptr, batch, rows, Q, row_step)
            if (tl.min(first, 0) < tl.program_id(1) * N + N) & (tl.max(last, 0) > tl.program_id(1) * N):
                q = load_rows(q_ptr, batch * H + head, rows, Q, D, WIDE)
                s, _ = scores(
                    q, k, rows, columns, first, last, batch, head, bias, position, mask, ids, floor,
                    scale, Q, K, H, offset, bias_heads, bias_step, id_step, mask_b, mask_h, mask_q, mask_k,
                    BIAS, POSITION, MASK, IDS, FLOOR, WIDEN,
                )  # fmt: skip
                most = load_row(most_ptr, batch * H + head, rows, Q, 0.0)
                tau = load_row(tau_ptr, batch * H + head, rows, Q, 0.0)
                total = load_row(total_ptr, batch * H + head, rows, Q, 1.0)
                p, w = weigh(s, most, tau, total, alpha, KIND)
                if tl.max(tl.max(w, 1), 0) > 0:
                    grad = load_rows(grad_ptr, batch * H + head, rows, Q, E, VALUE)
                    mean = load_row(mean_ptr, batch * H + head, rows, Q, 0.0)
                    ds = w * (dot(grad, tl.trans(v), WIDEN) - mean[:, None])
                    dk += dot(tl.trans(ds.to(q.dtype)), q, WIDEN)
                    if not PICKS:
                        dv += dot(tl.trans(p.to(grad.dtype)), grad, WIDEN)
                    if BIAS:
                        db += tl.sum(ds, 0)
        if BIAS:
            tl.store(dbias_ptr + (batch * H + head).to(tl.int64) * K + columns, db, mask=columns < K)
    store_rows(dk_ptr, dk * scale, batch * G + group, columns, K, D, WIDE)
    if not PICKS:
        store_rows(dv_ptr, dv, batch * G + group, columns, K, E, VALUE)


@triton.jit
def topk_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, most_ptr, index_ptr, weight_ptr, lo_ptr, hi_ptr,
    bias, position, mask, ids, floor,
    scale, Q, K, H, G, D, E, offset, row_step, bias_heads, bias_step, id_step, mask_b, mask_h, mask_q, mask_k,
    BIAS: tl.constexpr, POSITION: tl.constexpr, MASK: tl.constexpr, IDS: tl.constexpr, FLOOR: tl.constexpr,
    KEEP: tl.constexpr, ROOM: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr, VALUE: tl.constexpr, REAL: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """The KEEP largest scores of a row, in ROOM ≥ KEEP places (a power of two), and softmax among them."""
    head, batch = tl.program_id(0) % H, tl.program_id(0) // H
    group = batch * G + head * G // H
    rows = tl.program_id(1) * M + tl.arange(0, M)
    q = load_rows(q_ptr, batch * H + head, rows, Q, D, WIDE)
    first, last = interval(lo_ptr, hi_ptr, batch, rows, Q, row_step)
    start, stop = tl.min(first, 0) // N * N, tl.max(last, 0)

    place = tl.arange(0, ROOM)
    # A place beyond KEEP is never the worst one, so nothing is ever put there.
    held = tl.zeros([M, ROOM], REAL) + tl.where(place < KEEP, float("-inf"), float("inf"))[None, :]
    index = tl.zeros([M, ROOM], tl.int32) + (place + FAR)[None, :]
    met = tl.zeros([M], tl.int32)
    bad = tl.zeros([M], tl.int32)
    for at in range(start, stop, N):
        columns = at + tl.arange(0, N)
        k = load_rows(k_ptr, group, columns, K, D, WIDE)
        s, ok = scores(
            q, k, rows, columns, first, last, batch, head, bias, position, mask, ids, floor,
            scale, Q, K, H, offset, bias_heads, bias_step, id_step, mask_b, mask_h, mask_q, mask_k,
            BIAS, POSITION, MASK, IDS, FLOOR, WIDEN,
        )  # fmt: skip
        bad = bad | tl.max((ok & ((s != s) | (s == float("inf")))).to(tl.int32), 1)
        met = met | tl.max(ok.to(tl.int32), 1)
        s = tl.where(s == s, s, float("-inf"))
        going = 1
        while going > 0:
            here = tl.max(s, 1)
            who = tl.min(tl.where(s == here[:, None], columns[None, :], FAR), 1)
            worst = tl.min(held, 1)
            # Blocks come in order, so an equal score held already stands further left, and stays.
            enters = (here > worst) & (here < float("inf"))
            latest = tl.max(tl.where(held == worst[:, None], index, -1), 1)
            out_goes = enters[:, None] & (held == worst[:, None]) & (index == latest[:, None])
            held = tl.where(out_goes, here[:, None], held)
            index = tl.where(out_goes, who[:, None], index)
            s = tl.where(enters[:, None] & (columns[None, :] == who[:, None]), float("-inf"), s)
            going = tl.max(enters.to(tl.int32), 0)
    real = (place < KEEP)[None, :] & (held > float("-inf"))
    most = tl.max(tl.where(real, held, float("-inf")), 1)
    bad = bad | ((met != 0) & (most == float("-inf"))).to(tl.int32)
    works = (met != 0) & (bad == 0)
    most = tl.where(works, most, 0.0)
    p = tl.where(real & works[:, None], tl.exp(tl.where(real, held, 0.0) - most[:, None]), 0.0)
    total = tl.sum(p, 1)
    p = p / tl.where(works, total, 1.0)[:, None]
    index = tl.where(p > 0, index, 0)

    d = tl.arange(0, VALUE)
    out = tl.zeros([M, VALUE], REAL)
    at_row = (batch * H + head).to(tl.int64) * Q + rows
    for n in range(KEEP):
        mine = tl.sum(tl.where(place[None, :] == n, index, 0), 1)
        share = tl.sum(tl.where(place[None, :] == n, p, 0.0), 1)
        there = ((share > 0) & (rows < Q))[:, None] & (d < E)[None, :]
        v = tl.load(v_ptr + (group.to(tl.int64) * K + mine)[:, None] * E + d[None, :], mask=there, other=0.0)
        out += share[:, None] * v.to(REAL)
        tl.store(index_ptr + at_row * KEEP + n, mine, mask=rows < Q)
        tl.store(weight_ptr + at_row * KEEP + n, share, mask=rows < Q)
    out = tl.where((bad != 0)[:, None], float("nan"), out)
    store_rows(out_ptr, out, batch * H + head, rows, Q, E, VALUE)
    tl.store(most_ptr + at_row, tl.where(bad != 0, float("nan"), most), mask=rows < Q)


@triton.jit
def topk_backward(
    q_ptr, k_ptr, v_ptr, grad_ptr, index_ptr, weight_ptr, dq_ptr, dk_ptr, dv_ptr, dbias_ptr,
    scale, Q, K, H, G, D, E,
    BIAS: tl.constexpr, KEEP: tl.constexpr,
    M: tl.constexpr, WIDE: tl.constexpr, VALUE: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """Gradients through the keys that were kept, added where they stand: dk, dv and the bias begin as zeros."""
    head, batch = tl.program_id(0) % H, tl.program_id(0) // H
    group = (batch * G + head * G // H).to(tl.int64)
    rows = tl.program_id(1) * M + tl.arange(0, M)
    q = load_rows(q_ptr, batch * H + head, rows, Q, D, WIDE).to(REAL)
    grad = load_rows(grad_ptr, batch * H + head, rows, Q, E, VALUE).to(REAL)
    d, wide = tl.arange(0, VALUE), tl.arange(0, WIDE)
    at_row = (batch * H + head).to(tl.int64) * Q + rows
    mean = tl.zeros([M], REAL)
    for n in range(KEEP):
        share = tl.load(weight_ptr + at_row * KEEP + n, mask=rows < Q, other=0.0)
        mine = tl.load(index_ptr + at_row * KEEP + n, mask=rows < Q, other=0)
        there = (share > 0)[:, None] & (d < E)[None, :]
        v = tl.load(v_ptr + (group * K + mine)[:, None] * E + d[None, :], mask=there, other=0.0).to(REAL)
        mean += share * tl.sum(v * grad, 1)
    dq = tl.zeros([M, WIDE], REAL)
    for n in range(KEEP):
        share = tl.load(weight_ptr + at_row * KEEP + n, mask=rows < Q, other=0.0)
        mine = tl.load(index_ptr + at_row * KEEP + n, mask=rows < Q, other=0)
        there = (share > 0)[:, None] & (d < E)[None, :]
        near = (share > 0)[:, None] & (wide < D)[None, :]
        value_at = (group * K + mine)[:, None] * E + d[None, :]
        key_at = (group * K + mine)[:, None] * D + wide[None, :]
        v = tl.load(v_ptr + value_at, mask=there, other=0.0).to(REAL)
        k = tl.load(k_ptr + key_at, mask=near, other=0.0).to(REAL)
        ds = share * (tl.sum(v * grad, 1) - mean)
        dq += ds[:, None] * k * scale
        tl.atomic_add(dk_ptr + key_at, ds[:, None] * q * scale, mask=near)
        tl.atomic_add(dv_ptr + value_at, share[:, None] * grad, mask=there)
        if BIAS:
            tl.atomic_add(dbias_ptr + (batch * H + head).to(tl.int64) * K + mine, ds, mask=share > 0)
    store_rows(dq_ptr, dq, batch * H + head, rows, Q, D, WIDE)
