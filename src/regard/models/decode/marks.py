"""Whether weights are still what they were.

torch counts writes in `_version`, but not all: a fused optimiser, anything through `.data`, and whoever writes the memory itself
leave it as it was, and tensors of inference mode have none. So what was copied from weights is compared with their contents:

    content_mark(tensor)      every byte and its place: SmolLM2's 538 MB take about as long as one token
    weights_mark(model)       where the weights lie, their versions, and a few numbers of each: a millisecond
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from itertools import chain

import torch
from torch import Tensor, nn

from . import native

SAMPLES = 64
CHUNK = 1 << 18
"""Numbers that the plain sum multiplies at a time, few enough to stay near the processor."""
ODD = 0x5851F42D4C957F2D
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def content_mark(x: Tensor) -> int:
    """A number that changes with any byte of x and with their order."""
    x = x.detach()
    if x.is_meta:
        return 0
    x = x.resolve_conj().resolve_neg().contiguous()
    mark = native.checksum(x)
    return plain_mark(x) if mark is None else mark


def plain_mark(x: Tensor) -> int:
    """The same sum, by torch: Σ wordᵢ · oddᵢ modulo 2⁶⁴, chunk by chunk."""
    x = torch.view_as_real(x) if x.is_complex() else x
    words = x.reshape(-1).view(_WORDS[x.element_size()])
    odds = _odds(x.device, CHUNK if x.is_cpu else 16 * CHUNK)
    sums = [(part.long() * odds[: part.numel()]).sum() for part in words.split(odds.numel())]
    whole = sum(n * pow(ODD, i, 1 << 64) for i, n in enumerate(torch.stack(sums).tolist() if sums else [], 1))
    return (words.numel() + whole) % (1 << 64)


def weights_mark(model: nn.Module, samples: int = SAMPLES) -> int:
    """A number that changes when the weights move, when torch counts a write, and when about one in a few numbers differs.

    A write behind torch's back (`.data`) to single numbers is not seen; to whole tensors, as optimisers write, it is.
    """
    places: list[object] = []
    numbers: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    with torch.no_grad():
        for p in chain(model.parameters(), model.buffers()):
            places.append((p.data_ptr(), p.shape, p.stride(), p.dtype, -1 if p.is_inference() else p._version))
            if p.is_meta or not p.numel():
                continue
            flat = p.detach().reshape(-1)
            numbers[p.device, p.dtype].append(flat[:: max(1, flat.numel() // samples)])
        marks = [content_mark(torch.cat(parts)) for parts in numbers.values()]
    return hash((*places, *marks))


@cache
def _odds(device: torch.device, count: int) -> Tensor:
    with torch.inference_mode(False):
        return (torch.arange(count, device=device) * 2 + 1) * ODD


__all__ = ["content_mark", "plain_mark", "weights_mark"]
