"""Damage to files, the same for the same seed. REGARD_FUZZ says how many times each fuzz test damages something."""

from __future__ import annotations

import json
import os
import random
import struct
from typing import Any

NASTY: list[Any] = [
    None, True, -1, 0, 1 << 30, 1 << 63, 10**30, 1e308, float("nan"), float("inf"), "", "x", "\ud800", "\0", "../../etc/passwd", [], {},
    [[]], {"a": 1}, [1, "x"], "9" * 5000,
]  # fmt: skip
"""What a field of JSON or YAML might hold instead."""


def rounds(usual: int) -> int:
    return int(os.environ.get("REGARD_FUZZ") or usual)


def bytes_damaged(data: bytes, r: random.Random) -> bytes:
    """One wound: flipped bits, a cut, a hole, a doubled part, rubbish, or nothing left."""
    raw, at = bytearray(data), r.randrange(max(1, len(data)))
    match r.randrange(9):
        case 0:
            for _ in range(r.choice((1, 1, 2, 8))):
                if raw:
                    raw[r.randrange(len(raw))] ^= 1 << r.randrange(8)
        case 1:
            del raw[at:]
        case 2:
            del raw[at : at + r.choice((1, 4, 64))]
        case 3:
            raw[at:at] = raw[at : at + r.choice((1, 8, 200))]
        case 4:
            raw[at : at + 8] = r.randbytes(8)
        case 5:
            raw = bytearray(r.randbytes(r.choice((0, 1, 8, 300))))
        case 6:
            raw[at:at] = r.choice(
                (b"\xff\xfe", b"\0", b"[" * 3000, b"{" * 3000, b"nan", b"1e999", b"-", b"\xed\xa0\x80", b"9" * 5000)
            )
        case 7:
            # The length of a safetensors header, or the first bytes of anything else.
            raw[:8] = struct.pack("<Q", r.choice((0, 1, len(raw), 1 << 31, 1 << 62, (1 << 64) - 1)))
        case _:
            raw[at : at + 1] = bytes([r.choice(b"0123456789-\"'[]{},:. \n")])
    return bytes(raw)


def json_damaged(found: Any, r: random.Random) -> Any:
    """The same tree with one value replaced, removed or renamed, at any depth."""
    if isinstance(found, dict) and found:
        key = r.choice(list(found))
        changed = dict(found)
        match r.randrange(6):
            case 0:
                del changed[key]
            case 1:
                changed[r.choice(("x", "", "depth", key + "_"))] = changed.pop(key)
            case 2:
                changed[key] = r.choice(NASTY)
            case _:
                changed[key] = json_damaged(changed[key], r)
        return changed
    if isinstance(found, list) and found and r.randrange(3):
        at = r.randrange(len(found))
        return [*found[:at], json_damaged(found[at], r), *found[at + 1 :]]
    if isinstance(found, int) and not isinstance(found, bool) and r.randrange(2):
        return r.choice((found + 1, found - 1, -found, found * 1000, found << 20, float(found)))
    return r.choice(NASTY)


def header_damaged(data: bytes, r: random.Random) -> bytes:
    """A safetensors file whose header is JSON still, and says something else."""
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(json_damaged(json.loads(data[8 : 8 + size]), r)).encode()
    return struct.pack("<Q", len(header)) + header + data[8 + size :]
