"""Collectives through shared memory: ranks that are gone or differ, and where it cannot be used."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ds_comm_gloo import transports
from ds_ops_cpu import shared as ours
from ds_ops_cpu.kernels import native
from ds_testing import RemoteError, run_ranks
from torch import Tensor

from ds_core import comm
from ds_core.errors import CommError

sys.path.insert(0, str(Path(__file__).parent))

from shared_memory import ROOT, SMALL, core_checks, renew, transport, use_new_segments


def nothing_in_a_folder() -> None:
    """The segment has no name that could stay behind, whoever is killed whenever."""
    maps = Path("/proc/self/maps").read_text()
    assert "/memfd:ds_core collectives (deleted)" in maps
    assert "/dev/shm/ds" not in maps


def lose_one(how: str) -> None:
    use_new_segments(SMALL)
    nothing_in_a_folder()
    rank = dist.get_rank()
    big = torch.ones(4_000_000)
    if rank == 1 and how == "amid":  # in the middle of whatever runs then
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for step in range(100_000):
        if rank == 1 and how == "before" and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        work = comm.all_reduce(big, async_op=how == "amid")
        if work is not None:
            work.wait()


@pytest.mark.fast_cases("2-amid", "3-before")
@pytest.mark.parametrize(("size", "how"), [(2, "amid"), (4, "amid"), (3, "before")])
def test_a_killed_rank_is_named_at_once(size: int, how: str) -> None:
    begin = time.monotonic()
    with pytest.raises(RemoteError) as info:
        run_ranks(size, lose_one, how)
    failures = {f.rank: f for f in info.value.failures}
    assert len(failures) == size
    assert failures[1].what == "died of SIGKILL"
    for rank in failures.keys() - {1}:
        assert failures[rank].kind == "raised", failures[rank]
        assert "LostRankError" in failures[rank].what
        assert "rank 1 (process " in failures[rank].what
        assert ") has ended" in failures[rank].what
    assert time.monotonic() - begin < 45  # less than the pool's limit: nobody was hung


def one_ends_well() -> float:
    """A rank that has done its part may end while the others have not; and one that destroys the
    group has left.
    """
    use_new_segments()
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    total = torch.ones(3)
    if rank < 2:
        comm.all_reduce(total, group=pair)
    if rank == 1:
        dist.destroy_process_group(pair)
        del pair
    elif rank == 0:
        with pytest.raises(
            CommError, match=r"all_reduce SUM of 3 torch.float32 failed, for rank 1 has destroyed"
        ):
            comm.all_reduce(total.clone(), group=pair)
        # and so does the next
        with pytest.raises(CommError, match="failed, for rank 1 has destroyed"):
            comm.all_reduce(total.clone(), group=pair)
        dist.destroy_process_group(pair)
    comm.all_reduce(total)  # the world's goes on
    return total.sum().item()


def test_a_rank_that_left_is_named_and_other_groups_go_on() -> None:
    assert run_ranks(2, one_ends_well) == [12.0] * 2


def differ(how: str) -> str:
    use_new_segments()
    rank = dist.get_rank()
    if how == "late":
        segment = transport()
        renew()
        before, transports._timeout = transports._timeout, lambda group: 0.5
        comm.all_reduce(torch.ones(1))
        transports._timeout = before
        assert transport() is not segment
        if rank == 1:
            time.sleep(1.5)
    try:
        for _ in range(2):  # rank 1 finds what rank 0 had left there; but no second time
            comm.all_reduce(torch.ones(5 if how == "late" else 5 + rank))
    except CommError as error:
        return str(error)
    return ""


def test_ranks_that_call_different_collectives_or_come_too_late() -> None:
    first, second = run_ranks(2, differ, "size")
    assert (
        "rank 0: all_reduce SUM of 5 torch.float32 failed: rank 1 called all_reduce SUM of 6 "
        "torch.float32" in first
    )
    assert (
        "rank 1: all_reduce SUM of 6 torch.float32 failed: rank 0 called all_reduce SUM of 5 "
        "torch.float32" in second
    )
    first, second = run_ranks(2, differ, "late")
    assert "rank 1 has not come within 0.5 s" in first
    assert "rank 1 has not come within 0.5 s" in second


def interrupted() -> str:
    use_new_segments()
    if dist.get_rank() == 1:
        time.sleep(1.0)
        try:
            comm.all_reduce(torch.ones(5))
        except CommError as error:
            return str(error)
        return ""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        comm.all_reduce(torch.ones(5))
    except KeyboardInterrupt:
        return "broken off"
    return ""


def test_ctrl_c_breaks_off_a_wait() -> None:
    first, second = run_ranks(2, interrupted)
    assert first == "broken off"
    assert "rank 0 was interrupted" in second or not second  # or it had come before


def guarded(name: str, *args: Any) -> Any:
    use_new_segments()
    return getattr(core_checks("test_guard", ROOT / "plugins" / "comms_guard" / "tests"), name)(
        *args
    )


@pytest.mark.slow
def test_the_guard_sees_these_collectives_too() -> None:
    for off, on in zip(
        run_ranks(2, guarded, "everything", False),
        run_ranks(2, guarded, "everything", True),
        strict=True,
    ):
        assert all(
            torch.equal(a, b) if isinstance(a, Tensor) else a == b
            for a, b in zip(off, on, strict=True)
        )
    assert run_ranks(2, guarded, "slow", 1.2) == [[4.0] * 5] * 2
    for how, words in (
        (
            "label",
            [
                "rank 0: gradients of 'layer0' (all_reduce of 1000 float32)",
                "rank 1: gradients of 'layer1'",
            ],
        ),
        (
            "kind",
            [
                "rank 0: all_reduce of 1000 float32",
                "rank 1: all_gather_into_tensor of 2000 float32",
            ],
        ),
    ):
        with pytest.raises(RemoteError) as info:
            run_ranks(2, guarded, "disagree", how)
        assert len(info.value.failures) == 2
        for failure in info.value.failures:
            assert failure.kind != "hung"
            assert all(word in str(failure) for word in words), str(failure)


# -- where it cannot be used -----------------------------------------------------------------------


def without(why: str) -> list[Any]:
    """Every rank goes on over the backend, and says why in the debug log."""
    rank = dist.get_rank()
    told: list[str] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_ops_cpu").addHandler(handler)
    logging.getLogger("ds_ops_cpu").setLevel(logging.DEBUG)
    before = ours.host_key, native, resource.getrlimit(resource.RLIMIT_FSIZE)

    def no_compiler() -> Any:
        from ds_core.errors import KernelError

        raise KernelError("g++ not found")

    if why == "host" and rank == 1:
        ours.host_key = lambda: "elsewhere"
    if why == "compiler" and rank == 1:
        vars(ours)["native"] = no_compiler
    if why == "room" and rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[2][1]))
    try:
        renew()
        total = torch.full((5,), rank + 1.0)
        comm.all_reduce(total)
        comm.all_reduce(total)
    finally:
        ours.host_key, vars(ours)["native"] = before[:2]
        resource.setrlimit(resource.RLIMIT_FSIZE, before[2])
        logging.getLogger("ds_ops_cpu").removeHandler(handler)
    assert transport() is None
    renew()  # the next test of these processes may ask again
    assert "/memfd:ds_core collectives" not in "".join(
        os.readlink(f"/proc/self/fd/{f}") for f in fds()
    )
    return [total.tolist(), told]


def fds() -> list[str]:
    return [f for f in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{f}")]


@pytest.mark.parametrize(
    ("why", "words"),
    [
        ("host", "rank 1 is on another host than rank 0"),
        ("compiler", "rank 1: KernelError: g++ not found"),
        ("room", "bytes of shared memory are not to be had: File too large"),
    ],
)
def test_where_one_rank_cannot_all_use_the_backend_and_say_why(why: str, words: str) -> None:
    for total, told in run_ranks(2, without, why):
        assert total == [6.0] * 5
        assert len(told) == 1
        assert (
            "collectives of ranks (0, 1) go through their backend, not shared memory: " in told[0]
        )
        assert words in told[0]
