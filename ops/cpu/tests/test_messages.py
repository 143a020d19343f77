"""Messages through shared memory: order, sizes, full rings, many groups, polling, who is gone; as
over gloo.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ds_comm_gloo.group_queue import Messages
from ds_ops_cpu import shared as ours
from ds_testing import RemoteError, Traffic, run_ranks
from torch import Tensor

from ds_core import comm
from ds_core.comm import collectives
from ds_core.errors import CommError, LostRankError

SMALL = 1 << 14
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float64,
    torch.uint8,
)


def fresh(ring: int = SMALL, ranks: list[int] | None = None, timeout: float | None = None) -> Any:
    """A group whose messages go through rings of so many bytes."""
    ours.RING = ring
    comm.use_providers({("cpu", "gloo"): ours.collectives})
    group = dist.new_group(ranks, timeout=None if timeout is None else timedelta(seconds=timeout))
    if ranks is None or dist.get_rank() in ranks:
        comm.open_transport(group)
        assert isinstance(post(group), ours.SharedMemory)
    return group


def served(group: Any) -> Any:
    """The first provider that served a group."""
    return list(collectives._groups[group].made.values())[1]  # after torch's own


def post(group: Any) -> Any:
    return served(group).carrier


def numbers(length: int, dtype: torch.dtype, seed: int) -> Tensor:
    return ((torch.arange(length) * 7 + seed) % 251).to(dtype)


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("ds_ops_cpu")]


def no_threads() -> None:
    until = time.monotonic() + 20
    while threads() and time.monotonic() < until:
        time.sleep(0.01)
    assert not threads()


def everyone(group: Any, lengths: list[int], dtype: torch.dtype, order: str) -> None:
    """Each rank sends every length to each other one; receives are posted ahead or not, waits made
    in many orders.
    """
    rank = dist.get_rank()
    size = dist.get_world_size()
    others = [(rank + d) % size for d in range(1, size)]
    sent = [(numbers(n, dtype, 10 * rank + i), to) for i, n in enumerate(lengths) for to in others]
    into = [(torch.zeros(n, dtype=dtype), i, of) for i, n in enumerate(lengths) for of in others]
    if order == "late":
        works = [comm.isend(tensor, to, group) for tensor, to in sent]
        works += [comm.irecv(tensor, of, group) for tensor, _, of in into]
    else:
        works = [comm.irecv(tensor, of, group) for tensor, _, of in into]
        works += [comm.isend(tensor, to, group) for tensor, to in sent]
    assert not any(isinstance(w, Messages) for w in works)
    if order == "polled":
        until = time.monotonic() + 60
        while not all(w.is_completed() for w in works) and time.monotonic() < until:
            time.sleep(1e-3)
    elif order != "late":
        works = works[::-1] if order == "backwards" else works
    else:
        works = works[len(sent) :] + works[: len(sent)]
    for work in works:
        work.wait()
        assert work.is_completed()
    for tensor, i, of in into:
        assert torch.equal(tensor, numbers(len(tensor), dtype, 10 * of + i)), (
            len(tensor),
            dtype,
            order,
        )


def in_every_order() -> None:
    group = fresh()
    edge = SMALL // 4
    sizes = [0, 1, 3, 1000, edge - 3, edge - 2, edge - 1, edge, edge + 1, 0, 3 * edge + 17, 5]
    for order in ("ahead", "late", "backwards", "polled"):
        everyone(group, sizes, torch.float32, order)
        no_threads()
    for dtype in DTYPES:
        everyone(group, [3, 0, 997, 6001], dtype, "backwards")
    no_threads()
    for _ in range(40):  # the ring goes round, never two messages at a time
        everyone(group, [1001], torch.float32, "ahead")
    assert not threads()
    big = fresh(ours.RING)
    everyone(big, [1_500_017, 1, 700_000], torch.float32, "ahead")
    no_threads()


@pytest.mark.parametrize("size", [2, 3])
def test_order_sizes_dtypes_and_full_rings(size: int) -> None:
    run_ranks(size, in_every_order)


def blocking() -> None:
    """Blocking calls: ranks may send more than a ring holds to one that receives it only later."""
    group = fresh()
    rank = dist.get_rank()
    size = dist.get_world_size()
    for n in (0, 5, 20_000):
        if rank == 0:
            for to in range(1, size):
                comm.send(numbers(n, torch.float32, to), to, group)
            for of in range(size - 1, 0, -1):
                into = torch.zeros(n + 1)
                comm.recv(into, of, group)
                assert torch.equal(into, numbers(n + 1, torch.float32, of))
        else:
            into = torch.zeros(n)
            comm.recv(into, 0, group)
            assert torch.equal(into, numbers(n, torch.float32, rank))
            comm.send(numbers(n + 1, torch.float32, rank), 0, group)
    # Everything that is posted can be sent, whoever waits for what first: both wait for their
    # sends.
    peer = rank ^ 1
    if peer < size:
        many = [torch.zeros(3000) for _ in range(10)]
        posted = [comm.irecv(t, peer, group) for t in many]
        for i in range(10):
            comm.send(numbers(3000, torch.float32, rank + i), peer, group)
        for work in posted:
            work.wait()
        assert all(
            torch.equal(t, numbers(3000, torch.float32, peer + i)) for i, t in enumerate(many)
        )
    no_threads()


def test_blocking_calls() -> None:
    run_ranks(2, blocking)
    run_ranks(3, blocking)


def mingled() -> None:
    """Groups with rings of their own, collectives between the messages, strides."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    groups = [fresh() for _ in range(3)]
    right = (rank + 1) % size
    left = (rank - 1) % size
    got: list[tuple[Any, Tensor, Tensor]] = []
    sent = []
    sums = []
    for turn in range(12):
        for k in (0, 1, 2) if turn % 2 else (2, 0, 1):
            n = (5, 3000, 9000)[(turn + k) % 3]
            into = torch.zeros(n, 2)[:, 0] if turn % 3 == 0 else torch.zeros(n)
            got.append(
                (
                    comm.irecv(into, left, groups[k]),
                    into,
                    numbers(n, torch.float32, 100 * left + turn + k),
                )
            )
            mine = numbers(n, torch.float32, 100 * rank + turn + k)
            mine = torch.stack([mine, -mine], 1)[:, 0] if turn % 4 == 0 else mine
            sent.append((comm.isend(mine, right, groups[k]), mine))
            total = torch.full((2000,), rank + 1.0)
            sums.append((comm.all_reduce(total, group=groups[k], async_op=True), total))
        one = torch.full((7,), float(rank))
        comm.broadcast(one, src=turn % size, group=groups[turn % 3])
        assert one.tolist() == [float(turn % size)] * 7
    for work, into, want in got[::-1] if rank % 2 else got:
        work.wait()
        assert torch.equal(into, want)
    for work, _ in sent:
        work.wait()
    for summing, total in sums:
        assert summing is not None
        summing.wait()
        assert total.tolist() == [size * (size + 1) / 2] * 2000
    no_threads()


def test_several_groups_collectives_and_strides() -> None:
    run_ranks(3, mingled)


def broadcasts() -> None:
    group = fresh()
    rank = dist.get_rank()
    size = dist.get_world_size()
    for dtype in DTYPES:
        for n in (1, 1001, 400_000):
            for async_op in (False, True):
                tensor = numbers(2 * n, dtype, rank).view(n, 2)[:, 0]
                work = comm.broadcast(tensor, size - 1, group, async_op=async_op)
                if work is not None:
                    work.wait()
                assert torch.equal(tensor, numbers(2 * n, dtype, size - 1).view(n, 2)[:, 0])


def test_broadcasts() -> None:
    run_ranks(3, broadcasts)


def one_way() -> None:
    """A message that was sent before the transport opened is received where it was sent."""
    rank = dist.get_rank()
    comm.use_providers({("cpu", "gloo"): ours.collectives})
    group = dist.new_group()
    work = comm.isend(torch.tensor([3.0]), 1, group) if rank == 0 else None
    comm.all_reduce(torch.ones(1), group=group)
    assert isinstance(served(group).transport, ours.SharedMemory)
    assert post(group) is None
    into = torch.zeros(1)
    if rank == 1:
        comm.recv(into, 0, group)
        assert into.item() == 3
    elif work is not None:
        work.wait()
    # And what was sent before the provider is changed, likewise.
    group = fresh()
    before = post(group)
    if rank == 0:
        comm.send(torch.tensor([5.0]), 1, group)
    comm.use_providers({})
    comm.all_reduce(torch.ones(1), group=group)
    assert post(group) is before
    if rank == 1:
        comm.recv(into, 0, group)
        assert into.item() == 5


def test_the_way_of_a_groups_messages_does_not_change() -> None:
    run_ranks(2, one_way)


class Tagging(Traffic):
    def around(self, collective: comm.Collective, call: Callable[[], Any]) -> Any:
        if collective.op == "all_reduce":
            collective.tag = 77
        return super().around(collective, call)


def intercepted() -> None:
    """Interceptors see these messages, which have no tags, and collectives that have one."""
    group = fresh()
    with Tagging() as tagging:
        everyone(group, [3, 9000], torch.float32, "ahead")
        comm.all_reduce(torch.ones(3), group=group)
    seen = sorted((row.op, row.bytes) for row in tagging.sent if row.op != "open_transport")
    assert seen == sorted(
        [(op, n) for op in ("isend", "irecv") for n in (12, 36000)] + [("all_reduce", 12)]
    )


def test_interceptors_see_messages() -> None:
    run_ranks(2, intercepted)


def wrong() -> str:
    group = fresh(timeout=0.5)
    if dist.get_rank() == 0:
        comm.send(torch.zeros(3), 1, group)
        with pytest.raises(
            LostRankError, match=r"rank 0: receiving 4 bytes from rank 1 did not end within 0.5 s"
        ):
            comm.recv(torch.zeros(1), 1, group)
        work = comm.isend(torch.zeros(5 * SMALL), 1, group)
        with pytest.raises(LostRankError, match=r"bytes to rank 1 did not end within 0.2 s"):
            work.wait(timedelta(seconds=0.2))
        with pytest.raises(CommError, match="rank 0 is this rank"):
            comm.send(torch.zeros(3), 0, group)
        comm.barrier()
        return ""
    with pytest.raises(
        CommError, match=r"rank 1 receives 8 bytes from rank 0, which sent 12; both must name"
    ) as info:
        comm.recv(torch.zeros(2), 0, group)
    assert not isinstance(info.value, LostRankError)
    # what follows is not read as if nothing had happened
    with pytest.raises(CommError, match="which sent 12"):
        comm.recv(torch.zeros(3), 0, group)
    comm.barrier()
    return ""


def test_wrong_sizes_and_time_outs() -> None:
    run_ranks(2, wrong)


def exchanging() -> None:
    """Uneven all_to_all, rows of all sizes and none, beside messages of the same ranks on the same
    group.
    """
    group = fresh()
    rank = dist.get_rank()
    size = dist.get_world_size()
    right = (rank + 1) % size
    left = (rank - 1) % size
    for turn, dtype in enumerate((*DTYPES, torch.float32)):
        rows = [
            [(3 * a + 5 * b + turn) % 4 * (997 if turn % 3 else 1) for b in range(size)]
            for a in range(size)
        ]
        given = [
            numbers(rows[rank][r] * 6, dtype, 100 * rank + r).view(-1, 2, 3) for r in range(size)
        ]
        wanted = [
            numbers(rows[r][rank] * 6, dtype, 100 * r + rank).view(-1, 2, 3) for r in range(size)
        ]
        out = torch.empty(sum(len(w) for w in wanted), 3, 2, dtype=dtype).transpose(1, 2)
        sent = comm.isend(torch.full((3,), float(turn)), right, group)
        splits = [len(w) for w in wanted], [len(g) for g in given]
        work = comm.all_to_all_single(
            out, torch.cat(given), *splits, group=group, async_op=turn > 0
        )
        note = torch.empty(3)
        comm.recv(note, left, group)
        assert note.tolist() == [turn] * 3
        for each in (sent, work):
            assert each is None or each.wait()
        assert torch.equal(out, torch.cat(wanted))
    assert isinstance(served(group).exchanger, ours.SharedMemory)
    with pytest.raises(CommError, match="split sizes"):
        comm.all_to_all_single(torch.empty(4), torch.empty(4), [4] * size, [1] * size, group=group)
    with pytest.raises(CommError, match="divide"):
        comm.all_to_all_single(torch.empty(size + 1), torch.empty(size + 1), group=group)
    with pytest.raises(CommError, match="must be equal"):
        comm.all_to_all_single(torch.empty(size), torch.empty(size).double(), group=group)


@pytest.mark.parametrize("size", [2, 3])
def test_all_to_all(size: int) -> None:
    run_ranks(size, exchanging)


def lose_one(how: str) -> None:
    group = fresh()
    rank = dist.get_rank()
    comm.barrier()
    if rank == 1:
        if how != "sends":
            # arrives, though its sender does not live on
            comm.send(torch.full((5,), 2.0), 0, group)
        if how == "left":
            dist.destroy_process_group(group)
            del group
            time.sleep(20)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        return
    if how == "sends":
        comm.send(torch.zeros(10 * SMALL), 1, group)
    time.sleep(0.5)
    into = torch.zeros(5)
    comm.recv(into, 1, group)
    assert into.tolist() == [2.0] * 5
    if how == "polled":
        work = comm.irecv(into, 1, group)
        while not work.is_completed():
            time.sleep(0.01)
        work.wait()
    comm.recv(into, 1, group)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("receives", "rank 0: receiving 20 bytes from rank 1 failed, for rank 1 (process "),
        ("polled", "rank 0: receiving 20 bytes from rank 1 failed, for rank 1 (process "),
        ("sends", "rank 0: message of 655360 bytes failed, for rank 1 (process "),
        (
            "left",
            "rank 0: receiving 20 bytes from rank 1 failed, for rank 1 has destroyed the process "
            "group",
        ),
    ],
)
def test_a_rank_that_has_ended_is_named(how: str, words: str) -> None:
    with pytest.raises(RemoteError) as info:
        run_ranks(3, lose_one, how)
    failures = {f.rank: f for f in info.value.failures}
    assert how == "left" or failures[1].what == "died of SIGKILL"
    assert failures[0].kind == "raised", failures[0]
    assert "LostRankError" in failures[0].what
    assert words in failures[0].what
