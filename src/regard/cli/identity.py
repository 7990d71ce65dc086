"""`regard identity`: begin, look at, compare, fork, roll back, forget, and carry elsewhere."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..identity.wording import clean, several, size, spark, word
from .arguments import JsonOption, ModelOption, StoreOption, load, note, open_model, open_store, tokenizer_of
from .console import Yes, confirm, fail, progress, table, verb
from .facts import facts
from .generate import DEFAULT
from .upkeep import backup, check, gc, restore

if TYPE_CHECKING:
    from ..identity import Identity
    from ..identity.store import Commit
    from ..models.tokenizer import Tokenizer

app = typer.Typer(
    help="Identities that are kept: who they are, what happened to them, and how to undo it.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(help="the identity's name", show_default=False)]
SHOWN = 16
"""Imprints that `show` lists."""


@app.command()
@verb
def new(
    name: Name,
    message: Annotated[str, typer.Option(help="a line for the log")] = "",
    model: ModelOption = DEFAULT,
    store: StoreOption = None,
) -> None:
    """Begin an identity: empty, so that it is the model itself, bit for bit, until something is imprinted.

    \b
    regard identity new mara
    regard identity new mara --model ./my-model --store ./people.db
    """
    from ..identity import Identity
    from ..identity.store.records import checked_name

    checked_name(name)
    with progress() as tell:
        _, _, base = open_model(model, tell)
    with open_store(store) as opened:
        commit = opened.new(name, Identity.new(base), message=message)
    typer.echo(f"{name} {commit.id[:12]}  an empty identity of {base.name or base.family}")


@app.command("list")
@verb
def list_identities(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Who is here.

    \b
    regard identity list
    regard identity list --json | jq '.[].name'
    """
    with open_store(store) as opened:
        names = opened.names()
    if as_json:
        typer.echo(json.dumps([{"name": n, **_commit(c)} for n, c in sorted(names.items())]))
        return
    if not names:
        note("nobody is here yet; begin with: regard identity new NAME, or: regard imprint FILE --identity NAME")
        return
    rows = [
        (n, c.id[:12], _when(c.time), f"{c.experiences:,}", f"{c.tokens:,}", f"{c.imprints:,}", size(c.bytes))
        for n, c in sorted(names.items())
    ]
    table(("name", "head", "last change", "experiences", "tokens", "imprints", "size"), rows)


@app.command()
@verb
def show(
    name: Annotated[str, typer.Argument(help="a name, or the beginning of a commit's id")],
    model: ModelOption = DEFAULT,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """What an identity is made of: its life in numbers, and what it kept, in words.

    The words come from the model's tokenizer; without the model they are token numbers.

    \b
    regard identity show mara
    regard identity show 3f2a9c
    regard identity show mara --json
    """
    with open_store(store) as opened:
        commit = opened.find(name)
        who = opened.load(name)
    tokenizer = tokenizer_of(who, model)
    if as_json:
        typer.echo(json.dumps({"name": name, **_commit(commit), **_described(who, tokenizer)}, ensure_ascii=False))
        return
    typer.echo("\n".join([f"{name} {commit.id[:12]}, {_when(commit.time)}", *summary(who, tokenizer)]))


@app.command()
@verb
def log(
    name: Name,
    limit: Annotated[int | None, typer.Option("--limit", "-n", help="only the youngest", min=1)] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """What happened to an identity, youngest first.

    \b
    regard identity log mara
    regard identity log mara -n 5 --json
    """
    with open_store(store) as opened:
        commits = opened.log(name, limit)
    if as_json:
        typer.echo(json.dumps([_commit(c) for c in commits]))
        return
    for c in commits:
        typer.echo(f"{clean(str(c))}  ({several(c.imprints, 'imprint')}, {size(c.bytes)})")


@app.command()
@verb
def diff(
    a: Annotated[str, typer.Argument(help="a name or a commit")],
    b: Annotated[str, typer.Argument(help="another")],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """How two identities differ, or one at two times.

    \b
    regard identity diff mara mara-2
    regard identity diff 3f2a9c mara --json
    """
    with open_store(store) as opened:
        difference = opened.diff(a, b)
    typer.echo(json.dumps({**asdict(difference), "same": difference.same}) if as_json else str(difference))


@app.command()
@verb
def fork(
    name: Name,
    new_name: Annotated[str, typer.Argument(help="the name of the second")],
    at: Annotated[str | None, typer.Option(help="a commit in its history [default: the head]", show_default=False)] = None,
    store: StoreOption = None,
) -> None:
    """Let an identity go two ways from here; nothing is copied until they differ.

    \b
    regard identity fork mara mara-2
    regard identity fork mara mara-then --at 3f2a9c
    """
    with open_store(store) as opened:
        commit = opened.fork(name, new_name, at)
    typer.echo(f"{new_name} {commit.id[:12]}  from {name}")


@app.command()
@verb
def rollback(
    name: Name,
    to: Annotated[str, typer.Argument(help="how many commits to go back, or the commit to be again")] = "1",
    store: StoreOption = None,
) -> None:
    """Be again what the identity was; a further commit, so that this too can be undone.

    \b
    regard identity rollback mara
    regard identity rollback mara 3
    regard identity rollback mara 3f2a9c
    """
    with open_store(store) as opened:
        commit = opened.rollback(name, steps(to))
    typer.echo(f"{name} {commit.id[:12]}  {commit.message}")


@app.command()
@verb
def forget(
    name: Name,
    source: Annotated[str, typer.Argument(help="whose writing to take back; `regard identity show` names them")],
    yes: Yes = False,
    model: ModelOption = DEFAULT,
    store: StoreOption = None,
) -> None:
    """Take back all that a source wrote, and prove it.

    The identity is made again from nothing out of every other event, twice, and both must agree bit for bit. The history of the
    name is replaced; texts and states that held the source are removed for good, the database is written anew, and every file of the
    store is read for what was removed. The answer says which files were read, and what cannot be: backups, exports, and the log of a
    database server. Forks that hold it are named; a source of the same name elsewhere is somebody else's. This cannot be undone.

    \b
    regard identity forget mara diary
    regard identity forget mara monday --yes
    """
    from ..identity.store.replay import replay

    with open_store(store) as opened:
        load(opened, name)
        confirm(yes, f"take back all that {clean(source)!r} wrote into {name}? This cannot be undone")
        with progress() as tell:
            body, tokenizer, base = open_model(model, tell)
            opened.load(name, base)
            proof = opened.forget(name, source, replay(body, tokenizer, tell))
    typer.echo(clean(str(proof)))


@app.command()
@verb
def export(
    name: Name,
    path: Annotated[Path, typer.Argument(help="a new folder, or one file if it ends in .safetensors")],
    store: StoreOption = None,
) -> None:
    """Write an identity and its journal, to be read elsewhere with `import` or `Identity.load`.

    \b
    regard identity export mara ./mara
    regard identity export mara mara.safetensors
    """
    with open_store(store) as opened:
        where = opened.export(name, path)
    typer.echo(f"wrote {where}")


@app.command("import")
@verb
def import_identity(
    path: Annotated[Path, typer.Argument(help="what `export` wrote")],
    name: Annotated[str, typer.Argument(help="a new name for it here")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="refuse it unless it belongs to this model", show_default=False)
    ] = None,
    store: StoreOption = None,
) -> None:
    """Begin an identity with one that was exported; everything is checked before anything is written.

    \b
    regard identity import ./mara mara
    regard identity import mara.safetensors mara --model smollm2
    """
    if not path.exists():
        fail(f"there is no {path}; give a folder or a .safetensors that `regard identity export` wrote")
    base = None
    if model is not None:
        with progress() as tell:
            base = open_model(model, tell)[2]
    with open_store(store) as opened:
        commit = opened.import_(path, name, base)
    typer.echo(f"{name} {commit.id[:12]}  {several(commit.experiences, 'experience')}, {several(commit.imprints, 'imprint')}")


@app.command()
@verb
def delete(name: Name, yes: Yes = False, store: StoreOption = None) -> None:
    """Remove an identity and all of its history that no fork shares. This cannot be undone.

    \b
    regard identity delete mara
    """
    with open_store(store) as opened:
        load(opened, name)
        confirm(yes, f"remove {name} and its history? This cannot be undone")
        gone = opened.delete(name)
    typer.echo(f"{name} is gone, {several(gone, 'commit')} with it")


for _verb in (facts, check, backup, restore, gc):
    app.command()(_verb)


def steps(to: str) -> str | int:
    """A count of commits, or a commit: ids are given by four letters or more, so that short numbers are counts."""
    return int(to) if to.isdecimal() and len(to) < 4 else to


def summary(who: Identity, tokenizer: Tokenizer | None, shown: int = SHOWN) -> list[str]:
    """An identity in a few lines."""
    base, life = who.base, who.life
    lines = [
        f"  base      {base.name or base.family} ({base.fingerprint[:12]}): {base.depth} layers, {base.key_heads} key heads of {base.head_width}",
        f"  life      {several(life.experiences, 'experience')}, {several(life.tokens, 'token')}, {several(life.sleeps, 'sleep')}",
        f"  shock     {life.shock_mean:.2f} ± {life.shock_spread:.2f} nats",
        f"  size      {size(who.nbytes)}",
    ]
    if who.self is not None:
        lines.append(f"  self      {who.self.form}, |s| {float(who.self.s.norm()):.3g}  {spark(life.self_norms)}")
    if who.trace is not None:
        from ..identity.write.trace import spectrum

        eigenvalues = spectrum(who.trace)
        strength = eigenvalues.abs().amax((1, 2)).tolist()
        lines.append(
            f"  trace     rank {who.trace.rank}, eigenvalues {float(eigenvalues.min()):.3g} to {float(eigenvalues.max()):.3g}; by layer {spark(strength)}"
        )
    imprints = who.imprints
    lines.append(f"  imprints  {len(imprints)}")
    order = imprints.worth.argsort(descending=True).tolist()[:shown]
    for i in order:
        text = word(tokenizer, [int(imprints.token[i])])
        lines.append(f"    {text:<16} shock {float(imprints.shock[i]):5.2f}  {clean(who.sources[int(imprints.source[i])])}")
    if len(imprints) > len(order):
        lines.append(f"    … and {len(imprints) - len(order)} more")
    if who.episodes:
        told = sum(len(e) for e in who.episodes)
        lines.append(f"  episodes  {len(who.episodes)}, {several(told, 'token')}, {size(sum(e.nbytes for e in who.episodes))}")
    counts = [(s, int((imprints.source == n).sum())) for n, s in enumerate(who.sources)]
    if counts:
        lines.append("  sources   " + ", ".join(f"{clean(s)} ({n})" for s, n in counts))
    return lines


def _described(who: Identity, tokenizer: Tokenizer | None) -> dict[str, object]:
    imprints = who.imprints
    described: dict[str, object] = {
        "base": asdict(who.base),
        "life": asdict(who.life),
        "bytes": who.nbytes,
        "self": None if who.self is None else {"form": who.self.form, "norm": float(who.self.s.norm())},
        "trace": None,
        "imprints": [
            {
                "token": int(imprints.token[i]),
                "text": None
                if tokenizer is None or int(imprints.token[i]) < 0
                else tokenizer.decode([int(imprints.token[i])], special=True),
                "position": int(imprints.position[i]),
                "shock": float(imprints.shock[i]),
                "worth": float(imprints.worth[i]),
                "source": who.sources[int(imprints.source[i])],
            }
            for i in range(len(imprints))
        ],
        "episodes": [
            {**e.facts(), "text": None if tokenizer is None else tokenizer.decode(e.tokens.tolist()), "bytes": e.nbytes}
            for e in who.episodes
        ],
        "sources": list(who.sources),
    }
    if who.trace is not None:
        from ..identity.write.trace import spectrum

        described["trace"] = {"rank": who.trace.rank, "spectrum": spectrum(who.trace).tolist()}
    return described


def _commit(c: Commit) -> dict[str, Any]:
    names = ("id", "parent", "number", "kind", "source", "message", "time", "experiences", "tokens", "imprints", "bytes", "digest",
             "fingerprint")  # fmt: skip
    return {n: getattr(c, n) for n in names} | {"sources": list(c.sources)}


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
