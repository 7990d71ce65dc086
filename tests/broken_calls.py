"""Random calls with one thing wrong: each has to run, or to be refused by one of our own errors."""

from __future__ import annotations

import random as pseudo
from dataclasses import dataclass, replace

import torch
from random_calls import draw
from torch import Tensor

from regard import Document, LowRank, Mask, Padding, Prefix, RegardError, Window, attend, explain


@dataclass(frozen=True)
class Broken:
    arguments: dict[str, object]
    words: str


def broken(seed: int) -> Broken:
    """A drawn call with one argument, one rule or one tensor of the state replaced by something that does not belong there."""
    d, dice = draw(seed), pseudo.Random(-seed - 1)
    state, mask = d.state, torch.ones(d.q.shape[2], d.k.shape[2], dtype=torch.bool)
    me, additive = state.self, state.additive
    assert me is not None
    assert additive is not None
    given: dict[str, object] = {"q": d.q, "k": d.k, "v": d.v, "spec": d.spec, "allow": d.allow, "state": state}
    match place := dice.choice(
        ["q", "k", "v", "spec", "allow", "state", "rule", "field", "field", "low rank", "self", "additive"]
    ):
        case "q" | "k" | "v":
            given[place] = wrong(given[place], dice)
        case "spec" | "state":
            given[place] = wrong(None, dice)
        case "allow":
            given[place] = wrong(mask, dice)
        case "rule":
            kind = dice.choice([Padding, Document, Mask, Prefix, Window])
            given["allow"] = (kind, wrong(torch.zeros(d.k.shape[0], dtype=torch.long), dice))
        case "low rank":
            factors: list[object] = [
                torch.ones(d.k.shape[1], d.q.shape[-1], 2),
                torch.ones(d.k.shape[1], d.q.shape[-1], 2),
                torch.ones(2),
            ]
            n = dice.randrange(3)
            factors[n] = wrong(factors[n], dice)
            given["state"] = replace(state, trace=LowRank(*factors))  # type: ignore[arg-type]
        case "self":
            name = dice.choice(sorted(me.weights))
            weights = {**me.weights, name: wrong(me.weights[name], dice)}
            given["state"] = replace(state, self=replace(me, s=dice.choice([me.s, me.s, wrong(me.s, dice)]), weights=weights))
        case "additive":
            name = dice.choice(["w", "w_q", "w_k"])
            given["state"] = replace(state, additive=replace(additive, **{name: wrong(getattr(additive, name), dice)}))
        case _:
            place = dice.choice(
                ["trace", "self", "additive", "alpha", "temperature", "relative", "positions", "carry", "offset"]
            )
            given["state"] = replace(state, **{place: wrong(getattr(state, place), dice)})
    return Broken(given, f"{place} broken in {d.words}")


def wrong(x: object, dice: pseudo.Random) -> object:
    made: list[object] = [None, "word", 3, True, 2.5, [1, 2], float("nan"), torch.ones(2)]
    if isinstance(x, Tensor):
        x, dim = x.detach(), dice.randrange(max(x.ndim, 1))
        made += [x.unsqueeze(0), x.long(), x.bool(), x.to(torch.complex64), x.to("meta")]
        made += [x[0] if x.ndim and x.shape[0] else x, torch.cat([x, x], dim), x.narrow(dim, 0, 0)]
    return dice.choice(made)


def refusal_of(b: Broken) -> RegardError | None:
    """Our own error, or None where the call runs, forward and backward; an AssertionError that names the call otherwise."""
    a = dict(b.arguments)
    try:
        if isinstance(a["allow"], tuple):
            kind, argument = a["allow"]
            a["allow"] = kind(argument)
        for call in (attend, explain):
            out = call(a["q"], a["k"], a["v"], a["spec"], allow=a["allow"], state=a["state"])  # type: ignore[arg-type]
            if isinstance(out, Tensor) and out.requires_grad:
                out.sum().backward()
    except RegardError as error:
        return error
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n{b.words}") from error
    return None
