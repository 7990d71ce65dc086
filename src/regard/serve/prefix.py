"""The prefix cache: keys and values of prompts that were read before, for whoever begins with the same tokens as the same person.

    root      what must be the same beside the tokens: weights, the identity's version, and the digest of what its layers read
    node      a run of tokens after those of its parent: keys and values of their places, and the logits behind them where a prompt ended

A hit copies, so a row never writes where another reads, and an entry may go at any time. What was used longest ago goes first, leaves
before what they stand on. Tokens are compared themselves and not by a hash, and no way leads from one root to another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..models.decode.rows import Parts

OVERHEAD = 64
"""Bytes that a token of a key takes beside its keys and values."""


@dataclass(eq=False)
class Node:
    parent: Node | None
    key: Hashable
    """Its tokens; of a root, what tells it from the others."""
    parts: Parts = field(default_factory=lambda: Parts())
    logits: Tensor | None = None
    children: dict[Hashable, Node] = field(default_factory=lambda: dict[Hashable, Node]())
    nbytes: int = 0


@dataclass(frozen=True)
class Hit:
    """The longest known beginning of a prompt."""

    tokens: int = 0
    parts: tuple[Parts, ...] = ()
    logits: Tensor | None = None
    """Of the last token, where all of the prompt is known."""


class PrefixCache:
    """Not for several threads at once: the engine's own thread reads and writes it."""

    def __init__(self, most: int, grain: int) -> None:
        """At most `most` bytes. Beginnings are kept in runs of `grain` tokens, and whole prompts as they are."""
        self.most, self.grain = most, grain
        self.nbytes = self.hits = self.misses = 0
        self._roots: dict[Hashable, Node] = {}
        # The oldest first. Whoever touches a node touches those that it stands on after it, so the first one is a leaf.
        self._ages: OrderedDict[int, Node] = OrderedDict()

    def find(self, root: Hashable, prompt: Sequence[int]) -> Hit:
        node, path = self._roots.get(root), list[Node]()
        at = 0
        while node is not None and at < len(prompt):
            run = tuple(prompt[at : at + self.grain])
            node = node.children.get(run)
            # Behind the last token of a prompt come its logits: without them it has to be read.
            if node is None or (at + len(run) == len(prompt) and node.logits is None):
                break
            path.append(node)
            at += len(run)
        self._touch(path[-1] if path else None)
        if path:
            self.hits += 1
        else:
            self.misses += 1
        logits = path[-1].logits if path and at == len(prompt) else None
        return Hit(at, tuple(n.parts for n in path), logits)

    def keep(
        self, root: Hashable, tokens: Sequence[int], parts: Callable[[int, int], Parts | None], logits: Tensor | None = None
    ) -> None:
        """`parts(a, b)` copies the keys and values of tokens a..b; those of what is known already are not asked for.

        Without logits only whole runs are kept: a rest is of use to nobody who could not go on behind it.
        """
        if not tokens or not self.most:
            return
        node = self._roots.get(root) or Node(None, root)
        for at in range(0, len(tokens), self.grain):
            run = tuple(tokens[at : at + self.grain])
            ends = at + len(run) == len(tokens)
            if len(run) < self.grain and logits is None:
                break
            child = node.children.get(run)
            if child is None:
                copied = parts(at, at + len(run))
                if copied is None:
                    break
                child = Node(node, run, copied)
                child.nbytes = sum(x.nbytes for x in copied) + OVERHEAD * len(run)
                if self.nbytes + child.nbytes > self.most and not self._make_room(child.nbytes, node):
                    break
                self._put(root, child)
            if ends and logits is not None and child.logits is None:
                child.logits = logits.clone()
                child.nbytes += logits.nbytes
                self.nbytes += logits.nbytes
            node = child
        self._touch(node)
        self._make_room(0, None)

    def forget(self, match: Callable[[Any], bool]) -> None:
        """Drop whatever stands under the roots that `match`."""
        for root in [r for r in self._roots if match(r)]:
            pending = [self._roots[root]]
            while pending:
                node = pending.pop()
                pending += node.children.values()
                if self._ages.pop(id(node), None) is not None:
                    self.nbytes -= node.nbytes
            del self._roots[root]

    def _put(self, root: Hashable, child: Node) -> None:
        parent = child.parent
        assert parent is not None
        if parent.parent is None:
            self._roots[root] = parent
        parent.children[child.key] = child
        self._ages[id(child)] = child
        self.nbytes += child.nbytes
        self._touch(child)

    def _touch(self, node: Node | None) -> None:
        while node is not None and node.parent is not None:
            self._ages.move_to_end(id(node))
            node = node.parent

    def _make_room(self, needed: int, spared: Node | None) -> bool:
        """Drop the oldest until so many bytes fit; never what `spared` stands on, which is about to be built on."""
        if needed > self.most:
            return False
        self._touch(spared)
        while self.nbytes + needed > self.most:
            oldest = next(iter(self._ages.values()), None)
            if oldest is None or oldest is spared:
                return False
            self._drop(oldest)
        return True

    def _drop(self, leaf: Node) -> None:
        del self._ages[id(leaf)]
        self.nbytes -= leaf.nbytes
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key]
        if parent.parent is None and not parent.children:
            self._roots.pop(parent.key, None)


__all__ = ["Hit", "PrefixCache"]
