"""The guard: ranks that disagree are ended with a message and never mix data; ranks that are slow
are waited for.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ds_comm_gloo import GlooCollectives
from ds_comms_guard.config import CommsGuard
from ds_comms_guard.guard import guard_of_job, installed_guard
from ds_testing import RemoteError, run_ranks

from ds_core import comm
from ds_core.comm import collectives
from ds_core.comm.interceptor import reset


def use_guard(enabled: bool = True, patience: float | None = 0.4) -> None:
    """What a run with this section does; collectives of dscore-comm-gloo, unless others are in use."""
    if not collectives._makers:
        comm.use_providers({("cpu", "gloo"): GlooCollectives})
    if (guard := guard_of_job(CommsGuard(enabled=enabled, patience=patience))) is not None:
        comm.add_interceptor(guard)


def everything(on: bool) -> list[Any]:
    """Every collective, at sizes of every algorithm; the results."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    comm.use_providers({("cpu", "gloo"): GlooCollectives})
    if on:
        use_guard()
    torch.manual_seed(rank)
    out: list[Any] = []
    for numel in (0, 1, 7, 4096, 300_000, 2_500_000):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(numel).to(dtype)
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
                total = x.clone()
                comm.label("sum")
                work = comm.all_reduce(total, op=op, async_op=True)
                assert work is not None
                work.wait()
                out.append(total)
            whole = torch.empty(numel * size, dtype=dtype)
            comm.all_gather_into_tensor(whole, x)
            part = torch.empty(numel, dtype=dtype)
            comm.reduce_scatter_tensor(part, whole)
            comm.broadcast(x, src=size - 1)
            out += [whole, part, x.clone()]
    mixed = torch.empty(size, dtype=torch.int64)
    comm.all_to_all_single(mixed, torch.arange(size) + 10 * rank)
    comm.barrier()
    out += [mixed, comm.all_gather_json({"rank": rank})]
    reset()
    return [
        o.double().sum().item() if isinstance(o, torch.Tensor) and o.numel() > 4096 else o
        for o in out
    ]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_results_are_the_same_with_the_guard_and_without(size: int) -> None:
    for off, on in zip(
        run_ranks(size, everything, False), run_ranks(size, everything, True), strict=True
    ):
        assert len(off) == len(on)
        for a, b in zip(off, on, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def disagree(how: str) -> None:
    use_guard()
    rank = dist.get_rank()
    n = 1000
    comm.all_reduce(torch.ones(3))
    if how == "label":  # equal sizes, so that without the guard they would be added up
        comm.label(f"gradients of 'layer{rank}'")
        comm.all_reduce(torch.ones(n))
    elif how == "size":  # gloo ends the process without a word of ours
        comm.label("gradients")
        comm.all_reduce(torch.ones(n * (1 + 2 * rank)))
    elif how == "kind":
        if rank == 0:
            comm.all_reduce(torch.ones(n))
        else:
            comm.all_gather_into_tensor(torch.empty(n * dist.get_world_size()), torch.ones(n))
    elif how == "large":
        comm.label(f"weights of 'layer{rank}'")
        comm.all_reduce(torch.ones(2_000_000))
    elif how == "groups":
        groups = [dist.new_group(), dist.new_group()]
        comm.label(f"work of group {rank % 2}")
        comm.all_reduce(torch.ones(n), group=groups[rank % 2])
    print("went on")


@pytest.mark.fast_cases("2-label-words0", "2-size-words1", "4-kind-words5", "4-groups-words6")
@pytest.mark.parametrize(
    ("size", "how", "words"),
    [
        (
            2,
            "label",
            [
                "rank 0: gradients of 'layer0' (all_reduce of 1000 float32)",
                "rank 1: gradients of 'layer1'",
            ],
        ),
        (
            2,
            "size",
            ["gradients (all_reduce of 1000 float32)", "gradients (all_reduce of 3000 float32)"],
        ),
        (
            2,
            "kind",
            [
                "rank 0: all_reduce of 1000 float32",
                "rank 1: all_gather_into_tensor of 2000 float32",
            ],
        ),
        (2, "large", ["rank 0: weights of 'layer0'", "rank 1: weights of 'layer1'"]),
        (2, "groups", ["rank 0 waits for work of group 0", "rank 1 waits for work of group 1"]),
        (
            4,
            "kind",
            [
                "rank 0: all_reduce of 1000 float32",
                "ranks 1, 2, 3: all_gather_into_tensor of 4000 float32",
            ],
        ),
        (4, "groups", ["to which ranks 1, 3 have not come", "to which ranks 0, 2 have not come"]),
    ],
)
def test_ranks_that_disagree_are_ended_with_a_message(
    size: int, how: str, words: list[str]
) -> None:
    with pytest.raises(RemoteError) as info:
        run_ranks(size, disagree, how)
    assert len(info.value.failures) == size
    assert not any(f.kind == "hung" for f in info.value.failures)
    for failure in info.value.failures:
        told = str(failure)
        assert all(word in told for word in words), told
        assert "test_guard.py:" in told
        assert "went on" not in failure.output  # nobody used what came


def slow(seconds: float) -> list[float]:
    use_guard()
    total = torch.ones(5)
    for step in range(2):
        if dist.get_rank() == 1 and step == 1:
            time.sleep(seconds)  # as in a data loader
        comm.label("loss")
        comm.all_reduce(total)
    return [float(x) for x in total]


def test_a_slow_rank_is_waited_for() -> None:
    assert run_ranks(2, slow, 1.6) == [[4.0] * 5] * 2


def slow_chain() -> float:
    """Rank 0 waits for 1, which waits for 2 on another group, which sleeps; then all go on."""
    use_guard()
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    total = torch.ones(1)
    if rank == 2:
        time.sleep(1.6)
    if rank in (1, 2):
        comm.all_reduce(total, group=pairs[1])
    if rank in (0, 1):
        comm.all_reduce(total, group=pairs[0])
    comm.barrier()
    return total.item()


def test_a_chain_of_waits_that_ends_in_a_slow_rank_is_waited_for() -> None:
    assert run_ranks(4, slow_chain) == [3.0, 3.0, 2.0, 1.0]


def many(count: int) -> float:
    """Ranks that wait for each other all the time, each a little, are never stuck."""
    use_guard(patience=0.05)
    total = torch.ones(10)
    for step in range(count):
        if step % 50 == dist.get_rank() * 10:
            time.sleep(0.1)
        comm.all_reduce(total, op=dist.ReduceOp.AVG)
    return total.sum().item()


def test_many_short_waits_prove_nothing() -> None:
    assert run_ranks(2, many, 200) == [10.0, 10.0]


def off_and_on() -> int:
    assert installed_guard() is None
    comm.label("nothing")  # off: does nothing
    use_guard(enabled=False)
    assert installed_guard() is None
    comm.all_reduce(torch.ones(1))
    use_guard()
    first = installed_guard()
    comm.all_reduce(torch.ones(1))
    use_guard()
    assert installed_guard() is first  # on stays on
    comm.all_reduce(torch.ones(1))
    use_guard(enabled=False)
    assert installed_guard() is first  # another engine's config does not switch it off
    reset()
    assert installed_guard() is None
    comm.all_reduce(torch.ones(1))
    use_guard()
    assert installed_guard() is not first
    comm.all_reduce(torch.ones(1))
    return 1


def test_it_can_be_switched_off_and_on() -> None:
    assert run_ranks(2, off_and_on) == [1, 1]


def test_one_rank_needs_no_guard() -> None:
    use_guard()
    assert installed_guard() is None


ENDS = """
import torch, torch.distributed as dist
from ds_comms_guard.config import CommsGuard
from ds_comms_guard.guard import guard_of_job
from ds_core import comm

dist.init_process_group("gloo")
comm.add_interceptor(guard_of_job(CommsGuard(enabled=True, patience=0.4)))
comm.all_reduce(torch.ones(3))
if dist.get_rank() == 1:
    raise ValueError("bad sample 17")
comm.label("gradients of 'a.weight'")
comm.all_reduce(torch.ones(9))
"""


ENDS_IN_TORCH = """
import torch, torch.distributed as dist
import ds_core
from ds_core import comm

comm.init_distributed("gloo", config={"train_batch_size": 2})
comm.barrier()
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(9))
"""


@pytest.mark.slow
def test_a_failure_of_torch_s_own_collective_says_who_has_ended() -> None:
    """Without the guard's proofs, too: the backend's error names no rank."""
    told = run_to_the_end(ENDS_IN_TORCH)
    assert "rank 0 failed in torch.distributed.all_reduce, at <string>:9; rank 1 (host " in told[0]
    assert ") has ended (its program is over)" in told[0]


def run_to_the_end(code: str) -> list[str]:
    """What two processes of their own say: those of the pool outlive an exception."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=300)[1] for process in ranks]
    assert ranks[0].returncode != 0
    return told


@pytest.mark.slow
def test_who_ended_and_how_is_told() -> None:
    told = run_to_the_end(ENDS)
    assert "rank 1 has ended (ValueError: bad sample 17)" in told[0]
    assert "gradients of 'a.weight' (all_reduce of 9 float32)" in told[0]
    assert "ValueError: bad sample 17" in told[1]
