"""Counters and histograms in Prometheus' text format."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Mapping

__all__ = ["Histogram", "Metrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """How often values of seconds came, in fixed buckets."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self._counts[bisect.bisect_left(_SECONDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> list[str]:
        """Its samples."""
        found, total = [], 0
        for bound, count in zip((*map(str, _SECONDS), "+Inf"), self._counts, strict=True):
            total += count
            found.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*found, f"{name}_sum {self._sum:.6f}", f"{name}_count {total}"]


class Metrics:
    """What the server has done so far. requests: by (path, status); the tokens of answers, also of those cut short."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.prompt_tokens = self.completion_tokens = self.cancelled = 0
        self.first_token, self.whole = Histogram(), Histogram()

    def text(self, now: Mapping[str, int]) -> str:
        """All samples. now: gauges."""
        rows = [f'{{path="{path}",status="{status}"}} {n}' for (path, status), n in sorted(self.requests.items())]
        lines = _head("requests_total", "counter", "Answered requests.")
        lines += [f"dscore_serve_requests_total{row}" for row in rows]
        counters = {
            "prompt_tokens_total": ("Tokens of prompts.", self.prompt_tokens),
            "completion_tokens_total": ("Tokens generated.", self.completion_tokens),
            "cancelled_total": ("Requests whose client went away.", self.cancelled),
        }
        for name, (text, value) in counters.items():
            lines += [*_head(name, "counter", text), f"dscore_serve_{name} {value}"]
        for name, value in now.items():
            about = name.replace("_", " ").capitalize() + " now."
            lines += [*_head(name, "gauge", about), f"dscore_serve_{name} {value}"]
        for name, text, histogram in (
            ("first_token_seconds", "From a request to its first token.", self.first_token),
            ("request_seconds", "From a request to the end of its answer.", self.whole),
        ):
            lines += [*_head(name, "histogram", text), *histogram.lines(f"dscore_serve_{name}")]
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP dscore_serve_{name} {text}", f"# TYPE dscore_serve_{name} {kind}"]
