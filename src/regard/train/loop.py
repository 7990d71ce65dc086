"""The training loop: one function, on one core or on many hosts.

Everything a step depends on is a function of (config, step): its windows, its learning rate, its random numbers. So a run that
was stopped and resumed walks through the same losses as one that was not.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import CheckpointError, RegardError
from ..files import point, reading, sweep, write_text
from ..models.downloads import open_model
from ..models.objectives import IGNORED, Objective
from ..models.schema import ConfigError
from ..models.tokenizer import Tokenizer
from .begin import Start, TrainError, built, carried_on, locked, same_run
from .checkpoint import Progress, Source, Store, read_progress
from .data import Text, Tokens, find_text
from .data import tokens as open_tokens
from .distributed import Ranks, part_of_step, spread, to_shards
from .distributed import joined as joined_ranks
from .examples import Drawing, Pairs, Windows, marks_of, seed_of
from .optim import adamw, clip, rate, set_rate
from .precision import uses_bfloat16
from .report import Metrics, Reporter, reporter
from .settings import FROM_DATA, Config, check, dump
from .threads import FREE, FreeCores

BALANCE = 0.01
"""The weight of a mixture's load-balancing loss (Fedus et al. 2021)."""


@dataclass(frozen=True)
class Result:
    run: Path
    progress: Progress
    stopped: str
    """finished, early or interrupted"""
    loss: float
    """The last training loss."""
    validation: float | None
    """The best validation loss."""


class Loss(nn.Module):
    """The loss of an objective in nats, as a module, so that DDP and FSDP2 have a forward to hook into."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, inputs: dict[str, Tensor], targets: Tensor, asked: float | None = None, total: bool = False) -> Tensor:
        """The mean over the targets, or over the share of them that a part has; with `total`, the sum."""
        out = self.objective.outputs(self.model, inputs)
        loss = F.cross_entropy(
            out.logits.flatten(0, 1).float(),
            targets.flatten(),
            ignore_index=IGNORED,
            reduction="mean" if asked is None and not total else "sum",
        )
        if total:
            return loss
        loss = loss if asked is None else loss / asked
        # Mixtures of experts say how unevenly they were used; it is trained on, not validated on.
        balance: Tensor | None = getattr(out, "balance", None)
        return loss if balance is None else loss + BALANCE * balance


def train(
    c: Config,
    run: str | Path,
    *,
    resume: bool = False,
    new_data: bool = False,
    initial: Start | None = None,
    quiet: bool = False,
) -> Result:
    """Train as `c` says, in the folder `run`; with `resume`, go on from its last checkpoint; from an `initial` model otherwise.

    `initial` is a model and its tokenizer, as `open_model` gives them, and `c` is `config(..., initial=model)`.

    A resumed run has to find the text, the tokenizer and the model it began with. `new_data` lets it go on with other text, which
    is cut by the tokenizer it has. Whatever is refused, is refused before anything in `run` is written.
    """
    run = Path(run)
    check(c)
    if new_data and not resume:
        raise TrainError("--new-data lets a run that exists go on with other text: add --resume")
    if resume and initial is not None:
        raise TrainError("--init begins a run with a model's weights, and --resume goes on with the run's own: leave one out")
    if not resume and (c.data.tokenizer == "model") != (initial is not None):
        raise ConfigError(f"data.tokenizer={c.data.tokenizer}: `model` is the tokenizer of --init MODEL, and goes with it")
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(joined_ranks(c.train))
        report = stack.enter_context(reporter(ranks.first and not quiet))
        asked = stack.enter_context(interruptible())
        if c.train.threads > 0:
            torch.set_num_threads(c.train.threads)
        elif c.train.threads == FREE:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
        store = Store(run, ranks)
        last = begun(store, resume, stack)
        text = agreed_text(c, ranks)
        start = initial if last is None else open_model(last)
        if last is not None and start is not None:
            same_run(c, last, start[0], read_progress(last), text[1], new_data)
        c = c if start is None else carried_on(c, start[0])
        tokens = opened_tokens(c, ranks, report, asked, (text, start and start[1]))
        c = complete(c, tokens)
        store = replace(store, tokenizer=tokens.tokenizer, settings=dump({n: t for n, t in c.tree().items() if n != "model"}))
        trainer = Trainer(c, store, tokens, start, report, asked)
        progress = Progress(seed=c.train.seed) if last is None else store.load(trainer.model, trainer.optimizer)
        progress = replace(progress, source=Source(tokens.text, len(tokens.values)))
        if new_data:
            # A loss on other text is no better and no worse than one on this.
            progress = replace(progress, best=None, best_step=0, waited=0)
        prepare_folder(store, c, last, stack)
        metrics = stack.enter_context(Metrics(run / "metrics.jsonl", ranks.first))
        return trainer.go(progress, metrics, resume)


def begun(store: Store, resume: bool, stack: contextlib.ExitStack) -> Path | None:
    """The checkpoint to go on from; None for a run that begins, where none may stand."""
    run, ranks, problem, last = store.run, store.ranks, "", None
    try:
        with reading(run):
            if resume:
                if ranks.first and run.is_dir():
                    stack.enter_context(locked(run))
                last = store.last()
                if last is None:
                    raise CheckpointError(f"{run} holds no checkpoint to resume from; start it without --resume")
            elif store.taken():
                raise TrainError(f"{run} already holds a run; --resume continues it, --out names another folder")
    except RegardError as error:
        if ranks.world == 1:
            raise
        problem = str(error)
    ranks.agree(problem, TrainError)
    return last


def agreed_text(c: Config, ranks: Ranks) -> Text:
    """The text, which has to be the same on every rank."""
    text = find_text(c.data, c.objective.pair_fields)
    other = ranks.text(text[1]) != text[1]
    ranks.agree(f"data.source={c.data.source} is other text here than on the first rank" if other else "", TrainError)
    return text


def prepare_folder(store: Store, c: Config, last: Path | None, stack: contextlib.ExitStack) -> None:
    """The run's own files, now that nothing can be refused any more; and what killed processes left is swept."""
    run, ranks, problem = store.run, store.ranks, ""
    try:
        if ranks.first:
            if last is None:
                run.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(run))
                if store.taken():
                    raise TrainError(f"{run} holds a run that began just now; --out names another folder")
            elif not (store.root / "last").is_symlink():
                # What no link names is swept.
                point(store.root / "last", last.name)
            sweep(run, older_than=-math.inf)
            write_text(run / "config.yaml", dump(c.tree()))
            store.prune()
    except OSError as error:
        problem = f"cannot write to {run}: {error.strerror or error}"
    except RegardError as error:
        problem = str(error)
    ranks.agree(problem, TrainError)


def opened_tokens(
    c: Config, ranks: Ranks, report: Reporter, asked: Callable[[], bool], of: tuple[Text, Tokenizer | None]
) -> Tokens:
    """The tokens of a text, by a tokenizer of its own unless one is given."""
    text, tokenizer = of

    def building(label: str, done: int, total: int) -> None:
        report.building(label, done, total)
        if asked():
            # Nothing was trained yet, and half a token file is of no use: there is nothing to save.
            raise KeyboardInterrupt

    # Hosts may not share a cache, so one rank of each host makes the tokens; the renaming at its end settles races.
    if ranks.local == 0:
        open_tokens(c.data, building, tokenizer, text, c.objective.tokens)
    ranks.barrier()
    return open_tokens(c.data, None, tokenizer, text, c.objective.tokens)


def complete(c: Config, tokens: Tokens) -> Config:
    """The model's fields that the data decides, unless they are given; sizes have to be large enough."""
    have = [f for f in FROM_DATA if hasattr(c.model, f)]
    need = {"vocabulary": tokens.tokenizer.size, "context": c.data.context, "start": tokens.tokenizer.special.pad or 0}
    why = {"vocabulary": f"the {c.data.tokenizer} tokenizer of the data has", "context": "data.context is"}
    # A model that was there before keeps its sizes.
    fix = (
        "data.context can be smaller"
        if c.data.tokenizer == "model"
        else "Leave model.{} out, and it follows the data, or give at least as much"
    )
    for name in [n for n in have if n in why]:
        if name in c.given and getattr(c.model, name) < need[name]:
            raise ConfigError(
                f"model.{name}={getattr(c.model, name)} is too small: {why[name]} {need[name]}. {fix.format(name)}"
            )
    sizes = {n: need[n] for n in have if n not in c.given}
    return replace(c, model=replace(c.model, **sizes), given=frozenset(have))


class Trainer:
    """What one run holds while it runs."""

    def __init__(
        self, c: Config, store: Store, tokens: Tokens, start: Start | None, report: Reporter, asked: Callable[[], bool]
    ) -> None:
        self.c, self.store, self.ranks, self.report, self.asked = c, store, store.ranks, report, asked
        marks = marks_of(c.objective, tokens.tokenizer, c.model.vocabulary, getattr(c.model, "start", None))
        kind = Windows if c.objective.pair_fields is None else Pairs
        drawing = Drawing(c.train.batch, c.train.seed, c.objective, marks)
        self.examples, self.held_out = kind.split(tokens.values, c.data.validation, c.data.context, drawing)
        self.size = len(tokens.values)
        self.model = built(c, self.ranks, self.examples, start, tokens.tokenizer)
        blocks = getattr(self.model, "blocks", None)
        sparse = not self.model.trains_every_parameter
        self.module = spread(
            Loss(self.model, c.objective), blocks if isinstance(blocks, nn.ModuleList) else None, self.ranks, sparse
        )
        self.optimizer = adamw(self.model, c.optim)
        self.sphere: Callable[[], None] | None = getattr(self.model, "normalize_", None)
        """nGPT's weights go back to the unit sphere after each update."""
        self.half = uses_bfloat16(c.train.dtype, self.ranks.device)
        self.metrics = Metrics(store.run, live=False)
        self.cores = FreeCores() if c.train.threads == FREE and self.ranks.device.type == "cpu" else None

    def go(self, progress: Progress, metrics: Metrics, resumed: bool) -> Result:
        c, self.metrics = self.c, metrics
        self.metrics.add(event="resume" if resumed else "start", step=progress.step, world=self.ranks.world)
        size = sum(p.numel() for p in self.model.parameters())
        self.report.say(
            f"{c.family}, {size:,} parameters, {self.size:,} tokens of text, "
            f"{'bfloat16' if self.half else 'float32'} on {self.ranks.device.type} × {self.ranks.world} → {self.store.run}"
        )
        loss, stopped, began, before = math.nan, "finished", time.perf_counter(), progress.seconds
        mark, marked = time.perf_counter(), progress.tokens
        while progress.step < c.train.steps:
            if self.cores is not None:
                self.cores.look()
            loss, norm, stop = self.step(progress.step)
            step = progress.step + 1
            done = step == c.train.steps
            tokens = progress.tokens + self.examples.step_tokens
            progress = replace(progress, step=step, tokens=tokens, seconds=before + time.perf_counter() - began)
            if step % c.train.log_every == 0 or done:
                now = time.perf_counter()
                speed, mark, marked = (tokens - marked) / max(now - mark, 1e-9), now, tokens
                lr = rate(c.optim, step - 1, c.train.steps)
                self.metrics.add(step=step, loss=loss, norm=norm, lr=lr, tokens=tokens, speed=round(speed, 1))
                self.report.step(step, c.train.steps, loss, speed)
            better = False
            if step % c.train.validate_every == 0 or done:
                progress, better = self.validated(progress)
                mark, marked = time.perf_counter(), tokens
            early = 0 < c.train.patience <= progress.waited
            if better or done or early or stop or step % c.train.save_every == 0:
                to_shards(self.module)
                self.store.save(self.model, self.optimizer, progress, better)
            if (early or stop) and not done:
                stopped = "early" if early else "interrupted"
                break
        self.metrics.add(event=stopped, step=progress.step, best=progress.best, seconds=round(progress.seconds, 3))
        return Result(self.store.run, progress, stopped, loss, progress.best)

    def step(self, step: int) -> tuple[float, float, bool]:
        """One update: its loss over all ranks, the gradient's norm, and whether some rank was asked to stop."""
        c, ranks = self.c, self.ranks
        self.module.train()
        set_rate(self.optimizer, rate(c.optim, step, c.train.steps))
        torch.manual_seed(seed_of(c.train.seed, step, ranks.rank))
        pieces, parts = c.train.accumulate, ranks.world * c.train.accumulate
        summed = torch.zeros((), dtype=torch.float64, device=ranks.device)
        for piece in range(pieces):
            batch = self.examples.at(step, ranks.rank * pieces + piece, parts).to(ranks.device)
            with part_of_step(self.module, last=piece == pieces - 1):
                with self.precision():
                    loss = self.module(*batch) / pieces
                loss.backward()
            summed += loss.detach()
        loss, stop = ranks.total(summed / ranks.world, float(self.asked()))
        if not math.isfinite(loss):
            raise TrainError(
                f"the loss of step {step + 1} is {loss}; a smaller optim.lr (now {c.optim.lr:g}) or a longer optim.warmup "
                f"may help. The last checkpoint in {self.store.root} is from before"
            )
        norm = clip(self.model.parameters(), c.optim.clip)
        self.optimizer.step()
        if self.sphere is not None:
            self.sphere()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, float(norm), stop > 0

    def validated(self, progress: Progress) -> tuple[Progress, bool]:
        """The mean loss over the whole held-out part, and whether it is the best so far."""
        summed, count = torch.zeros((), dtype=torch.float64, device=self.ranks.device), 0
        self.module.eval()
        with torch.no_grad(), self.precision():
            for batch in self.held_out.in_order(self.ranks.rank, self.ranks.world):
                summed += self.module(*batch.to(self.ranks.device), total=True)
                count += int((batch.targets != IGNORED).sum())
        total, tokens = self.ranks.total(summed, float(count))
        loss = total / tokens
        better = progress.best is None or loss < progress.best
        self.metrics.add(step=progress.step, validation=loss, seconds=round(progress.seconds, 3))
        self.report.say(f"step {progress.step}  validation {loss:.4f}{'  (best)' if better else ''}")
        if better:
            return replace(progress, best=loss, best_step=progress.step, waited=0), True
        return replace(progress, waited=progress.waited + 1), False

    def precision(self) -> contextlib.AbstractContextManager[object]:
        return torch.autocast(self.ranks.device.type, torch.bfloat16) if self.half else contextlib.nullcontext()


@contextlib.contextmanager
def interruptible() -> Generator[Callable[[], bool]]:
    """The first Ctrl-C (or SIGTERM) is a request that the loop answers after its step; the second is Python's own."""
    asked: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        for signum, handler in before.items():
            signal.signal(signum, handler)

    try:
        for signum in (signal.SIGINT, signal.SIGTERM):
            # What was started deaf to a signal (`regard train &` in a script) stays so: the Ctrl-C is somebody else's.
            if signal.getsignal(signum) is not signal.SIG_IGN:
                before[signum] = signal.signal(signum, note)
    except ValueError:
        before.clear()  # not the main thread: signals are somebody else's
    try:
        yield lambda: bool(asked)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
