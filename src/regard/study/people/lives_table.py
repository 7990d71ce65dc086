"""The tables of natural people, of LongMemEval and of long lives in the documentation: means with 95% intervals by bootstrap over people.

    python -m regard.study.people.lives_table docs/studies                 # the folder of measured lines
    python -m regard.study.people.lives_table docs/studies rows.jsonl      # and rows of LongMemEval (`longmemeval.py`)

A person, row or life is drawn with all its questions: what is drawn again is who was measured, not what was asked.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..frame.results import Results, records_of
from ..frame.study import Record, study
from .longmemeval import ABSENT

DRAWS = 2000
Statistic = Callable[[Sequence[Record]], float]


def bootstrap(records: Sequence[Record], statistic: Statistic, digits: int = 2) -> str:
    """A statistic of all records, and the 95% interval of it over records drawn with replacement."""
    if not records:
        return "–"
    picks = torch.randint(len(records), (DRAWS, len(records)), generator=torch.Generator().manual_seed(0)).tolist()
    drawn = torch.tensor([statistic([records[i] for i in pick]) for pick in picks], dtype=torch.float64)
    low, high = drawn.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return f"{statistic(records):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def pooled(
    values: Callable[[Record], Sequence[float]], average: Callable[[list[float]], float] = statistics.fmean
) -> Statistic:
    """The mean, or another average, over all that was asked of all of them."""

    def statistic(records: Sequence[Record]) -> float:
        every = [float(x) for r in records for x in values(r)]
        return average(every) if every else 0.0

    return statistic


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _of(state: str, key: str) -> Callable[[Record], Sequence[float]]:
    return lambda r: r["states"][state][key]


def _gain(state: str) -> Statistic:
    """Share of the in-context gain, of all nats together."""

    def statistic(records: Sequence[Record]) -> float:
        nothing, context, own = (pooled(_of(s, "nats"))(records) for s in ("nothing", "history in context", state))
        return 100 * (nothing - own) / max(nothing - context, 1e-3)

    return statistic


def natural_table(records: Sequence[Record]) -> str:
    """Every state: right answers, nats, the share of the in-context gain, and tokens of the prompt beside the question."""
    plain = pooled(_of("nothing", "tokens"))(records)
    rows = [
        [
            state,
            bootstrap(records, lambda rs, s=state: 100 * pooled(_of(s, "right"))(rs), 0),
            bootstrap(records, pooled(_of(state, "nats"))),
            f"{pooled(_of(state, 'nats'), statistics.median)(records):.2f}",
            bootstrap(records, _gain(state), 0),
            f"{pooled(_of(state, 'tokens'))(records) - plain:.0f}",
        ]
        for state in records[0]["states"]
    ]
    return markdown_table(("state", "right (%)", "nats, mean", "nats, median", "share of the in-context gain (%)", "more tokens in the prompt"), rows)  # fmt: skip


def _rank(name: str, first: int) -> Statistic:
    return lambda rs: 100 * pooled(lambda r: [float(rank < first) for rank in r["ranks"][name]])(rs)


def _percent(values: Callable[[Record], Sequence[float]]) -> Statistic:
    return lambda rs: 100 * pooled(values)(rs)


def harm_table(records: Sequence[Record]) -> str:
    """The right turn, refusal, everyday answers, and what it costs."""
    rows = [
        *([f"the right turn among the first {n}, {name} (%)", bootstrap(records, _rank(name, n), 0)] for name in ("episodes", "MiniLM", "BM25", "shuffled") for n in (1, 3)),
        ["questions without an answer that bring nothing to mind (%)", bootstrap(records, _percent(lambda r: r["refused"]), 0)],
        ["questions with an answer that bring nothing to mind (%)", bootstrap(records, _percent(lambda r: [not c["turns"] for c in r["chosen"]]), 0)],
        ["everyday questions that bring nothing to mind (%)", bootstrap(records, _percent(lambda r: r["everyday"]["refused"]), 0)],
        ["everyday questions answered as without an identity (%)", bootstrap(records, _percent(lambda r: r["everyday"]["same"]), 0)],
        ["private words in everyday answers", str(round(sum(sum(r["everyday"]["private"]) for r in records)))],
        ["everyday answers, nats against the base", bootstrap(records, pooled(lambda r: r["everyday"]["nats"]), 3)],
        ["neutral prose, nats against the base", bootstrap(records, pooled(lambda r: [r["prose"]]), 3)],
        ["bytes of episodes for a token of the life", bootstrap(records, pooled(lambda r: [r["bytes"]["episodes"] / r["tokens"]]), 0)],
        ["seconds to write the history", bootstrap(records, pooled(lambda r: [r["timed_write"]]), 1)],
        ["seconds to train the LoRA", bootstrap(records, pooled(lambda r: [r["timed_seconds"]["lora"]]), 1)],
    ]  # fmt: skip
    return markdown_table(("measured", f"{len(records)} people"), rows)


def longmemeval_table(records: Sequence[Record]) -> str:
    """By type of question: nats below nothing (mean, median), answers that contain the gold one, ranks and refusal."""
    every = [row for r in records for row in r["longmemeval"] or ()]
    states = ("history in context", "the right turns", "BM25, 1 turn", "BM25, 3 turns", "MiniLM, 1 turn", "MiniLM, 3 turns", "imprints", "episodes", "another's episodes")  # fmt: skip
    answered = [row for row in every if row["type"] != ABSENT]
    rows: list[list[str]] = []
    for kind in ["all", *sorted({row["type"] for row in answered})]:
        some = [row for row in answered if kind in ("all", row["type"])]
        for state in states:
            here = [row for row in some if state in row["nats"]]
            below = pooled(lambda row, s=state: [row["nats"]["nothing"] - row["nats"][s]])
            middle = pooled(lambda row, s=state: [row["nats"]["nothing"] - row["nats"][s]], statistics.median)
            if here and (kind == "all" or state in ("MiniLM, 1 turn", "MiniLM, 3 turns", "episodes", "another's episodes")):
                right = 100 * statistics.fmean(row["contains"][state] for row in here)
                rows.append([kind, state, str(len(here)), bootstrap(here, below), f"{middle(here):.2f}", f"{right:.0f}"])
    table = markdown_table(("type", "state", "rows", "nats below nothing, mean", "median", "contains the answer (%)"), rows)
    with_turn = [row for row in answered if "the right turns" in row["nats"]]
    said = [
        f"The right turn among the first {n}: episodes {bootstrap(with_turn, _percent(lambda row, k=n: [row['rank']['episodes'] < k]), 0)}%, "
        f"MiniLM {bootstrap(with_turn, _percent(lambda row, k=n: [row['rank']['MiniLM'] < k]), 0)}%."
        for n in (1, 3)
    ]
    absent = [row for row in every if row["type"] == ABSENT]
    said.append(f"Refused: {bootstrap(absent, _percent(lambda row: [row['refused']]), 0)}% of {len(absent)} rows without an answer, {bootstrap(answered, _percent(lambda row: [row['refused']]), 0)}% of those with one.")  # fmt: skip
    return table + "\n\n" + " ".join(said)


def _asked(key: str) -> Callable[[Record], Sequence[float]]:
    return lambda life: [q[key] for q in life["questions"]]


def _aged(key: str, low: int, high: int) -> Callable[[Record], Sequence[float]]:
    return lambda r: [q[key] for life in r["lives"].values() for q in life["questions"] if low <= q["age"] < high]


def lives_table(records: Sequence[Record]) -> str:
    """By length: recall, rank, updates, times and bytes."""
    rows: list[list[str]] = []
    for length in sorted({x for r in records for x in r["lives"]}, key=int):
        lives = [{**r["lives"][length], "token_ms": r["timed_token_ms"][length], "nobody_ms": r["timed_token_ms"]["nobody"]} for r in records if length in r["lives"]]  # fmt: skip
        rows.append([
            f"{int(length):,}", str(len(lives)), bootstrap(lives, _percent(_asked("right")), 0), bootstrap(lives, _percent(_asked("other_right")), 0),
            bootstrap(lives, pooled(lambda r: [q["nothing"] - q["nats"] for q in r["questions"]])),
            bootstrap(lives, _percent(lambda r: [rank < 3 for _, rank in r["ranks"]]), 0),
            bootstrap(lives, _percent(lambda r: [q["nats"] < q["old"]["nats"] for q in r["questions"] if "old" in q]), 0),
            f"{statistics.median(r['token_ms'] for r in lives):.1f} / {statistics.median(r['nobody_ms'] for r in lives):.1f}",
            f"{statistics.median(q['timed_choose_ms'] for r in lives for q in r['questions']):.0f}",
            f"{statistics.median(q['timed_first_s'] for r in lives for q in r['questions']):.2f} / {statistics.median(q['timed_next_s'] for r in lives for q in r['questions']):.2f}",
            f"{statistics.fmean(r['bytes_per_token'] for r in lives):,.0f}",
        ])  # fmt: skip
    head = ("tokens", "lives", "right (%)", "another's (%)", "nats below nothing", "right turn among 3 (%)", "updates win (%)", "ms a token / nobody's", "ms to choose", "s, first / next answer", "bytes a token")  # fmt: skip
    return markdown_table(head, rows)


def age_table(records: Sequence[Record], ages: Sequence[int]) -> str:
    """By tokens since the answer was told, over all lengths."""
    rows: list[list[str]] = []
    for low, high in zip((0, *ages), ages, strict=False):
        count = sum(len(_aged("right", low, high)(r)) for r in records)
        if count:
            name = f"{low:,} to {high:,}" if high < ages[-1] else f"{low:,} and more"
            rows.append(
                [
                    name,
                    str(count),
                    *(bootstrap(records, _percent(_aged(k, low, high)), 0) for k in ("right", "other_right", "came")),
                ]
            )
    return markdown_table(("tokens since", "questions", "right (%)", "another's (%)", "the right turn came (%)"), rows)


def main(folder: str = "studies", *files: str) -> str:
    """All tables for which the folder has lines, the full size before quick ones; `files` hold rows of LongMemEval."""
    from ..long_lives import AGES

    results, parts = Results(Path(folder)), list[str]()
    for name in ("natural_recall", "long_lives"):
        best = next((lines for size in ("full", "quick") if (lines := results.lines(study(name), size, stale=True))), None)
        records = records_of(best or [])
        if not records:
            continue
        if name == "long_lives":
            parts += [lives_table(records), age_table(records, AGES)]
        else:
            parts += [natural_table(records), harm_table(records)]
            if any(r["longmemeval"] for r in records):
                parts.append(longmemeval_table(records))
    rows = [json.loads(line) for file in files for line in Path(file).read_text(encoding="utf-8").splitlines() if line]
    return "\n\n".join([*parts, *([longmemeval_table([{"longmemeval": rows}])] if rows else [])])


if __name__ == "__main__":
    print(main(*sys.argv[1:]))


__all__ = ["age_table", "bootstrap", "harm_table", "lives_table", "longmemeval_table", "natural_table"]
