"""`regard generate`: continue a text, or answer it."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from .console import fail, progress, verb, watched

if TYPE_CHECKING:
    from ..models.decode.generate import Generated
    from ..models.decode.prepare import Weights
    from ..models.decode.rooms import CacheKind
    from ..models.decode.stream import Token

DEFAULT = "smollm2"
TokenizerOption = Annotated[
    str | None,
    typer.Option(
        help="another tokenizer: a folder, a .gguf, a tokenizer.json, a .model or a tokenizer.bin [default: the model's own]",
        show_default=False,
    ),
]
SpeculateOption = Annotated[
    int | None,
    typer.Option(
        help="guess up to so many tokens at a time from what was said: the same text, sooner where it repeats [default: none]",
        show_default=False,
        min=1,
        max=256,
    ),
]
CacheOption = Annotated[str, typer.Option(help="float32, or int8: keys and values in a quarter of the room")]


@verb
def generate(
    prompt: Annotated[str, typer.Argument(help="the text to continue; - reads it from stdin")],
    model: Annotated[
        str, typer.Option("--model", "-m", help="a name from `regard models list`, a folder, a .gguf or a .bin")
    ] = DEFAULT,
    attention: Annotated[
        str | None, typer.Option("--attention", "-a", help='put another mechanism in: "cosine | entmax(1.5)"')
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="how many tokens at most")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 takes the most likely token")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="draw from the k most likely tokens")] = None,
    top_p: Annotated[float | None, typer.Option(help="draw from the fewest tokens that hold this probability")] = None,
    min_p: Annotated[float | None, typer.Option(help="draw from tokens this many times as likely as the first")] = None,
    repetition_penalty: Annotated[float, typer.Option(help="above 1: tokens that were seen become less likely")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="a text that ends it; may be given several times")] = None,
    seed: Annotated[int, typer.Option(help="same seed, same text")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="the prompt is a message, and the model answers")] = False,
    system: Annotated[str | None, typer.Option(help="with --chat: who the model is")] = None,
    tokenizer: TokenizerOption = None,
    weights: Annotated[
        str, typer.Option(help="float32; int8 or q4 (blocks of a GGUF file): faster, a little less exact")
    ] = "float32",
    speculate: SpeculateOption = None,
    cache: CacheOption = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object instead of a stream of text")] = False,
) -> None:
    """Continue a text.

    \b
    regard generate "The sea is"
    regard generate "Why is the sky blue?" --chat --weights int8
    regard generate "The sea is" --attention "dot | topk(8)" --temperature 0.8 --seed 3
    cat letter.txt | regard generate - --max-tokens 200
    regard generate "Once" --model stories.bin --tokenizer tokenizer.model
    regard generate "ROM<mask>O: what say<mask> thou?" --model runs/text-bert
    regard generate "translate: a house" --model runs/pairs-t5
    """
    if system is not None and not chat:
        fail("--system says who answers a message: add --chat")
    if not -(1 << 63) <= seed < 1 << 63:
        fail(f"--seed {str(seed)[:40]}: it is a number of at most 63 bits")
    text, exact, kept = _read(prompt), parse_weights(weights), parse_cache(cache)
    changes = {} if attention is None else {"attention": attention}
    with progress() as tell:
        # Before torch is imported, which takes seconds where it was not used for a while.
        tell(f"loading {model}", None)
        from ..models import downloads as hub
        from ..models.decode.generate import Sampling
        from ..models.decode.generate import generate as run

        # What is wrong with these should show before a model is loaded.
        sampling = Sampling(max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, tuple(stop or ()), seed=seed)
        if model == DEFAULT and not hub.present(DEFAULT):
            fail("no model is here yet; get SmolLM2 (93 MB) with: regard models get smollm2, or name one with --model")
        loaded, words = hub.open_model(model, tell, tokenizer=tokenizer, **changes)
    if loaded.instead is not None:
        chosen = [name for name, given in (("--chat", chat), ("--temperature", temperature), ("--stop", stop)) if given]
        if chosen:
            fail(f"{chosen[0]} is for models that continue a text; a {type(loaded).__name__} {loaded.instead}")
        reply = loaded.answer(text, words, max_tokens)
        typer.echo(json.dumps({"text": reply}, ensure_ascii=False) if as_json else reply)
        return
    if chat:
        messages = [{"role": "user", "content": text}]
        text = words.chat([*([{"role": "system", "content": system}] if system else []), *messages])
    started = time.perf_counter()
    if not chat and not as_json:
        sys.stdout.write(text)
    out = run(
        loaded,
        text,
        sampling,
        tokenizer=words,
        on_token=None if as_json else _show,
        weights=exact,
        speculate=speculate,
        cache=kept,
    )
    _report(out, time.perf_counter() - started, as_json)
    if out.finish[0] == "interrupted":
        raise typer.Exit(130)


def parse_cache(text: str) -> CacheKind:
    if text not in ("float32", "int8"):
        fail(f"--cache {text}: choose float32 or int8")
    return text


def parse_weights(text: str) -> Weights:
    if text not in ("float32", "int8", "q4"):
        fail(f"--weights {text}: choose float32, int8 or q4")
    return text


def _read(prompt: str) -> str:
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode("utf-8")
    except UnicodeError as error:
        fail(f"the prompt is not UTF-8 text: {error}")
    return text or fail("the prompt is empty; write what the text begins with")


def _show(token: Token) -> None:
    sys.stdout.write(token.text)
    sys.stdout.flush()


def _report(out: Generated, seconds: float, as_json: bool) -> None:
    """What there is to say after the text itself."""
    text, tokens = (out.text or [""])[0], out.tokens[0]
    share = out.accepted_share
    if as_json:
        counts: dict[str, float] = {"seconds": round(seconds, 3), "count": len(tokens)}
        if out.drafted is not None:
            counts |= {"drafted": sum(out.drafted), "accepted": sum(out.accepted or ())}
        typer.echo(json.dumps({"text": text, "tokens": tokens, "finish": out.finish[0], **counts}, ensure_ascii=False))
        return
    typer.echo()
    if watched():
        guesses = "" if share is None else f", {share:.0%} of {sum(out.drafted or ())} guesses right"
        typer.echo(f"{len(tokens)} tokens in {seconds:.1f} s{guesses}", err=True)
