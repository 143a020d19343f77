"""Saving while training goes on: ``"checkpoint": {"async": true}``.

`save` copies this rank's states to host memory and returns; a thread then writes them. Ranks'
threads talk through the storage that they write to (a collective would get between those of
training): each leaves a report when its files are on the disk, and rank 0's commits once all have.
At most one save is under way. What went wrong is raised by the next `save`, `load` or `wait`, on
all ranks; the end of the process waits for the thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_checkpoint.collective_errors import describe, on_every_rank
from ds_checkpoint.folder.writing import Prepared, SaveJob, commit, publish, write
from ds_core.errors import CheckpointError

if TYPE_CHECKING:
    from ds_checkpoint.storages.contract import Draft
    from ds_core.accelerator import Accelerator

log = logging.getLogger("ds_checkpoint")

ORPHAN_SECONDS = 60.0
"""How long rank 0 goes on waiting for other ranks' files once its own program has ended."""

HostCopies = dict[tuple[Any, ...], Tensor]


class _Elsewhere(CheckpointError):
    """This rank gave up because another did, which knows why."""


@dataclasses.dataclass(slots=True)
class _InFlight:
    thread: threading.Thread
    action: str
    error: Exception | None = None


class Background:
    """At most one save under way, and the host memory that saves use again."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._flight: _InFlight | None = None
        self._copies: HostCopies = {}

    def start(self, action: str, prepared: Prepared, job: SaveJob) -> None:
        """Copy what `prepared` refers to, and go on writing it in another thread."""
        copied, self._copies = snapshot(self._accelerator, prepared, self._copies)
        thread = threading.Thread(
            target=lambda: _run(flight, copied, job), name=f"saving {job.tag}"
        )
        flight = self._flight = _InFlight(thread, action)
        thread.start()

    @property
    def under_way(self) -> bool:
        """Whether a save was started and not waited for. The same on all ranks."""
        return self._flight is not None

    def wait(self) -> None:
        """Until the save under way is done; CheckpointError on all ranks if it failed on one.

        Collective then.
        """
        flight, self._flight = self._flight, None
        if flight is None:
            return
        flight.thread.join()

        def work() -> None:
            if flight.error is not None and not isinstance(flight.error, _Elsewhere):
                raise flight.error

        _, elsewhere = on_every_rank(flight.action, work, lambda _: flight.error is not None)
        if any(elsewhere):
            raise CheckpointError(f"{flight.action}: {flight.error or 'rank 0 gave up'}")


def snapshot(
    accelerator: Accelerator, prepared: Prepared, copies: HostCopies
) -> tuple[Prepared, HostCopies]:
    """(`prepared` with copies of all tensors in host memory, that memory); copies: memory of an
    earlier save.
    """
    kept: HostCopies = {}

    def copy(kind: str, name: str, place: object, tensor: Tensor) -> Tensor:
        # Page-locked memory is slow to get, so the copies of the last save are used again.
        key = (kind, name, place, tensor.numel(), tensor.dtype)
        host = copies.get(key)
        if host is None:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            host = host if tensor.device.type == "cpu" else accelerator.pin(host)
        kept[key] = host.view(tensor.shape).copy_(tensor.detach(), non_blocking=True)
        return kept[key]

    # All copies are started, then waited for once: they run beside each other.
    pieces = [
        dataclasses.replace(
            p, tensor=copy("state", p.name, (p.start, p.box), p.values().reshape(-1)), read=None
        )
        for p in prepared.pieces
    ]
    local = {name: copy("local", name, None, t) for name, t in prepared.local_tensors.items()}
    common = {name: copy("common", name, None, t) for name, t in prepared.common_tensors.items()}
    # Training may change the tensors as soon as this function has returned.
    accelerator.synchronize()
    copied = dataclasses.replace(
        prepared, pieces=pieces, local_tensors=local, common_tensors=common, buffers={}
    )
    return copied, kept


def _run(flight: _InFlight, prepared: Prepared, job: SaveJob) -> None:
    try:
        _write_and_commit(prepared, job)
    except Exception as error:
        flight.error = error
        log.error("%s: %s", flight.action, describe(error))
    else:
        if prepared.rank == 0:
            log.info("saved checkpoint %s", job.storage.path(job.tag))


def _write_and_commit(prepared: Prepared, job: SaveJob) -> None:
    try:
        _leave_report(job.draft, prepared.rank, {"report": write(prepared, job)})
    except Exception as error:
        # It is gone: another rank failed and discarded it, and its error is the cause.
        if job.draft.gone:
            raise _Elsewhere("another rank could not write its files") from error
        _give_up(prepared.rank, job.draft, describe(error))
        raise
    # Only rank 0 commits; it waits for the reports of the others.
    if prepared.rank != 0:
        return
    try:
        written = _reports(job.draft, prepared.head["world_size"])
        commit(prepared, job, written)
    except Exception:
        job.draft.discard()
        raise
    publish(job)


def _give_up(rank: int, draft: Draft, text: str) -> None:
    """Let rank 0 know.

    Where no report can be left (the disk is full), the draft goes, which tells it as well.
    """
    if rank != 0:
        with contextlib.suppress(OSError, CheckpointError):
            _leave_report(draft, rank, {"error": text})
            return
    with contextlib.suppress(OSError, CheckpointError):
        draft.discard()


def _leave_report(draft: Draft, rank: int, report: Any) -> None:
    draft.leave_report(rank, json.dumps(report).encode())


def _reports(draft: Draft, world_size: int) -> list[Any]:
    """Wait for every rank's report; CheckpointError when one has an error."""
    reports: dict[int, Any] = {}
    began = time.monotonic()
    ended: float | None = None
    while len(reports) < world_size:
        for rank, text in draft.take_reports(set(range(world_size)) - set(reports)).items():
            reports[rank] = json.loads(text)
            # The rank that failed raises its own error; this one only gives up.
            if "error" in reports[rank]:
                raise _Elsewhere(f"rank {rank}: {reports[rank]['error']}")
        if len(reports) < world_size:
            if draft.gone:
                raise _Elsewhere("another rank could not write its files")
            missing = sorted(set(range(world_size)) - set(reports))
            if draft.patience is not None and time.monotonic() - began > draft.patience:
                raise CheckpointError(
                    f"ranks {missing} have not said within {draft.patience:g} s that their files "
                    "are written"
                )
            # The other ranks may have been killed: after the program's end nothing else stops this
            # wait.
            if ended is None and not threading.main_thread().is_alive():
                ended = time.monotonic()
            if ended is not None and time.monotonic() - ended > ORPHAN_SECONDS:
                raise CheckpointError(
                    f"ranks {missing} have not written their files, and the program has ended"
                )
            time.sleep(draft.poll_seconds)
    return [reports[rank]["report"] for rank in range(world_size)]
