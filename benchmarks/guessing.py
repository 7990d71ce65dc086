"""Tokens guessed from the prompt beside plain decoding of the same model: the same tokens, asserted, and how many of the guesses were right."""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

import torch
from torch import Tensor

from regard.models import Sampling, generate
from regard.models import downloads as hub
from regard.models.decode.prepare import Weights

from .harness import Bench, Case, Row

TITLE = "decoding with guesses"
LETTER = (
    "Dear Ms Tanaka, thank you for your letter of the 3rd of May. The pump of the fountain in the east garden was replaced on Tuesday, and the two "
    "lamps beside the gate will be repaired next week. The gardener asks that the gate stay closed until then, because the roe deer have eaten "
    "the young roses twice already. Yours sincerely, Ana Pereira"
)
TEXTS = {
    "an edit: a letter written again": (f"Write this letter again, with Wednesday in place of Tuesday.\n\n{LETTER}", Sampling(max_tokens=96)),
    "a story, temperature 0.9": ("Tell me a story about a lighthouse.", Sampling(max_tokens=96, temperature=0.9, top_p=0.95, seed=4)),
}  # fmt: skip


def cases(bench: Bench) -> list[Case]:
    kinds = [w for w in ("float32", "int8") if w in get_args(Weights)]
    return [Case(f"{weights}, {run}", lambda w=weights, r=run: _row(bench, w, r)) for weights in kinds for run in TEXTS]


def _row(bench: Bench, weights: Any, run: str) -> Row:
    model, tokenizer = _model()
    message, sampling = TEXTS[run]
    prompt = tokenizer.encode(tokenizer.chat([{"role": "user", "content": message}]))

    def written(speculate: Any = None) -> Any:
        return generate(model, prompt, sampling, tokenizer=tokenizer, weights=weights, speculate=speculate)

    guessed = written("lookup")
    count, share = len(guessed.tokens[0]), guessed.accepted_share
    right = "no guesses" if share is None else f"{share:.0%} of {sum(guessed.drafted or ())} guesses right, {count} tokens"

    def ours() -> Tensor:
        return torch.tensor(written("lookup").tokens)

    def theirs() -> Tensor:
        return torch.tensor(written().tokens)

    return bench.compare(f"{weights}, a token", run, "one by one", ours, theirs, None, per=count, note=right)


@cache
def _model() -> tuple[Any, Any]:
    hub.get("smollm2")
    return hub.open_model("smollm2")
