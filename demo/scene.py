"""The q and k that the tour looks at: 24 tokens of three topics, in runs, with strangers between them.

A token's query is near the keys of its own topic; a stranger's query is near nothing. So one can see at a glance who
blends, who selects and who refuses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.attention.allow import Causal
from regard.attention.inspect import Attended, inspect
from regard.state import State

TOPICS = "aaaabbb·aabb·cccbbc·aacc"
WIDTH = 32


@dataclass(frozen=True)
class Scene:
    q: Tensor
    k: Tensor
    v: Tensor
    trace: Tensor
    """−δδᵀ between the topics a and c: an experience that drew them together."""


@dataclass(frozen=True)
class View:
    title: str
    spec: str
    remark: str


EIGHT = (
    View("softmax", "dot | softmax", "blends everything"),
    View("sparsemax", "dot | sparsemax", "exact zeros"),
    View("top-k", "dot | topk(3)", "three keys, always"),
    View("hard", "dot | hard", "one key, always"),
    View("GD", "euclidean | gd(beta=0.055, coherence=1)", "one key, or none"),
    View("selective", "dot | selective", "masked by earlier tokens"),
    View("ALiBi", "dot | softmax | alibi", "near is better"),
    View("trace", "trace | softmax", "a and c were drawn together"),
)


def scene(seed: int = 3) -> Scene:
    g = torch.Generator().manual_seed(seed)
    centres = {name: torch.randn(WIDTH, generator=g) for name in "abc"}
    n = len(TOPICS)
    k, q = torch.randn(1, 1, n, WIDTH, generator=g), torch.randn(1, 1, n, WIDTH, generator=g)
    for i, topic in enumerate(TOPICS):
        if topic in centres:
            k[0, 0, i] = 0.9 * centres[topic] + 0.45 * k[0, 0, i]
            q[0, 0, i] = 0.85 * centres[topic] + 0.5 * q[0, 0, i]
    across = centres["c"] - centres["a"]
    across = across / across.norm()
    # Eight query heads over one key head, all alike: ALiBi's slopes differ between them, and the first is looked at.
    return Scene(
        q.expand(1, 8, n, WIDTH), k, torch.randn(1, 1, n, WIDTH, generator=g), (-0.05 * torch.outer(across, across))[None]
    )


def look(view: View, s: Scene) -> Attended:
    return inspect(s.q, s.k, s.v, view.spec, allow=Causal(), state=State(trace=s.trace))
