"""Collectives through shared memory: the kit of providers, sizes and dtypes, several groups."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ds_ops_cpu import shared as ours
from ds_ops_cpu.kernels import native
from ds_testing import CollectivesConformance, run_ranks
from ds_testing.kits.parallel.collectives import check_reductions, contribution, expected

from ds_core import comm
from ds_core.errors import CommError

sys.path.insert(0, str(Path(__file__).parent))

from shared_memory import SMALL, transport, use_new_segments


class TestSharedMemory(CollectivesConformance):
    """The same bits as one process that adds in rank order, as over gloo."""

    provider = "ds_ops_cpu.shared:collectives"
    rank_order = True


def at_borders() -> None:
    for once in (0, 1 << 12):
        use_new_segments(SMALL, once)
        for dtype in (torch.float32, torch.bfloat16, torch.int16):
            box = SMALL // dtype.itemsize
            for length in (box - 1, box, box + 1, 3 * box + 17, (1 << 12) // dtype.itemsize + 1):
                check_reductions(length, dtype, "AVG" if once else "SUM", async_op=length > box)
    use_new_segments()
    check_reductions(1_500_017, torch.float32, "SUM", False)
    check_reductions(1_500_017, torch.float16, "AVG", True)


@pytest.mark.parametrize(
    "size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))]
)
def test_sizes_at_the_borders_of_boxes_and_large_ones(size: int) -> None:
    run_ranks(size, at_borders)


def bits() -> None:
    use_new_segments()
    rank = dist.get_rank()
    size = dist.get_world_size()
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool):
        parts = [(torch.arange(77) * (r + 3) % 5).to(dtype) for r in range(size)]
        for name, fold in (
            ("BAND", torch.bitwise_and),
            ("BOR", torch.bitwise_or),
            ("BXOR", torch.bitwise_xor),
        ):
            mine = parts[rank].clone()
            want = parts[0]
            for part in parts[1:]:
                want = fold(want, part)
            comm.all_reduce(mine, getattr(dist.ReduceOp, name))
            assert torch.equal(mine, want)
    strange = [
        torch.tensor([float("nan"), 1.0, float("inf"), -0.5]),
        torch.tensor([1.0, float("nan"), 2.0, -0.25]),
    ]
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for name in ("MAX", "MIN"):
            choose = torch.maximum if name == "MAX" else torch.minimum
            mine = strange[rank % 2].to(dtype, copy=True)
            want = choose(*(s.to(dtype) for s in strange))
            comm.all_reduce(mine, getattr(dist.ReduceOp, name))
            assert torch.equal(mine.nan_to_num(77), want.nan_to_num(77))
    with pytest.raises(CommError, match="average of bool"):
        comm.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG)
    turned = torch.full((3,), 1j * (rank + 1))  # no kernel for it: by the backend
    comm.all_reduce(turned)
    assert turned.tolist() == [1j * size * (size + 1) / 2] * 3


def test_bits_nan_and_what_is_left_to_the_backend() -> None:
    run_ranks(3, bits)


def test_every_instruction_set_reduces_alike() -> None:
    """In one process: the arithmetic alone, of each instruction set that this processor has."""
    module = native()
    for dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int32,
        torch.uint8,
    ):
        for length in (1, 15, 16, 1037):
            parts = [contribution(length, dtype, r) for r in range(3)]
            for op in ("SUM", "AVG", "PRODUCT", "MAX", "MIN"):
                want = expected(parts, op)
                for name in module.instruction_sets():
                    out = parts[1].clone()  # the result may overwrite a part
                    at = [parts[0].data_ptr(), out.data_ptr(), parts[2].data_ptr()]
                    module.fold(name, out.data_ptr(), at, length, *ours._arithmetic(dtype, op)[1:])
                    assert torch.equal(out, want), (name, dtype, length, op)


def crossing() -> None:
    """Two groups that have not met, used in another order on each rank: nobody may wait in the
    first call.
    """
    use_new_segments()
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    mine = [torch.full((5,), float(i + 1)) for i in range(2)]
    order = (0, 1) if dist.get_rank() == 0 else (1, 0)
    works = [comm.all_reduce(mine[i], group=groups[i], async_op=True) for i in order]
    for work in works:
        assert work is not None
        work.wait()
    assert [m[0].item() for m in mine] == [2.0, 4.0]
    assert [transport(g) for g in groups] == [None, None]
    for group in groups:
        comm.all_reduce(mine[0], group=group)
        assert isinstance(transport(group), ours.SharedMemory)


def test_ranks_do_not_meet_in_an_asynchronous_call() -> None:
    run_ranks(2, crossing)


def overlapping() -> None:
    """Groups that share ranks, disjoint ones and the world, all in flight at once, waited for in
    any order.
    """
    use_new_segments(SMALL)
    rank = dist.get_rank()
    members = [[0, 1, 2, 3], [0, 1], [2, 3], [1, 2, 3], [0, 2]]
    groups = [dist.new_group(ranks) for ranks in members]
    for ranks, group in zip(members, groups, strict=True):
        if rank in ranks:
            comm.open_transport(group)
    flying = []
    for turn in range(4):
        for ranks, group in zip(members, groups, strict=True):
            if rank in ranks:
                length = 1000 + 20_000 * (turn % 2)
                mine = contribution(length, torch.float32, 10 * turn + rank)
                work = comm.all_reduce(mine, group=group, async_op=True)
                flying.append(
                    (
                        work,
                        mine,
                        [contribution(length, torch.float32, 10 * turn + r) for r in ranks],
                    )
                )
    for work, mine, parts in flying[::-1] if rank % 2 else flying:
        assert work is not None
        work.wait()
        assert torch.equal(mine, expected(parts, "SUM"))
    assert all(
        isinstance(transport(g), ours.SharedMemory)
        for g, m in zip(groups, members, strict=True)
        if rank in m
    )
    for ranks, group in zip(members, groups, strict=True):
        if rank in ranks:
            dist.destroy_process_group(group)


@pytest.mark.slow
def test_groups_that_share_ranks_in_flight_together() -> None:
    run_ranks(4, overlapping)
