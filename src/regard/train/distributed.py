"""One process or many: who we are, how a model is spread, and how ranks agree.

`torchrun` says through the environment which rank a process is; without it there is one rank and nothing below communicates.
A batch is cut among ranks, never multiplied by them, so the losses are those of one rank.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import RegardError
from ..models.schema import ConfigError
from .settings import TrainConfig

Spread = Literal["none", "ddp", "fsdp"]
TEXT = 4096


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    local: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    spread: Spread = "none"

    @property
    def first(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def total(self, *values: float | Tensor) -> list[float]:
        """Each value summed over ranks, in float64 and in one message."""
        parts = [v.detach().double() if isinstance(v, Tensor) else torch.tensor(v, dtype=torch.float64) for v in values]
        both = torch.stack([p.to(self.device) for p in parts])
        if self.world > 1:
            dist.all_reduce(both)
        return both.tolist()

    def agree(self, problem: str, kind: type[RegardError]) -> None:
        """All ranks go on, or all stop, each with its own problem."""
        if self.total(float(bool(problem)))[0]:
            raise kind(problem or "another rank could not go on; it says why")

    def text(self, text: str) -> str:
        """The first rank's text, on every rank."""
        if self.world == 1:
            return text
        raw = torch.zeros(TEXT, dtype=torch.uint8)
        if self.first:
            data = text.encode()[:TEXT]
            raw[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        raw = raw.to(self.device)
        dist.broadcast(raw, 0)
        return bytes(raw.cpu().tolist()).rstrip(b"\0").decode()


@contextlib.contextmanager
def joined(c: TrainConfig) -> Generator[Ranks]:
    """Join the group that `torchrun` announces, if any, and leave it at the end."""
    world, rank, local = (from_environment(n, d) for n, d in (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)))
    device = pick_device(c.device, local)
    spread: Spread = ("ddp" if world > 1 else "none") if c.parallel == "auto" else c.parallel
    if world > 1 and spread == "none":
        raise ConfigError(f"train.parallel=none with {world} ranks would train {world} separate models; use ddp or fsdp")
    if world == 1:
        # One rank has nothing to spread; the same config then runs anywhere.
        yield Ranks(device=device)
        return
    if c.batch % (world * c.accumulate):
        raise ConfigError(
            f"train.batch={c.batch} does not divide among {world} ranks × train.accumulate={c.accumulate}; "
            f"use a multiple of {world * c.accumulate}"
        )
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"rank {rank} of {world} cannot join the others: {error}; start it with torchrun") from error
    try:
        yield Ranks(rank, local, world, device, spread)
        # Ranks leave together: one that goes while another still speaks to it can take it down.
        dist.barrier()
    finally:
        gc.collect()  # what still holds the group, such as DDP's reducer, goes before it
        dist.destroy_process_group()


def from_environment(name: str, default: int) -> int:
    """A number that `torchrun` sets."""
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or len(text) > 9:
        raise ConfigError(f"{name}={text} in the environment is no count; torchrun sets it, and one process needs none")
    return int(text)


def pick_device(name: str, local: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"train.device={name!r} is no device of torch; use auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda", "mps", "xpu"):
        raise ConfigError(f"train.device={name}: nothing is trained on {device.type}; use auto, cpu or cuda")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"train.device={name} but torch sees no CUDA device here; use train.device=cpu")
        device = torch.device("cuda", local if device.index is None else device.index)
        if device.index >= torch.cuda.device_count():
            raise ConfigError(f"train.device={device}, and torch sees {torch.cuda.device_count()} CUDA devices here")
        torch.cuda.set_device(device)
    return device


def spread(objective: nn.Module, blocks: nn.ModuleList | None, ranks: Ranks, sparse: bool = False) -> nn.Module:
    """The module to call: as it is, a replica that averages gradients (DDP), or one whose parameters are cut up (FSDP2).

    In a `sparse` model some parameters may go without a gradient in a step, which DDP has to be told.
    """
    if ranks.spread == "none":
        return objective
    if ranks.spread == "ddp":
        ids = [ranks.device.index] if ranks.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(objective, device_ids=ids, find_unused_parameters=sparse)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    # A block's weights are gathered when it runs and dropped after; what is left (embeddings, head) forms the root.
    for block in blocks or ():
        fully_shard(block, mesh=mesh)
    fully_shard(objective, mesh=mesh)
    return objective


@contextlib.contextmanager
def part_of_step(module: nn.Module, last: bool) -> Generator[None]:
    """Gradients travel between ranks once a step, with its last part."""
    if isinstance(module, nn.parallel.DistributedDataParallel) and not last:
        with module.no_sync():
            yield
        return
    shards: Any = getattr(module, "set_requires_gradient_sync", None)
    if shards is not None:
        shards(last)
    yield


def to_shards(module: nn.Module) -> None:
    """What a sharded model has gathered for its last call goes back to the ranks: only shards are saved."""
    reshard: Any = getattr(module, "reshard", None)
    if reshard is not None:
        reshard()
