"""The collectives and messages of this process, numbered by group, and those that somebody waits
for.
"""

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
from ds_core.accelerator import Accelerator
from ds_core.comm.interceptor import TAG_BITS, Collective

KEPT = 64
"""Collectives per group that are remembered for comparison; tags stop ranks within a few of a
difference.
"""

MESSAGES = {"send": "dst", "isend": "dst", "recv": "src", "irecv": "src"}
"""Each operation between two ranks, and the argument that names the other one."""

_UNEVEN = ("all_to_all_single", "barrier", "open_transport")  # sizes may differ between ranks
_BY_OUTPUT = ("all_gather_into_tensor", "reduce_scatter_tensor")

Key = tuple[str, str, int, Any]


class Call:
    """One collective: its number in its group, and what it is. key: operation, label, elements (or
    -1), dtype.
    """

    __slots__ = ("digest", "group", "key", "number")

    def __init__(self, group: _GroupCalls, number: int, key: Key, digest: int) -> None:
        self.group = group
        self.number = number
        self.key = key
        self.digest = digest

    @property
    def place(self) -> tuple[str, int]:
        """(group name, number), equal on all ranks of the group."""
        return self.group.name, self.number

    def describe(self) -> str:
        """``weights of 'h.0.weight' (all_gather_into_tensor of 4096 float32)``."""
        op, text, numel, dtype = self.key
        what = describe(op, numel, dtype, self.group.members)
        return f"{text} ({what})" if text else what


def describe(op: str, numel: int, dtype: Any, ends: Sequence[int] | None) -> str:
    """An operation in words.

    numel: -1 where it has no message.
    ends: of a message between two ranks.
    """
    what = f"{op} of {numel} {str(dtype).removeprefix('torch.')}" if numel >= 0 else op
    if op in MESSAGES and ends is not None:
        what += f" to rank {ends[1]}" if MESSAGES[op] == "dst" else f" from rank {ends[0]}"
    return what


def channel_name(group: str, ends: Sequence[int]) -> str:
    """The name of the group of two that a message's sender and receiver are."""
    return f"{group} {ends[0]}>{ends[1]}"


class _GroupCalls:
    """What this rank has called on one group.

    members: global ranks.
    digest: of all calls so far, in order.

    Messages from one rank to another are a group of their own: `channels`, by the argument that
    names the other one.
    """

    __slots__ = ("calls", "channels", "count", "digest", "members", "name")

    def __init__(self, name: str, members: Sequence[int]) -> None:
        self.name = name
        self.members = tuple(members)
        self.count = 0
        self.digest = 1
        self.calls: deque[Call] = deque(maxlen=KEPT)
        self.channels: dict[tuple[str, int], _GroupCalls] = {}


class Ledger:
    """Numbers every collective of this process in its group.

    Each is folded into the group's digest, which is its tag.

    waiting: by thread, the call that it waits for.
    device: the accelerator, where the host may go on before a collective has ended; None: it waits.
    streams: those that calls were queued on since somebody took the set.
    """

    def __init__(self, device: Accelerator) -> None:
        self.waiting: dict[int, Call] = {}
        waits = device.device_type == "cpu" and device.current_stream() is None
        self.device = None if waits else device
        self.streams: set[Any] = set()
        self._groups: WeakKeyDictionary[ProcessGroup, _GroupCalls] = WeakKeyDictionary()
        self._marks: dict[Key, int] = {}
        self._since: dict[Call, float] = {}

    def record(self, collective: Collective) -> Call:
        """Number `collective` and set its tag."""
        group = self._groups.get(collective.group) or self._group(collective.group)
        op = collective.op
        numel = -1
        dtype = None
        arguments = collective.arguments
        if op in MESSAGES:
            return self._message(collective, group)
        if op not in _UNEVEN:
            message = arguments["output" if op in _BY_OUTPUT else "tensor"]
            numel = message.numel()
            dtype = message.dtype
        key = (op, collective.label, numel, dtype)
        group.count += 1
        mark = self._marks.get(key)
        if mark is None:  # crc: Python's own hash of a string differs between processes
            mark = self._marks[key] = zlib.crc32(repr(key).encode())
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

    def note_stream(self, collective: Collective) -> None:
        """A collective, or a wait for it, may have been queued on the device's current stream."""
        message = collective.message
        if self.device is None or message is None or message.device.type != self.device.device_type:
            return
        stream = self.device.current_stream()
        if stream is None:  # the device has no streams, so the host waits for it
            self.device = None
        else:
            self.streams.add(stream)

    def take_streams(self) -> set[Any]:
        """`streams`, which is empty afterwards."""
        taken, self.streams = self.streams, set()
        return taken

    def longest(self) -> tuple[Call, float] | None:
        """The call that somebody has waited for longest, and since when it was seen.

        One thread asks, often.
        """
        now = time.monotonic()
        self._since = {call: self._since.get(call, now) for call in list(self.waiting.values())}
        first = min(self._since, key=lambda c: self._since[c], default=None)
        return None if first is None else (first, self._since[first])

    @property
    def issued(self) -> int:
        """All calls so far."""
        return sum(group.count for group in self._all())

    def histories(self) -> dict[str, GroupHistory]:
        """The last calls of each group, by its name."""
        return {
            group.name: GroupHistory(
                group.members,
                group.count,
                tuple((c.number, c.digest, c.describe()) for c in list(group.calls)),
            )
            for group in self._all()
        }

    def _all(self) -> list[_GroupCalls]:
        groups = list(self._groups.values())
        return groups + [channel for group in groups for channel in list(group.channels.values())]

    def _group(self, group: ProcessGroup) -> _GroupCalls:
        self._groups[group] = found = _GroupCalls(
            group.group_name, dist.get_process_group_ranks(group)
        )
        return found

    def _message(self, collective: Collective, group: _GroupCalls) -> Call:
        """A message; they are matched by their order, and have no tag."""
        side = MESSAGES[collective.op]
        peer = collective.arguments[side]
        message = collective.arguments["tensor"]
        channel = group.channels.get((side, peer))
        if channel is None:
            ends = (dist.get_rank(), peer) if side == "dst" else (peer, dist.get_rank())
            channel = group.channels[side, peer] = _GroupCalls(channel_name(group.name, ends), ends)
        channel.count += 1
        call = Call(
            channel,
            channel.count,
            (collective.op, collective.label, message.numel(), message.dtype),
            0,
        )
        channel.calls.append(call)
        return call
