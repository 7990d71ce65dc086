"""Small problems are mostly made of what they have in common with the last one: masks and bands are kept, and stay as they were."""

import subprocess
import sys
import threading
from dataclasses import dataclass, field

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from regard import Allow, Causal, Window, attend
from regard.attention import allow, band
from regard.attention.reference import attend_plainly
from regard.position import Position
from regard.values import keepable

RULES = [Causal(), Window(3), ~Window(1), Causal() & Window(4), Causal() & ~Window(2)]
SPECS = ["dot | softmax | alibi", "gd", "hard", "entmax(1.5)", "sparsemax | alibi", "euclidean"]


@pytest.fixture(autouse=True)
def nothing_kept():
    allow._kept_tile.cache_clear()
    band._kept.cache_clear()


def inputs(Q: int = 6, K: int = 6) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(Q * 100 + K)
    return [torch.randn(1, 2, n, 4, generator=draw, dtype=torch.float64) for n in (Q, K, K)]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("rule", RULES)
def test_the_second_call_gives_what_the_first_gave(spec, rule):
    for Q, K in ((6, 6), (1, 6), (6, 6), (3, 6), (1, 6)):
        q, k, v = inputs(Q, K)
        wanted = attend_plainly(q, k, v, spec, allow=rule).output
        torch.testing.assert_close(attend(q, k, v, spec, allow=rule), wanted, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(
            attend(q.float(), k.float(), v.float(), spec, allow=rule).double(), wanted, rtol=1e-4, atol=1e-4
        )


def test_equal_rules_share_a_mask_and_others_do_not():
    t = allow.Tile(0, 4, 0, 5, 1, torch.device("cpu"))
    assert allow.allowed_in(Causal() & Window(2), t) is allow.allowed_in(Causal() & Window(2), t)
    assert not torch.equal(allow.allowed_in(Window(2), t), allow.allowed_in(Window(3), t))
    assert not torch.equal(
        allow.allowed_in(Causal(), t), allow.allowed_in(Causal(), allow.Tile(0, 4, 0, 5, 0, torch.device("cpu")))
    )


@pytest.mark.parametrize("spec", SPECS)
def test_what_is_kept_is_never_written_to(spec):
    q, k, v = inputs()
    attend(q, k, v, spec, allow=~Window(1))
    t = allow.Tile(0, 6, 0, 6, 0, torch.device("cpu"))
    mask = allow.allowed_in(~Window(1), t)
    version = mask._version
    for _ in range(3):
        attend(*(x.clone().requires_grad_() for x in (q, k, v)), spec, allow=~Window(1)).sum().backward()
    assert mask._version == version
    assert torch.equal(mask[0, 0], ~torch.eye(6, dtype=torch.bool))


@pytest.mark.parametrize("spec", SPECS)
def test_a_call_without_gradients_first_leaves_nothing_that_cannot_be_trained_with(spec):
    q, k, v = inputs()
    with torch.inference_mode():
        attend(q, k, v, spec, allow=~Window(1))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    attend(*leaves, spec, allow=~Window(1)).sum().backward()
    assert leaves[2].grad is not None


def test_what_is_traced_keeps_nothing():
    q, k, v = inputs()
    with FakeTensorMode() as mode:
        assert not keepable()
        fake = [mode.from_tensor(x) for x in (q, k, v)]
        attend(*fake, "dot | softmax | alibi", allow=~Window(1))
    assert allow._kept_tile.cache_info().currsize == band._kept.cache_info().currsize == 0
    torch.func.vmap(lambda a: attend(a, a, a, "hard", allow=~Window(1)))(q.unsqueeze(0))
    wanted = attend_plainly(q, k, v, "dot | softmax | alibi", allow=~Window(1)).output
    torch.testing.assert_close(attend(q, k, v, "dot | softmax | alibi", allow=~Window(1)), wanted)


@dataclass(frozen=True)
class Ramp(Position):
    """A bias that somebody wrote, whose numbers lie in a list."""

    name = "ramp"
    biases = True
    shift_invariant = True
    heights: list[float] = field(default_factory=lambda: [0.0, 1.0, 4.0])

    def bias(self, q_at: torch.Tensor, k_at: torch.Tensor, like: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
        far = (q_at.unsqueeze(-1) - k_at).abs().clamp_max(2)
        return -torch.tensor(self.heights, dtype=like.dtype)[far].expand(like.shape[1], -1, -1)


@dataclass(frozen=True)
class Steps(Allow):
    """A rule that somebody wrote: how far back a query may look, in a list."""

    back: list[int]

    def tile(self, t: allow.Tile) -> torch.Tensor:
        return torch.isin(t.q_at() - t.k_at(), torch.tensor(self.back))[None, None]

    @property
    def by_distance(self) -> bool:
        return True


def test_parts_that_cannot_be_hashed_are_asked_each_time():
    q, k, v = inputs()
    for rule in (Causal(), Steps([0, 2, 3])):
        for heights in ([0.0, 1.0, 4.0], [0.0, -1.0, 2.0]):
            found = attend(q, k, v, position=Ramp(heights), allow=rule)
            wanted = attend_plainly(q, k, v, position=Ramp(heights), allow=rule).output
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    assert torch.equal(attend(q, k, v, "hard", allow=Steps([1])), attend_plainly(q, k, v, "hard", allow=Steps([1])).output)


def test_threads_share_what_is_kept():
    q, k, v = inputs()
    wanted, wrong = {r: attend_plainly(q, k, v, "dot | softmax | alibi", allow=r).output for r in RULES}, []

    def call() -> None:
        for _ in range(10):
            for r in RULES:
                if not torch.allclose(attend(q, k, v, "dot | softmax | alibi", allow=r), wanted[r]):
                    wrong.append(r)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_the_first_call_does_not_import_torchs_compiler():
    code = "import sys, torch, regard; q = torch.ones(1, 1, 2, 2); regard.attend(q, q, q, 'sparsemax'); print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
