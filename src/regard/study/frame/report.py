"""The report of measured studies: verdicts first, then a figure and a paragraph each; as Markdown, as one HTML page, and as JSON.

report(Results("docs/studies"))       # docs/studies/NAME.{json,png}, docs/studies/index.html, docs/studies.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import StateError
from ...files import write_text
from .figure import picture
from .page import page
from .results import Line, Results, code_of, records_of
from .study import Size, Study, studies
from .verdict import KINDS, Check, Interval, Verdict, interval


@dataclass(frozen=True)
class Judged:
    """A study that was measured."""

    study: Study
    size: Size
    lines: Sequence[Line]
    verdict: Verdict

    @property
    def statements(self) -> list[dict[str, Any]]:
        """What was printed beside what was measured."""
        records = records_of(self.lines)
        return [
            {
                "statement": p.statement,
                "printed": p.printed,
                "measured": p.measured(records),
                "contradicted": p.contradicted(records),
            }
            for p in self.study.published
        ]

    @property
    def origin(self) -> str:
        """Seeds, version, machine and time, in a line."""
        first, seconds = self.lines[-1], sum(line["seconds"] for line in self.lines)
        at = first["machine"]
        return (
            f"{len(self.lines)} seeds, size {self.size}, regard {first['version']}, torch {at['torch']}, {at['processor']}, "
            f"{seconds:,.0f} s of one thread; `{first['command']}`"
            + (
                ""
                if all(line["code"] == code_of(self.study.name) for line in self.lines)
                else "; the code that measures has changed since"
            )
        )


def judged_studies(results: Results, chosen: Sequence[Study] | None = None) -> list[Judged]:
    """Every study of the folder that was measured with all its seeds."""
    every = list[Judged]()
    for study in chosen or studies().values():
        best = results.best(study)
        if best is not None:
            every.append(Judged(study, *best, study.judge(records_of(best[1]))))
    return every


def report(results: Results, tell: Callable[[str, float], None] = lambda _what, _share: None) -> list[Judged]:
    """Draw every figure, and write the summaries, the page beside the folder and the HTML page in it."""
    every = judged_studies(results)
    if not every:
        raise StateError(f"nothing is measured in {results.folder}; run: regard study run all --out {results.folder}")
    for n, each in enumerate(every):
        tell(f"drawing {each.study.name}", n / len(every))
        summarise(each, results.folder)
    write_text(results.folder.with_suffix(".md"), markdown(every, results.folder.name))
    write_text(results.folder / "index.html", page(every, results.folder))
    return every


def summarise(each: Judged, folder: Path) -> None:
    """The verdict with its checks and the numbers of its figure, as JSON, beside the figure."""
    name = each.study.name
    panels = picture(each.study, records_of(each.lines), folder / f"{name}.png")
    summary = {
        "study": name,
        "claim": each.study.claim,
        "source": each.study.source,
        "size": each.size,
        "seeds": [line["seed"] for line in each.lines],
        "verdict": {"kind": each.verdict.kind, "text": str(each.verdict), "because": each.verdict.because},
        "checks": [_check(c) for c in each.verdict.checks],
        "published": each.statements,
        "machine": each.lines[-1]["machine"],
        "version": each.lines[-1]["version"],
        "command": each.lines[-1]["command"],
        "seconds": sum(line["seconds"] for line in each.lines),
        "figure": panels,
    }
    write_text(folder / f"{name}.json", json.dumps(summary, ensure_ascii=False, indent=1) + "\n")


def _check(c: Check) -> dict[str, Any]:
    def plain(x: Interval) -> dict[str, float]:
        return {"mean": x.mean, "low": x.low, "high": x.high, "count": x.count}

    control = None if c.control is None else plain(interval(c.control))
    return {
        "what": c.what,
        "measured": plain(c.measured),
        "above": c.above,
        "below": c.below,
        "control": control,
        "passed": c.passed,
    }


def verdict_table(every: Sequence[Judged], link: str) -> str:
    """One line a study; `link` is the page that its name leads to."""
    rows = [
        f"| [{e.study.name}]({link}#{e.study.name}) | {_cell(e.study.claim)} | {KINDS[e.verdict.kind][0]} {_cell(e.verdict.short)} |"
        for e in every
    ]
    return "\n".join(["| study | claim | verdict |", "|---|---|---|", *rows])


def verdict_table_in_japanese(every: Sequence[Judged], link: str) -> str:
    rows = [
        f"| [{e.study.name}]({link}#{e.study.name}) | {' '.join(KINDS[e.verdict.kind])} | {_cell(e.study.claim)} |"
        for e in every
    ]
    return "\n".join(["| 実験 | 判定 | 主張（英語） |", "|---|---|---|", *rows])


def failed_statements(every: Sequence[Judged], link: str) -> str:
    """Every printed statement that the data contradict, with both numbers."""
    rows = [
        f"| {_cell(s['statement'])} | {_cell(s['printed'])} | {_cell(s['measured'])} | [{e.study.name}]({link}#{e.study.name}) |"
        for e in every
        for s in e.statements
        if s["contradicted"]
    ]
    return "\n".join(["| statement | printed | measured | study |", "|---|---|---|---|", *rows])


BLOCKS: dict[str, Callable[[Sequence[Judged], str], str]] = {
    "verdicts": verdict_table,
    "verdicts in Japanese": verdict_table_in_japanese,
    "failed statements": failed_statements,
}
"""What may be filled into another page, between `<!-- verdicts -->` and `<!-- /verdicts -->`."""


def fill(page: Path, every: Sequence[Judged], link: str) -> None:
    """Put the tables into the marked blocks of a page; a page without one is refused."""
    text = page.read_text(encoding="utf-8")
    count = 0
    for name, table in BLOCKS.items():
        text, n = re.subn(
            rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)",
            lambda m, t=table: m[1] + t(every, link) + "\n" + m[2],
            text,
            flags=re.S,
        )
        count += n
    if not count:
        marks = ", ".join(f"<!-- {name} --> … <!-- /{name} -->" for name in BLOCKS)
        raise StateError(f"{page} has no block to fill; it would stand between {marks}")
    write_text(page, text)


def markdown(every: Sequence[Judged], folder: str) -> str:
    """The whole report as a page of the documentation."""
    tally = {kind: sum(e.verdict.kind == kind for e in every) for kind in KINDS}
    counted = ", ".join(f"{sign} {kind} {'…' if kind == 'holds only if' else ''}{n}".replace(" …", " … ") for (kind, (sign, _)), n in zip(KINDS.items(), tally.values(), strict=True))  # fmt: skip
    parts = [
        "# The studies",
        f"Every claim we were given, with an experiment, its controls, a figure and a verdict that is computed from the data: {counted}. "
        "Intervals are 95%; a check passes when its whole interval lies on the asked side and its control's does not. "
        "`regard study run NAME` measures one again, `regard study report` makes this page.",
        verdict_table(every, ""),
        "## Published statements that failed their test",
        failed_statements(every, ""),
        *(_section(e, folder) for e in every),
    ]
    return "\n\n".join(parts) + "\n"


def _section(e: Judged, folder: str) -> str:
    s = e.study
    checks = [f"| {'✓' if c.passed else '✗'} | {_cell(c.what)} | {c.measured} | {_asked(c)} | {'–' if c.control is None else interval(c.control)} |" for c in e.verdict.checks]  # fmt: skip
    printed = [
        f"*Printed:* {p['statement']}: {p['printed']}. *Measured:* {p['measured']}{' (contradicted)' if p['contradicted'] else ''}."
        for p in e.statements
    ]
    return "\n\n".join(
        [
            f"## {s.name}",
            f"**Claim.** {s.claim} ({s.source})",
            f"**Verdict: {KINDS[e.verdict.kind][0]} {e.verdict}**"
            + ("" if e.verdict.kind == "holds only if" else f": {e.verdict.because}."),
            f"![{_cell(s.caption)}]({folder}/{s.name}.png)",
            s.caption,
            "\n".join(["| | check | measured | asked | control |", "|---|---|---|---|---|", *checks]),
            *printed,
            f"**How.** {s.protocol} Controls: {'; '.join(s.controls)}.",
            *([f"Read beside it: {', '.join(f'[{t}]({page})' for t, page in s.parts.items())}."] if s.parts else []),
            f"<small>{e.origin}</small>",
        ]
    )


def _asked(c: Check) -> str:
    return " and ".join(
        [*([f"≥ {c.above:g}"] if c.above is not None else []), *([f"≤ {c.below:g}"] if c.below is not None else [])]
    )


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
