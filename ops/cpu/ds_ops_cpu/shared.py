"""The collectives of ranks on one host, through memory that all of them have mapped: the provider
``shm``.

One rank makes an anonymous memory file (memfd), which has no name in any folder, so that nothing is
left behind however the processes end; the others open it through /proc. All ranks agree, once per
group, on whether it is used; where one of them cannot, the group's backend serves, and a line in
the debug log says why.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Sequence
from typing import Any

import torch
from ds_comm_gloo import GlooCollectives, Members, Transport, host_key
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_core.errors import CommError, DSError, LostRankError
from ds_ops_cpu.kernels import native
from ds_ops_cpu.messages import LEFT, Post, Receiving, Sending, SentWork

log = logging.getLogger("ds_ops_cpu")

BOX = 1 << 20
"""Bytes of a box; each rank has two. What is larger goes through them piece by piece."""

RING = 1 << 22
"""Bytes of a ring, a power of two; there is one for each ordered pair of ranks, in memory only once
it is used.
"""

ONCE = 1 << 15
"""all_reduce of up to so many bytes: every rank adds up all of it, which saves one of two waits."""

SPIN_NS = 30_000
"""How long a rank that has a core of its own looks for the others before it sleeps."""

_TYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float64: 3,
    torch.int64: 4,
    torch.int32: 5,
    torch.int16: 6,
    torch.int8: 7,
    torch.uint8: 8,
    torch.bool: 8,
}
_OPS = {"SUM": 0, "AVG": 0, "PRODUCT": 1, "MAX": 2, "MIN": 3, "BAND": 4, "BOR": 5, "BXOR": 6}
# Of booleans a sum is "any" and a product "all", as torch has it.
_BOOL_OPS = {"SUM": 5, "MAX": 5, "BOR": 5, "PRODUCT": 4, "MIN": 4, "BAND": 4, "BXOR": 6}
_BITS = ("BAND", "BOR", "BXOR")
# Codes of failures, as in cpp/shared/memory.h.
_GONE = 1
_LATE = 2
_DIFFERENT = 3
_INTERRUPTED = 4
_LEFT = LEFT


class SharedMemory:
    """A group's segment: a `Transport`.

    pids: the ranks' processes, for messages.
    """

    def __init__(self, segment: Any, members: Members, pids: Sequence[int]) -> None:
        # Not `Members` itself: it knows the queue of the group's collectives; both are to go with
        # their group.
        self._segment = segment
        self._pids = list(pids)
        self._rank = members.rank
        self._names = members.names
        self._timeout = members.timeout
        self._post = Post(segment, members.rank, members.names, pids, RING, members.timeout)

    def takes(self, kind: str, size: int, dtype: torch.dtype, op: str) -> bool:
        """See `Transport`."""
        if kind == "all_gather":
            return True
        if dtype not in _TYPES:
            return False
        if dtype == torch.bool:
            return op in _BOOL_OPS
        return op in _OPS and not (op in _BITS and dtype.is_floating_point)

    def all_reduce(self, flat: Tensor, op: str, tag: int) -> None:
        """See `Transport`."""
        # Every rank writes what it calls into the segment, so that ranks that differ can name each
        # other's call.
        text = f"all_reduce {op} of {flat.numel()} {flat.dtype}"
        code = self._segment.all_reduce(
            tag, text, _is_main(), flat.data_ptr(), flat.numel(), *_arithmetic(flat.dtype, op), ONCE
        )
        if code:
            raise self._error(code, text)

    def reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], op: str, tag: int) -> None:
        """See `Transport`."""
        sizes = [len(p) for p in parts]
        text = f"reduce_scatter {op} of {sum(sizes)} {output.dtype}{_uneven(sizes)}"
        addresses = [p.data_ptr() for p in parts]
        code = self._segment.reduce_scatter(
            tag,
            text,
            _is_main(),
            output.data_ptr(),
            addresses,
            sizes,
            *_arithmetic(output.dtype, op),
        )
        if code:
            raise self._error(code, text)

    def all_gather(self, parts: Sequence[Tensor], mine: Tensor, tag: int) -> None:
        """See `Transport`."""
        sizes = [p.nbytes for p in parts]
        text = f"all_gather of {sum(sizes)} bytes of {mine.dtype}{_uneven(sizes)}"
        addresses = [p.data_ptr() for p in parts]
        code = self._segment.all_gather(tag, text, _is_main(), addresses, sizes, mine.data_ptr())
        if code:
            raise self._error(code, text)

    def broadcast(self, flat: Tensor, src: int, tag: int) -> None:
        """See `Transport`; the others gather nothing to `src`'s."""
        parts = [flat if rank == src else flat[:0] for rank in range(len(self._names))]
        self.all_gather(parts, parts[self._rank], tag)

    def isend(self, flat: Tensor, to: int) -> Sending | SentWork:
        """See `Transport`."""
        return self._post.isend(flat, to)

    def irecv(self, flat: Tensor, source: int) -> Receiving:
        """See `Transport`."""
        return self._post.irecv(flat, source)

    def _error(self, code: int, text: str) -> CommError:
        """What became of a collective, in words; the segment serves no other after it."""
        # As C++ packs it: the code, and the rank whose fault it is.
        kind = code & 0xFF
        rank = code >> 8
        name = self._names[rank]
        head = f"rank {self._names[self._rank]}: {text} failed"
        if kind == _DIFFERENT:
            return CommError(
                f"{head}: rank {name} called {self._segment.call_of(rank)} at the same place; all "
                "ranks of a group "
                'must make the same collectives in the same order ("comms_guard": {"enabled": '
                "true} finds the place)"
            )
        why = {
            _GONE: f"rank {name} (process {self._pids[rank]}) has ended",
            _LATE: f"rank {name} has not come within {self._timeout:g} s, the process group's "
            "timeout",
            _INTERRUPTED: f"rank {name} was interrupted in it or in one before",
            _LEFT: f"rank {name} has destroyed the process group",
        }[kind]
        return LostRankError(f"{head}, for {why}")


def collectives(group: ProcessGroup, messages: bool) -> GlooCollectives:
    """The provider ``shm``: collectives through a segment, over gloo where the ranks cannot share
    one.
    """
    return GlooCollectives(group, messages, open_segment)


def open_segment(members: Members) -> Transport | None:
    """The segment of a group, or None when its ranks cannot share one; collective."""
    mine, record = _prepare(members)
    # First meeting: where everybody is, and whether anything is in the way.
    records = members.exchange(record)
    reason = _why_apart(records, members)
    segment = None
    if reason is None:
        try:
            segment = _map(members, records, mine)
            reason = ""
        except (OSError, RuntimeError) as error:
            reason = f"{type(error).__name__}: {error}"
        # Second meeting: whether all could map it.
        answers = members.exchange({"reason": reason[:800]})
        reason = _first_reason(answers, members)
    elif mine >= 0:
        with contextlib.suppress(OSError):
            os.close(mine)
    if reason is not None:
        log.debug(
            "collectives of ranks %s go through their backend, not shared memory: %s",
            members.names,
            reason,
        )
        return None
    log.debug(
        "collectives of ranks %s go through shared memory, %d bytes a rank", members.names, 2 * BOX
    )
    return SharedMemory(segment, members, [r["pid"] for r in records])


def _prepare(members: Members) -> tuple[int, dict[str, Any]]:
    """On the first rank the memory file (else -1), and what this rank tells the others."""
    key = secrets.token_hex(16)
    file = -1
    reason = None
    # What is missing here is not raised: all ranks must agree, so each says what it found.
    try:
        module = native()
        reason = _obstacle(module, members)
        if members.rank == 0 and reason is None:
            file = _make(
                module.Segment.bytes_for(members.size, BOX),
                module.Segment.ring_bytes_for(members.size, RING),
                key,
            )
    except (DSError, OSError) as error:
        reason = f"{type(error).__name__}: {error}"
    return file, {
        "host": host_key(),
        "pid": os.getpid(),
        "file": file,
        "key": key,
        "reason": (reason or "")[:800],
    }


def _map(members: Members, records: Sequence[dict[str, Any]], mine: int) -> Any:
    """The segment of the first rank's file, which it closes; OSError or RuntimeError."""
    first = records[0]
    file = mine
    if members.rank != 0:
        # The memory has no name; another process's descriptors can be opened by this path.
        file = os.open(f"/proc/{first['pid']}/fd/{first['file']}", os.O_RDWR | os.O_CLOEXEC)
    # Ranks that share a core would spin in each other's time.
    spin = SPIN_NS if members.size <= _cores() else 0
    return native().Segment(
        file,
        first["key"].encode(),
        members.rank,
        members.size,
        BOX,
        RING,
        members.timeout,
        spin,
    )


def _obstacle(module: Any, members: Members) -> str | None:
    if not hasattr(module, "Segment"):
        return "this system has no futex"
    if members.size > module.MOST_RANKS:
        return f"{members.size} ranks; at most {module.MOST_RANKS} share a segment"
    return None


def _make(size: int, rings: int, key: str) -> int:
    """A memory file of `size` and `rings` bytes that begins with `key`.

    The first ones are there: a full machine is an error here, not a crash later. The others take
    memory when used.
    """
    file = os.memfd_create("ds_core collectives", os.MFD_CLOEXEC)
    try:
        # Boxes are allocated now, rings only reserved (a ring is for each pair of ranks).
        os.posix_fallocate(file, 0, size)
        os.ftruncate(file, size + rings)
        os.pwrite(file, key.encode(), 0)
    except OSError as error:
        os.close(file)
        raise OSError(
            error.errno, f"{size} bytes of shared memory are not to be had: {error.strerror}"
        ) from error
    return file


def _why_apart(records: Sequence[dict[str, Any]], members: Members) -> str | None:
    if (reason := _first_reason(records, members)) is not None:
        return reason
    other = next((i for i, r in enumerate(records) if r["host"] != records[0]["host"]), None)
    return (
        None
        if other is None
        else f"rank {members.names[other]} is on another host than rank {members.names[0]}"
    )


def _first_reason(records: Sequence[dict[str, Any]], members: Members) -> str | None:
    return next(
        (
            f"rank {n}: {r['reason']}"
            for n, r in zip(members.names, records, strict=True)
            if r["reason"]
        ),
        None,
    )


def _arithmetic(dtype: torch.dtype, op: str) -> tuple[int, int, int, bool]:
    """Width, type, operation and whether to average, in the numbers of cpp/shared/fold_table.h."""
    ops = _BOOL_OPS if dtype == torch.bool else _OPS
    return dtype.itemsize, _TYPES[dtype], ops[op], op == "AVG"


def _uneven(sizes: Sequence[int]) -> str:
    return "" if len(set(sizes)) == 1 else f" in parts of {list(sizes)}"


def _is_main() -> bool:
    """Whether Ctrl-C may break off the wait: signals come to the main thread only."""
    return threading.current_thread() is threading.main_thread()


def _cores() -> int:
    return len(os.sched_getaffinity(0))
