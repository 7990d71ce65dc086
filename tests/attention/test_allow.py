"""Rules against dense tensors that are made another way, pair by pair."""

from collections.abc import Callable

import pytest
import torch
from helpers import F64, assert_agree, gradients, random
from hypothesis import given
from hypothesis import strategies as st

from regard import Allow, Causal, Document, Padding, Prefix, State, Window, attend, inspect
from regard.attention.allow import Tile, rule

B = 2


def dense(Q: int, K: int, meets: Callable[[int, int, int], bool]) -> torch.Tensor:
    """meets(batch row, place of the query, place of the key)."""
    offset = K - Q
    return torch.tensor([[[[meets(b, i + offset, j) for j in range(K)] for i in range(Q)]] for b in range(B)])


@st.composite
def rules(draw, Q: int, K: int, depth: int = 3) -> tuple[Allow, torch.Tensor]:
    """A rule, and what it means as a tensor (B, 1, Q, K)."""
    kind = draw(st.integers(0, 9 if depth else 5))
    if kind == 0:
        return Causal(), dense(Q, K, lambda b, i, j: j <= i)
    if kind == 1:
        keys, ahead = draw(st.integers(1, K + 1)), draw(st.integers(0, 3))
        return Window(keys, ahead), dense(Q, K, lambda b, i, j: i - keys < j <= i + ahead)
    if kind == 2:
        n = draw(st.integers(0, K + 1))
        return Prefix(n), dense(Q, K, lambda b, i, j: j < n)
    if kind == 3:
        lengths = draw(st.lists(st.integers(0, K), min_size=B, max_size=B))
        side = draw(st.sampled_from(["right", "left"]))
        real = (lambda b, i, j: j < lengths[b]) if side == "right" else (lambda b, i, j: j >= K - lengths[b])
        return Padding(torch.tensor(lengths), side), dense(Q, K, real)
    if kind == 4 and Q <= K:
        ids = draw(st.lists(st.lists(st.integers(0, 2), min_size=K, max_size=K), min_size=B, max_size=B))
        return Document(torch.tensor(ids)), dense(Q, K, lambda b, i, j: ids[b][i] == ids[b][j])
    if kind <= 5:
        seed = draw(st.integers(0, 99))
        mask = torch.rand(B, 1, Q, K, generator=torch.Generator().manual_seed(seed)) < 0.5
        return rule(mask), mask
    a, a_dense = draw(rules(Q, K, depth - 1))
    if kind == 6:
        return ~a, ~a_dense
    b, b_dense = draw(rules(Q, K, depth - 1))
    return (a & b, a_dense & b_dense) if kind == 7 else (a | b, a_dense | b_dense)


@st.composite
def sized_rules(draw) -> tuple[Allow, torch.Tensor]:
    Q, K = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    return draw(rules(Q, K))


@given(sized_rules())
def test_any_composition_of_rules_is_its_dense_tensor(made):
    allow, expected = made
    Q, K = expected.shape[-2:]
    bound = allow.bind(K)
    found = bound.tile(Tile(0, Q, 0, K, K - Q, torch.device("cpu"))).expand(B, 1, Q, K)
    assert torch.equal(found, expected)


@given(sized_rules(), st.data())
def test_a_span_never_hides_an_allowed_pair_and_never_promises_a_forbidden_one(made, data):
    allow, expected = made
    Q, K = expected.shape[-2:]
    start = data.draw(st.integers(0, Q - 1))
    stop = data.draw(st.integers(start + 1, Q))
    span = allow.bind(K).span(start + K - Q, stop - 1 + K - Q, K).clip(K)
    rows = expected[:, :, start:stop]
    assert not rows[..., : span.lo].any()
    assert not rows[..., span.hi :].any()
    assert rows[..., span.sure_lo : span.sure_hi].all()


@given(sized_rules(), st.sampled_from(["dot", "euclidean", "sparsemax", "alibi", "selective", "hard", "monotonic"]))
def test_a_rule_attends_as_its_dense_tensor(made, line):
    allow, expected = made
    Q, K = expected.shape[-2:]
    torch.manual_seed(0)
    q, k, v = (x.requires_grad_() for x in (random(B, 2, Q, 4), random(B, 1, K, 4), random(B, 1, K, 3)))
    by_rule, by_mask = (attend(q, k, v, line, allow=a) for a in (allow, expected))
    assert_agree(by_rule, by_mask)
    assert not by_rule[(~expected.any(-1)).expand(B, 2, Q)].any()
    for a, b in zip(gradients(by_rule, [q, k, v]), gradients(by_mask, [q, k, v]), strict=True):
        assert_agree(a, b)


def counted(allow, Q=7, K=7) -> list[int]:
    q, k = torch.zeros(1, 1, Q, 2, dtype=F64), torch.zeros(1, 1, K, 2, dtype=F64)
    return inspect(q, k, k, allow=allow).support.flatten().tolist()


def test_window_of_three_keys_counts_three():
    assert counted(Causal() & Window(3)) == [1, 2, 3, 3, 3, 3, 3]
    assert counted(Window(3)) == [1, 2, 3, 3, 3, 3, 3]
    assert counted(Window(1)) == [1] * 7
    assert counted(Window(3, ahead=2)) == [3, 4, 5, 5, 5, 4, 3]


def test_the_last_query_meets_the_last_key():
    assert counted(Causal(), Q=3, K=7) == [5, 6, 7]
    assert counted(Causal(), Q=7, K=3) == [0, 0, 0, 0, 1, 2, 3]


def test_a_prefix_is_seen_by_everyone():
    assert counted(Causal() | Prefix(4)) == [4, 4, 4, 4, 5, 6, 7]


def test_offset_says_where_the_first_query_stands():
    q, k, v = random(1, 2, 3, 4), random(1, 2, 7, 4), random(1, 2, 7, 4)
    for line in ("dot", "euclidean", "sparsemax", "rope", "alibi"):
        first = attend(q, k, v, line, allow=Causal(), state=State(offset=0))
        assert_agree(first, attend(q, k[:, :, :3], v[:, :, :3], line, allow=Causal()))


def test_documents_do_not_meet():
    q, k, v = (random(1, 2, 7, 4) for _ in range(3))
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    out = attend(q, k, v, allow=Causal() & Document(ids))
    assert_agree(out[:, :, 3:], attend(*(x[:, :, 3:] for x in (q, k, v)), allow=Causal()))


@pytest.mark.parametrize("shape", [(7, 5), (1, 5), (7, 1), (2, 1, 5), (1, 1, 7, 5), (2, 1, 1, 5), (2, 3, 7, 5)])
def test_masks_broadcast(shape):
    q, k, v = random(2, 3, 7, 4), random(2, 3, 5, 4), random(2, 3, 5, 4)
    mask = torch.rand(shape) < 0.6
    if len(shape) == 3:
        mask, shape = torch.rand(3, 1, 5) < 0.6, (3, 1, 5)
    wide = mask.expand(2, 3, 7, 5)
    for line in ("dot", "sparsemax"):
        assert_agree(attend(q, k, v, line, allow=mask), attend(q, k, v, line, allow=wide))
    assert_agree(attend(q, k, v, allow=mask & Causal()), attend(q, k, v, allow=Causal() & mask))
