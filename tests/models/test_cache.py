"""A static cache reads like a growing one, and two ways on from it do not disturb each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from regard import Causal
from regard.errors import ShapeError
from regard.models.decode.cache import StaticCache, static_caches
from regard.nn import Attention, Cache

SHAPE = (2, 3, 5)


def piece(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*SHAPE[:2], n, SHAPE[2], generator=g), torch.randn(*SHAPE[:2], n, SHAPE[2], generator=g)


def test_static_cache_reads_what_a_growing_cache_reads():
    static, growing = StaticCache(capacity=16), Cache()
    for seed, n in enumerate((4, 1, 7, 1)):
        k, v = piece(n, seed)
        static, growing = static.grown(k, v), growing.grown(k, v)
        assert len(static) == len(growing)
        assert torch.equal(static.keys(), growing.keys())
        assert torch.equal(static.values(), growing.values())


def test_room_is_taken_once_while_it_suffices():
    cache = StaticCache(capacity=8).grown(*piece(3, 0))
    room = cache.k
    assert room is not None
    assert cache.grown(*piece(5, 1)).k is room


def test_cache_that_outgrows_its_room_keeps_what_it_held():
    cache = StaticCache(capacity=2).grown(*piece(2, 0))
    longer = cache.grown(*piece(3, 1))
    assert longer.capacity >= 5
    assert torch.equal(longer.keys()[:, :, :2], piece(2, 0)[0])
    assert torch.equal(longer.keys()[:, :, 2:], piece(3, 1)[0])


def test_two_ways_on_from_one_cache_stay_apart():
    start = StaticCache(capacity=8).grown(*piece(2, 0))
    left = start.grown(*piece(1, 1))
    right = start.grown(*piece(1, 2))
    assert torch.equal(left.keys()[:, :, 2:], piece(1, 1)[0])
    assert torch.equal(right.keys()[:, :, 2:], piece(1, 2)[0])
    assert len(start) == 2


def test_rows_of_a_cache_are_copies():
    cache = StaticCache(capacity=8).grown(*piece(2, 0))
    one = cache.rows(torch.tensor([1]))
    assert torch.equal(one.keys(), cache.keys()[1:])
    one.grown(piece(1, 3)[0][1:], piece(1, 3)[1][1:])
    assert len(cache.grown(*piece(1, 4))) == 3


@pytest.mark.parametrize("spec", ["dot | softmax | rope", "cosine | entmax(1.5) | alibi", "dot | selective", "dot | monotonic"])
@torch.no_grad()
def test_attention_step_takes_a_static_cache_unchanged(spec: str):
    torch.manual_seed(0)
    attention = Attention(16, 4, spec, key_heads=2)
    x = torch.randn(2, 9, 16)
    whole = attention(x, allow=Causal())
    (cache,) = static_caches(1, 4)
    outs: list[torch.Tensor] = []
    for part in x.split([4, 1, 3, 1], dim=1):
        out, cache = attention.step(part, cache, allow=Causal())
        outs.append(out)
    assert isinstance(cache, StaticCache)
    torch.testing.assert_close(torch.cat(outs, 1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 3, 1, 5), (2, 1, 1, 5), (2, 3, 1, 1), (2, 3, 1, 7), (4, 3, 1, 5)])
@pytest.mark.parametrize("capacity", [8, 2])
def test_cache_refuses_rows_heads_or_widths_that_are_not_its_own(shape: tuple[int, int, int, int], capacity: int):
    cache = StaticCache(capacity=capacity).grown(*piece(2, 0))
    good = piece(1, 1)[0]
    for k, v in ((torch.ones(shape), torch.ones(shape)), (torch.ones(shape), good), (good, torch.ones(shape))):
        with pytest.raises(ShapeError, match="takes"):
            cache.grown(k, v)
    assert torch.equal(cache.keys(), piece(2, 0)[0])


def test_cache_refuses_more_values_than_keys():
    cache = StaticCache(capacity=8).grown(*piece(2, 0))
    with pytest.raises(ShapeError, match="takes"):
        cache.grown(piece(1, 1)[0], piece(2, 1)[1])


def test_threads_that_go_on_from_one_cache_stay_apart():
    start = StaticCache(capacity=64).grown(*piece(2, 0))
    with ThreadPoolExecutor(8) as pool:
        ways = list(pool.map(lambda seed: start.grown(*piece(3, seed)), range(1, 65)))
    for seed, way in enumerate(ways, 1):
        assert torch.equal(way.keys()[:, :, 2:], piece(3, seed)[0])
        assert torch.equal(way.keys()[:, :, :2], piece(2, 0)[0])
    assert sum(way.k is start.k for way in ways) == 1
