"""Texts and conversations in files: .txt, a .json list of messages, a .jsonl with a message on every line.

read_document(Path("diary.txt"))           "I live in Porto. …"
read_document(Path("monday.jsonl"))        [{"role": "user", "content": "…"}, …]
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from ..errors import StateError
from .store.records import MOST_TEXT

Messages = list[dict[str, str]]


def read_document(path: Path) -> str | Messages:
    """What a file says, if it is text and not too much of it."""
    if not path.exists():
        raise StateError(f"there is no file {path}; give a text, a .json or a .jsonl of messages")
    if path.is_dir():
        raise StateError(f"{path} is a folder; give one file, and call again for the next")
    with path.open("rb") as f:
        return parse_document(f.read(MOST_TEXT + 1), str(path))


def parse_document(data: bytes, name: str) -> str | Messages:
    """What these bytes say; the ending of `name` tells what they are."""
    if len(data) > MOST_TEXT:
        raise StateError(
            f"{name} has more than {MOST_TEXT >> 20} MB of text, the most that one imprint takes: give it in parts (split -C 1M)"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise StateError(
            f"{name} is not text in UTF-8 (byte {error.start:,} cannot be read); a PDF or an archive has to become text first"
        ) from error
    if "\0" in text:
        raise StateError(f"{name} is no text: it holds NUL bytes")
    if not text.strip():
        raise StateError(f"{name} is empty: there is nothing to imprint")
    match Path(name).suffix.lower():
        case ".json":
            parsed = _json(text, name)
            if not isinstance(parsed, list) or not parsed:
                raise StateError(f'{name} holds no list of messages: [{{"role": "user", "content": "…"}}, …]')
            rows = cast(list[Any], parsed)
            return [message(m, f"{name}, message {i}") for i, m in enumerate(rows, 1)]
        case ".jsonl":
            lines = [(line, f"{name}, line {i}") for i, line in enumerate(text.splitlines(), 1) if line.strip()]
            return [message(_json(line, where), where) for line, where in lines]
        case _:
            # From stdin there is no name to tell by: lines that are all messages are messages.
            return _all_messages(text) or text


def message(value: object, where: str) -> dict[str, str]:
    """A message with its role and its content, and nothing else that it came with."""
    match value:
        case {"role": str(role), "content": str(content)}:
            return {"role": role, "content": content}
        case _:
            raise StateError(f'{where} is no message: it needs {{"role": "user", "content": "…"}}, and is {value!r:.60}')


def checked_text(given: object) -> str | Messages:
    """A text or a chat that an app gave, as an event keeps it."""
    if isinstance(given, str):
        return given if given.strip() else _nothing(given)
    if isinstance(given, Mapping) or not isinstance(given, Sequence):
        raise StateError(f"{given!r:.60} is nothing to tell: give a text, a list of messages, or a pathlib.Path of a file")
    rows = cast(Sequence[object], given)
    return [message(m, f"message {i}") for i, m in enumerate(rows, 1)] if len(rows) else _nothing(rows)


def _nothing(given: object) -> NoReturn:
    raise StateError(f"{given!r:.60} says nothing: there is nothing to imprint")


def _all_messages(text: str) -> Messages:
    lines = [line for line in text.splitlines() if line.strip()]
    if not all(line.lstrip().startswith("{") for line in lines):
        return []
    try:
        return [message(json.loads(line), "") for line in lines]
    except (ValueError, RecursionError):
        return []


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StateError(f"{where} is not JSON: {error}") from error


__all__ = ["Messages", "checked_text", "parse_document", "read_document"]
