"""One file that shows attention: any layers of a model on a text, by itself or with an identity, under any mechanism, without a server.

    regard.view(model, "The animal didn't cross the street because it was too tired", tokenizer)     in a notebook it shows itself
    regard.view("smollm2", text, spec=["entmax(1.5)", "topk(4)"], layers=[3, 18]).save("view.html")

Weights are rounded to 1/255 of the largest of their head; of each row those that are left are stored, so that long texts fit. A browser
opens one head at a time.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ShapeError, StateError
from ..files import write_bytes
from ..identity.read.recall import recall
from ..identity.state import Identity
from ..models.base import Model
from ..models.tokenizer import Tokenizer
from .attention import AttentionReader, LayerSeen

Tell = Callable[[str, float | None], object]
LIMIT = 24 << 20
"""Bytes of a file, unless the caller says otherwise: browsers open it at once."""
LONGEST = 4096
AT_ONCE = 1 << 23
"""Weights that are held at full precision on the way into the file."""
MECHANISMS = 4
STATIC = Path(__file__).parent / "static" / "view"
REFUSED = 0x8000


@dataclass(frozen=True, eq=False)
class View:
    """A page of its own, as text."""

    html: str
    title: str

    def save(self, path: str | Path) -> Path:
        """Write the file, whole or not at all."""
        path = Path(path)
        write_bytes(path, self.html.encode("utf-8"))
        return path

    def _repr_html_(self) -> str:
        """In a notebook, in a frame of its own: nothing of the page reaches the notebook, and nothing of it the page."""
        inside = html.escape(self.html, quote=True)
        return f'<iframe srcdoc="{inside}" sandbox="allow-scripts allow-downloads" title="{html.escape(self.title, quote=True)}" width="100%" height="760" style="border:0"></iframe>'

    def __repr__(self) -> str:
        return f"View({self.title!r}, {len(self.html) / 1e6:.1f} MB): .save('view.html'), or let a notebook show it"


def view(
    model: str | Path | Model,
    text: str,
    tokenizer: Tokenizer | None = None,
    *,
    identity: Identity | None = None,
    name: str = "",
    spec: str | Sequence[str] = (),
    layers: Sequence[int] | None = None,
    everywhere: bool = False,
    limit: int = LIMIT,
    called: str = "",
    tell: Tell = lambda what, share: None,
) -> View:
    """The attention of a model on a text: the model's own, and beside it that of each `spec`.

    `layers` are those to keep, all by default. `identity` is read as the text brings it to mind; `name` is what it is called on the page.
    `called` is what the model is. What would be larger than `limit` bytes is refused, with what would fit.
    """
    model, tokenizer, own = _opened(model, tokenizer)
    reader = AttentionReader(model, tokenizer)
    tokens = reader.encode(text)
    depth = len(reader.layers)
    chosen = list(range(depth)) if layers is None else sorted({i + depth if i < 0 else i for i in layers})
    wrong = [i for i in chosen if not 0 <= i < depth]
    if wrong or not chosen:
        raise ShapeError(f"layers={list(layers or ())}: this model has layers 0 to {depth - 1}; name at least one of them")
    if not 1 <= len(tokens) <= LONGEST:
        raise ShapeError(f"a text of {len(tokens):,} tokens: give 1 to {LONGEST:,} of them")
    specs = [None, *([spec] if isinstance(spec, str) else spec)]
    if len(specs) > MECHANISMS:
        raise ShapeError(f"{len(specs) - 1} mechanisms: {MECHANISMS - 1} are compared with the model's own at most")
    who = None if identity is None else recall(model, identity, tokens, tokenizer)
    words = reader.words(tokens)
    room = limit
    packed: list[dict[str, Any]] = []
    for n, one in enumerate(specs):
        heads: dict[str, list[dict[str, Any]]] = {}
        seen: LayerSeen | None = None
        for i, seen in enumerate(reader.read_layers(tokens, chosen, spec=one, everywhere=everywhere, identity=who)):
            tell("reading attention", (n * len(chosen) + i) / (len(specs) * len(chosen)))
            heads[str(seen.layer)] = _packed_layer(seen)
            room -= sum(len(h["data"]) for h in heads[str(seen.layer)])
            if room < 0:
                done = n * len(chosen) + i
                raise ShapeError(
                    f"{done + 1} of {len(specs) * len(chosen)} layers of this text of {len(tokens):,} tokens fill {limit / 1e6:.0f} MB: name "
                    f"fewer layers (about {max(1, done)} fit), or allow a larger file with limit="
                )
        assert seen is not None
        scores = reader.head_scores(tokens) if n == 0 and len(tokens) >= 3 and who is None else None
        packed.append({
            "spec": seen.spec, "tokens": words, "slots": list(seen.slots), "heads": seen.heads, "layers": depth, "chosen": chosen, "causal": reader.causal,
            "scores": scores and {k: x.double().round(decimals=3).tolist() for k, x in scores.items()}, "packed": heads,
        })  # fmt: skip
    title = text if len(text) <= 80 else text[:79] + "…"
    return View(_page({"title": title, "model": called or own, "identity": name, "views": packed}, title), title)


def _opened(model: str | Path | Model, tokenizer: Tokenizer | None) -> tuple[Model, Tokenizer, str]:
    if isinstance(model, str | Path):
        from ..identity.opened import fetched

        loaded, own, base = fetched(model)
        return loaded, tokenizer or own, base.name
    if tokenizer is None:
        raise StateError(f"view({type(model).__name__}, …): a loaded model comes with its tokenizer, third")
    return model, tokenizer, model.family


def _packed_layer(seen: LayerSeen) -> list[dict[str, Any]]:
    """Every head of a layer, packed; rows are computed some at a time."""
    keys = len(seen.slots) + len(seen.tokens)
    # Many rows at a time: those of one tile are computed together, and would be again for the next of them.
    step = max(1, AT_ONCE // (keys * seen.heads))
    weights: list[Tensor] = []
    accepted: list[Tensor] = []
    every = list(range(seen.heads))
    for start in range(0, len(seen.tokens), step):
        rows = seen.attended.rows(range(start, min(len(seen.tokens), start + step)), every)
        # Halves of what will be stored in eight bits.
        weights.append(rows.weights[0].half())
        accepted.append(rows.accepted[0])
    whole, fits = torch.cat(weights, 1), torch.cat(accepted, 1)
    return [packed_head(whole[h].float(), fits[h]) for h in every]


def packed_head(weights: Tensor, accepted: Tensor) -> dict[str, Any]:
    """One head, (rows, keys): of each row how many weights, at which keys, and in eight bits each; then all of it deflated."""
    signed = bool((weights < 0).any())
    scale = float(weights.abs().max()) or 1.0
    codes = (weights / scale * (127 if signed else 255)).round().to(torch.int16)
    parts: list[bytes] = []
    for row, fits in zip(codes, accepted.tolist(), strict=True):
        at = row.nonzero().flatten()
        parts.append(struct.pack("<H", len(at) | (0 if fits else REFUSED)))
        parts.append(at.to(torch.uint16).numpy().tobytes())
        parts.append(row[at].to(torch.int8 if signed else torch.uint8).numpy().tobytes())
    data = base64.b64encode(zlib.compress(b"".join(parts), 9)).decode("ascii")
    return {"data": data, "scale": scale, "signed": signed}


def _page(data: dict[str, Any], title: str) -> str:
    """The file: the page's script and sheet inside it, and a policy that lets nothing else run or load."""
    script, sheet = ((STATIC / name).read_text(encoding="utf-8") for name in ("view.js", "view.css"))
    script = script.replace("</script", "<\\/script")
    inside = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(sheet)}; img-src data: blob:; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(title)} · regard view</title>\n<style>{sheet}</style>\n</head>\n<body>\n"
        '<div id="app"></div>\n'
        f'<script type="application/json" id="regard-data">{inside}</script>\n<script>{script}</script>\n</body>\n</html>\n'
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"


__all__ = ["View", "view"]
