"""LongMemEval (Wu et al. 2025) as a yardstick of lives that nobody here wrote: real histories, questions, and gold answers.

The file is JSON lines, or those gzipped, one row each:
    {"id", "type", "question", "answer", "sessions": [{"messages": [{"role", "content", "has_answer"}, …]}, …]}
A row whose id ends in `_abs` has no answer in its history, and is to be refused.

    python -m regard.study.people.longmemeval FILE 0 24 > rows.jsonl        # the first 24 rows, apart from any study
    python -m regard.study.people.lives_table docs/studies rows.jsonl
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from ...errors import CheckpointError
from ...identity.state import Identity, Recollection
from .asking import Ask, Examiner, Written, rank_of, write_episodes
from .baselines import Turns
from .generator import Conversation
from .natural import Turn, contains

LETTERS = 24_000
"""Of a history at most, about six thousand tokens: longer rows are left out, as each would take minutes to live through."""
WHOLE = 3000
"""Tokens of a history at most that is read in the context as well: longer ones take a minute each."""
TOGETHER = 4
"""Rows whose lives are held at once."""
SEED = 0
ABSENT = "abstention"
"""The type of the rows that are to be refused."""


@dataclass(frozen=True)
class LongRow:
    id: str
    type: str
    question: str
    answer: str
    history: tuple[Conversation, ...]
    right: tuple[Turn, ...]
    """Messages that hold the answer."""

    @classmethod
    def of(cls, given: dict[str, Any]) -> LongRow:
        sessions = [s["messages"] for s in given["sessions"]]
        history = tuple(
            tuple({"role": m["role"], "content": m["content"]} for m in s if m["content"].strip()) for s in sessions
        )
        kept = [[m for m in s if m["content"].strip()] for s in sessions]
        right = tuple((c, n) for c, s in enumerate(kept) for n, m in enumerate(s) if m.get("has_answer"))
        kind = ABSENT if given["id"].endswith("_abs") else given["type"]
        return cls(given["id"], kind, given["question"], str(given["answer"]), history, right)


@cache
def longmemeval(path: str) -> list[LongRow]:
    """The rows of a file that are not too long, drawn by a seed, one type after the other in turn, so that the first few hold every type."""
    try:
        data = Path(path).read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
        rows = [LongRow.of(json.loads(line)) for line in text.splitlines() if line.strip()]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"REGARD_LONGMEMEVAL={path}: JSON lines with id, type, question, answer and sessions of messages ({error})"
        ) from error
    groups: dict[str, list[LongRow]] = defaultdict(list)
    for row in rows:
        if sum(len(m["content"]) for c in row.history for m in c) <= LETTERS:
            groups[row.type].append(row)
    for kind in sorted(groups):
        Random(f"{SEED} {kind}").shuffle(groups[kind])
    order = sorted((n, kind) for kind, group in groups.items() for n in range(len(group)))
    return [groups[kind][n] for n, kind in order]


def asked_rows(examiner: Examiner, rows: Sequence[LongRow]) -> list[dict[str, Any]]:
    """Every row under every state; another's life is that of the row before."""
    lives = [write_episodes(examiner, row.history) for row in rows]
    return [_asked(examiner, row, lives[n], lives[n - 1].identity) for n, row in enumerate(rows)]


def _asked(examiner: Examiner, row: LongRow, life: Written, other: Identity) -> dict[str, Any]:
    turns, question = Turns.of(row.history), {"role": "user", "content": row.question}
    order, by_words = turns.by_meaning(row.question), turns.by_words(row.question)
    right = [n for n, place in enumerate(turns.places) if place in row.right]
    texts: dict[str, Sequence[int]] = {"nothing": ()}
    for name, best in (("BM25", by_words), ("MiniLM", order)):
        texts |= {f"{name}, 1 turn": best[:1], f"{name}, 3 turns": best[:3]}
    if right:
        texts["the right turns"] = right
    if life.identity.life.tokens <= WHOLE:
        texts["history in context"] = range(len(turns.messages))
    plain = examiner.prompt([question])
    mind = examiner.recalled(life.identity, plain)
    states: dict[str, tuple[list[int], Identity | None]] = {
        name: (examiner.prompt(turns.before(question, which)), None) for name, which in texts.items()
    }
    states |= {
        "episodes": (plain, mind),
        "another's episodes": (plain, examiner.recalled(other, plain)),
    }
    nats, contained, said = dict[str, float](), dict[str, float](), dict[str, str]()
    answers = examiner.ask_all([Ask(prompt, row.answer, who) for prompt, who in states.values()])
    for name, answer in zip(states, answers, strict=True):
        nats[name], contained[name] = round(answer.nats, 4), float(contains(answer.text, row.answer))
        said[name] = answer.text
    ranking = life.ranking(examiner, row.question)
    return {
        "id": row.id,
        "type": row.type,
        "tokens": life.identity.life.tokens,
        "nats": nats,
        "contains": contained,
        "said": said["episodes"],
        "rank": {
            "episodes": rank_of(ranking, row.right),
            "MiniLM": rank_of([[turns.places[n]] for n in order], row.right),
        },
        "refused": float(_refused(mind)),
    }


def _refused(mind: Identity) -> bool:
    return isinstance(mind, Recollection) and not mind.chosen


def main(path: str, start: str = "0", stop: str = "24") -> None:
    """Print one JSON line a row, a few rows at a time: another's life is that of the row before."""
    from ..tasks.packaged import sentence_vectors
    from ..tasks.pretrained import smollm2

    sentence_vectors(["."])  # an episode has a meaning only where the encoder is at hand
    examiner, rows = Examiner(*smollm2()), longmemeval(path)[int(start) : int(stop)]
    for at in range(0, len(rows), TOGETHER):
        for row in asked_rows(examiner, rows[at : at + TOGETHER]):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])


__all__ = ["ABSENT", "LongRow", "asked_rows", "longmemeval"]
