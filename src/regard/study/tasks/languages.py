"""Languages over two letters, 0 and 1: who is a member, strings to learn from, and recognisers made of hard attention.

A recogniser is a program of masked unique hard attention (Yang, Chiang and Angluin 2024): every place holds bits, `look` sends each place to the first
or the last place before (or after) it where a bit is set, and reads the bits there; all else is done at each place by itself. `look` is the
library's operator with `hard`; ties between equal scores decide which place it is. Such programs recognise exactly the star-free languages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...attention.allow import Causal, Window
from ...attention.operator import attend

Side = Literal["left", "right"]
BEFORE, AFTER = Causal() & ~Window(1), ~Causal()
"""Places before a place, and after it, without itself."""


class Look:
    """The one step at which places meet; `swapped` breaks ties on the wrong side."""

    def __init__(self, swapped: bool = False) -> None:
        self.swapped = swapped

    def __call__(self, where: Tensor, what: Tensor, tie: Side, after: bool = False) -> tuple[Tensor, Tensor]:
        """For each place the bit `what` (B, N) of the outermost place where `where` is set, and whether there is one."""
        tie = tie if not self.swapped else "right" if tie == "left" else "left"
        k = where.float()[:, None, :, None]
        v = torch.stack([what.float(), where.float()], -1).unsqueeze(1)
        out = attend(torch.ones_like(k), k, v, f"dot(scale=1) | hard(tie={tie})", allow=AFTER if after else BEFORE)[:, 0]
        there = out[..., 1] > 0
        return (out[..., 0] > 0) & there, there

    def ever(self, bit: Tensor) -> Tensor:
        """(B): the bit is set at some place, as the last place sees it."""
        return bit[:, -1] | self(bit, bit, "right")[1][:, -1]


@dataclass(frozen=True)
class Language:
    """Strings x (B, N) of 0 and 1."""

    prefixes: Callable[[Tensor], Tensor]
    """(B, N): whether the string up to each place is a member."""
    sample: Callable[[torch.Generator, int, int], Tensor]
    """Strings of which many prefixes are members and many are not."""
    recognise: Callable[[Tensor, Look], Tensor] | None = None
    """The program, or None where there is none."""
    star_free: bool = True


def _coin(g: torch.Generator, rows: int, length: int) -> Tensor:
    return torch.randint(2, (rows, length), generator=g)


def _flipped(x: Tensor, g: torch.Generator) -> Tensor:
    """Every second string with one letter changed."""
    at = torch.randint(x.shape[1], (len(x), 1), generator=g)
    change = torch.zeros_like(x).scatter_(1, at, 1) * (torch.arange(len(x)) % 2).unsqueeze(1)
    return x ^ change


def _in_order(g: torch.Generator, rows: int, length: int) -> Tensor:
    """Zeros and then ones, the first one anywhere within twice the length."""
    begin = torch.randint(2 * length, (rows, 1), generator=g)
    return _flipped((torch.arange(length) >= begin).long(), g)


def _sorted_prefixes(x: Tensor) -> Tensor:
    seen_one = x.cummax(1).values
    return ((x == 0) & (seen_one == 1)).cumsum(1) == 0


def _sorted(x: Tensor, look: Look) -> Tensor:
    one = x == 1
    return ~look.ever(~one & look(one, one, "right")[1])


def _turned(g: torch.Generator, rows: int, length: int) -> Tensor:
    """Ones and then zeros, so that 01 is rare."""
    return 1 - _in_order(g, rows, length)


def _contains(x: Tensor, look: Look) -> Tensor:
    one = x == 1
    before, there = look(torch.ones_like(one), one, "right")
    return look.ever(one & there & ~before)


def _contains_prefixes(x: Tensor) -> Tensor:
    hit = torch.zeros_like(x, dtype=torch.bool)
    hit[:, 1:] = (x[:, 1:] == 1) & (x[:, :-1] == 0)
    return hit.cumsum(1) > 0


def _first_is_last(x: Tensor, look: Look) -> Tensor:
    one = x == 1
    first, there = look(torch.ones_like(one), one, "left")
    return ((first == one) | ~there)[:, -1]


def _walk(depth: int) -> Callable[[torch.Generator, int, int], Tensor]:
    """Brackets (0 opens, 1 closes) that never go below 0 or above `depth`, every second string with one changed."""

    def sample(g: torch.Generator, rows: int, length: int) -> Tensor:
        coins, at = torch.rand(rows, length, generator=g), torch.zeros(rows, dtype=torch.long)
        letters = list[Tensor]()
        for n in range(length):
            down = ((coins[:, n] < 0.5) & (at > 0)) | (at == depth)
            at = at + torch.where(down, -1, 1)
            letters.append(down.long())
        return _flipped(torch.stack(letters, 1), g)

    return sample


def _dyck_prefixes(depth: int) -> Callable[[Tensor], Tensor]:
    def prefixes(x: Tensor) -> Tensor:
        at = (1 - 2 * x).cumsum(1)
        return (((at < 0) | (at > depth)).cumsum(1) == 0) & (at == 0)

    return prefixes


def _dyck(depth: int) -> Callable[[Tensor, Look], Tensor]:
    """`depth` rounds, each of which takes away all pairs of brackets with nothing left between them."""

    def recognise(x: Tensor, look: Look) -> Tensor:
        closes = x == 1
        left = torch.ones_like(closes)
        for _ in range(depth):
            after, has_after = look(left, closes, "left", after=True)
            before, has_before = look(left, closes, "right")
            paired = (~closes & has_after & after) | (closes & has_before & ~before)
            left = left & ~paired
        return ~look.ever(left)

    return recognise


def _counted(modulus: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.cumsum(1) % modulus == 0


LANGUAGES = {
    "a*b*": Language(_sorted_prefixes, _in_order, _sorted),
    "contains ab": Language(_contains_prefixes, _turned, _contains),
    "first = last": Language(lambda x: x == x[:, :1], _coin, _first_is_last),
    "brackets, depth 1": Language(_dyck_prefixes(1), _walk(1), _dyck(1)),
    "brackets, depth 3": Language(_dyck_prefixes(3), _walk(3), _dyck(3)),
    "parity of b": Language(_counted(2), _coin, star_free=False),
    "b modulo 3": Language(_counted(3), _coin, star_free=False),
}
"""By name; a is 0 and b is 1."""


def every_string(length: int) -> Tensor:
    """All strings of this length, (2^N, N)."""
    return (torch.arange(2**length).unsqueeze(1) >> torch.arange(length)) & 1
