"""What the verbs about identities share: where the model and the store come from, and how a state is put into words."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from .console import fail
from .generate import DEFAULT

if TYPE_CHECKING:
    from ..identity import Base, Identity, IdentityStore
    from ..models.base import Model
    from ..models.tokenizer import Tokenizer

Tell = Callable[[str, float | None], None]
ModelOption = Annotated[
    str, typer.Option("--model", "-m", help="a name from `regard models list`, a folder, a .gguf or a .bin")
]
StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        envvar="REGARD_STORE",
        help="a file, or a PostgreSQL URL [default: identities.db in the cache]",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON instead of text")]
BARS = "▁▂▃▄▅▆▇█"


def open_model(source: str, tell: Tell) -> tuple[Model, Tokenizer, Base]:
    """A model, its tokenizer, and who it is; the base carries the name that the model was asked for by."""
    from dataclasses import replace

    from ..models import downloads as hub

    if source == DEFAULT and not hub.present(DEFAULT):
        fail("no model is here yet; get SmolLM2 (93 MB) with: regard models get smollm2, or name one with --model")
    tell(f"loading {source}", None)
    model, tokenizer = hub.open_model(source, tell)
    from ..identity import base_of

    # A folder is remembered by its last name: where it lies on this machine is nobody's business.
    name = Path(source).name if Path(source).exists() else source
    return model, tokenizer, replace(base_of(model), name=name)


def open_store(url: str | None) -> IdentityStore:
    from ..identity import IdentityStore

    return IdentityStore(url)


def load(store: IdentityStore, name: str, base: Base | None = None) -> Identity:
    """The identity at the head of a name; an unknown one is answered with how to begin it."""
    from ..identity.store import StoreError

    try:
        store.head(name)
    except StoreError as error:
        fail(f"{error}; begin one with: regard identity new {clean(name)}")
    return store.load(name, base)


def parse_affect(text: str) -> Any:
    """A number from −1 to 1, or "estimated"."""
    if text == "estimated":
        return text
    try:
        number = float(text.replace("−", "-"))
    except ValueError:
        number = float("nan")
    if not -1 <= number <= 1:
        from ..errors import SpecError

        raise SpecError(f"affect {text!r:.40}: give a number from -1 (it hurt) to 1 (it mattered), or estimated")
    return number


def text_of(path: str) -> str:
    """What a file or stdin holds, if it is text and not too much of it."""
    from ..identity.store.records import MOST_TEXT

    if path == "-":
        data = sys.stdin.buffer.read(MOST_TEXT + 1)
    else:
        file = Path(path)
        if not file.exists():
            fail(f"there is no file {path}; give a text, a .json or a .jsonl of messages, or - for stdin")
        if file.is_dir():
            fail(f"{path} is a folder; give one file, and call again for the next")
        with file.open("rb") as f:
            data = f.read(MOST_TEXT + 1)
    if len(data) > MOST_TEXT:
        fail(
            f"{path} has more than {MOST_TEXT >> 20} MB of text, the most that one imprint takes: give it in parts (split -C 1M)"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fail(f"{path} is not text in UTF-8 (byte {error.start:,} cannot be read); a PDF or an archive has to become text first")
    if "\0" in text:
        fail(f"{path} is no text: it holds NUL bytes")
    if not text.strip():
        fail(f"{path} is empty: there is nothing to imprint")
    return text


def words(identity: Identity, tokenizer: Tokenizer, index: Iterable[int] | None = None) -> list[tuple[str, float, int]]:
    """Imprints as words: tokens that followed each other read together. Each with its largest worth and its first index, the
    worthiest first."""
    kept = identity.imprints
    chosen = sorted(range(len(kept)) if index is None else index)
    position, token, source, worth = (cast(list[Any], x.tolist()) for x in (kept.position, kept.token, kept.source, kept.worth))
    runs: list[list[int]] = []
    for i in chosen:
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and position[i] == position[last] + 1
            and source[i] == source[last]
            and min(token[i], token[last]) >= 0
        ):
            runs[-1].append(i)
        else:
            runs.append([i])
    found = [(word(tokenizer, [token[i] for i in run]), max(worth[i] for i in run), run[0]) for run in runs]
    return sorted(found, key=lambda x: -x[1])


def word(tokenizer: Tokenizer | None, tokens: Sequence[int]) -> str:
    """Tokens to be read by a person; one that stands for several merged moments has no word."""
    if tokenizer is None or any(t < 0 for t in tokens):
        return "·" if any(t < 0 for t in tokens) else " ".join(f"#{t}" for t in tokens)
    return clean(tokenizer.decode(tokens, special=True)).replace("\n", "⏎").strip() or "␣"


def clean(text: str) -> str:
    """Text that cannot steer a terminal: control characters are shown, not sent."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


def spark(values: Sequence[float], width: int = 40) -> str:
    """A line of bars; of many values, evenly picked ones and always the last."""
    if len(values) > width:
        values = [values[round(i * (len(values) - 1) / (width - 1))] for i in range(width)]
    top = max(values, default=0.0)
    return "".join(BARS[min(int(v / top * len(BARS)), len(BARS) - 1)] if top > 0 else BARS[0] for v in values)


def size(count: int) -> str:
    return f"{count:,} bytes" if count < 10_000 else f"{count / 1000:,.0f} KB"


def note(text: str) -> None:
    """A remark to whoever watches: stdout is for results."""
    if sys.stderr.isatty() and "NO_COLOR" not in os.environ:
        text = f"\x1b[2m{text}\x1b[0m"
    typer.echo(text, err=True)


def several(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
