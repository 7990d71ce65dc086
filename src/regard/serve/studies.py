"""The studies of a folder, as `regard study run` left them: their summaries and figures."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
SMALL, FIGURE = 1 << 20, 8 << 20
"""Bytes of a summary and of a figure, at most."""
PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class StudyFolder:
    folder: Path

    def summaries(self) -> list[dict[str, Any]]:
        """One of each study that was measured, by name; what cannot be read is left out."""
        found: list[dict[str, Any]] = []
        for path in sorted(self.folder.glob("*.json")) if self.folder.is_dir() else ():
            if NAME.fullmatch(path.stem) and (summary := _read(path)) is not None:
                found.append(summary)
        return found

    def figure(self, name: str) -> bytes | None:
        """The picture of a study; None where there is none. Names are those of studies, so that none leads out of the folder."""
        path = self.folder / f"{name}.png"
        if not NAME.fullmatch(name) or not path.is_file() or path.stat().st_size > FIGURE:
            return None
        data = path.read_bytes()
        return data if data.startswith(PNG) else None


def _read(path: Path) -> dict[str, Any] | None:
    """A summary, with only what a page shows of it."""
    try:
        if path.stat().st_size > SMALL:
            return None
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(data, dict):
        return None
    data = cast(dict[str, Any], data)
    if data.get("study") != path.stem or not isinstance(data.get("verdict"), dict):
        return None
    shown = ("study", "claim", "source", "size", "seeds", "verdict", "checks", "published", "seconds", "command")
    return {**{name: data.get(name) for name in shown}, "figure": path.with_suffix(".png").is_file()}


__all__ = ["StudyFolder"]
