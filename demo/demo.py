"""The demo: a few people and one model on the first page; the attention operator, measured, on the second; tables on the screen."""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from demo import map as two_axis
from demo import speak, speed, two, two_page
from demo.figures import draw_eight, draw_landscape, draw_map
from demo.map import Place
from demo.page import Code, Link, Picture, Section, Table, render
from demo.scene import EIGHT, Scene, look, scene
from demo.screen import Screen
from demo.speed import Timing
from demo.style import DARK, LIGHT, Draw, save
from demo.two_figures import draw_controls, draw_crowd, draw_selves, draw_spectra
from regard import __version__
from regard.attention.allow import Causal
from regard.attention.operator import explain
from regard.study.frame.run import one_thread

LEAD = (
    "regard is one attention operator over two axes: a geometry says how near a query and a key are, a selection turns a row "
    "of scores into a choice. A position and a rule of who may meet complete it. Everything on this page was computed just now, "
    "on this machine."
)


IDENTITIES, OPERATOR = "index.html", "operator.html"
Drawing = tuple[str, Draw, tuple[float, float]]


def build(folder: Path, screen: Screen) -> Path:
    """Both pages, and the path of the one to open first."""
    folder.mkdir(parents=True, exist_ok=True)
    first = build_identities(folder, screen)
    second = build_operator(folder, screen)
    return first or second


def build_identities(folder: Path, screen: Screen) -> Path | None:
    """The page of a few people; None where the model cannot be had."""
    start = time.perf_counter()
    found = two.measure(screen)
    if found is None:
        # A page of an earlier run would pass for one of this run.
        (folder / IDENTITIES).unlink(missing_ok=True)
        return None
    screen.table("All of them", two_page.score_head(), two_page.score_rows(found))
    screen.say(two_page.scored(found))
    for asked in found.asked:
        screen.say(f"\n“{asked.prompt}”\n" + "\n".join(f"  {x.who}: {x.text}" for x in asked.answers))
    head = two_page.control_head(found)
    screen.table("Surprise at the next conversation, nats per token", head, two_page.control_rows(found))
    screen.say(two_page.verdict(found))
    page = folder / IDENTITIES
    with tempfile.TemporaryDirectory() as pictures:
        draw_all(
            Path(pictures),
            screen,
            [
                ("crowd", lambda f, t: draw_crowd(f, t, found), (11, 4.2)),
                ("controls", lambda f, t: draw_controls(f, t, found), (11, 3.8)),
                ("selves", lambda f, t: draw_selves(f, t, found), (11, 3.8)),
                ("spectra", lambda f, t: draw_spectra(f, t, found), (11, 4)),
            ],
        )
        foot = f"{_foot()} SmolLM2-135M-Instruct. These measurements took {time.perf_counter() - start:.0f} s."
        links = [
            Link("The evidence: docs/identity_measured.md", "../docs/identity_measured.md"),
            Link("The attention operator behind it, measured", OPERATOR),
        ]
        text = render(two_page.TITLE, two_page.lead(found), two_page.sections(found), foot, Path(pictures), links)
    page.write_text(text, encoding="utf-8")
    return page


def draw_all(pictures: Path, screen: Screen, drawings: Sequence[Drawing]) -> None:
    with screen.steps("figures", 2 * len(drawings)) as tick, one_thread():
        for name, draw, size in drawings:
            for theme in (LIGHT, DARK):
                save(pictures / f"{name}-{theme.name}.png", draw, size, theme, dpi=150)
                tick()


def build_operator(folder: Path, screen: Screen) -> Path:
    s = scene()
    crowded = speed.busy()
    with screen.steps("speed beside torch", len(speed.SPECS)) as tick:
        timings = speed.measure(tick)
    with screen.steps("two-axis map", two_axis.STEPS) as tick:
        places, trails = two_axis.measure(tick)
    said = speak.speak(screen)
    rows = what_they_do(s)
    page = folder / OPERATOR
    links = [Link(two_page.TITLE, IDENTITIES)] if (folder / IDENTITIES).is_file() else []
    with tempfile.TemporaryDirectory() as pictures:
        draw_all(
            Path(pictures),
            screen,
            [
                ("eight", lambda f, t: draw_eight(f, t, s), (10, 5.6)),
                ("landscape", draw_landscape, (10, 4.2)),
                ("map", lambda f, t: draw_map(f, t, places, trails), (8.4, 5)),
            ],
        )
        page.write_text(_page(rows, timings, places, crowded, said, Path(pictures), links), encoding="utf-8")
    screen.table("The same q and k under eight mechanisms", WHAT, rows)
    screen.table(f"Forward, causal, beside torch's SDPA ({_machine()})", CLOCK, clock(timings))
    if crowded:
        screen.say(CROWDED)
    return page


CROWDED = "Other work was running, so these ratios are pessimistic: a path of many small steps waits at each of them."
WHAT = ("mechanism", "keys in use", "effective keys", "rows refused")
CLOCK = ("mechanism", "backend", "ms", "SDPA ms", "ratio")


def what_they_do(s: Scene) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for view in EIGHT:
        seen = look(view, s)
        taken = seen.accepted[0, 0]
        support, effective = (x[0, 0][taken].float().mean().item() for x in (seen.support, seen.effective))
        found.append((view.spec, f"{support:.1f}", f"{effective:.1f}", f"{int((~taken).sum())} of {len(taken)}"))
    return found


def clock(timings: Sequence[Timing]) -> list[tuple[str, ...]]:
    return [(t.spec, t.backend, f"{t.milliseconds:.1f}", f"{t.sdpa:.1f}", f"{t.ratio:.2f} ×") for t in timings]


def _machine() -> str:
    shape = f"H={speed.HEADS}, N={speed.LENGTH}, D={speed.WIDTH}, float32"
    return f"{shape}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _example() -> str:
    q = torch.zeros(1, 8, 1024, 64)
    plan = explain(q, q, q, "cosine | entmax(1.5) | alibi", allow=Causal())
    call = 'print(regard.explain(q, k, v, "cosine | entmax(1.5) | alibi", allow=regard.Causal()))'
    return f">>> {call}\n{plan}"


def _page(
    rows: list[tuple[str, ...]], timings: Sequence[Timing], places: Sequence[Place], crowded: bool, said: Sequence[speak.Said],
    pictures: Path, links: Sequence[Link],
) -> str:  # fmt: skip
    standing = [
        (p.spec, f"{p.effective:.2f} ± {p.effective_sd:.2f}", f"{p.refusal:.3f} ± {p.refusal_sd:.3f}", f"{p.kept:.2f}")
        for p in places
    ]
    sections = [
        Section(
            "The same q and k under eight mechanisms",
            "24 tokens of three topics (a, b, c) with strangers (·) between them, causal. One word of the spec changes from "
            "picture to picture; q, k and v do not.",
            [
                Picture(
                    "eight",
                    "Eight triangular heatmaps of attention weights over the same 24 tokens. Softmax spreads over whole blocks; "
                    "sparsemax and top-k keep a few cells; hard keeps one cell per row; GD keeps one cell and crosses out rows "
                    "it refuses; selective keeps recent tokens; ALiBi fades with distance; trace joins topics a and c.",
                    "Colour is the weight on a square-root scale. A line through a row: the mechanism refused it.",
                    (1500, 840),
                ),
                Table("Means over accepted rows; a key is in use when its weight is above zero.", WHAT, rows),
            ],
        ),
        Section(
            "Energy landscapes",
            "GD looks at the energy between a query and a key at distance L. Up to L = √2 it has one valley, and the two "
            "cohere; beyond, it has two, and the point that was to be unique is not. A Hopfield retrieval rolls down an energy "
            "over stored patterns; one step of it is softmax attention.",
            [
                Picture(
                    "landscape",
                    "Left: four energy curves between a query and a key; for distances 0.8 and √2 there is one minimum, for 2 and "
                    "3 there are two. Right: a contour map of Hopfield energy with paths that run downhill to stored patterns.",
                    "Left: φ(x) = −log(½e^(−x²) + ½e^(−(L−x)²)). Right: fourteen starts, five updates each.",
                    (1500, 630),
                )
            ],
        ),
        Section(
            "Blending or selection, weak or strong control: measured",
            "Rows of 64 keys, 4 of them consistent with the query or none; eight seeds of 256 rows. Across: how many keys a "
            "mechanism effectively reads. Upwards: how much weight it keeps off strangers, half of the time with nobody else "
            "to turn to. Whoever must choose stays below ½.",
            [
                Picture(
                    "map",
                    "A scatter plot. Mechanisms that must choose lie on one rising curve from rbf at the lower left, through "
                    "softmax, to hard at one half on the right; abstain and GD with a coherence threshold lie far above it. "
                    "The table below holds the same numbers.",
                    "Bands: how far one parameter moves softmax and GD. Hollow: less than half of the weight on what fits.",
                    (1260, 750),
                ),
                Table(
                    "Mean ± standard deviation between seeds; kept: weight on consistent keys.",
                    ("spec", "effective keys", "kept off strangers", "kept"),
                    standing,
                ),
            ],
        ),
        speak.section(said),
        Section(
            "Speed, measured just now",
            f"Forward, causal, {_machine()}. Ours and torch's scaled_dot_product_attention take turns; ratios are medians over "
            f"up to {speed.ROUNDS} rounds.{' ' + CROWDED if crowded else ''}",
            [Table("Ratio: our time over that of torch's fused softmax attention on the same q, k, v.", CLOCK, clock(timings))],
        ),
        Section(
            "Why it is fast, in its own words", "The plan says which backend runs and for which reason.", [Code(_example())]
        ),
    ]
    return render("regard: one attention operator, measured", LEAD, sections, _foot(), pictures, links)


def _foot() -> str:
    return f"regard {__version__}, torch {torch.__version__}, {platform.machine()}. Only the CPU was used."
