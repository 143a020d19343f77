"""A plugin of somebody else's, whole: bytes that ranks exchange, by operation, as metrics of every
step.

``{"plugins": {"load": ["count_bytes=count_bytes"]}, "count_bytes": {"ops": ["all_reduce"]}}``
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ds_core import comm
from ds_core.config import RunConfig, Section, option
from ds_core.context import Context


class CountBytes(Section):
    ops: list[str] = option([], "The operations to count; empty: all.")


class ByteCounter(comm.Interceptor):
    def __init__(self, section: CountBytes) -> None:
        self.ops = frozenset(section.ops)
        self.bytes = Counter[str]()

    def around(self, collective: comm.Collective, call: Callable[[], Any]) -> Any:
        if collective.message is not None and (not self.ops or collective.op in self.ops):
            self.bytes[collective.op] += collective.message.nbytes
        return call()


def installed() -> ByteCounter | None:
    return next((i for i in comm.interceptors() if isinstance(i, ByteCounter)), None)


def ds_config() -> type[CountBytes]:
    return CountBytes


def ds_interceptors(config: RunConfig) -> Iterable[comm.Interceptor]:
    section = config.section("count_bytes")
    assert isinstance(section, CountBytes)
    return [installed() or ByteCounter(section)]


def ds_metrics(ctx: Context, step: int) -> Mapping[str, float]:
    if (counter := installed()) is None:
        return {}
    counted, counter.bytes = counter.bytes, Counter()
    return {f"Comm/{op}_bytes": float(n) for op, n in sorted(counted.items())}


def ds_close(ctx: Context) -> None:
    if (counter := installed()) is not None:
        comm.remove_interceptor(counter)
