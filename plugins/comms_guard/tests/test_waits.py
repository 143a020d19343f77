"""Nobody waits in silence: one rank tells who has not come to a collective and where those are, on
every backend.

The late rank goes on when the wait was told, so nothing here sleeps for a time that must suffice.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ds_comms_guard import guard, plugin
from ds_comms_guard.processes import Home
from ds_comms_guard.report import describe_waits
from ds_comms_guard.verdict import GroupHistory, Position
from ds_testing import RemoteError, run_ranks

import ds_core
from ds_core import comm
from ds_core.accelerator import set_accelerator
from ds_core.accelerator.cpu import CpuAccelerator
from ds_core.setup.compose import compose

PATIENCE = 1.0
LINE = r"test_waits.py:\d+ in "


def watch(told: Callable[[str], Any], **section: Any) -> list[str]:
    """Install what a run installs; a list of what is logged. told: called with each message."""
    chosen = compose({"comms_guard": {"patience": PATIENCE, **section}})
    for interceptor in plugin.ds_interceptors(chosen.config):
        comm.add_interceptor(interceptor)
    logged: list[str] = []
    handler = logging.Handler(logging.WARNING)

    def emit(record: logging.LogRecord) -> None:
        logged.append(record.getMessage())
        told(logged[-1])

    handler.emit = emit  # type: ignore[method-assign]
    log = logging.getLogger("ds_core.comm")
    log.handlers[:] = [handler]
    return logged


def unwatch() -> None:
    guard._watchers.pop(dist.group.WORLD).stop()  # type: ignore[arg-type]


def load_a_batch(flag: Path) -> None:
    while not flag.exists():
        time.sleep(0.01)


def wait_for_the_last(folder: str, how: str) -> tuple[str, int, list[str]]:
    """The last rank comes when one has told of the wait.

    Returns its host and process, and what this rank logged.
    """
    rank = comm.rank()
    size = comm.world_size()
    late = size - 1
    flag = Path(folder) / "told"
    total = torch.ones(1)
    logged = watch(lambda _: flag.touch())
    comm.all_reduce(torch.ones(2))
    if rank == late:
        load_a_batch(flag)
    if how == "collective":
        comm.all_reduce(total)
    elif how == "message":
        for work in (
            [comm.isend(total, 0)]
            if rank == late
            else [comm.irecv(total, late)]
            if rank == 0
            else []
        ):
            work.wait()
    elif how == "async":
        work = comm.all_gather_into_tensor(torch.empty(size), total, async_op=True)
        assert work is not None
        work.wait()
    elif how == "torch":
        dist.barrier()
    comm.barrier()
    unwatch()
    return socket.gethostname(), os.getpid(), logged


ASYNC = r"an asynchronous collective or a message \(.*\)"


@pytest.mark.parametrize(
    ("size", "how", "waits"),
    [
        (
            4,
            "collective",
            r"ranks 0, 1, 2 wait for all_reduce of 1 float32, called by .*test_waits",
        ),
        (2, "message", f"rank 0 waits for {ASYNC}, message .* from rank 1 to rank 0"),
        (2, "async", f"rank 0 waits for {ASYNC}, collective .* of group '.*'"),
        (2, "torch", "rank 0 waits for torch.distributed.barrier"),
    ],
)
def test_one_rank_tells_who_has_not_come_and_where_it_is(
    tmp_path: Path, size: int, how: str, waits: str
) -> None:
    found = run_ranks(size, wait_for_the_last, str(tmp_path), how)
    messages = [message for _, _, logged in found for message in logged]
    told = [message for message in messages if message.startswith(f"{size - 1} of {size} ranks ha")]
    assert len(told) == 1, messages
    host, pid, _ = found[-1]
    assert_found(rf"{waits}, at {LINE}wait_for_the_last; rank {size - 1} has not come\n", told[0])
    assert_found(
        rf"rank {size - 1} \(host {host}, pid {pid}\) is busy, at {LINE}load_a_batch", told[0]
    )


def initialize_late(folder: str) -> list[str]:
    """The last rank has started the process group and comes to `initialize` when a wait for it was
    told.
    """
    flag = Path(folder) / "told"
    logged = list[str]()

    def emit(record: logging.LogRecord) -> None:
        logged.append(record.getMessage())
        flag.touch()

    handler = logging.Handler(logging.WARNING)
    handler.emit = emit  # type: ignore[method-assign]
    logging.getLogger("ds_core.comm").handlers[:] = [handler]
    if comm.rank() == 1:
        load_a_batch(flag)
    config = {
        "comms_guard": {"patience": PATIENCE},
        "train_batch_size": 2,
        "optimizer": {"type": "SGD"},
    }
    ds_core.initialize(model=torch.nn.Linear(1, 1), config=config)
    unwatch()
    return logged


def test_the_first_talk_of_all_ranks_is_watched_too(tmp_path: Path) -> None:
    told = run_ranks(2, initialize_late, str(tmp_path))[0][0]
    assert_found("rank 0 waits for ", told)
    assert_found("rank 1 does not answer, .*: it has not come to `initialize` yet", told)


def assert_found(pattern: str, text: str) -> None:
    assert re.search(pattern, text), f"{pattern}\n--- not in ---\n{text}"


def stop_one(stopped: int) -> list[str]:
    pids = comm.all_gather_json(os.getpid())
    logged = watch(
        lambda message: os.kill(pids[stopped], signal.SIGCONT) if "is stopped" in message else None
    )
    watcher = guard._watchers[dist.group.WORLD]  # type: ignore[index]
    while not watcher._introduced or not watcher._keeper.pid:
        time.sleep(0.01)
    comm.barrier()
    if comm.rank() == stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    comm.all_reduce(torch.ones(1))
    comm.barrier()
    unwatch()
    return [message for message in logged if "is stopped" in message]


@pytest.mark.parametrize("stopped", [1, 0])
def test_a_stopped_process_is_told_of_by_the_others(stopped: int) -> None:
    """Also that of rank 0, which keeps the store: nothing comes from the store then."""
    told = run_ranks(2, stop_one, stopped)
    assert not told[stopped] and len(told[1 - stopped]) == 1
    text = told[1 - stopped][0]
    assert_found(
        rf"rank {stopped} \(host .*, pid \d+\) is stopped \(by SIGSTOP, .* `kill -CONT \d+`", text
    )
    assert_found(rf"for all_reduce of 1 float32, called by .*test_waits, at {LINE}stop_one", text)
    assert ("since the job's store does not answer (rank 0 keeps it" in text) == (stopped == 0)


# -- the host does not wait: a backend as NCCL -----------------------------------------------------


class Event:
    def record(self) -> None:
        self.works = list(Queued.works)

    def query(self) -> bool:
        return all(work.is_completed() for work in self.works)


class Device(CpuAccelerator):
    """A device with a stream, on which collectives are."""

    def current_stream(self) -> Any:
        return "stream"

    def new_event(self, timing: bool = False) -> Any:
        return Event()


class Queued(comm.GroupCollectives):
    """Starts collectives and lets the host go on: they end late."""

    works: list[Any] = []

    def all_reduce(self, tensor: torch.Tensor, op: Any, async_op: bool) -> Any:
        self.works.append(dist.all_reduce(tensor, op, self.group, True))
        return self.works[-1] if async_op else None


def start_device() -> None:
    Queued.works.clear()
    set_accelerator(Device())
    comm.use_providers({("cpu", "gloo"): Queued})


def read(tensor: torch.Tensor) -> float:
    """As `tensor.item()` does, which waits for the device."""
    while not all(work.is_completed() for work in Queued.works):
        time.sleep(0.01)
    return tensor.item()


def train_on_device(folder: str) -> tuple[float, list[str]]:
    start_device()
    flag = Path(folder) / "told"
    total = torch.ones(3)
    logged = watch(lambda _: flag.touch())
    comm.all_reduce(total)
    read(total[0])
    if comm.rank() == 1:
        load_a_batch(flag)
    comm.all_reduce(total)
    comm.all_reduce(torch.ones(2))  # queued behind it
    found = read(total[0])
    unwatch()
    return found, logged


def test_where_the_host_goes_on_the_device_is_watched(tmp_path: Path) -> None:
    (first, logged), (second, silent) = run_ranks(2, train_on_device, str(tmp_path))
    assert first == second == 4.0
    told = [message for message in logged + silent if "has waited 1" in message]
    assert len(told) == 1, logged + silent
    call = "rank 0 waits for what was queued on its device, collective .* of group '.*'"
    assert_found(rf"{call}, at {LINE}read; rank 1 has not come\n", told[0])
    assert_found(rf"rank 1 \(host .*\) is busy, at {LINE}load_a_batch", told[0])


def disagree_on_device() -> None:
    start_device()
    watch(lambda _: None, enabled=True, patience=0.4)
    never = torch.ones(3)
    # as what NCCL does with different collectives
    Queued.works.append(dist.irecv(never, 1 - comm.rank(), tag=7))
    comm.label(f"gradients of 'layer{comm.rank()}'")
    comm.all_reduce(torch.ones(5))
    read(never)


def test_the_guard_ends_ranks_that_disagree_there_too() -> None:
    with pytest.raises(RemoteError) as info:
        run_ranks(2, disagree_on_device)
    for failure in info.value.failures:
        told = str(failure)
        assert "rank 0: gradients of 'layer0' (all_reduce of 5 float32)" in told
        assert "rank 1: gradients of 'layer1' (all_reduce of 5 float32)" in told


# -- the text, without processes -------------------------------------------------------------------


def at(rank: int, wait: tuple[str, int] | None, waits: str, **counts: int) -> Position:
    groups = {
        name: GroupHistory(
            (0, 1, 2, 3), count, tuple((n, 1, f"call {n}") for n in range(1, count + 1))
        )
        for name, count in counts.items()
    }
    return Position(
        rank, 1, groups, wait, at=f"train.py:{rank}", waits=waits, home=f"host h{rank}, pid {rank}"
    )


def test_a_chain_of_waits_names_its_cause_first() -> None:
    positions = {
        0: at(0, ("g", 2), "call 2", g=2),
        1: at(1, ("h", 1), "call 1", g=1, h=1),
        2: at(2, None, "", g=2),
    }
    lines = describe_waits(
        positions, {3: "(host h3, pid 3) has ended: its process is gone"}, 4, 61.2
    ).splitlines()
    assert lines == [
        "2 of 4 ranks have waited 61.2 s:",
        "  rank 0 waits for call 2, at train.py:0; ranks 1, 3 have not come",
        "  rank 1 waits for call 1, at train.py:1; ranks 0, 2, 3 have not come",
        "  rank 2 (host h2, pid 2) is busy, at train.py:2",
        "  rank 3 (host h3, pid 3) has ended: its process is gone",
        "  rank 0 (host h0, pid 0) waits itself",
        "  rank 1 (host h1, pid 1) waits itself",
    ]


def test_all_have_come() -> None:
    positions = {rank: at(rank, ("g", 2), "call 2", g=2) for rank in range(4)}
    first, second = describe_waits(positions, {}, 4, 60.0).splitlines()
    assert first == "4 of 4 ranks have waited 60 s:"
    assert second.startswith(
        "  ranks 0, 1, 2, 3 wait for call 2, at train.py:0; all have come, so the backend or the "
    )


def test_a_first_run_that_compiles_is_not_taken_for_a_broken_network() -> None:
    positions = {r: at(r, None, "open_transport, called by ds_core.mesh") for r in range(2)}
    said = describe_waits(positions, {}, 2, 60.0)
    assert "; all have come; kernels are still being compiled, or the network is" in said


def test_who_waits_for_something_else_has_not_come_to_a_call_of_torch() -> None:
    positions = {
        0: at(0, None, "torch.distributed.all_reduce", g=2),
        1: at(1, ("g", 3), "call 3", g=3),
    }
    first, second = describe_waits(positions, {}, 2, 60.0).splitlines()[1:3]
    assert (
        first
        == "  rank 0 waits for torch.distributed.all_reduce, at train.py:0; rank 1 has not come"
    )
    assert second.startswith("  rank 1 waits for call 3, at train.py:1; ranks 0, ")


def test_what_the_system_says_of_a_process() -> None:
    here = Home.here()
    assert not here.state().settled
    gone = here._replace(born="1")  # another process had the number
    assert gone.state() == ("has ended: its process is gone", True)


@pytest.mark.gpu
def test_events_of_a_gpu_are_looked_at_from_another_thread() -> None:
    """As the watcher does: a wait while the device works, and none when it is done."""
    from concurrent.futures import ThreadPoolExecutor

    from ds_comms_guard.waits import Waits

    from ds_core.accelerator import get_accelerator

    class OnDevice:
        issued = 1
        device = get_accelerator()

        def longest(self) -> None: ...

        def take_streams(self) -> set[Any]:
            return {self.device.current_stream()}

    waits = Waits(OnDevice(), 0.0, ())  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as thread:
        thread.submit(waits.look).result()  # the first look sees that this rank has moved
        torch.cuda._sleep(2_000_000_000)  # cycles: about a second
        seen = thread.submit(waits.look).result()
        assert seen is not None and seen.text == "what was queued on its device"
        torch.cuda.synchronize()
        assert thread.submit(waits.look).result() is None
