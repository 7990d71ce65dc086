"""What the server counts, for Prometheus. No label says who somebody is: routes, methods, statuses and endings only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..errors import needs_extra

with needs_extra("serve"):
    from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from .contract import EngineLike

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    def __init__(self) -> None:
        # A registry of its own: two servers in one process count apart.
        self.registry = r = CollectorRegistry()
        by_route = ("route", "method", "status")
        self.requests = Counter("regard_requests", "Requests that were answered", by_route, registry=r)
        self.seconds = Histogram(
            "regard_request_seconds", "From a request to its last byte", ("route",), buckets=LONG, registry=r
        )
        self.first_token = Histogram(
            "regard_first_token_seconds", "From a request to its first token", buckets=LONG, registry=r
        )
        self.token = Histogram("regard_token_seconds", "Between two tokens of an answer", buckets=SHORT, registry=r)
        self.queue = Histogram("regard_queue_seconds", "From a job's arrival to the first work on it", buckets=LONG, registry=r)
        self.commit = Histogram("regard_commit_seconds", "Imprinting a turn and committing it", buckets=LONG, registry=r)
        self.endings = Counter("regard_answers", "Answers, by how they ended", ("ending",), registry=r)
        self.turns = Counter("regard_turns_committed", "Turns that were imprinted and committed", registry=r)
        self.refused = Counter("regard_refused", "Requests that were refused, by code", ("code",), registry=r)

    def watch(self, engine: EngineLike) -> None:
        """Tell of this engine whenever somebody asks."""
        self.registry.register(_EngineStats(engine))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _EngineStats(Collector):
    def __init__(self, engine: EngineLike) -> None:
        self.engine = engine

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        s = self.engine.stats()
        yield GaugeMetricFamily("regard_queued", "Jobs that wait", s.queued)
        yield GaugeMetricFamily("regard_running", "Jobs that are being written", s.running)
        yield GaugeMetricFamily("regard_prefix_cache_bytes", "Bytes of the prefix cache", s.cache_bytes)
        yield CounterMetricFamily("regard_prompt_tokens", "Tokens of prompts", s.prompt_tokens)
        yield CounterMetricFamily("regard_completion_tokens", "Tokens that were written", s.completion_tokens)
        yield CounterMetricFamily("regard_cached_tokens", "Tokens of prompts that the prefix cache had", s.cached_tokens)
        yield CounterMetricFamily("regard_prefix_cache_hits", "Prompts of which the prefix cache had a part", s.cache_hits)
        yield CounterMetricFamily("regard_prefix_cache_misses", "Prompts of which it had none", s.cache_misses)


__all__ = ["Metrics"]
