"""The demo page: one HTML file beside its pictures, without scripts, fonts or anything else from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

_CSS = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1b1f24; --soft: #59636e; --line: #d1d9e0; --card: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14171b; --ink: #e6e8eb; --soft: #9aa4af; --line: #343b43; --card: #1c2026; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.6 system-ui, sans-serif; }
main { max-width: 64rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { margin: 0 0 .25rem; font-size: 2rem; } h2 { margin: 2.75rem 0 .5rem; font-size: 1.3rem; }
p { max-width: 46rem; } .soft { color: var(--soft); }
img { display: block; width: 100%; min-width: 42rem; height: auto; }
figure { margin: 1rem 0; } figcaption { color: var(--soft); font-size: .9rem; margin-top: .4rem; max-width: 46rem; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: .93rem; }
th, td { padding: .4rem .75rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
tr:last-child td { border-bottom: 0; } th { background: var(--card); font-weight: 600; }
th:first-child, td:first-child { text-align: left; }
code, pre { font: .9em ui-monospace, monospace; background: var(--card); border-radius: 4px; padding: .1em .3em; }
pre { padding: .8rem 1rem; overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; }
"""


@dataclass(frozen=True)
class Picture:
    """`name` stands for name-light.png and name-dark.png beside the page."""

    name: str
    alt: str
    caption: str
    size: tuple[int, int]


@dataclass(frozen=True)
class Table:
    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Code:
    text: str


@dataclass(frozen=True)
class Section:
    title: str
    text: str
    parts: Sequence[Picture | Table | Code]


def render(title: str, lead: str, sections: Sequence[Section], foot: str) -> str:
    body = "\n".join(_section(s) for s in sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_safe(title)}</title>
<style>{_CSS}</style>
</head>
<body>
<main>
<h1>{_safe(title)}</h1>
<p>{_safe(lead)}</p>
{body}
<p class="soft">{_safe(foot)}</p>
</main>
</body>
</html>
"""


def _section(s: Section) -> str:
    return (
        f"<section>\n<h2>{_safe(s.title)}</h2>\n<p>{_safe(s.text)}</p>\n"
        + "\n".join(_part(p) for p in s.parts)
        + "\n</section>"
    )


def _part(part: Picture | Table | Code) -> str:
    match part:
        case Picture(name, alt, caption, (width, height)):
            return (
                f'<figure><div class="wide" tabindex="0"><picture><source srcset="{name}-dark.png" media="(prefers-color-scheme: dark)">'
                f'<img src="{name}-light.png" width="{width}" height="{height}" alt="{_safe(alt)}"></picture></div>'
                f"<figcaption>{_safe(caption)}</figcaption></figure>"
            )
        case Table(caption, head, rows):
            top = "".join(f'<th scope="col">{_safe(x)}</th>' for x in head)
            lines = "\n".join("<tr>" + "".join(f"<td>{_cell(x, n)}</td>" for n, x in enumerate(r)) + "</tr>" for r in rows)
            return (
                f'<figure><div class="wide" tabindex="0"><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'
                f"<figcaption>{_safe(caption)}</figcaption></figure>"
            )
        case Code(text):
            return f"<pre>{_safe(text)}</pre>"


def _cell(text: str, column: int) -> str:
    return _safe(text) if column else f"<code>{_safe(text)}</code>"


def _safe(text: str) -> str:
    return html.escape(text, quote=True)
