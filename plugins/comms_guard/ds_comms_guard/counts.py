"""The calls of this process as the core counts them, and what its threads wait for, read off their
frames.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Collection
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from ds_comms_guard.ledger import MESSAGES, Call, channel_name, describe
from ds_comms_guard.verdict import GroupHistory
from ds_core import comm
from ds_core.accelerator import Accelerator
from ds_core.comm import collectives
from ds_core.comm.interceptor import OPERATIONS

_CALL = collectives.all_reduce.__code__  # of what surrounds every function of ds_core.comm
_WAIT = comm.AfterWork.wait.__code__
_TORCH = distributed_c10d.__file__


class Counts:
    """How much was called on each group.

    device: the accelerator, where a backend lets the host go on.
    """

    def __init__(self, device: Accelerator) -> None:
        self._device = device

    @property
    def issued(self) -> int:
        """All calls so far."""
        return sum(count + sum(messages.values()) for _, count, messages in collectives.called())

    def longest(self) -> tuple[Call, float] | None:
        """None: what is waited for is not kept."""
        return None

    def histories(self) -> dict[str, GroupHistory]:
        """How many calls there were on each group, by its name; a sender and a receiver are a
        group.
        """
        found: dict[str, GroupHistory] = {}
        for group, count, messages in collectives.called():
            with contextlib.suppress(KeyError):  # the program has destroyed the group
                found[group.group_name] = GroupHistory(
                    tuple(dist.get_process_group_ranks(group)), count, ()
                )
            for ends, sent in dict(messages).items():
                found[channel_name(group.group_name, ends)] = GroupHistory(ends, sent, ())
        return found

    @property
    def device(self) -> Accelerator | None:
        """The accelerator, if collectives were called on it and the host does not wait there."""
        kind = self._device.device_type
        if kind == "cpu" and self._device.current_stream() is None:
            return None
        used = [group for group, count, messages in collectives.called() if count or messages]
        return self._device if any(_lets_go(group, kind) for group in used) else None

    def take_streams(self) -> set[Any]:
        """The default stream, which waits for the others where it needs what they do."""
        stream = self._device.current_stream()  # of the watcher's thread
        return set() if stream is None else {stream}


def _lets_go(group: ProcessGroup, kind: str) -> bool:
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return kind == "cpu" or backends.get(kind, "gloo") != "gloo"


class Seen(NamedTuple):
    """A wait of a thread.

    frame: the function that waits.
    wait: (group name, number), where it is known.

    queued: it is for some of what was called.
    exact: it began with the last call.
    """

    frame: FrameType
    text: str
    wait: tuple[str, int] | None = None
    queued: bool = False
    exact: bool = False


def find_wait(packages: Collection[str]) -> Seen | None:
    """What a thread of this process waits for; the main thread's wait first.

    packages: with works of their own.
    """
    frames = sys._current_frames()
    me = threading.get_ident()
    main = threading.main_thread().ident
    for thread in sorted(frames, key=lambda t: t != main):
        # The outermost frame that is known says most: inside it torch waits in functions of its
        # own.
        outermost_first = (
            reversed([f for f, _ in traceback.walk_stack(frames[thread])]) if thread != me else ()
        )
        for frame in outermost_first:
            if (seen := _look_at(frame, packages)) is not None:
                return seen
    return None


def _look_at(frame: FrameType, packages: Collection[str]) -> Seen | None:
    code = frame.f_code
    if code is _CALL:
        return _call(frame)
    module = str(frame.f_globals.get("__name__"))
    if code is _WAIT or (code.co_name == "wait" and module.partition(".")[0] in packages):
        return Seen(frame, f"an asynchronous collective or a message ({module})", queued=True)
    if code.co_filename == _TORCH:
        return Seen(frame, f"torch.distributed.{code.co_name}")
    return None


def _call(frame: FrameType) -> Seen | None:
    """A function of `ds_core.comm`, in which the host waits."""
    seen = frame.f_locals
    op = seen["op"]
    arguments = {**dict(zip(seen["names"], seen["args"], strict=False)), **seen["kwargs"]}
    group = arguments.get("group") or dist.group.WORLD
    counted = {id(known): (count, messages) for known, count, messages in collectives.called()}
    if not isinstance(group, ProcessGroup) or id(group) not in counted:
        return None
    name = str(group.group_name)
    ends = None
    (count, messages) = counted[id(group)]
    if op in MESSAGES:
        ends = (
            (dist.get_rank(), arguments["dst"])
            # A message has a count of its own by its two ends, since other ranks take no part in
            # it.
            if "dst" in arguments
            else (arguments["src"], dist.get_rank())
        )
        count = messages[ends]
        name = channel_name(name, ends)
    message = arguments.get(OPERATIONS.get(op, ""))
    numel, dtype = (message.numel(), message.dtype) if message is not None else (-1, None)
    caller = "" if frame.f_back is None else f", called by {frame.f_back.f_globals.get('__name__')}"
    return Seen(frame, describe(op, numel, dtype, ends) + caller, (name, count), exact=True)
