"""Metrics of a server for Prometheus, in a registry of its own, so that several share a process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """The counters of one server.

    now: gauges, as (name, description) -> what reads it.
    """

    def __init__(self, now: Mapping[tuple[str, str], Callable[[], float]]) -> None:
        self._registry = CollectorRegistry()
        common: Any = {"namespace": "dscore_serve", "registry": self._registry}
        self.requests = Counter("requests", "Answered requests.", ("path", "status"), **common)
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts.", **common)
        self.completion_tokens = Counter("completion_tokens", "Tokens generated.", **common)
        self.cancelled = Counter("cancelled", "Requests whose client went away.", **common)
        self.first_token = Histogram(
            "first_token_seconds", "From a request to its first token.", buckets=_SECONDS, **common
        )
        self.whole = Histogram(
            "request_seconds",
            "From a request to the end of its answer.",
            buckets=_SECONDS,
            **common,
        )
        for (name, text), read in now.items():
            Gauge(name, text, **common).set_function(read)

    def text(self, accept: str) -> tuple[bytes, str]:
        """All samples, in the format that a request's header `accept` asks for, and that format's
        content type.
        """
        encode, kind = choose_encoder(accept)
        return encode(self._registry), kind
