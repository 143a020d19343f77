"""The collectives of this process, numbered by group, and those that somebody waits for."""

from __future__ import annotations

import threading
import time
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ds_comms_guard.verdict import GroupHistory
from ds_core.comm.interceptor import TAG_BITS, Collective

__all__ = ["Call", "Ledger"]

KEPT = 64
"""Collectives per group that are remembered for comparison; tags stop ranks within a few of a difference."""

_UNEVEN = ("all_to_all_single", "barrier", "open_transport")  # sizes may differ between ranks
_BY_OUTPUT = ("all_gather_into_tensor", "reduce_scatter_tensor")

Key = tuple[str, str, int, Any]


class Call:
    """One collective: its number in its group, and what it is. key: operation, label, elements (or -1), dtype."""

    __slots__ = ("digest", "group", "key", "number")

    def __init__(self, group: _GroupCalls, number: int, key: Key, digest: int) -> None:
        self.group, self.number, self.key, self.digest = group, number, key, digest

    @property
    def place(self) -> tuple[str, int]:
        """(group name, number), equal on all ranks of the group."""
        return self.group.name, self.number

    def describe(self) -> str:
        """``weights of 'h.0.weight' (all_gather_into_tensor of 4096 float32)``."""
        op, text, numel, dtype = self.key
        what = f"{op} of {numel} {str(dtype).removeprefix('torch.')}" if numel >= 0 else op
        return f"{text} ({what})" if text else what


class _GroupCalls:
    """What this rank has called on one group. members: global ranks. digest: of all calls so far, in order."""

    __slots__ = ("calls", "count", "digest", "members", "name")

    def __init__(self, name: str, members: Sequence[int]) -> None:
        self.name, self.members = name, tuple(members)
        self.count = 0
        self.digest = 1
        self.calls: deque[Call] = deque(maxlen=KEPT)


class Ledger:
    """Every collective of this process gets a number and is folded into the digest of its group.

    waiting: by thread, the call that it waits for.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, Call] = {}
        self._groups: WeakKeyDictionary[ProcessGroup, _GroupCalls] = WeakKeyDictionary()
        self._marks: dict[Key, int] = {}
        self._since: dict[Call, float] = {}

    def record(self, collective: Collective) -> Call:
        """Number `collective` and set its tag, which is part of the digest."""
        group = self._groups.get(collective.group) or self._group(collective.group)
        op, numel, dtype = collective.op, -1, None
        if op not in _UNEVEN:
            message = collective.arguments["output" if op in _BY_OUTPUT else "tensor"]
            numel, dtype = message.numel(), message.dtype
        key = (op, collective.label, numel, dtype)
        mark = self._marks.get(key)
        if mark is None:  # crc: Python's own hash of a string differs between processes
            mark = self._marks[key] = zlib.crc32(repr(key).encode())
        group.count += 1
        group.digest = (group.digest * 1000003 + mark) & 0xFFFFFFFF
        collective.tag = group.digest >> (32 - TAG_BITS)
        call = Call(group, group.count, key, group.digest)
        group.calls.append(call)
        return call

    def begin_wait(self, call: Call) -> None:
        """This thread waits for `call` from now on."""
        self.waiting[threading.get_ident()] = call

    def end_wait(self) -> None:
        """This thread no longer waits."""
        self.waiting.pop(threading.get_ident(), None)

    def overdue(self, patience: float) -> Call | None:
        """The call that somebody has waited for longest, if that is at least `patience` seconds. One thread asks."""
        now = time.monotonic()
        self._since = {call: self._since.get(call, now) for call in list(self.waiting.values())}
        first = min(self._since, key=lambda c: self._since[c], default=None)
        return first if first is not None and now - self._since[first] >= patience else None

    def histories(self) -> dict[str, GroupHistory]:
        """The last calls of each group, by its name."""
        return {
            group.name: GroupHistory(
                group.members, group.count, tuple((c.number, c.digest, c.describe()) for c in list(group.calls))
            )
            for group in list(self._groups.values())
        }

    def _group(self, group: ProcessGroup) -> _GroupCalls:
        self._groups[group] = found = _GroupCalls(group.group_name, dist.get_process_group_ranks(group))
        return found
