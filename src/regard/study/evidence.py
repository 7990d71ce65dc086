"""The tables and the figure of the evidence, from the lines of the people that were measured (`evaluate.py`).

Every figure is a mean over people with a 95% interval by bootstrap over people, pairs kept together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import StateError
from .evaluate import SHARES, Record

Summary = dict[str, Any]
"""Figures by name, in groups."""


def joined(rows: Sequence[Record], sleeps: Sequence[Record]) -> list[Record]:
    """People with what sleep did to them, where both were measured."""
    slept = {r["i"]: r["sleep"] for r in sleeps}
    return [{**r, "sleep": slept[r["i"]]} if r["i"] in slept else r for r in rows]


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


def summary(records: Sequence[Record]) -> Summary:
    """Every figure of the evidence, from the people that were measured."""
    rows = sorted(records, key=lambda r: r["i"])
    if not rows:
        raise StateError("no one has been measured yet; run: regard evaluate identity")
    by = {r["i"]: r for r in rows}
    gain = [r["base"] - r["context"] for r in rows]
    out: Summary = {
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
    sleepers = [r for r in rows if "sleep" in r]
    out["slept people"] = len(sleepers)
    if sleepers:
        out["slept"] = {}
        for n in dict.fromkeys(n for r in sleepers for n in r["sleep"] if n != "recall"):
            # Not every state was slept over by everyone.
            those = [r for r in sleepers if n in r["sleep"]]
            state = _state(those, by, lambda r, n=n: r["sleep"][n])
            state["share"] = bootstrap(
                [r["base"] - r["sleep"][n]["own"] for r in those], [r["base"] - r["context"] for r in those]
            )
            state["damage"] = {k: bootstrap([r["sleep"][n]["damage"][k] for r in those]) for k in ("chat", "prose")}
            out["slept"][n] = state
    asked = [r["sleep"]["recall"] for r in sleepers if "recall" in r["sleep"]]
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


def _state(rows: list[Record], by: dict[int, Record], get: Callable[[Record], dict[str, float]]) -> Summary:
    own = [get(r)["own"] - r["base"] for r in rows]
    pairs = [
        (get(by[r["i"] - 1])["on_other"], get(r)["own"], r["base"])
        for r in rows
        if r["i"] - 1 in by and _has(get, by[r["i"] - 1])
    ]
    figures: Summary = {"own": bootstrap(own), "bytes": max(get(r)["bytes"] for r in rows), "count": len(rows)}
    figures |= {n: bootstrap([get(r)[n] - r["base"] for r in rows]) for n in ("shuffled", "random") if n in get(rows[0])}
    if pairs:
        figures["other"] = bootstrap([o - b for o, _, b in pairs])
        figures["own − other"] = bootstrap([m - o for o, m, _ in pairs])
    return figures


def _has(get: Callable[[Record], dict[str, float]], row: Record) -> bool:
    try:
        return bool(get(row))
    except KeyError:
        return False


PEERS = ("attention", "snapkv", "value_norm", "diversity", "recency", "random")
"""What the default keeper is to be ahead of, at every budget."""


@dataclass(frozen=True)
class Goal:
    what: str
    got: str
    asked: str
    met: bool


def goals(s: Summary) -> list[Goal]:
    """What was aimed at, and whether it was reached; only what was measured is asked."""
    table: list[Goal] = []
    rivals = {x: [f"{n} {x}" for n in PEERS if f"{n} {x}" in s["keep"]] for x in SHARES}
    if all(rivals.values()):
        best = {x: max(rivals[x], key=lambda n: s["keep"][n].mean) for x in SHARES}
        got = " / ".join(f"{s['keep'][f'learned {x}'].mean:.0%}" for x in SHARES)
        them = " / ".join(f"{s['keep'][best[x]].mean:.0%} ({best[x].split()[0]})" for x in SHARES)
        ahead = all(s["keep"][f"learned {x}"].mean > s["keep"][best[x]].mean for x in SHARES)
        table.append(Goal("imprints, fast, at 12.5 / 25 / 50%", got, f"ahead of the best peer, {them}", ahead))
    for name, label in (("trace_fast", "trace, fast"), ("self_fast self_token", "self as a token, fast")):
        if apart := s["states"][name].get("own − other"):
            table.append(Goal(f"{label}: own − another's", str(apart), "below zero, interval too", apart.high < 0))
    if apart := s["states"]["imprints"].get("own − other"):
        table.append(Goal("imprints, fast: own − another's", str(apart), "−0.5 or less", apart.mean <= -0.5 and apart.high < 0))
    slept = s.get("slept", {})
    for name, least in (("imprints 0.125", 0.6), ("imprints 0.25", 0.78), ("imprints 0.5", 0.9), ("everything 0.25", 0.85)):
        if name in slept:
            share = slept[name]["share"]
            table.append(Goal(f"{name}, slept: share of the gain", share.percent(), f"{least:.0%}", share.mean >= least))
    for name in ("trace", "self"):
        if "other" in slept.get(name, {}):
            own, other, apart = (slept[name][n] for n in ("own", "other", "own − other"))
            table.append(Goal(f"{name} alone, slept: own − base", str(own), "−0.30 or less", own.mean <= -0.3))
            table.append(Goal(f"{name} alone, slept: another's − base", str(other), "within ±0.03", abs(other.mean) <= 0.03))
            table.append(Goal(f"{name} alone, slept: own − another's", str(apart), "below zero, interval too", apart.high < 0))
    if "own of context" in s.get("recall", {}):
        r = s["recall"]
        table.append(
            Goal(
                "recall, of what is recalled in context", r["own of context"].percent(), "75%", r["own of context"].mean >= 0.75
            )
        )
        table.append(
            Goal(
                "recall by another's identity",
                r["other"].percent(),
                "no more than nobody's",
                r["other"].low <= r["nobody"].mean,
            )
        )
    if "everything 0.25" in slept:
        for kind, where in (("chat", "in a chat"), ("prose", "as bare prose")):
            harm = slept["everything 0.25"]["damage"][kind]
            table.append(Goal(f"neutral text {where}, everything slept", str(harm), "+0.02 or less", harm.mean <= 0.02))
        size = slept["everything 0.25"]["bytes"]
        table.append(Goal("bytes of a person, everything at a quarter", f"{size:,}", "1,000,000", size <= 1_000_000))
    return table


def markdown(s: Summary) -> str:
    """The evidence as tables, for eyes."""
    lines = [
        f"{s['people']} people; nats per token of the assistant's words in the next conversation; 95% intervals by bootstrap over people.",
        "",
        "| aimed at | reached | asked | |",
        "|---|---|---|---|",
        *(f"| {g.what} | {g.got} | {g.asked} | {'met' if g.met else '**missed**'} |" for g in goals(s)),
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
        lines.append("| learned, then slept | " + " | ".join(cells) + " |")
        lines.append(f"| everything, slept |  | {s['slept']['everything 0.25']['share'].percent()} |  |")
        lines.append("| people who slept | " + " | ".join("–" if x is None else str(x["count"]) for x in slept) + " |")
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


def speaker_table(records: Sequence[Record]) -> str:
    rows = sorted(records, key=lambda r: r["i"])
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


def figure(s: Summary, path: Path) -> None:
    """Two pictures: what each keeper keeps at each budget, and whose a state is."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(12.5, 4.6), layout="constrained")
    left, right = canvas.subplots(1, 2)
    # Okabe and Ito's colours, told apart by everyone, and markers for those who see none. Blue is for our own default.
    colours = (
        "#D55E00",
        "#009E73",
        "#CC79A7",
        "#E69F00",
        "#56B4E9",
        "#000000",
        "#999999",
        "#7F3C8D",
        "#B0A000",
        "#8C6D46",
        "#4D4D4D",
    )
    looks = zip(colours, "osv^D<>pXPh", strict=True)
    slept = [(100 * x, 100 * y["share"].mean) for x in SHARES if (y := s.get("slept", {}).get(f"imprints {x}"))]
    if slept:
        left.plot(*zip(*slept, strict=True), "s--", color="#0072B2", lw=2.4, label="learned, then slept")
    for name in sorted({n.split()[0] for n in s["keep"]}, key=lambda n: -s["keep"][f"{n} 0.25"].mean):
        colour, marker, width = ("#0072B2", "o", 2.8) if name == "learned" else (*next(looks), 1.3)
        means = [100 * s["keep"][f"{name} {x}"].mean for x in SHARES]
        left.plot([100 * x for x in SHARES], means, color=colour, marker=marker, ms=5, lw=width, label=name)
    left.axhline(100, color="#666666", lw=1, ls=":")
    left.set(
        xlabel="share of the history's tokens that is kept (%)",
        ylabel="share of the in-context gain (%)",
        xticks=[100 * x for x in SHARES],
    )
    left.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    states = {f"{n.replace('_fast', '')}, fast": x for n, x in s["states"].items()} | {
        f"{n}, slept": x for n, x in s.get("slept", {}).items()
    }
    states = {n: x for n, x in states.items() if "other" in x}
    rows = range(len(states))
    for shift, kind, colour, label in ((-0.18, "own", "#0072B2", "own"), (0.18, "other", "#D55E00", "another's")):
        figures = [x[kind] for x in states.values()]
        spread = [[f.mean - f.low for f in figures], [f.high - f.mean for f in figures]]
        right.barh([r + shift for r in rows], [f.mean for f in figures], 0.34, xerr=spread, color=colour, label=label)
    right.set_yticks(list(rows), list(states))
    right.invert_yaxis()
    right.axvline(0, color="#666666", lw=1)
    right.set_xlabel("nats per token against the base model; 95% intervals")
    right.legend(fontsize=8)
    canvas.savefig(path, dpi=90)
