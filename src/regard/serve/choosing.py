"""Who answers, and how tokens are drawn: from what a request says to an identity's head and a `Sampling`.

    model="smollm2"          the model itself          model="smollm2:mara"      an identity on it
    identity="mara"          the same as a field       X-Regard-Identity: mara   and as a header; two that differ are refused

A base whose own name has a colon or an @ is known by it whole, or with %3A and %40 for them: what follows it and a further colon is
the identity.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from urllib.parse import quote

from ..identity.store.records import Commit
from ..models.decode.sampling import Sampling
from .errors import ApiError, no_identity, refuse
from .keys import Caller
from .schema import Choosing, Drawing
from .service import Service

HEADER = "x-regard-identity"
MARK = ":"


@dataclass(frozen=True)
class Who:
    """An identity that answers, as it was when the request came."""

    name: str
    head: Commit
    remember: bool
    source: str | None = None


def split_model(given: str, bases: tuple[str, ...]) -> tuple[str, str | None]:
    """The base and the identity that a client's `model` names: the longest base that it begins with."""
    spelled = {form: base for base in bases for form in (base, quote(base, safe="/"))}
    for form in sorted(spelled, key=len, reverse=True):
        if given == form:
            return spelled[form], None
        if given.startswith(form + MARK) and len(given) > len(form) + 1:
            return spelled[form], given[len(form) + 1 :]
    raise ApiError(
        404, f"there is no model {given!r:.120} here; there is {', '.join(bases)}, and identities on it as {bases[0]}{MARK}name",
        code="model_not_found", param="model",
    )  # fmt: skip


def chosen(
    service: Service, caller: Caller, body: Choosing, headers: Mapping[str, str], *, remember: bool = True
) -> Who | None:
    """Who answers; None is the model itself. `remember` is what is usual for the route."""
    named = split_model(body.model, (service.name,))[1] if body.model else None
    ways = {"model": named, "identity": body.identity, HEADER: headers.get(HEADER)}
    given = {way: name for way, name in ways.items() if name}
    if len(set(given.values())) > 1:
        raise ApiError(
            400,
            f"{' and '.join(given)} name different identities; name one, or the same",
            code="identity_conflict",
            param="identity",
        )
    if not given:
        if body.remember:
            raise ApiError(
                400,
                "remember: the model itself remembers nothing; name an identity",
                code="identity_required",
                param="remember",
            )
        return None
    name = next(iter(given.values()))
    head = service.head(caller, name)
    if head.fingerprint != service.base.fingerprint:
        raise no_identity(name)
    asked = remember if body.remember is None else body.remember
    if asked and not caller.holds("write"):
        if body.remember:
            raise ApiError(403, "remember: this key may read and not write", code="insufficient_scope", param="remember")
        # Whoever may only read is answered, and nothing is written.
        asked = False
    return Who(name, head, asked, body.source)


def sampling_of(
    service: Service, body: Drawing, *, max_tokens: int, penalty: float = 1.0, logprobs: int | None = None
) -> Sampling:
    """How the first choice is drawn; `choices` gives the others their seeds."""
    chance = body.top_p not in (None, 1) or body.top_k not in (None, -1, 0) or bool(body.min_p) or (body.n or 1) > 1
    temperature = body.temperature if body.temperature is not None else float(chance)
    # Clients send cuts at temperature 0 too, where they do nothing; at top_p 0 only the most likely token is left.
    greedy = temperature == 0 or body.top_p == 0
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return Sampling(
        max_tokens=max_tokens,
        temperature=0.0 if greedy else temperature,
        top_k=None if greedy or body.top_k in (None, -1, 0) else body.top_k,
        top_p=None if greedy else body.top_p,
        min_p=None if greedy else body.min_p,
        repetition_penalty=penalty if body.repetition_penalty is None else body.repetition_penalty,
        stop=tuple(s for s in stop if s),
        seed=body.seed if body.seed is not None else secrets.randbits(31),
        logprobs=logprobs,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        bias=bias_of(service, body.logit_bias or {}),
    )


def bias_of(service: Service, given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    vocabulary: int = service.model.config.vocabulary
    pairs: list[tuple[int, float]] = []
    for key, value in given.items():
        if not key.isascii() or not key.isdecimal() or len(key) > 9 or int(key) >= vocabulary:
            raise refuse("logit_bias", f"{key!r:.40} is no token id; this model knows 0 to {vocabulary - 1}", "invalid_value")
        pairs.append((int(key), value))
    return tuple(pairs)


def choices(service: Service, body: Drawing, sampling: Sampling) -> list[Sampling]:
    """One for each choice that was asked for, each with a seed of its own."""
    n = body.n or 1
    if n > service.settings.choices:
        raise refuse("n", f"{n} choices; at most {service.settings.choices} here", "invalid_value")
    return [replace(sampling, seed=sampling.seed + i) for i in range(n)]


def room_for(service: Service, prompt: int, wanted: int | None, param: str = "max_tokens") -> int:
    """How many tokens an answer may have: what was asked for, or what is usual, within the context."""
    context = service.model.context
    # The last token of an answer does not go through the model again.
    room = service.settings.max_tokens if context is None else context - prompt + 1
    if room < 1 or (wanted is not None and context is not None and wanted > room):
        raise ApiError(
            400,
            f"this model's context has {context:,} tokens; the prompt has {prompt:,}"
            + (f" and {param} asks for {wanted:,} more: ask for at most {room:,}" if room > 0 else ": shorten it"),
            code="context_length_exceeded",
            param=param if room > 0 else "messages",
        )
    return min(room, service.settings.max_tokens) if wanted is None else wanted


__all__ = ["HEADER", "Who", "choices", "chosen", "room_for", "sampling_of", "split_model"]
