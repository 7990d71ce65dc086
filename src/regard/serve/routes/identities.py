"""/v1/identities: somebody new, who there is, what they are made of, and every verb that changes them."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import Field

from ...errors import RegardError
from ...identity.body import body_of
from ...identity.facts import fact_of, facts, strike
from ...identity.sleep.stored import sleep_over
from ...identity.state import Identity
from ...identity.store import Commit, StoreError, unique_source
from ...identity.store.imprinting import imprint_into
from ...identity.store.records import checked_source
from ...identity.store.replay import imprint_event, replay
from ..access import READ, SERVICE, WRITE
from ..errors import ApiError
from ..jobs import Tell
from ..keys import Caller
from ..people import facts_of, log, one, page, proof_of, shown
from ..schema import Body, Name, Seed
from ..service import Service

router = APIRouter(prefix="/v1/identities", tags=["identities"])
T = TypeVar("T")
MOST_IMPRINT = 1 << 15
"""Characters that one call imprints: the model reads all of them while others wait to be recalled."""
MOST_STEPS = 2000
LONGEST_KEY = 255
UPLOADS = 4
"""Files that are received at the same time."""
Said = Annotated[str, Field(min_length=1, max_length=MOST_IMPRINT)]
Ref = Annotated[str, Field(min_length=1, max_length=64)]


class NewIdentity(Body):
    id: Name


class Fork(Body):
    id: Name
    at: Ref | None = None
    """The beginning of a commit's id; the head, if none is given."""


class Rollback(Body):
    to: Ref | Annotated[int, Field(ge=1, le=1 << 31)]
    """A commit in the history, or how many to go back."""


class Told(Body):
    role: Literal["system", "user", "assistant"]
    content: Said


class Imprint(Body):
    text: Said | None = None
    messages: Annotated[list[Told], Field(min_length=1, max_length=256)] | None = None
    source: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    affect: Annotated[float, Field(ge=-1, le=1)] | Literal["estimated"] = 1.0


class Forget(Body):
    source: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    line: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    """The number of a fact."""


class Sleep(Body):
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] | None = None
    seed: Annotated[Seed, Field(ge=0)] = 0
    resume: bool = False


@router.get("")
async def identities(
    limit: Annotated[int, Query(ge=1, le=200)] = 100, after: Annotated[str | None, Query(max_length=64)] = None,
    service: Service = SERVICE, caller: Caller = READ,
) -> dict[str, Any]:  # fmt: skip
    """Everybody that the key may see, by name, a page at a time: `after` the last name of the page before."""
    return await service.aside(lambda: page(service, caller, limit, after))


@router.post("", status_code=201)
async def new(body: NewIdentity, service: Service = SERVICE, caller: Caller = WRITE) -> JSONResponse:
    """Somebody new, who has lived through nothing."""

    def begin() -> dict[str, Any]:
        name = service.new_person(caller, body.id)
        _named(service, name, lambda: service.store.new(name, Identity.new(service.base)))
        return one(service, caller, name)

    return JSONResponse(await service.aside(begin), 201, body.warning())


@router.get("/{id}")
async def identity(id: str, service: Service = SERVICE, caller: Caller = READ) -> dict[str, Any]:
    """Somebody, with what they keep, their trace's directions and their self."""
    told = await service.aside(lambda: one(service, caller, id))
    head = await service.aside(lambda: _of_this_model(service, service.head(caller, id)))
    who = await service.aside(lambda: service.loaded(id, head))
    return {**told, **await service.reading(lambda: shown(service, who))}


@router.delete("/{id}")
async def delete(id: str, service: Service = SERVICE, caller: Caller = WRITE) -> dict[str, Any]:
    """Remove them, and all that no other name needs."""

    def remove() -> dict[str, Any]:
        name = service.person(caller, id)
        for job in service.jobs.every():
            if job.identity == name:
                service.jobs.cancel(job)
        commits = service.store.delete(name)
        service.let_go(name)
        return {"id": name, "object": "identity", "deleted": True, "commits": commits}

    return await service.aside(remove)


@router.get("/{id}/log")
async def history(
    id: str, limit: Annotated[int, Query(ge=1, le=1000)] = 200, service: Service = SERVICE, caller: Caller = READ
) -> dict[str, Any]:
    """Every commit, the youngest first."""
    return await service.aside(lambda: log(service, service.person(caller, id), limit))


@router.get("/{id}/diff")
async def diff(
    id: str, other: Annotated[str, Query(min_length=1, max_length=64)], service: Service = SERVICE, caller: Caller = READ
) -> dict[str, Any]:
    """What changed from a commit of theirs, or from another identity of the caller's, to their head."""

    def compare() -> dict[str, Any]:
        found = service.store.diff(service.commit(caller, id, other).id, service.head(caller, id).id)
        numbers = {
            k: getattr(found, k)
            for k in (
                "added",
                "removed",
                "kept",
                "rewritten",
                "episodes_kept",
                "experiences",
                "tokens",
                "sleeps",
                "bytes",
                "same",
            )
        }
        gone, come = len(found.episodes_removed), len(found.episodes_added)
        sources = {"sources_added": list(found.sources_added), "sources_removed": list(found.sources_removed)}
        return {"text": str(found), **numbers, **sources, "episodes_added": come, "episodes_removed": gone}

    return await service.aside(compare)


@router.get("/{id}/facts")
async def listed(id: str, service: Service = SERVICE, caller: Caller = READ) -> dict[str, Any]:
    """The lines that they are made of, and which words of each are imprints."""

    def read() -> dict[str, Any]:
        head = _of_this_model(service, service.head(caller, id))
        return facts_of(service, service.store.journal(head.id), service.loaded(id, head))

    return await service.aside(read)


@router.post("/{id}/fork", status_code=201)
async def fork(id: str, body: Fork, service: Service = SERVICE, caller: Caller = WRITE) -> JSONResponse:
    """A second name for what they are now, or were at a commit."""

    def begin() -> dict[str, Any]:
        name = service.person(caller, id)
        at = None if body.at is None else service.commit(caller, name, body.at).id
        twin = service.new_person(caller, body.id)
        _named(service, twin, lambda: service.store.fork(name, twin, at))
        return one(service, caller, twin)

    return JSONResponse(await service.aside(begin), 201, body.warning())


@router.post("/{id}/rollback")
async def rollback(id: str, body: Rollback, service: Service = SERVICE, caller: Caller = WRITE) -> dict[str, Any]:
    """Be again what they were; a further commit, which can itself be rolled back."""

    def back() -> dict[str, Any]:
        name = service.person(caller, id)
        to = body.to if isinstance(body.to, int) else service.commit(caller, name, body.to).id
        commit = service.store.rollback(name, to)
        service.let_go(name)
        return {**one(service, caller, name), "commit": commit.id, "to": commit.origin}

    return await service.aside(back)


@router.post("/{id}/imprint")
async def imprint(
    id: str, body: Imprint, request: Request, service: Service = SERVICE, caller: Caller = WRITE
) -> dict[str, Any]:
    """Let them live through a text or a conversation; what they have lived through already is recognised, and not written again."""
    head = await service.aside(lambda: _of_this_model(service, service.head(caller, id)))
    if (body.text is None) == (body.messages is None):
        raise ApiError(400, "give a text or messages: one of them", code="invalid_value", param="text")
    told = body.text if body.text is not None else [m.model_dump(include={"role", "content"}) for m in body.messages or ()]
    if sum(len(m.content) for m in body.messages or ()) > MOST_IMPRINT:
        raise ApiError(
            400, f"more than {MOST_IMPRINT:,} characters; imprint them in several calls", code="too_long", param="messages"
        )
    key = request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= LONGEST_KEY:
        raise ApiError(400, f"Idempotency-Key: 1 to {LONGEST_KEY} characters", code="invalid_header")
    source = unique_source("told", str(told)) if body.source is None else checked_source(body.source)
    event = imprint_event(told, source=source, affect=body.affect, piece=body_of(service.model).piece)
    token = (
        None
        if key is None
        else hashlib.sha256(f"{caller.id}\0imprint\0{id}\0{key}".encode("utf-8", "surrogatepass")).hexdigest()
    )

    def write() -> dict[str, Any]:
        service.person(caller, id)
        before = None if token is None else service.store.attempted(token)
        if before is not None and event.text not in [e.text for e in service.store.events(before.id)]:
            raise ApiError(409, "this Idempotency-Key belongs to another text; take a new one", code="idempotency_mismatch")
        done = imprint_into(service.store, id, service.model, service.tokenizer, event, base=service.base, token=token)
        return {
            "id": id, "object": "imprint", "commit": done.commit or service.store.head(id).id, "recognised": done.commit is None or before is not None,
            "source": done.source, "kept": done.count, "tokens": done.tokens, "words": list(done.words),
        }  # fmt: skip

    answer = await service.change(id, write)
    service.engine.forget(service.version(id, head.id))
    return answer


@router.post("/{id}/forget", status_code=202)
async def forget(id: str, body: Forget, service: Service = SERVICE, caller: Caller = WRITE) -> JSONResponse:
    """Take back all that a source wrote, or one line, by living the rest again; a job, whose result is the proof."""
    head = await service.aside(lambda: _of_this_model(service, service.head(caller, id)))
    if (body.source is None) == (body.line is None):
        raise ApiError(400, "give a source or a line: one of them", code="invalid_value", param="source")

    def line() -> str | None:
        if body.line is None:
            return None
        listed = facts(service.store.journal(head.id), service.loaded(id, head), None)
        return fact_of(listed, body.line).text

    text = await service.aside(line)

    def work(tell: Tell) -> dict[str, Any]:
        relive = replay(service.jobs.model(service.model), service.tokenizer, tell)
        if body.line is None:
            found = service.store.forget(id, str(body.source), relive)
        else:
            now = facts(service.store.journal(id), service.store.load(id), None)
            fact = fact_of(now, body.line)
            if fact.text != text:
                raise ApiError(
                    409, f"line {body.line} is another one by now; look at the lines again", code="conflict", param="line"
                )
            found = strike(service.store, id, fact, relive)
        service.let_go(id)
        return proof_of(found, caller)

    return _accepted(service, caller, "forget", id, work)


@router.post("/{id}/sleep", status_code=202)
async def sleep(id: str, body: Sleep, service: Service = SERVICE, caller: Caller = WRITE) -> JSONResponse:
    """Let them sleep over what they lived through; a job. Cancelled, it keeps the best so far if that helps, and says so."""
    await service.aside(lambda: _of_this_model(service, service.head(caller, id)))

    def work(tell: Tell) -> dict[str, Any]:
        model = service.jobs.model(service.model)
        done = sleep_over(
            service.store, id, model, service.tokenizer, steps=body.steps, seed=body.seed, resume=body.resume, tell=tell
        )
        service.let_go(id)
        return {
            "commit": done.commit, "kept": "nothing" if done.commit is None else "best", "helped": done.helped, "text": str(done),
            "interrupted": done.interrupted, "resumed": done.resumed, "conversations": done.conversations,
            "best_step": done.slept.best_step, "questions": done.slept.questions,
        }  # fmt: skip

    return _accepted(service, caller, "sleep", id, work)


@router.get("/{id}/export", response_class=StreamingResponse)
async def export(id: str, service: Service = SERVICE, caller: Caller = READ) -> StreamingResponse:
    """All of them in one file, with their journal: what `import` takes."""

    def write() -> tuple[str, int, BinaryIO]:
        name = service.person(caller, id)
        with tempfile.TemporaryDirectory(prefix="regard-") as folder:
            file = service.store.export(name, Path(folder) / f"{name}.safetensors")
            # Open, and without a name: whatever becomes of the client, nothing of it stays behind.
            return file.name, file.stat().st_size, file.open("rb")

    name, size, opened = await service.aside(write)

    def parts() -> Iterator[bytes]:
        with opened:
            while data := opened.read(1 << 20):
                yield data

    headers = {"content-disposition": f'attachment; filename="{name}"', "content-length": str(size)}
    return StreamingResponse(parts(), media_type="application/octet-stream", headers=headers)


UPLOAD = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}, "required": True}


@router.post("/{id}/import", status_code=201, openapi_extra={"requestBody": UPLOAD})
async def import_(id: str, request: Request, service: Service = SERVICE, caller: Caller = WRITE) -> JSONResponse:
    """Begin somebody with a file that `export` or `regard identity export` wrote."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/octet-stream":
        raise ApiError(415, "send the file itself: content-type: application/octet-stream", code="unsupported_media_type")
    name = await service.aside(lambda: service.new_person(caller, id))
    if service.uploads >= UPLOADS:
        raise ApiError(
            429, "other files are being received; try again in a moment", code="queue_full", headers={"retry-after": "2"}
        )
    service.uploads += 1
    try:
        with tempfile.TemporaryDirectory(prefix="regard-") as folder:
            file = Path(folder) / "upload.safetensors"
            with file.open("wb") as into:
                async for chunk in request.stream():
                    into.write(chunk)
            # One at a time: the whole of a file is in memory while it is read.
            async with service.importing:
                return JSONResponse(await service.aside(lambda: _imported(service, caller, name, file)), 201)
    finally:
        service.uploads -= 1


def _imported(service: Service, caller: Caller, name: str, file: Path) -> dict[str, Any]:
    try:
        _named(service, name, lambda: service.store.import_(file, name, service.base))
    except ApiError:
        raise
    except RegardError as error:
        if isinstance(error, StoreError):
            raise
        # The store is sound: it is the file that is not.
        said = str(error).replace(str(file), "the file")
        raise ApiError(400, f"this file cannot be imported: {said:.400}", code="invalid_file") from error
    return one(service, caller, name)


def _named(service: Service, name: str, begin: Callable[[], T]) -> T:
    """A new name; who was faster has it."""
    try:
        return begin()
    except StoreError as error:
        if name in service.store:
            raise ApiError(409, f"{name!r} is here already; choose another name", code="exists", param="id") from error
        raise


def _of_this_model(service: Service, head: Commit) -> Commit:
    if head.fingerprint != service.base.fingerprint:
        raise ApiError(
            409, f"this identity belongs to another model ({head.fingerprint[:12]}), and {service.name} is served here",
            code="another_base", param="id",
        )  # fmt: skip
    return head


def _accepted(
    service: Service, caller: Caller, kind: Literal["sleep", "forget"], name: str, work: Callable[[Tell], dict[str, Any]]
) -> JSONResponse:
    # A night that is cancelled keeps its best so far; of a forgetting there is all or nothing.
    job = service.jobs.submit(kind, name, work, interrupts=kind == "sleep", by=caller.id)
    return JSONResponse(job.body(), 202, {"location": f"/v1/jobs/{job.id}"})


__all__ = ["router"]
