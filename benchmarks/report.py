"""Rows to JSON, to Markdown, and into the docs between two markers: a few in the READMEs, all of them in `docs/speed.md`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .harness import Row

OPEN, CLOSE = "<!-- speed -->", "<!-- /speed -->"

SHOWN = (
    ("trace", "forward, N=1024", "SDPA"),
    ("entmax(1.5)", "forward + backward, N=1024", "package entmax"),
    ("hard", "forward, N=2048", "SDPA"),
    ("GPT 6 × 384", "training step, 8 × 256 tokens", "x-transformers"),
    ("int8, one row", "64 after 32", "transformers.generate"),
    ("rank-8 trace, self, 64 imprints", "64 after 32", "without"),
)
"""The rows of the READMEs: one for each thing that people ask first, met or missed."""

HEADINGS = {
    "en": ("what", "run", "against", "ours", "peer", "ratio", "quartiles", "reach", "met"),
    "ja": ("対象", "測定", "比較相手", "regard", "相手", "比", "四分位", "目標", "達成"),
}
WORDS_JA = {
    "forward + backward": "順伝播＋逆伝播",
    "forward": "順伝播",
    "memory": "メモリ",
    "published prototype": "公開された試作",
    "package entmax": "パッケージ entmax",
    "per-key bisection in Python": "Python によるキーごとの二分法",
    "itself at": "自分自身",
    "per query": "クエリあたり",
    "beyond": "を除く",
    " × faster": " 倍速い",
    "learned": "学習",
    "yes": "はい",
    "no": "いいえ",
}
"""Whole phrases, longest first; the names of mechanisms stay as they are written in a spec."""


def write(name: str, title: str, rows: Sequence[Row], where: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    record = {"name": name, "title": title, "environment": where, "rows": [r.record() for r in rows]}
    (folder / f"{name}.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    text = f"# {title}\n\n{table(rows)}\n{notes(rows)}\n{measured_on(where)}\n"
    (folder / f"{name}.md").write_text(text, encoding="utf-8")


def read(name: str, folder: Path) -> tuple[list[Row], dict[str, Any]] | None:
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    record = json.loads(path.read_text(encoding="utf-8"))
    return [Row.read(r) for r in record["rows"]], record["environment"]


def table(rows: Sequence[Row], language: str = "en") -> str:
    head = HEADINGS[language]
    lines = [_line(head), _line(["---"] * 3 + ["--:"] * 4 + ["---", "---"])]
    for r in rows:
        times = " × faster" if r.kind == "faster" else " ×"
        value = amount(r.value, "s") if r.kind == "seconds" else f"{number(r.value)}{times}"
        spread = "–" if r.low is None or r.high is None else f"{number(r.low)} – {number(r.high)}"
        if r.kind == "seconds" and r.low is not None and r.high is not None:
            spread = f"{amount(r.low, 's')} – {amount(r.high, 's')}"
        met = "–" if r.met is None else ("yes" if r.met else "no")
        cells = [r.what, r.run, r.peer, amount(r.ours, r.unit), amount(r.theirs, r.unit), value, spread]
        cells += ["–" if r.reach is None else str(r.reach), met]
        lines.append(_line([cells[0], *(said(c, language) for c in cells[1:])]))
    return "\n".join(lines) + "\n"


def notes(rows: Sequence[Row]) -> str:
    found = list(dict.fromkeys(r.note for r in rows if r.note))
    return "".join(f"- {n}\n" for n in found)


def measured_on(where: dict[str, Any]) -> str:
    machine = where.get("device", f"{where['cpu']}, {where['threads']} threads")
    return (
        f"{machine}, torch {where['torch']}, {where.get('dtype', 'float32')}, batch 1. Ours and the peer take turns in one "
        "process; medians of the paired ratios and their quartiles."
    )


def measured_on_ja(where: dict[str, Any]) -> str:
    return (
        f"{where['cpu']}、{where['threads']} スレッド、torch {where['torch']}、float32、バッチ 1。同一プロセスで交互に実行し、"
        "対ごとの比の中央値と四分位を示す。"
    )


def said(text: str, language: str) -> str:
    if language != "ja":
        return text
    if text in ("yes", "no"):
        return WORDS_JA[text]
    for english, japanese in WORDS_JA.items():
        text = text if english in ("yes", "no") else text.replace(english, japanese)
    return text


def update_docs(root: Path, rows: Sequence[Row], where: dict[str, Any]) -> list[Path]:
    """Replace what stands between the markers; a page without them is left alone."""
    few = [r for key in SHOWN for r in rows if (r.what, r.run, r.peer) == key]
    pages = (("README.md", "en", few), ("README.ja.md", "ja", few), ("docs/speed.md", "en", rows))
    done: list[Path] = []
    for name, language, shown in pages:
        path = root / name
        under = measured_on(where) if language == "en" else measured_on_ja(where)
        if path.exists() and replace_block(path, f"{table(shown, language)}\n{under}"):
            done.append(path)
    return done


def replace_block(path: Path, text: str) -> bool:
    old = path.read_text(encoding="utf-8")
    before, opened, rest = old.partition(OPEN)
    _, closed, after = rest.partition(CLOSE)
    if not (opened and closed):
        return False
    path.write_text(f"{before}{OPEN}\n{text.strip()}\n{CLOSE}{after}", encoding="utf-8")
    return True


def amount(x: float, unit: str) -> str:
    """Three digits and the unit that fits them."""
    steps = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)) if unit == "s" else (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))
    for name, size in steps:
        if abs(x) >= size:
            return f"{number(x / size)} {name}"
    return f"{number(x / steps[-1][1])} {steps[-1][0]}"


def number(x: float) -> str:
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"


def _line(cells: Sequence[str]) -> str:
    # A bar inside a cell would end it.
    return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"
