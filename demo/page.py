"""The demo pages: each is one HTML file that holds its pictures, without scripts, fonts or anything else from elsewhere."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_CSS = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1b1f24; --soft: #59636e; --line: #d1d9e0; --card: #f6f8fa;
  --link: #0a5796; --one: #0072B2; --two: #D55E00; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14171b; --ink: #e6e8eb; --soft: #9aa4af; --line: #343b43; --card: #1c2026;
    --link: #7cc0f0; --one: #56B4E9; --two: #F08A3C; }
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
a { color: var(--link); } h3 { margin: 0 0 .5rem; font-size: 1rem; }
.ask { margin: 1.25rem 0; } .ask > h3 { font-size: 1.1rem; }
.side { display: grid; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); gap: .75rem; }
.card { background: var(--card); border: 1px solid var(--line); border-top: 6px solid var(--soft); border-radius: 8px; padding: .75rem .9rem; }
.one { border-top-color: var(--one); } .two { border-top-color: var(--two); border-top-style: double; }
.card p { margin: .4rem 0 0; font-size: .88rem; } .card .said { font-size: 1.02rem; line-height: 1.45; }
.word { display: inline-block; white-space: pre; }
.piece { display: inline-block; white-space: pre; position: relative; padding-bottom: 1.35rem; }
.piece::after { content: ""; position: absolute; left: 0; right: 1px; bottom: 0; height: max(1px, calc(var(--h) * 1.2rem)); background: var(--soft); }
.one .piece::after { background: var(--one); } .two .piece::after { background: var(--two); }
details { font-size: .88rem; margin-top: .5rem; color: var(--soft); } summary { cursor: pointer; }
.cloud { line-height: 1.5; margin: .5rem 0 0; } .cloud span { white-space: nowrap; margin-right: .3em; }
.told { margin: .4rem 0 0; padding-left: 1.2rem; font-size: .92rem; }
.verdict { border-left: 4px solid var(--one); padding: .1rem 0 .1rem .9rem; font-size: 1.05rem; }
"""


@dataclass(frozen=True)
class Picture:
    """`name` stands for name-light.png and name-dark.png, which the page takes in."""

    name: str
    alt: str
    caption: str
    size: tuple[int, int]


@dataclass(frozen=True)
class Table:
    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    code: bool = True
    """Whether the first column is something to type."""


@dataclass(frozen=True)
class Code:
    text: str


@dataclass(frozen=True)
class Link:
    text: str
    to: str


@dataclass(frozen=True)
class Markup:
    """HTML as it is: whoever makes one has escaped what is in it."""

    html: str


Part = Picture | Table | Code | Markup


@dataclass(frozen=True)
class Section:
    title: str
    text: str
    parts: Sequence[Part]


def render(
    title: str, lead: str, sections: Sequence[Section], foot: str, pictures: Path = Path(), links: Sequence[Link] = ()
) -> str:
    """The page; its pictures are read from a folder, and need not stay there."""
    body = "\n".join(_section(s, pictures) for s in sections)
    more = " · ".join(f'<a href="{safe(link.to)}">{safe(link.text)}</a>' for link in links)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{safe(title)}</title>
<style>{_CSS}</style>
</head>
<body>
<main>
<h1>{safe(title)}</h1>
<p>{safe(lead)}</p>
{body}
<p>{more}</p>
<p class="soft">{safe(foot)}</p>
</main>
</body>
</html>
"""


def _section(s: Section, pictures: Path) -> str:
    return (
        f"<section>\n<h2>{safe(s.title)}</h2>\n<p>{safe(s.text)}</p>\n"
        + "\n".join(_part(p, pictures) for p in s.parts)
        + "\n</section>"
    )


def _part(part: Part, pictures: Path) -> str:
    match part:
        case Picture(name, alt, caption, (width, height)):
            return (
                f'<figure><div class="wide" tabindex="0"><picture><source srcset="{_inside(pictures / f"{name}-dark.png")}" media="(prefers-color-scheme: dark)">'
                f'<img src="{_inside(pictures / f"{name}-light.png")}" width="{width}" height="{height}" alt="{safe(alt)}"></picture></div>'
                f"<figcaption>{safe(caption)}</figcaption></figure>"
            )
        case Table(caption, head, rows, code):
            top = "".join(f'<th scope="col">{safe(x)}</th>' for x in head)
            lines = "\n".join(
                "<tr>" + "".join(f"<td>{_cell(x, code and n == 0)}</td>" for n, x in enumerate(r)) + "</tr>" for r in rows
            )
            return (
                f'<figure><div class="wide" tabindex="0"><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'
                f"<figcaption>{safe(caption)}</figcaption></figure>"
            )
        case Code(text):
            return f"<pre>{safe(text)}</pre>"
        case Markup(text):
            return text


def _inside(picture: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()


def _cell(text: str, code: bool) -> str:
    return f"<code>{safe(text)}</code>" if code else safe(text)


def safe(text: str) -> str:
    return html.escape(text, quote=True)
