"""The first page of the demo: the score of all people first, then two of them, chosen by seed, and what the controls say."""

from __future__ import annotations

from collections.abc import Sequence

from demo.page import Markup, Picture, Section, Table, safe
from demo.two import CONTROLS, POOL, SCORED, SEEDS, WHOSE, Answer, Asked, Portrait, Two, Word
from regard.study.people.natural import contains

TITLE = "A few people, one model"
CLASSES = ("one", "two")
HIGH = 6.0
"""Nats at which a bar under a token is full."""


def lead(two: Two) -> str:
    size = max(p.nbytes for p in two.people) / 1000
    return (
        f"{len(two.crowd)} made-up people each had three short conversations with SmolLM2, a model of 135 million weights; their listener "
        f"never repeats what it is told. What they said was written into an identity of up to {size:,.0f} kB each. Then the "
        "conversations were taken away. No weight of the model has changed, and what they told is in none of the prompts below. "
        "Everything on this page was computed just now, on this machine; nobody was left out."
    )


def scored(two: Two) -> str:
    """The score over all people, in words."""
    n = sum(p.questions for p in two.crowd)
    right = {who: sum(p.right[who] for p in two.crowd) for who in WHOSE}
    base, own, other, context = (
        sum(p.losses[who] for p in two.crowd) / len(two.crowd) for who in ("nobody", "own", "other", "context")
    )
    share = f", {(base - own) / (base - context):.0%} of what the whole history in context gives" if base > context else ""
    return (
        f"Of {n} natural questions the own identities answered {right['own']}, another person's {right['other']}, the model alone "
        f"{right['nobody']}, and the model with the whole history in its context {right['context']}. The surprise at the next "
        f"conversation went from {base:.2f} to {own:.2f} nats per token{share}; with another person's identity it is {other:.2f}."
    )


def score_head() -> tuple[str, ...]:
    short = ("own", "another's", "nobody", "in context")
    return ("person", *(f"right, {who}" for who in short), *(f"nats, {who}" for who in short))


def score_rows(two: Two) -> list[tuple[str, ...]]:
    return [
        (
            p.name + (" (shown below)" if p.chosen else ""),
            *(f"{p.right[who]} of {p.questions}" for who in WHOSE),
            *(f"{p.losses[who]:.2f}" for who in WHOSE),
        )
        for p in two.crowd
    ]


def score_alt(two: Two) -> str:
    each = [f"{p.name}: " + ", ".join(f"{WHOSE[n]} {p.losses[n]:.2f}" for n in WHOSE) for p in two.crowd]
    return "Nats per token of the next conversation, a line for each person. " + "; ".join(each) + "."


def sections(two: Two) -> list[Section]:
    a, b = (p.name for p in two.people)
    return [
        Section(
            "All of them",
            f"The pool “{POOL}” of people who talk as people do; nothing about identities was chosen on it. Each is asked {SCORED} natural questions, "
            "drawn by seed, in a fresh chat; right is a greedy answer that has what they told. Before any night.",
            [
                Markup(f'<p class="verdict">{safe(scored(two))}</p>'),
                Picture(
                    "crowd",
                    score_alt(two),
                    "Each line is one person. The further left, the less surprised; the dotted end is the model alone.",
                    (1650, 630),
                ),
                Table("The same numbers, person by person.", score_head(), score_rows(two), code=False),
            ],
        ),
        Section(
            "Two of them: the same words, different answers",
            f"{a} and {b} were drawn by seed, and so were their questions; nobody looked at answers first. Both slept before they were asked. Greedy answers in a fresh "
            f"chat. The bar under each piece is KL({a} ‖ {b}) at that place, or the other way round: how far the other identity would have gone another "
            f"way, in nats; a full bar is {HIGH:g} or more. A model this small is often wrong, with the whole history before its eyes too: the fold below each row shows that.",
            [Markup(_asked(x)) for x in two.asked],
        ),
        Section(
            "Does an identity belong to its person?",
            "Each person comes back and asks for what they told, in other words. The number is the surprise at what a listener who "
            "remembers would say, in nats per token of the assistant's words: lower is better.",
            [
                Markup(f'<p class="verdict">{safe(verdict(two))}</p>'),
                Markup(f"<p>{safe(remarks(two))}</p>"),
                Picture("controls", controls_alt(two), CONTROLS_CAPTION, (1650, 570)),
                Table(
                    f"The same numbers. Random controls are means over {SEEDS} seeds.",
                    control_head(two),
                    control_rows(two),
                    code=False,
                ),
            ],
        ),
        Section(
            "What was kept",
            "Imprints are single moments: the keys and values of a few tokens, chosen as the rarest words of what "
            "was told. The larger a word, the more it surprised the model when it was said.",
            [Markup(_told(two.people))],
        ),
        Section(
            "Where their selves went",
            "A self is one more key and value in every layer, pooled from what was said. Each conversation moves it, and so may sleep. "
            f"In the end the two selves have a cosine of {two.self_cosine:+.2f}: 1 would be the same self, 0 nothing in common."
            + _common(two.self_cosine),
            [
                Picture(
                    "selves",
                    f"Left: two paths that start at one point and end apart, {a}'s with circles and {b}'s with squares, three "
                    "conversations and then sleep. Right: the length of each self by layer after every conversation and after sleep.",
                    "Star: nobody yet. 1–3: after each conversation. Dotted: what sleep did.",
                    (1650, 570),
                )
            ],
        ),
        Section(
            "The spectrum of each trace",
            "A trace bends the distance between queries and keys. Its eigenvalues say in how many directions and which way: above "
            "zero it pushes apart, below zero it draws together.",
            [
                Picture(
                    "spectra",
                    f"Two maps of eigenvalues by layer on one scale, {a}'s and {b}'s; orange above zero, violet below.",
                    f"After sleep, all key heads of a layer in one column; colours follow a root, so that small ones show. The cosine "
                    f"of the two traces is {two.trace_cosine:+.2f}.{_common(two.trace_cosine)}",
                    (1650, 600),
                )
            ],
        ),
        Section(
            "How they slept",
            "Sleep is a few gradient steps on the identity alone: it comes nearer to what the model answers with one statement of "
            "the person's before its eyes, and is held to the model itself on everything else. The questions below were held "
            f"back from it; a night that loses answers or changes everyday ones is forgotten. {slept(two)}",
            [Table("KL on the questions that were held back, in nats per token.", *_nights(two), code=False)],
        ),
        Section(
            "What this page does not show",
            f"{len(two.crowd)} people and {sum(p.questions for p in two.crowd)} questions are few, and people who were made up are not people. How identities do with intervals, beside "
            "retrieval, and where they fail is in docs/identity_measured.md and docs/studies.md.",
            [],
        ),
    ]


CONTROLS_CAPTION = (
    "Shuffled: the same numbers in the wrong places. Random: every head turned, so that all sizes and spectra stay. An arrow: the "
    "value lies beyond the picture. A random state may do worse than none, so the other person's is the control to look at."
)


def _common(cosine: float) -> str:
    """What a high cosine means, where it is high."""
    return " The two are nearly alike: what tells these people apart is hardly here." if cosine > 0.8 else ""


def control_head(two: Two) -> tuple[str, ...]:
    return ("read with", *(f"{p.name}'s next conversation" for p in two.people), "against nobody")


def control_rows(two: Two) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name, text in CONTROLS.items():
        more = [p.losses[name] - p.losses["nobody"] for p in two.people]
        change = "–" if name == "nobody" else " / ".join(f"{x:+.2f}" for x in more)
        found.append((text, *(f"{p.losses[name]:.2f}" for p in two.people), change))
    return found


def verdict(two: Two) -> str:
    """What the numbers say, whichever way they came out."""
    said: list[str] = []
    for p in two.people:
        x = p.losses
        rivals = {name: x[name] for name in ("nobody", "other", "shuffled", "random")}
        best = min(rivals, key=lambda n: rivals[n])
        gap = rivals[best] - x["own"]
        if gap > 0:
            said.append(f"{p.name}'s own identity does best, {gap:.2f} nats per token below the next: {CONTROLS[best]}.")
        else:
            said.append(
                f"For {p.name} the control failed: “{CONTROLS[best]}” is {-gap:.2f} nats per token better than their own."
            )
    return " ".join(said)


def remarks(two: Two) -> str:
    """What a careful reader would ask next."""
    found: list[str] = []
    shared = [p.losses["nobody"] - p.losses["other"] for p in two.people]
    if min(shared) > 0:
        found.append(
            f"The other person's identity helps as well, by {_both(shared)} nats, so not all of the gain is about the person."
        )
    gain, room = (sum(p.losses["nobody"] - p.losses[n] for p in two.people) for n in ("own", "context"))
    if room > 0:
        found.append(f"Own identities reach {gain / room:.0%} of what the whole history in context gives.")
        if gain > room:
            found.append("More than all of it means that the context is no upper bound here; why, this page does not test.")
    return " ".join(found)


def slept(two: Two) -> str:
    """Whether the night was worth it, in words."""
    found: list[str] = []
    for p in two.people:
        before, best = p.night[0][1], min(x for _, x in p.night)
        done = (
            f"went from {before:.2f} to {best:.2f}"
            if best < before
            else "did no better than before, so that night is forgotten"
        )
        found.append(f"{p.name} {done}.")
    return " ".join(found)


def _both(numbers: Sequence[float]) -> str:
    return " and ".join(f"{x:.2f}" for x in numbers)


def controls_alt(two: Two) -> str:
    each = [f"{p.name}: " + ", ".join(f"{CONTROLS[n]} {x:.2f}" for n, x in p.losses.items()) for p in two.people]
    return "Nats per token by what was read with. " + "; ".join(each) + "."


def _asked(asked: Asked) -> str:
    base, one, two, *context = asked.answers
    told = asked.accepted
    cards = [
        _card("The model alone", "", base, told=told),
        *(_card(f"Living as {x.who}", c, x, o, told) for x, c, o in ((one, "one", two), (two, "two", one))),
    ]
    folded = "".join(f"<p><b>{safe(x.who)}:</b> {safe(x.text)}</p>" for x in context)
    numbers = "".join(f"<p><b>{safe(x.who)}:</b> {_numbers(x)}</p>" for x in (one, two))
    return (
        f'<div class="ask"><h3>“{safe(asked.prompt)}”</h3><p class="soft">{safe(asked.whose)} asks, and had told: {safe(told[0])}.</p>'
        f'<div class="side">{"".join(cards)}</div>'
        f"<details><summary>The same question with the history in context</summary>{folded}</details>"
        f"<details><summary>KL at each token, as numbers</summary>{numbers}</details></div>"
    )


def _card(title: str, name: str, answer: Answer, other: Answer | None = None, told: Sequence[str] = ()) -> str:
    note = "<p><b>✓ has it</b></p>" if any(contains(answer.text, x) for x in told) else ""
    if other is not None and answer.apart and answer.from_base is not None:
        mean = sum(answer.apart) / len(answer.apart)
        note += (
            f'<p class="soft">KL per token: {mean:.2f} from {safe(other.who)}, {answer.from_base:.2f} from the model alone</p>'
        )
    said = _strip(answer) + "…" * answer.cut if answer.apart else safe(answer.text)
    return f'<div class="card {name}"><h3>{safe(title)}</h3><p class="said">{said}</p>{note}</div>'


def _strip(answer: Answer) -> str:
    """Pieces over bars; those of one word stay on one line."""
    words: list[list[str]] = []
    for piece, nats in zip(answer.pieces, answer.apart, strict=True):
        text = piece.replace("\n", " ")
        if not words or text[:1] == " ":
            words.append([])
        height = min(1.0, nats / HIGH)
        words[-1].append(f'<span class="piece" style="--h:{height:.2f}" title="{nats:.2f} nats">{safe(text.strip())}</span>')
    return " ".join(f'<span class="word">{"".join(w)}</span>' for w in words)


def _numbers(answer: Answer) -> str:
    return ", ".join(f"{safe(p.strip())} {x:.2f}" for p, x in zip(answer.pieces, answer.apart, strict=True) if p.strip())


def _told(people: Sequence[Portrait]) -> str:
    cards: list[str] = []
    for p, name in zip(people, CLASSES, strict=True):
        largest = max((w.shock for w in p.words), default=1.0) or 1.0
        lines = "".join(
            f'<li>{safe(told)}<p class="cloud">{"".join(_word(w, largest) for w in p.words if w.source == n) or "–"}</p></li>'
            for n, told in enumerate(p.told)
        )
        cards.append(
            f'<div class="card {name}"><h3>{safe(p.name)} said, and {len(p.words)} of {p.met} tokens were kept</h3><ol class="told">{lines}</ol></div>'
        )
    return f'<div class="side">{"".join(cards)}</div>'


def _word(word: Word, largest: float) -> str:
    size = 0.8 + 1.1 * max(0.0, word.shock) / largest
    return f'<span style="font-size:{size:.2f}rem" title="{word.shock:.1f} nats">{safe(word.text.strip() or "·")}</span> '


def _nights(two: Two) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    # A night that was forgotten has no step after the first look, and stands beside one that has.
    steps = sorted({step for p in two.people for step, _ in p.night})
    head = ("", *("before" if s == 0 else f"step {s}" for s in steps))
    seen = [dict(p.night) for p in two.people]
    return head, [
        (p.name, *(f"{looks[s]:.2f}" if s in looks else "–" for s in steps)) for p, looks in zip(two.people, seen, strict=True)
    ]


__all__ = [
    "TITLE",
    "control_head",
    "control_rows",
    "controls_alt",
    "lead",
    "score_head",
    "score_rows",
    "scored",
    "sections",
    "verdict",
]
