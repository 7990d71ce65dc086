"""`regard serve`: a model and its identities over HTTP; `regard serve key`: who may call it; `regard studio`: the same with its page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..identity.wording import clean
from .arguments import BlobsOption, JsonOption, ModelOption, StoreOption
from .console import fail, progress, table, verb
from .generate import DEFAULT, CacheOption, parse_cache, parse_weights

if TYPE_CHECKING:
    from ..serve.settings import Settings

app = typer.Typer(invoke_without_command=True)
key = typer.Typer(help="Who may call the server, and whose identities are theirs.", no_args_is_help=True)
app.add_typer(key, name="key")

HostOption = Annotated[str, typer.Option(help="the address to serve on; any but this machine's own needs a key")]
PortOption = Annotated[int, typer.Option(help="0 takes any that is free", min=0, max=65535)]
WeightsOption = Annotated[str, typer.Option(help="float32; int8 or q4 (blocks of a GGUF file): faster, a little less exact")]
RowsOption = Annotated[int, typer.Option(help="answers that are written at the same time", min=1)]
QueueOption = Annotated[int, typer.Option(help="requests that wait at most; one more gets 429", min=1)]
EngineOption = Annotated[str, typer.Option(help="batch, plain (one after another), or ray")]
ReplicasOption = Annotated[int, typer.Option(help="of --engine ray: processes, each with the model", min=1, max=1000)]
CorsOption = Annotated[
    list[str] | None, typer.Option("--cors", help="an origin whose pages may call, such as https://example.org")
]
AllowOption = Annotated[list[str] | None, typer.Option("--allow-host", help="a further name that this server is called by")]
KeysOption = Annotated[
    Path | None, typer.Option("--keys", help="the file of keys [default: serve/keys.json in the cache]", show_default=False)
]
DeadlineOption = Annotated[float, typer.Option(help="seconds that an answer may take", min=1)]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="no line for each request")]


@app.callback()
@verb
def serve(
    context: typer.Context,
    model: ModelOption = DEFAULT,
    store: StoreOption = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    weights: WeightsOption = "float32",
    cache: CacheOption = "float32",
    rows: RowsOption = 8,
    queue: QueueOption = 64,
    engine: EngineOption = "batch",
    replicas: ReplicasOption = 2,
    blobs: BlobsOption = None,
    cors: CorsOption = None,
    allow_host: AllowOption = None,
    keys: KeysOption = None,
    deadline: DeadlineOption = 300.0,
    quiet: QuietOption = False,
) -> None:
    """Serve a model and the identities on it to every OpenAI client.

    On this machine alone nobody needs a key until there is one; on any other address the server does not start without. SIGTERM and
    Ctrl-C finish the turns that run, commit them, and exit.

    \b
    regard serve
    regard serve --weights int8 --cache int8 --port 9000
    regard serve key new phone --scope write --own mara
    regard serve --host 0.0.0.0 --allow-host models.example.org
    regard serve --engine ray --replicas 4 --store postgresql://regard@db/people --blobs s3://bucket/people
    curl localhost:8000/v1/chat/completions -H 'content-type: application/json' \\
      -d '{"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}]}'
    """
    if context.invoked_subcommand is not None:
        return
    settings = _settings(host, port, weights, cache, rows, queue, engine, cors, allow_host, deadline)
    if engine == "ray":
        _on_ray(model, store, blobs, settings, keys, replicas)
    else:
        _run(model, store, settings, keys, quiet, page=False, blobs=blobs)


@verb
def studio(
    model: ModelOption = DEFAULT,
    store: StoreOption = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    weights: WeightsOption = "float32",
    cache: CacheOption = "float32",
    engine: EngineOption = "batch",
    blobs: BlobsOption = None,
    keys: KeysOption = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="do not open the page")] = False,
) -> None:
    """Serve, and open the page where you watch the model think.

    \b
    regard studio
    regard studio --no-open --port 9000
    """
    settings = _settings(host, port, weights, cache, 8, 64, engine, None, None, 300.0)
    _run(model, store, settings, keys, True, page=not no_open, blobs=blobs)


def _settings(
    host: str, port: int, weights: str, cache: str, rows: int, queue: int, engine: str, cors: list[str] | None,
    hosts: list[str] | None, deadline: float,
) -> Settings:  # fmt: skip
    from ..serve.settings import Settings

    names = ("batch", "plain", "ray")
    if engine not in names:
        fail(f"--engine {clean(engine)}: there are {', '.join(names)}")
    return Settings(
        host=host, port=port, weights=parse_weights(weights), cache=parse_cache(cache), rows=rows, queue=queue,
        engine=engine,  # pyright: ignore[reportArgumentType]
        cors=tuple(cors or ()), hosts=tuple(hosts or ()), deadline=deadline, warm=True,
    )  # fmt: skip


def _run(
    model: str, store: str | None, settings: Settings, keys: Path | None, quiet: bool, *, page: bool, blobs: str | None = None
) -> None:
    import logging

    from ..models import downloads
    from ..serve.keys import Keys
    from ..serve.running import address, expect_keys, listening, open_service, serve

    if model == DEFAULT and not downloads.present(DEFAULT):
        fail("no model is here yet; get SmolLM2 (93 MB) with: regard models get smollm2, or name one with --model")
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("regard.serve").setLevel(logging.WARNING if quiet else logging.INFO)
    expect_keys(settings, Keys(keys))
    taken = listening(settings)
    try:
        with progress() as tell:
            service = open_service(model, store, settings, keys, tell, blobs)
    except BaseException:
        taken.close()
        raise

    def ready() -> None:
        url = address(taken)
        whose = "a key is needed" if service.guarded else "no key is needed on this machine"
        typer.echo(f"{service.name} is served at {url}/v1, its page at {url}/ ({whose}; Ctrl-C ends it)")
        sys.stdout.flush()
        if page:
            import webbrowser

            webbrowser.open(url)

    serve(service, taken, ready)


def _on_ray(model: str, store: str | None, blobs: str | None, settings: Settings, keys: Path | None, replicas: int) -> None:
    from ..serve.on_ray import Setup, serve_on_ray

    def ready(url: str) -> None:
        typer.echo(f"{clean(model)} is served at {url}/v1 by {replicas} replicas on Ray (Ctrl-C ends it)")
        sys.stdout.flush()

    serve_on_ray(Setup(model, store, blobs, keys, settings), replicas, ready)


@key.command("new")
@verb
def key_new(
    name: Annotated[str, typer.Argument(help="what to call it, to revoke it by")],
    scope: Annotated[
        list[str] | None, typer.Option(help="read, write or admin; several are allowed [default: write]", show_default=False)
    ] = None,
    own: Annotated[list[str] | None, typer.Option(help="an identity that is theirs, or a beginning of names and a *")] = None,
    keys: KeysOption = None,
) -> None:
    """Make a key. It is printed once, and kept nowhere.

    read may ask, and look at the identities that it owns; write may also change those; admin may do all, to everybody.

    \b
    regard serve key new phone --scope write --own mara
    regard serve key new family --scope write --own 'family-*'
    regard serve key new me --scope admin
    """
    from ..serve.keys import Keys

    known = Keys(keys)
    token, made = known.new(name, scope or ["write"], own or [])
    owns = ", ".join(made.owns) or ("everybody" if "admin" in made.scopes else "nobody's identity")
    typer.echo(f"{made.id} {clean(made.label)}: {', '.join(made.scopes)}; owns {owns}. It is shown this once:", err=True)
    typer.echo(token)


@key.command("list")
@verb
def key_list(keys: KeysOption = None, as_json: JsonOption = False) -> None:
    """Every key, revoked ones too; never the token of one.

    \b
    regard serve key list
    """
    import json
    import time

    from ..serve.keys import Keys

    known = Keys(keys).all()
    day = "%Y-%m-%d"
    if as_json:
        records = [
            {"id": k.id, "name": k.label, "scopes": k.scopes, "owns": k.owns, "created": k.created, "revoked": k.revoked}
            for k in known
        ]
        typer.echo(json.dumps(records, indent=1))
        return
    rows = [
        [k.id, clean(k.label), ",".join(k.scopes), ",".join(k.owns) or "-", time.strftime(day, time.gmtime(k.created)),
         "-" if k.revoked is None else time.strftime(day, time.gmtime(k.revoked))]
        for k in known
    ]  # fmt: skip
    table(["key", "name", "scopes", "owns", "made", "revoked"], rows)


@key.command("revoke")
@verb
def key_revoke(which: Annotated[str, typer.Argument(help="its id, or its name")], keys: KeysOption = None) -> None:
    """Refuse a key from now on, also in a server that runs.

    \b
    regard serve key revoke phone
    """
    from ..serve.keys import Keys

    gone = Keys(keys).revoke(which)
    typer.echo(f"{gone.id} {clean(gone.label)} is refused from now on")
