"""What the verbs about identities are given: a model, a store, a name, an affect."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..identity.wording import clean
from .console import fail, progress
from .generate import DEFAULT

if TYPE_CHECKING:
    from ..identity import Base, Identity, IdentityStore, Rule
    from ..identity.store.replay import Affect
    from ..models.base import Model
    from ..models.tokenizer import Tokenizer

Tell = Callable[[str, float | None], None]
ModelOption = Annotated[
    str, typer.Option("--model", "-m", help="a name from `regard models list`, a folder, a .gguf or a .bin")
]
EpisodesOption = Annotated[
    str | None,
    typer.Option(
        help="what is said whole, to come to mind when asked for: again (read again then), kept (with keys and values: 12 KB a token more) or none "
        "[default: again]",
        show_default=False,
    ),
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
BlobsOption = Annotated[
    str | None,
    typer.Option(
        "--blobs",
        envvar="REGARD_BLOBS",
        help="where the store keeps its tensors: a folder, or s3://bucket/prefix [default: beside the store]",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON instead of text")]


def open_model(source: str, tell: Tell) -> tuple[Model, Tokenizer, Base]:
    """A model, its tokenizer, and who it is."""
    from ..identity.opened import opened
    from ..models import downloads

    if source == DEFAULT and not downloads.present(DEFAULT):
        fail("no model is here yet; get SmolLM2 (93 MB) with: regard models get smollm2, or name one with --model")
    return opened(source, tell)


def open_store(url: str | None, blobs: str | None = None) -> IdentityStore:
    """REGARD_BLOBS says for every verb where the blobs are, as REGARD_STORE does of the store."""
    from ..identity import IdentityStore

    return IdentityStore(url, blobs=blobs or os.environ.get("REGARD_BLOBS") or None)


def load(store: IdentityStore, name: str, base: Base | None = None) -> Identity:
    """The identity at the head of a name; an unknown one is answered with how to begin it."""
    from ..identity.store import StoreError

    try:
        store.head(name)
    except StoreError as error:
        fail(f"{error}; begin one with: regard identity new {clean(name)}")
    return store.load(name, base)


def tokenizer_of(who: Identity, model: str, otherwise: str = "imprints are shown as token numbers") -> Tokenizer | None:
    """The tokenizer of the identity's own model; None, and a word about it, where that is not the model at hand."""
    from ..errors import RegardError
    from ..models import downloads

    if not len(who.imprints) and not who.episodes:
        return None
    try:
        if model == DEFAULT and not downloads.present(DEFAULT):
            note(f"{otherwise}: words need the model that it was written on, --model")
            return None
        with progress() as tell:
            _, tokenizer, base = open_model(model, tell)
        who.base.refuse(base)
    except RegardError as error:
        note(f"{otherwise}: {error}")
        return None
    return tokenizer


def parse_affect(text: str) -> Affect:
    """A number from −1 to 1, or "estimated"."""
    if text == "estimated":
        return "estimated"
    try:
        number = float(text.replace("−", "-"))
    except ValueError:
        number = float("nan")
    if not -1 <= number <= 1:
        from ..errors import SpecError

        raise SpecError(f"affect {text!r:.40}: give a number from -1 (it hurt) to 1 (it mattered), or estimated")
    return number


def parse_rule(keep: str | None, budget: int | None, episodes: str | None) -> Rule:
    """How a text is imprinted; None leaves what is usual."""
    from ..errors import SpecError
    from ..identity import Rule

    ways: dict[str, bool | Literal["kept"]] = {"again": True, "kept": "kept", "none": False}
    if episodes is not None and episodes not in ways:
        raise SpecError(f"--episodes {episodes!r:.40}: give one of {', '.join(ways)}")
    rule = Rule() if budget is None else Rule(budget=budget)
    rule = rule if keep is None else replace(rule, keep=keep)
    return rule if episodes is None else replace(rule, episodes=ways[episodes])


def note(text: str) -> None:
    """A remark to whoever watches: stdout is for results."""
    if sys.stderr.isatty() and "NO_COLOR" not in os.environ:
        text = f"\x1b[2m{text}\x1b[0m"
    typer.echo(text, err=True)
