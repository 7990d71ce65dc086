"""What a server is started with, and every limit that it holds."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Literal

from ..errors import SpecError
from ..identity.penalty import REPETITION_PENALTY
from ..models.decode.prepare import Weights
from ..models.decode.rooms import CacheKind, caches_of

EngineName = Literal["plain", "batch", "ray"]
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Settings:
    host: str = "127.0.0.1"
    port: int = 8000
    weights: Weights = "float32"
    cache: CacheKind = "float32"
    """How keys and values are kept, of those who are answered and of prompts."""
    engine: EngineName = "batch"
    rows: int = 8
    """Jobs that are written at the same time."""
    queue: int = 64
    """Jobs that wait at most; one more is answered with 429."""
    cache_bytes: int = 256 << 20
    """Of the prefix cache."""
    hosts: tuple[str, ...] = ()
    """Names that a request may address this server by, beside its own address."""
    cors: tuple[str, ...] = ()
    """Origins whose pages may call this server, such as https://example.org; none unless named."""
    body_bytes: int = 4 << 20
    upload_bytes: int = 256 << 20
    """Of an identity that is imported."""
    messages: int = 1024
    prompts: int = 128
    """Texts in one call of /v1/completions or /v1/embeddings."""
    choices: int = 8
    max_tokens: int = 1024
    """Of an answer for which the client names no length, where the context has room for it."""
    deadline: float = 300.0
    """Seconds that a request may take, from its arrival to its last token."""
    drain: float = 30.0
    """Seconds that running requests have after SIGTERM."""
    identities: int = 1000
    """That one key may own."""
    responses: int = 256
    """Kept for `previous_response_id`, of each key."""
    repetition_penalty: float = REPETITION_PENALTY
    """Of chat answers for which the client names none."""
    studies: str = "studies"
    """The folder of measured studies, as `regard study run --out` has it."""
    warm: bool = False
    """Whether what the first turn with a person needs is made while the server starts."""

    def __post_init__(self) -> None:
        caches_of(self.cache)
        for name in (
            "rows", "queue", "cache_bytes", "body_bytes", "upload_bytes", "messages", "prompts", "choices", "max_tokens",
            "deadline", "identities", "responses",
        ):  # fmt: skip
            value = getattr(self, name)
            if not value > 0 and not (name == "cache_bytes" and value == 0):
                raise SpecError(f"{name}={value!r}: it must be above 0")
        if not 0 <= self.port < 1 << 16:
            raise SpecError(f"port={self.port!r}: a port is 1 to 65535, or 0 for any that is free")
        for origin in self.cors:
            scheme, mark, rest = origin.partition("://")
            if scheme not in ("http", "https") or not mark or not rest or "/" in rest or "*" in rest:
                raise SpecError(f"cors={origin!r}: name an origin such as https://example.org, without a path; * is not taken")

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False

    @property
    def allowed_hosts(self) -> frozenset[str]:
        """What the Host header may name, without a port. An address that stands for all of them is itself no name of anything."""
        own = () if self.host in ("0.0.0.0", "::", "") else (self.host.strip("[]").lower(),)
        return frozenset({*LOOPBACK, *own, *(h.strip("[]").lower() for h in self.hosts)})


__all__ = ["EngineName", "Settings"]
