"""Identities as clients read them: in a list, whole, and commit by commit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import RegardError
from ..identity.facts import facts
from ..identity.state import Identity
from ..identity.store import Commit, Event, Forgotten
from ..identity.trace_directions import directions
from ..identity.wording import word
from ..identity.write.trace import dense
from .keys import Caller
from .service import Service
from .summaries import finite

MOST_KEPT = 512
"""Of the imprints, the worthiest that are shown."""
MOST_DIRECTIONS = 24
MOST_PLACED = 48
"""Tokens that are placed along them: each costs a forward."""
MOST_STATES = 200
"""States of a log that are read for the self's path."""


def info(service: Service, name: str, head: Commit, created: float) -> dict[str, Any]:
    ours = head.fingerprint == service.base.fingerprint
    return {
        "id": name, "object": "identity", "base": service.name if ours else head.fingerprint[:12], "head": head.id, "created": created,
        "updated": head.time, "experiences": head.experiences, "tokens": head.tokens, "imprints": head.imprints,
        "episodes": head.episodes, "sleeps": service.summaries.sleeps(service.store, head), "bytes": head.bytes,
    }  # fmt: skip


def one(service: Service, caller: Caller, name: str) -> dict[str, Any]:
    """`info` of somebody that this caller may see."""

    def read() -> dict[str, Any]:
        head = service.head(caller, name)
        with service.store.db.read() as c:
            created = service.store.db.created(c, [name])
        return info(service, name, head, created.get(name, head.time))

    return service.store.settled(read)


def page(service: Service, caller: Caller, limit: int, after: str | None) -> dict[str, Any]:
    """Names in their order, `limit` of them after one."""
    return service.store.settled(lambda: _page(service, caller, limit, after))


def _page(service: Service, caller: Caller, limit: int, after: str | None) -> dict[str, Any]:
    db = service.store.db
    with db.read() as c:
        mine = [n for n in db.heads(c) if caller.may(n) and (after is None or n > after)]
        chosen = mine[:limit]
        heads = {n: h for n in chosen if (h := db.head(c, n)) is not None}
        created = db.created(c, chosen)
    data = [info(service, n, h, created.get(n, h.time)) for n, h in heads.items()]
    return {
        "object": "list", "data": data, "first_id": chosen[0] if chosen else None, "last_id": chosen[-1] if chosen else None,
        "has_more": len(mine) > len(chosen),
    }  # fmt: skip


# -- somebody, whole -------------------------------------------------------------------------------------------------------


def shown(service: Service, who: Identity) -> dict[str, Any]:
    """What they keep, and which way their trace and self go; read on the model, for its words."""
    me = None if who.self is None else {"form": who.self.form, "norms": [finite(s.norm()) for s in who.self.s.float()]}
    return {"kept": _kept(service, who), "trace": _trace(service, who), "self": me, "sources": list(who.sources)}


def _kept(service: Service, who: Identity) -> list[dict[str, Any]]:
    """Imprints, the worthiest first; tokens that followed each other stand together."""
    imprints = who.imprints
    position, token, source, worth, shock = (
        cast(list[Any], x.tolist())
        for x in (imprints.position, imprints.token, imprints.source, imprints.worth, imprints.shock)
    )
    runs: list[list[int]] = []
    for i in range(len(imprints)):
        last = runs[-1][-1] if runs else None
        follows = last is not None and position[i] == position[last] + 1 and source[i] == source[last]
        if follows and last is not None and min(token[i], token[last]) >= 0:
            runs[-1].append(i)
        else:
            runs.append([i])
    runs.sort(key=lambda run: -max(worth[i] for i in run))
    return [
        {
            "text": word(service.tokenizer, [token[i] for i in run]),
            "words": [word(service.tokenizer, [token[i]]) for i in run],
            "worth": finite(max(worth[i] for i in run)),
            "shock": finite(max(shock[i] for i in run)),
            "source": who.sources[source[run[0]]],
            "position": position[run[0]],
        }
        for run in runs[:MOST_KEPT]
    ]


def _trace(service: Service, who: Identity) -> dict[str, Any] | None:
    if who.trace is None:
        return None
    values = torch.linalg.eigvalsh(dense(who.trace).double())
    strongest = values.flatten(1).gather(1, values.flatten(1).abs().argsort(1, descending=True))[:, : max(1, who.trace.rank)]
    try:
        worthy = [int(who.imprints.token[i]) for i in who.imprints.shock.argsort(descending=True).tolist()]
        placed = list(dict.fromkeys(t for t in worthy if t >= 0))[:MOST_PLACED]
        every = directions(who, service.model, service.tokenizer, tokens=placed)
    except RegardError:
        # Nothing to place along them: too few tokens were kept.
        every = None
    return {
        "rank": who.trace.rank,
        "spectrum": [[finite(x) for x in layer] for layer in strongest],
        "directions": [
            {
                "layer": d.layer, "head": d.head, "sign": 1 if d.value > 0 else -1, "strength": finite(abs(d.value)),
                "toward": [w for w, _ in every.attracted(d)], "away": [w for w, _ in every.repelled(d)],
            }
            for d in every.all[:MOST_DIRECTIONS]
        ] if every is not None else [],
    }  # fmt: skip


# -- commit by commit ------------------------------------------------------------------------------------------------------


def log(service: Service, name: str, limit: int) -> dict[str, Any]:
    """The youngest first; the self's path is drawn over the commits that are listed, youngest of them first."""

    def read() -> dict[str, Any]:
        chain = service.store.log(name, limit)
        states = [service.summaries.of(service.store, x) for x in chain[:MOST_STATES]]
        path = _path([s[3] for s in states])
        rest = [(0, None, None, None)] * (len(chain) - len(states))
        rows = [
            {
                "id": x.id, "parent": x.parent, "origin": x.origin, "number": x.number, "kind": x.kind, "message": x.message,
                "source": x.source, "created": x.time, "tokens": x.tokens, "imprints": x.imprints, "episodes": x.episodes,
                "bytes": x.bytes, "self_norm": norm, "trace_norm": trace, "self": place,
            }
            for x, (_, norm, trace, _), place in zip(chain, [*states, *rest], [*path, *[None] * len(rest)], strict=True)
        ]  # fmt: skip
        return {"object": "list", "data": rows, "has_more": bool(chain and chain[-1].parent)}

    return service.store.settled(read)


def _path(selves: Sequence[Tensor | None]) -> list[list[float] | None]:
    """Two coordinates of each self: the directions in which they differ most, by an exact SVD."""
    known = [s for s in selves if s is not None]
    if len(known) < 2 or len({len(s) for s in known}) > 1:
        return [None if s is None else [0.0, 0.0] for s in selves]
    x = torch.stack(known).double()
    x = x - x.mean(0)
    u, s, _ = torch.linalg.svd(x, full_matrices=False)
    places = u[:, :2] * s[:2]
    if places.shape[1] < 2:
        places = torch.nn.functional.pad(places, (0, 2 - places.shape[1]))
    rows = iter(places.tolist())
    return [None if s is None else [finite(v) for v in next(rows)] for s in selves]


def facts_of(service: Service, journal: Sequence[Event], who: Identity) -> dict[str, Any]:
    listed = facts(journal, who, service.tokenizer)
    return {
        "object": "list",
        "data": [
            {
                "number": f.number, "text": f.text, "imprinted": [f.text[a:b] for a, b in f.imprinted],
                "source": str(f.event.source), "created": f.event.time,
            }
            for f in listed
        ],
    }  # fmt: skip


def proof_of(found: Forgotten, may: Caller) -> dict[str, Any]:
    """A forgetting as it is told; of other names only those that the caller may see, and how many others there are."""

    def seen(names: Sequence[str]) -> list[str]:
        return [n for n in names if may.may(n)]

    hidden = sum(not may.may(n) for n in found.forks)
    return {
        "source": found.source, "whole": found.whole, "events_removed": found.events_removed, "events_kept": found.events_kept,
        "before": found.before, "after": found.after, "again": found.again, "verified": found.after == found.again,
        "commits_removed": found.commits_removed, "blobs_removed": found.blobs_removed, "echoes": found.echoes,
        "scrubbed": found.scrubbed, "read": len(found.searched.files), "left": len(found.searched.left),
        "unreachable": list(found.searched.unreachable), "forks": seen(found.forks), "copies": seen(found.copies),
        "other_holders": hidden, "head": found.head, "commit": found.head,
    }  # fmt: skip


__all__ = ["facts_of", "info", "log", "one", "page", "proof_of", "shown"]
