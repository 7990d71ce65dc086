"""What another attention does to a pretrained model: SmolLM2 speaks under four of them, untrained for three.

Nothing is fine-tuned. The perplexity is over one fixed paragraph, written for this page so that no model has read it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from demo.page import Code, Section, Table
from demo.screen import Screen
from regard.errors import CheckpointError

SPECS = ("dot | softmax", "dot | entmax(1.5)", "dot | topk(8)", "cosine | softmax")
PROMPT = "The lighthouse keeper opened the door and"
LENGTH = 40
PARAGRAPH = (
    "The bridge at the edge of our village has two lives. In the morning it carries children to school, and the boards answer "
    "their steps like a slow drum. At night it belongs to the river, which rises in autumn until it can almost touch the "
    "railing. My grandfather built it with his brother in a single summer. He used to say that a bridge is only a promise "
    "made of wood, and that someone has to keep it every year. So each spring we take the rotten boards out, measure the gaps, "
    "and put new ones in their place, although nobody pays us for it."
)
HEAD = ("attention", "perplexity", "times softmax's")
TITLE = "The same pretrained model under another attention"
MISSING = "SmolLM2 is not here, so nothing speaks: regard models get smollm2"


@dataclass(frozen=True)
class Said:
    spec: str
    perplexity: float
    text: str


def measure(tick: Callable[[], None] = lambda: None, specs: Sequence[str] = SPECS) -> list[Said]:
    """Each mechanism in all layers, greedy, the same prompt. Raises CheckpointError where the model cannot be had."""
    from regard.models import downloads as hub
    from regard.models.decode.generate import Sampling, generate, perplexity

    hub.get("smollm2")
    found: list[Said] = []
    for spec in specs:
        model, tokenizer = hub.open_model("smollm2", attention=spec)
        out = generate(model, PROMPT, Sampling(max_tokens=LENGTH), tokenizer=tokenizer)
        assert out.text is not None
        found.append(Said(spec, perplexity(model, tokenizer.encode(PARAGRAPH)), out.text[0]))
        tick()
    return found


def speak(screen: Screen) -> list[Said]:
    """Measure and show; an empty list where the model cannot be had, which the screen says."""
    try:
        with screen.steps("SmolLM2 under four attentions", len(SPECS)) as tick:
            said = measure(tick)
    except (CheckpointError, ImportError) as error:
        screen.say(f"{MISSING} ({error})")
        return []
    screen.table("SmolLM2-135M, nothing trained: perplexity of a fixed paragraph", HEAD, rows(said))
    for x in said:
        screen.say(f"{x.spec}\n{_told(x)}\n")
    return said


def rows(said: Sequence[Said]) -> list[tuple[str, ...]]:
    base = said[0].perplexity
    return [(x.spec, _short(x.perplexity), f"{_short(x.perplexity / base)} ×") for x in said]


def section(said: Sequence[Said]) -> Section:
    if not said:
        return Section(TITLE, MISSING, [])
    return Section(
        TITLE,
        "SmolLM2-135M-Instruct continues one sentence, greedily, with one mechanism in all of its 30 layers. It was trained "
        "with softmax over dot products, and nothing is trained here: what stays readable shows how near a mechanism is to "
        "the one that the weights expect.",
        [
            Table("Perplexity of one paragraph of about 110 words: the lower, the less surprised.", HEAD, rows(said)),
            *(Code(f"{x.spec}\n{_told(x)}") for x in said),
        ],
    )


def _told(x: Said) -> str:
    return textwrap.fill(f"{PROMPT}{x.text}".replace("\n", " "), 96, initial_indent="  ", subsequent_indent="  ")


def _short(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"
