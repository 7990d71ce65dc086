"""Serving SmolLM2-135M: many clients against one, a prompt that begins as another did against a new one, the server against decoding in
this process, and against llama.cpp's server on the same GGUF where `xllamacpp` is installed.

Clients are threads that read their tokens as they fall. Before anything is timed, every client's tokens are compared with those of
`generate` alone. Their prompts are known to the server then, so rows of clients are about tokens; prompts have a row of their own.
Times are seconds per token, or to the first one.
"""

from __future__ import annotations

import atexit
import http.client
import importlib
import itertools
import json
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import torch

from regard.models import Sampling, generate
from regard.models import downloads as hub
from regard.models.decode.cache import static_caches
from regard.models.decode.prepare import Weights, prepare
from regard.serve.contract import Job
from regard.serve.engine import Engine

from .harness import Bench, Case, Pairs, Reach, Row, quartiles, take_turns

TITLE = "Serving SmolLM2-135M"
ROWS = 32
PROMPT = 32
LONG = 512
OURS, PEER = "one client", "llama.cpp's server"
_FIRST = itertools.count(1)


def cases(bench: Bench) -> list[Case]:
    new = 8 if bench.settings.quick else 32
    long = bench.settings.size(LONG)
    return [
        Case("eight clients, int8", lambda: _clients(bench, 8, new, "int8", Reach(3, "faster"))),
        Case("eight clients, float32", lambda: _clients(bench, 8, new, "float32", Reach(3, "faster"))),
        Case("warm prefix", lambda: _warm(bench, long)),
        Case("engine", lambda: _overhead(bench, new)),
        Case("server", lambda: _server(bench, new)),
        *([Case("beside llama.cpp", lambda: _beside(bench, 8, new))] if _xllamacpp() is not None else []),
        *([Case("beside llama.cpp, one client", lambda: _beside(bench, 1, new))] if _xllamacpp() is not None else []),
        Case("32 clients, int8", lambda: _clients(bench, ROWS, new, "int8", None)),
        Case("32 clients, float32", lambda: _clients(bench, ROWS, new, "float32", None)),
    ]


def _clients(bench: Bench, count: int, new: int, weights: Weights, reach: Reach | None) -> Row:
    model, _ = _model()
    engine, prompts = _engine(weights), _prompts(count, PROMPT)
    some = min(new, 16)
    alone = [generate(model, p, Sampling(max_tokens=some), weights=weights).tokens[0] for p in prompts]
    assert _said(engine, prompts, some) == alone, "a client's tokens are not those it would get alone"
    pairs = take_turns(lambda: _said(engine, prompts, new), lambda: _said(engine, prompts[:1], new), bench.settings)
    # Of one client's tokens and of all clients': seconds per token each.
    pairs = Pairs([s / (count * new) for s in pairs.ours], [s / new for s in pairs.theirs])
    return _row(f"{count} clients, {weights}", f"{new} after {PROMPT}, known", OURS, pairs, "faster", reach, _rate(pairs))


def _warm(bench: Bench, length: int) -> Row:
    engine, (shared,) = _engine("int8"), _prompts(1, length)

    def first(prompt: list[int]) -> None:
        next(engine.submit(Job(tuple(prompt), Sampling(max_tokens=1))).pieces())

    def warm() -> None:
        # Another question after the same beginning.
        first([*shared[:-PROMPT], *_prompts(1, PROMPT, next(_FIRST))[0]])

    def cold() -> None:
        first(_prompts(1, length, next(_FIRST))[0])

    warm()
    pairs = take_turns(warm, cold, bench.settings)
    return _row("warm prefix", f"first of {length}, {PROMPT} of them new", "cold", pairs, "times", Reach(0.25, "times"))


def _overhead(bench: Bench, new: int) -> Row:
    engine, prompts = _engine("int8"), _prompts(1, PROMPT)
    pairs = take_turns(lambda: _said(engine, prompts, new), lambda: _decoded(prompts[0], new), bench.settings)
    pairs = Pairs([s / new for s in pairs.ours], [s / new for s in pairs.theirs])
    return _row(
        "engine, one client", f"{new} after {PROMPT}, int8", "in-process decoding", pairs, "times", Reach(1.15, "times")
    )


def _server(bench: Bench, new: int) -> Row:
    where, (prompt,) = _served(), _prompts(1, PROMPT)
    pairs = take_turns(lambda: _asked(where, prompt, new), lambda: _decoded(prompt, new), bench.settings)
    pairs = Pairs([s / new for s in pairs.ours], [s / new for s in pairs.theirs])
    return _row(
        "server, one client", f"{new} after {PROMPT}, int8, streamed", "in-process decoding", pairs, "times", Reach(1.15, "times")
    )  # fmt: skip


def _beside(bench: Bench, count: int, new: int) -> Row:
    ours, theirs, prompts = _served(), _peer(), _prompts(count, PROMPT)

    def all_of(where: str) -> None:
        with ThreadPoolExecutor(count) as clients:
            list(clients.map(lambda p: _asked(where, p, new), prompts))

    pairs = take_turns(lambda: all_of(ours), lambda: all_of(theirs), bench.settings)
    pairs = Pairs([s / (count * new) for s in pairs.ours], [s / (count * new) for s in pairs.theirs])
    what = f"server, {'one client' if count == 1 else f'{count} clients'}"
    note = f"ours int8, theirs the GGUF's own Q4_1; {_rate(pairs)}"
    return _row(what, f"{new} after {PROMPT}, streamed", PEER, pairs, "faster", None, note)


def _row(what: str, run: str, peer: str, pairs: Pairs, kind: Any, reach: Reach | None, note: str = "") -> Row:
    ratios = pairs.ratios(kind)
    low, high = quartiles(ratios)
    # Clients, server and peer share the machine with whatever else runs on it.
    note = f"{what}: {note + '; ' if note else ''}load average {os.getloadavg()[0]:.0f}"
    return Row(what, run, peer, median(pairs.ours), median(pairs.theirs), median(ratios), low, high, reach, kind, note=note)


def _rate(pairs: Pairs) -> str:
    return f"{1 / median(pairs.ours):.1f} tokens a second against {1 / median(pairs.theirs):.1f}"


def _said(engine: Engine, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Every client's tokens; all begin at once."""
    together = threading.Barrier(len(prompts))

    def client(prompt: list[int]) -> list[int]:
        together.wait()
        run = engine.submit(Job(tuple(prompt), Sampling(max_tokens=new)))
        return [piece.token for piece in run.pieces()]

    with ThreadPoolExecutor(len(prompts)) as clients:
        return list(clients.map(client, prompts))


@torch.inference_mode()
def _decoded(prompt: list[int], new: int) -> list[int]:
    """The least that decoding in this process takes: a prepared decoder, its prompt read once before, and the most likely token."""
    decoder, caches = _read(tuple(prompt))
    tokens = [prompt[-1]]
    for _ in range(new):
        logits, caches = decoder(torch.tensor([tokens[-1:]]), caches)
        tokens.append(int(logits[0].argmax()))
    return tokens


@cache
@torch.inference_mode()
def _read(prompt: tuple[int, ...]) -> tuple[Any, Any]:
    decoder = prepare(_model()[0], "int8")
    return decoder, decoder(torch.tensor([prompt[:-1]]), static_caches(decoder.depth, 512))[1]


def _prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    return torch.randint(100, 40000, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()


@cache
def _model() -> tuple[Any, Any]:
    hub.get("smollm2")
    model, tokenizer = hub.open_model("smollm2")
    model.generation_info = type(model.generation_info)()
    return model, tokenizer


@cache
def _engine(weights: Weights) -> Engine:
    """Without a tokenizer: no text ends early, and every client gets as many tokens."""
    engine = Engine(_model()[0], None, weights=weights, rows=ROWS)
    engine.start()
    atexit.register(engine.close)
    return engine


@cache
def _served() -> str:
    """Our server, on a port of its own in a thread of this process."""
    from dataclasses import replace

    from regard.identity.body import base_of
    from regard.identity.store import IdentityStore
    from regard.serve.keys import Keys
    from regard.serve.running import Server, address, listening
    from regard.serve.service import Service
    from regard.serve.settings import Settings

    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    settings = Settings(port=0, weights="int8", rows=8)
    taken = listening(settings)
    model, tokenizer = _model()
    store = IdentityStore(f"{folder.name}/store")
    engine = Engine(model, tokenizer, weights="int8", rows=8)
    base = replace(base_of(model), name="smollm2")
    service = Service(model, tokenizer, base, engine, store, Keys(Path(folder.name) / "keys.json"), settings)
    ready = threading.Event()
    server = Server(service, ready.set)
    thread = threading.Thread(target=lambda: server.run(sockets=[taken]), daemon=True)
    thread.start()
    ready.wait(60)

    def end() -> None:
        server.should_exit = True
        thread.join(10)
        service.close()
        store.close()

    atexit.register(end)
    return address(taken)


@cache
def _xllamacpp() -> Any:
    """The peer, where its wheel is installed."""
    try:
        return importlib.import_module("xllamacpp")
    except ImportError:
        return None


@cache
def _peer() -> str:
    x = _xllamacpp()
    p = x.CommonParams()
    p.model.path = str(next(hub.resolve("smollm2").parent.glob("*.gguf")))
    p.n_parallel, p.n_ctx, p.port, p.verbosity = 8, 8 * 1024, 0, -1
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = torch.get_num_threads()
    server = x.Server(p)
    # The server lives as long as its object.
    _KEPT.append(server)
    return server.listening_address


_KEPT: list[Any] = []


def _asked(where: str, prompt: list[int], new: int) -> int:
    """The pieces of a completion, streamed."""
    at = urlsplit(where)
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=600)
    # What would end a text is ruled out, so that both write as many tokens.
    never = {str(i): -100 for i in _model()[1].eos_ids}
    asked = {"model": "smollm2", "prompt": prompt, "max_tokens": new, "temperature": 0, "stream": True, "logit_bias": never}
    connection.request("POST", "/v1/completions", json.dumps(asked), {"content-type": "application/json"})
    response = connection.getresponse()
    lines = response.read().splitlines()
    connection.close()
    assert response.status == 200, lines
    return sum(line.startswith(b"data: {") for line in lines)
