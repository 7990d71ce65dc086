"""The report as one HTML file: its figures are inside, and nothing is fetched from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from .verdict import KINDS, interval

if TYPE_CHECKING:
    from .report import Judged

_CSS = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1b1f24; --soft: #59636e; --line: #d1d9e0; --card: #f6f8fa; --link: #0a5796; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14171b; --ink: #e6e8eb; --soft: #9aa4af; --line: #343b43; --card: #1c2026; --link: #7cc0f0; } }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.6 system-ui, sans-serif; }
main { max-width: 64rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; } p { max-width: 48rem; }
h2 { margin: 2.5rem 0 .5rem; } a { color: var(--link); } .soft { color: var(--soft); font-size: .85rem; }
img { width: 100%; height: auto; background: #fff; border: 1px solid var(--line); border-radius: 8px; }
figure { margin: 1rem 0; } figcaption { color: var(--soft); } .wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; } th { background: var(--card); }
th, td { text-align: left; padding: .35rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
.verdict { border-left: 4px solid var(--soft); padding-left: .8rem; } .holds { border-color: #0072B2; } .not { border-color: #D55E00; border-left-style: double; }
code { font-family: ui-monospace, monospace; }
"""


def page(every: Sequence[Judged], folder: Path) -> str:
    """The page of these studies, whose figures are in the folder."""

    def verdict(e: Judged) -> str:
        return escape(f"{KINDS[e.verdict.kind][0]} {e.verdict}")

    rows = [f'<a href="#{e.study.name}">{e.study.name}</a>|{escape(e.study.claim)}|{verdict(e)}'.split("|") for e in every]
    failed = [
        [escape(s["statement"]), escape(s["printed"]), escape(s["measured"]), f'<a href="#{e.study.name}">{e.study.name}</a>']
        for e in every
        for s in e.statements
        if s["contradicted"]
    ]
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>The studies of regard</title><style>{_CSS}</style></head><body><main>",
        "<h1>The studies</h1><p>Every claim with an experiment, controls, a figure and a verdict computed from the data. "
        "Intervals are 95%.</p>",
        _table(("study", "claim", "verdict"), rows),
        "<h2>Published statements that failed their test</h2>",
        _table(("statement", "printed", "measured", "study"), failed),
        *(_section(e, folder, verdict(e)) for e in every),
        "</main></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _section(e: Judged, folder: Path, verdict: str) -> str:
    s, look = e.study, {"holds": "holds", "holds only if": "", "does not hold": "not"}[e.verdict.kind]
    data = base64.b64encode((folder / f"{s.name}.png").read_bytes()).decode()
    checks = [
        ["✓" if c.passed else "✗", escape(str(c)), "–" if c.control is None else str(interval(c.control))]
        for c in e.verdict.checks
    ]
    return "\n".join(
        [
            f'<section><h2 id="{s.name}">{s.name}</h2><p><b>Claim.</b> {escape(s.claim)} ({escape(s.source)})</p>',
            f'<p class="verdict {look}"><b>{verdict}</b><br>{escape(e.verdict.because)}</p>',
            f'<figure><img alt="{escape(s.caption, quote=True)}" src="data:image/png;base64,{data}">',
            f"<figcaption>{escape(s.caption)}</figcaption></figure>",
            _table(("", "check", "control"), checks),
            f"<p><b>How.</b> {escape(s.protocol)} Controls: {escape('; '.join(s.controls))}.</p>",
            f'<p class="soft">{escape(e.origin)}</p></section>',
        ]
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML already."""
    if not rows:
        return "<p>None.</p>"
    top = "".join(f'<th scope="col">{h}</th>' for h in head)
    body = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
