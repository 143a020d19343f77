"""``deepspeed.comm`` and ``deepspeed.utils.groups`` on one and two ranks: torch.distributed's
results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ds_deepspeed_compat.services import comm
from ds_deepspeed_compat.utils import groups
from ds_testing import run_ranks

import ds_core
from ds_core.comm import Collective, Interceptor, add_interceptor, remove_interceptor
from ds_core.errors import UsageError

SUM = comm.ReduceOp.SUM


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values)


class Seen(dict[str, Any]):
    """Results of collectives, by name."""

    def fill(self, name: str, tensor: torch.Tensor, work: Any = None) -> None:
        if work is not None:
            work.wait()
        self[name] = tensor.flatten().tolist()


def reduces(rank: int, mine: torch.Tensor, fill: Callable[..., None]) -> None:
    out = mine.clone()
    fill(
        "all_reduce", out, comm.all_reduce(out, SUM, None, True, prof=True, log_name="x", debug="")
    )
    out = mine.clone()
    fill("all_reduce positional", out, comm.all_reduce(out, SUM, None, False, True, "name"))
    fill("inference_all_reduce", comm.inference_all_reduce(mine.clone()))
    some = [mine.clone(), mine.clone() * 2]
    comm.all_reduce_coalesced(some, async_op=True).wait()
    fill("all_reduce_coalesced", torch.cat(some))
    out = mine.clone()
    comm.reduce(out, 0)
    fill("reduce", out if rank == 0 else t())
    out = torch.empty(1)
    comm.reduce_scatter_tensor(out, mine)
    fill("reduce_scatter_tensor", out)
    out = torch.empty(1, 2)
    comm.reduce_scatter(out, [mine.view(1, 2), 10 * mine.view(1, 2)])
    fill("reduce_scatter", out)


def copies(rank: int, mine: torch.Tensor, fill: Callable[..., None]) -> None:
    """Broadcast, gather, scatter, and each to each."""
    out = mine.clone()
    comm.broadcast(out, 1)
    fill("broadcast", out)
    pair = [torch.empty(2), torch.empty(2)]
    comm.all_gather(pair, mine)
    fill("all_gather", torch.cat(pair))
    out = torch.empty(4)
    comm.all_gather_into_tensor(out, mine)
    fill("all_gather_into_tensor", out)
    outs = [torch.empty(4), torch.empty(4)]
    fill(
        "all_gather_coalesced",
        outs[1],
        comm.all_gather_coalesced(outs, [mine, mine * 2], async_op=True),
    )
    out = torch.empty(2)
    comm.all_to_all_single(out, mine)
    fill("all_to_all_single", out)
    outs = [torch.empty(1, rank + 1), torch.empty(1, rank + 1)]
    given = [torch.full((1, 1), float(rank)), torch.full((1, 2), 10.0 + rank)]
    fill("all_to_all", torch.cat(outs) if comm.all_to_all(outs, given) is None else t())
    fill("all_to_all later", outs[1], comm.all_to_all(outs, given, async_op=True))
    gathered = [torch.empty(2), torch.empty(2)] if rank == 0 else None
    comm.gather(mine, gathered)
    fill("gather", torch.cat(gathered) if gathered else t())
    out = torch.empty(2)
    comm.scatter(out, [mine, 2 * mine] if rank == 0 else None)
    fill("scatter", out)


def sends(rank: int, mine: torch.Tensor, fill: Callable[..., None]) -> None:
    other = 1 - rank
    out = torch.empty(2)
    if rank == 0:
        comm.send(mine, 1, tag=3)
        comm.recv(out, 1, tag=4)
    else:
        comm.recv(out, 0, tag=3)
        comm.send(mine, 0, tag=4)
    fill("send", out)
    works = [comm.isend(mine, other), comm.irecv(out, other)]
    fill("isend", out, [work.wait() for work in works] and None)
    works = comm.batch_isend_irecv(
        [comm.P2POp(dist.isend, mine, other), comm.P2POp(dist.irecv, out, other)]
    )
    fill("batch", out, [work.wait() for work in works] and None)


def every_collective() -> dict[str, Any]:
    ds_core.init_distributed("gloo")
    rank = comm.get_rank()
    mine = t(1.0 + rank, 3.0 + rank)
    seen = Seen()
    for calls in (reduces, copies, sends):
        calls(rank, mine, seen.fill)
    comm.barrier()
    comm.monitored_barrier()
    objects: list[Any] = [{"a": [1, None]}, "text"] if rank == 0 else [None, None]
    comm.broadcast_object_list(objects)
    listed = [None, None]
    comm.all_gather_object(listed, rank)
    seen["objects"] = (objects, listed)
    with pytest.raises(TypeError, match="nothing is pickled"):
        comm.all_gather_object(listed, {1: 2})
    seen["ranks"] = (
        comm.get_world_size(),
        comm.get_global_rank(comm.get_world_group(), 1),
        comm.get_all_ranks_from_group(),
        comm.get_local_rank() == rank,
    )
    return dict(seen)


def test_every_collective() -> None:
    first, second = run_ranks(2, every_collective)
    expected = {
        "all_reduce": [3, 7],
        "all_reduce positional": [3, 7],
        "inference_all_reduce": [3, 7],
        "all_reduce_coalesced": [3, 7, 6, 14],
        "broadcast": [2, 4],
        "all_gather": [1, 3, 2, 4],
        "all_gather_into_tensor": [1, 3, 2, 4],
        "all_gather_coalesced": [2, 6, 4, 8],
        "objects": ([{"a": [1, None]}, "text"], [0, 1]),
        "ranks": (2, 1, [0, 1], True),
    }
    assert (
        {name: first[name] for name in expected}
        == expected
        == {name: second[name] for name in expected}
    )
    each = {name: (first[name], second[name]) for name in first if name not in expected}
    assert each == {
        "reduce": ([3, 7], []),
        "reduce_scatter_tensor": ([3], [7]),
        "reduce_scatter": ([3, 7], [30, 70]),
        "all_to_all_single": ([1, 2], [3, 4]),
        "all_to_all": ([0, 1], [10, 10, 11, 11]),
        "all_to_all later": ([1], [11, 11]),
        "gather": ([1, 3, 2, 4], []),
        "scatter": ([1, 3], [2, 6]),
        "send": ([2, 4], [1, 3]),
        "isend": ([2, 4], [1, 3]),
        "batch": ([2, 4], [1, 3]),
    }


def intercepted() -> list[str]:
    ds_core.init_distributed("gloo")
    seen: list[str] = []

    class Note(Interceptor):
        def around(self, collective: Collective, call: Any) -> Any:
            seen.append(collective.op)
            return call()

    note = Note()
    add_interceptor(note)
    try:
        comm.all_reduce(torch.ones(1))
        comm.broadcast(torch.ones(1), 0)
    finally:
        remove_interceptor(note)
    return seen


def test_interceptors_see_them() -> None:
    assert run_ranks(2, intercepted) == [["all_reduce", "broadcast"]] * 2


def test_on_one_rank_without_a_group() -> None:
    assert (comm.get_rank(), comm.get_world_size(), comm.is_initialized()) == (
        0,
        1,
        dist.is_initialized(),
    )
    out = t(1.0)
    comm.all_reduce(out)
    comm.monitored_barrier()
    objects = ["a", None]
    comm.broadcast_object_list(objects)
    assert (out.item(), objects) == (1.0, ["a", None])


def test_groups_answer_from_the_latest_engine() -> None:
    with pytest.raises(UsageError, match=r"call deepspeed\.initialize first"):
        groups._get_data_parallel_world_size()
    engine, *_ = ds_core.initialize(model=torch.nn.Linear(1, 1), config={"train_batch_size": 1})
    assert groups._get_data_parallel_world_size() == groups.get_data_parallel_world_size() == 1
    assert groups._get_data_parallel_group().size() == 1
    assert groups._get_expert_parallel_group_ranks("ep_size_1") == [0]
    assert (groups._get_max_expert_size_name(), groups._get_broadcast_src_rank()) == (
        "ep_size_1",
        0,
    )
    assert groups.get_model_parallel_rank.__name__ == "get_model_parallel_rank"
    assert not hasattr(groups, "_get_data_parallel_colour")
    engine.destroy()
