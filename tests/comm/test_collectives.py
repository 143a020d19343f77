"""Collectives against a plain reference: each algorithm, operation, dtype and awkward size; the same bits on all."""

from __future__ import annotations

import gc
import math
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ds_testing import run_ranks
from torch import Tensor

from ds_core import comm
from ds_core.comm import gloo
from ds_core.errors import CommError

LOW = (torch.float16, torch.bfloat16)
OPS = {name: getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "MAX", "MIN", "PRODUCT")}
# In bytes of the whole buffer around every threshold, so that each algorithm runs, also over several chunks.
KIB = 1 << 10
BYTES = (128 * KIB, 512 * KIB, 2048 * KIB, 4096 * KIB)


def data(length: int, dtype: torch.dtype, rank: int) -> Tensor:
    """What `rank` contributes; sums of these are not exact in 16 bits, so that the order and the rounding show."""
    generator = torch.Generator().manual_seed(1000 + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, (length,), generator=generator).bool()
    if not dtype.is_floating_point:
        return torch.randint(-9 if dtype.is_signed else 0, 9, (length,), generator=generator).to(dtype)
    return torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)


def reference(parts: list[Tensor], op: str) -> Tensor:
    """Rank by rank, in fp32 for 16-bit sums."""
    dtype = parts[0].dtype
    if len(parts) == 1:
        return parts[0]
    wide = dtype in LOW and op in ("SUM", "AVG", "PRODUCT")
    total = parts[0].float() if wide else parts[0].clone()
    for part in parts[1:]:
        other = part.float() if wide else part
        if op in ("SUM", "AVG"):
            total = total + other
        elif op == "PRODUCT":
            total = total * other
        else:
            total = (torch.maximum if op == "MAX" else torch.minimum)(total, other)
    if op == "AVG":
        total = total / len(parts) if dtype.is_floating_point else torch.div(total, len(parts), rounding_mode="trunc")
    return total.to(dtype)


def finish(work: Any, async_op: bool) -> None:
    assert (work is not None) == async_op
    if async_op:
        work.wait()
        assert work.is_completed()


def check_all(length: int, dtype: torch.dtype, op: str, async_op: bool, group: Any = None) -> None:
    """all_reduce, reduce_scatter_tensor and all_gather_into_tensor with `length` elements per rank."""
    size, rank = comm.world_size(group), comm.rank(group)
    case = f"{length} x {dtype} {op} async={async_op} on {size}"
    parts = [data(length, dtype, r) for r in range(size)]
    mine = parts[rank].clone()
    finish(comm.all_reduce(mine, OPS[op], group=group, async_op=async_op), async_op)
    assert torch.equal(mine, reference(parts, op)), f"all_reduce {case}"

    whole = [data(length * size, dtype, r) for r in range(size)]
    out, before = torch.empty(length, dtype=dtype), whole[rank].clone()
    finish(comm.reduce_scatter_tensor(out, whole[rank], OPS[op], group=group, async_op=async_op), async_op)
    assert torch.equal(out, reference(whole, op)[rank * length : (rank + 1) * length]), f"reduce_scatter {case}"
    assert torch.equal(whole[rank], before), f"reduce_scatter changed its input: {case}"

    gathered = torch.empty(length * size, dtype=dtype)
    finish(comm.all_gather_into_tensor(gathered, parts[rank], group=group, async_op=async_op), async_op)
    assert torch.equal(gathered, torch.cat(parts)), f"all_gather {case}"


def sweep_small() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8):
        for length in (0, 1, 3, 1001):
            for op in ("SUM", "AVG", "MAX", "MIN"):
                for async_op in (False, True):
                    check_all(length, dtype, op, async_op)
    check_all(17, torch.float32, "PRODUCT", False)
    check_all(17, torch.bfloat16, "PRODUCT", True)
    for op in ("MAX", "MIN", "SUM"):
        check_all(5, torch.bool, op, False)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_small_sizes_dtypes_and_operations(size: int) -> None:
    run_ranks(size, sweep_small)


def sweep_large(dtype: torch.dtype, ops: list[str]) -> None:
    for total in BYTES:
        for extra in (0, 7):
            length = total // dtype.itemsize + extra
            check_all(length, dtype, ops[0], async_op=bool(extra))
    # more than two rounds of the chunked algorithms, with a ragged end
    for op in ops:
        check_all(2 * gloo.CHUNK_BYTES // dtype.itemsize + 5, dtype, op, async_op=False)
        check_all(2 * gloo.CHUNK_BYTES // dtype.itemsize + 5, dtype, op, async_op=True)


@pytest.mark.parametrize(
    ("size", "dtype", "ops"),
    [
        (2, torch.float32, ["SUM", "MAX"]),
        (2, torch.bfloat16, ["AVG"]),
        pytest.param(2, torch.float16, ["AVG"], marks=pytest.mark.slow),
        pytest.param(3, torch.float32, ["SUM", "MAX"], marks=pytest.mark.slow),
        pytest.param(3, torch.bfloat16, ["AVG"], marks=pytest.mark.slow),
        pytest.param(3, torch.float16, ["AVG"], marks=pytest.mark.slow),
    ],
)
def test_sizes_around_the_thresholds_and_beyond(size: int, dtype: torch.dtype, ops: list[str]) -> None:
    run_ranks(size, sweep_large, dtype, ops)


def several_blocks(rounds: int) -> None:
    size = comm.world_size()
    length = rounds * size * gloo.CHUNK_BYTES // 8 + 3
    parts = [data(length, torch.float64, r) for r in range(size)]
    mine = parts[comm.rank()].clone()
    comm.all_reduce(mine)
    assert torch.equal(mine, reference(parts, "SUM"))


@pytest.mark.parametrize("size", [3, 4])
def test_all_reduce_over_several_blocks(size: int) -> None:
    run_ranks(size, several_blocks, 2)


def average_at_the_edge_of_fp16() -> None:
    for length in (3, gloo.PAIR_BYTES):  # both sides of the threshold
        big = torch.full((length,), 60000.0, dtype=torch.float16)
        comm.all_reduce(big, OPS["AVG"])
        assert torch.equal(big, torch.full_like(big, 60000.0))


@pytest.mark.parametrize("size", [2, 3])
def test_an_average_in_fp16_does_not_overflow(size: int) -> None:
    run_ranks(size, average_at_the_edge_of_fp16)


def in_groups() -> None:
    pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3], [3], [0, 1, 2])]
    rank = comm.rank()
    mine = pairs[rank % 2]
    for async_op in (False, True):
        check_all(1001, torch.float32, "AVG", async_op, mine)
        check_all(700_001, torch.float32, "SUM", async_op, mine)
        if rank == 3:
            check_all(9, torch.float32, "AVG", async_op, pairs[2])
        else:
            check_all(300_001, torch.bfloat16, "SUM", async_op, pairs[3])
    if rank == 3:
        with pytest.raises(CommError, match="rank 3 is not in the group"):
            comm.all_reduce(torch.ones(3), group=pairs[3])
    for group in pairs:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def _alone() -> list[float]:
    """Every collective over the group of this rank alone gives back what it got."""
    from ds_core.comm import ALONE

    mine = torch.tensor([float(comm.rank() + 1)] * 3)
    values = [mine.clone() for _ in range(5)]
    comm.all_reduce(values[0], group=ALONE)
    comm.broadcast(values[1], src=comm.rank(), group=ALONE)
    comm.all_gather_into_tensor(values[2], mine, group=ALONE)
    comm.reduce_scatter_tensor(values[3], mine, group=ALONE)
    comm.all_to_all_single(values[4], mine, group=ALONE)
    comm.barrier(group=ALONE)
    assert comm.all_gather_json("x", group=ALONE) == ["x"]
    assert (comm.world_size(ALONE), comm.rank(ALONE)) == (1, 0)
    return [float((v - mine).abs().max()) for v in values]


def test_a_group_of_one_rank_is_not_the_world() -> None:
    assert run_ranks(2, _alone) == [[0.0] * 5] * 2


def test_groups_smaller_than_the_world() -> None:
    run_ranks(4, in_groups)


def many_in_flight() -> None:
    """Long and short collectives of all kinds started together, and waited for in an order of each rank's own."""
    size, rank = comm.world_size(), comm.rank()
    lengths = [3_000_001, 11, 1_500_003, 400_001, 2_500_000]
    tensors, works = [], []
    for length in lengths:
        tensors.append(data(length, torch.float32, rank))
        works.append(comm.all_reduce(tensors[-1], async_op=True))
        whole = data(length * size, torch.float32, rank)
        tensors.append(torch.empty(length))
        works.append(comm.reduce_scatter_tensor(tensors[-1], whole, async_op=True))
        tensors.append(torch.empty(size * length))
        works.append(comm.all_gather_into_tensor(tensors[-1], data(length, torch.float32, rank), async_op=True))
    late = data(2_500_001, torch.float32, rank)
    comm.all_reduce(late, OPS["MAX"])  # a blocking one after them
    assert torch.equal(late, reference([data(2_500_001, torch.float32, r) for r in range(size)], "MAX"))
    for work in works[::-1] if rank else works:
        assert work is not None
        work.wait()
    for index, length in enumerate(lengths):
        reduced, scattered, gathered = tensors[3 * index : 3 * index + 3]
        parts = [data(length, torch.float32, r) for r in range(size)]
        assert torch.equal(reduced, reference(parts, "SUM"))
        assert torch.equal(gathered, torch.cat(parts))
        whole_sum = reference([data(length * size, torch.float32, r) for r in range(size)], "SUM")
        assert torch.equal(scattered, whole_sum[rank * length : (rank + 1) * length])


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_many_in_flight_waited_for_in_different_orders(size: int) -> None:
    run_ranks(size, many_in_flight)


def polled() -> None:
    size, rank = comm.world_size(), comm.rank()
    for length in (100, 3_000_000):
        out = torch.empty(length)
        work = comm.reduce_scatter_tensor(out, torch.full((size * length,), rank + 1.0), async_op=True)
        assert work is not None
        while not work.is_completed():
            pass
        assert torch.equal(out, torch.full((length,), size * (size + 1) / 2))  # without a wait
        work.wait()
        assert out[0] == size * (size + 1) / 2  # the sum is made once
        other = (rank + 1) % size
        works = [comm.irecv(out, (rank - 1) % size), comm.isend(torch.full((length,), rank + 0.5), other)]
        while not all(w.is_completed() for w in works):
            pass
        for message in works:
            message.wait()
            message.wait()
        assert out[0] == (rank - 1) % size + 0.5


@pytest.mark.parametrize("size", [2, 3])
def test_a_work_that_says_completed_is_completed(size: int) -> None:
    run_ranks(size, polled)


def shapes_and_strides() -> None:
    size, rank = comm.world_size(), comm.rank()
    scalar = torch.tensor(rank + 1.0)
    comm.all_reduce(scalar)
    assert scalar.item() == size * (size + 1) / 2
    for async_op in (False, True):
        base = torch.zeros(40, 50)
        base.t()[:, ::2] = rank + 1.0
        view = base.t()[:, ::2]
        finish(comm.all_reduce(view, async_op=async_op), async_op)
        assert torch.equal(base[::2], torch.full((20, 50), size * (size + 1) / 2))
        assert torch.equal(base[1::2], torch.zeros(20, 50))
        out = torch.zeros(6, size * 4)[:, ::2]
        finish(comm.all_gather_into_tensor(out, torch.full((4, 3), float(rank)).t(), async_op=async_op), async_op)
        assert torch.equal(out.reshape(size, -1), torch.arange(float(size)).unsqueeze(1).expand(size, 12))
        whole = torch.zeros(2 * size, 5)
        comm.all_gather_into_tensor(whole, torch.full((2, 5), rank + 0.0))
        into = whole[2 * rank : 2 * rank + 2]  # in place, as partitioners do
        into.fill_(rank + 5.0)
        finish(comm.all_gather_into_tensor(whole, into, async_op=async_op), async_op)
        assert torch.equal(whole.view(size, 10)[:, 0], torch.arange(float(size)) + 5)
    weight = torch.nn.Parameter(torch.full((5,), rank + 1.0))
    comm.all_reduce(weight)  # a leaf that requires grad
    assert weight.tolist() == [size * (size + 1) / 2] * 5 and weight.grad_fn is None
    with torch.inference_mode():
        frozen = torch.full((3_000_000,), rank + 1.0)
        finish(comm.all_reduce(frozen, OPS["MAX"], async_op=True), True)
        assert frozen.min() == size


@pytest.mark.parametrize("size", [1, 2, 3])
def test_shapes_strides_parameters_and_in_place(size: int) -> None:
    run_ranks(size, shapes_and_strides)


def lists_of_any_length() -> None:
    size, rank = comm.world_size(), comm.rank()
    for unit in (0, 3, 1_000_000):
        for async_op in (False, True):
            lengths = [unit * i for i in range(size)]
            out = [torch.empty(n) for n in lengths]
            finish(comm.all_gather(out, torch.full((lengths[rank],), rank + 1.0), async_op=async_op), async_op)
            for r, tensor in enumerate(out):
                assert torch.equal(tensor, torch.full((lengths[r],), r + 1.0))
    with pytest.raises(CommError, match=f"over {size} ranks was given {size + 1} tensors"):
        comm.all_gather([torch.empty(1)] * (size + 1), torch.ones(1))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_gather_of_uneven_and_empty_tensors(size: int) -> None:
    run_ranks(size, lists_of_any_length)


def the_rest() -> None:
    size, rank = comm.world_size(), comm.rank()
    last = size - 1
    for async_op in (False, True):
        tensor = torch.full((3,), float(rank))
        finish(comm.broadcast(tensor, last, async_op=async_op), async_op)
        assert tensor.tolist() == [float(last)] * 3
        tensor = torch.tensor([rank + 1.0])
        finish(comm.reduce(tensor, last, OPS["AVG"], async_op=async_op), async_op)
        if rank == last:
            assert tensor.item() == (size + 1) / 2
        rows = [torch.empty(2) for _ in range(size)] if rank == last else None
        finish(comm.gather(torch.full((2,), float(rank)), rows, last, async_op=async_op), async_op)
        if rows is not None:
            assert [row.tolist() for row in rows] == [[float(r)] * 2 for r in range(size)]
        given = [torch.full((2,), float(r)) for r in range(size)] if rank == last else None
        got = torch.empty(2)
        finish(comm.scatter(got, given, last, async_op=async_op), async_op)
        assert got.tolist() == [float(rank)] * 2
        sent = torch.arange(float(size)) + 10 * rank
        back = torch.empty(size)
        finish(comm.all_to_all_single(back, sent, async_op=async_op), async_op)
        assert back.tolist() == [10.0 * r + rank for r in range(size)]
        finish(comm.barrier(async_op=async_op), async_op)
    uneven = torch.empty(size * (rank + 1))
    comm.all_to_all_single(
        uneven,
        torch.cat([torch.full((r + 1,), float(rank)) for r in range(size)]),
        [rank + 1] * size,
        [r + 1 for r in range(size)],
    )
    assert uneven.tolist() == [float(r) for r in range(size) for _ in range(rank + 1)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_other_collectives(size: int) -> None:
    run_ranks(size, the_rest)


def ring() -> None:
    size, rank = comm.world_size(), comm.rank()
    right, left = (rank + 1) % size, (rank - 1) % size
    got = torch.empty(4)
    works = comm.batch_isend_irecv([(comm.isend, torch.full((4,), float(rank)), right), (comm.irecv, got, left)])
    for work in works:
        work.wait()
    assert got.tolist() == [float(left)] * 4
    if rank == 0:
        comm.send(torch.tensor([7.0]), 1, tag=3)
    elif rank == 1:
        assert comm.recv(got[:1], 0, tag=3) == 0
        assert got[0] == 7
    with pytest.raises(CommError, match="takes ds_core"):
        comm.batch_isend_irecv([(print, got, 0)])  # type: ignore[list-item]
    assert comm.batch_isend_irecv([]) == []


def test_point_to_point() -> None:
    run_ranks(3, ring)


def wrong_lengths() -> None:
    size = comm.world_size()
    with pytest.raises(CommError, match=f"input has 5 elements, output 3; input must have {size} x 3 = {3 * size}"):
        comm.reduce_scatter_tensor(torch.empty(3), torch.empty(5))
    with pytest.raises(CommError, match="output has 5 elements"):
        comm.all_gather_into_tensor(torch.empty(5), torch.empty(3))
    with pytest.raises(CommError, match=r"torch.float64, input torch.float32"):
        comm.all_gather_into_tensor(torch.empty(size, dtype=torch.float64), torch.empty(1))


def test_wrong_lengths_and_dtypes_are_named() -> None:
    run_ranks(2, wrong_lengths)


def bool_average() -> None:
    work = comm.all_reduce(torch.ones(3, dtype=torch.bool), OPS["AVG"], async_op=True)
    assert work is not None
    with pytest.raises(CommError, match="average of bool"):
        work.wait()
    long = comm.all_reduce(torch.ones(9_000_000, dtype=torch.bool), OPS["AVG"], async_op=True)  # on the lane
    assert long is not None
    with pytest.raises(CommError, match="average of bool"):
        long.wait()
    after = torch.ones(3_000_000)
    comm.all_reduce(after, OPS["MAX"])  # one failure does not hold up the next
    assert after.sum() == 3_000_000


def test_an_error_of_an_asynchronous_collective_comes_with_wait() -> None:
    run_ranks(2, bool_average)


def json_everywhere() -> None:
    size, rank = comm.world_size(), comm.rank()
    objects = [{"rank": r, "text": "é" * 1000 * r, "none": None, "list": [1.5, True]} for r in range(size)]
    assert comm.all_gather_json(objects[rank]) == objects
    assert comm.all_gather_json("") == [""] * size
    assert comm.broadcast_json(objects[rank], size - 1) == objects[-1]
    with pytest.raises(TypeError):
        comm.all_gather_json({1, 2})


@pytest.mark.parametrize("size", [1, 2, 3])
def test_json(size: int) -> None:
    run_ranks(size, json_everywhere)


def lanes_of_stopped_groups() -> int:
    before = set(threading.enumerate())  # of the world, which an earlier test may have used
    for _ in range(5):
        group = dist.new_group(backend="gloo")
        finish(comm.all_reduce(torch.ones(1 << 21), group=group, async_op=True), True)
        dist.destroy_process_group(group)
        del group
        gc.collect()
    lanes = [t for t in threading.enumerate() if t.name == "ds_core.comm lane" and t not in before]
    for thread in lanes:
        thread.join(10)
    return sum(thread.is_alive() for thread in lanes)


def test_a_lane_ends_with_its_group() -> None:
    """Its thread too: 100 starts and stops left more than 100 of them."""
    assert run_ranks(3, lanes_of_stopped_groups) == [0, 0, 0]


def calls_at_size_one() -> None:
    alone = [dist.new_group([r]) for r in range(2)][comm.rank()]
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
        with torch.profiler.profile() as profile:
            tensor = torch.ones(4)
            if name == "all_reduce":
                comm.all_reduce(tensor, group=alone)
            else:
                getattr(comm, name)(torch.empty(4), tensor, group=alone)
        events = [e.key for e in profile.key_averages() if "gloo" in e.key or "c10d" in e.key]
        assert events == [], name
    with torch.profiler.profile() as profile:
        comm.all_reduce(torch.ones(4))
    assert any("gloo" in e.key or "c10d" in e.key for e in profile.key_averages())  # the check does see calls


def test_a_group_of_one_calls_nothing() -> None:
    run_ranks(2, calls_at_size_one)


def test_without_a_process_group_everything_is_one_rank() -> None:
    assert (comm.world_size(), comm.rank(), comm.is_initialized()) == (1, 0, False)
    tensor, out = torch.arange(4.0), torch.empty(4)
    comm.all_reduce(tensor, OPS["AVG"])
    assert tensor.tolist() == [0, 1, 2, 3]
    finish(comm.reduce_scatter_tensor(out, tensor, async_op=True), True)
    assert torch.equal(out, tensor)
    assert comm.all_gather_json({"a": (1, 2)}) == [{"a": [1, 2]}]
    comm.barrier()


def test_the_algorithm_depends_only_on_what_all_ranks_share() -> None:
    """Thresholds keep their order, so that each algorithm has sizes of its own."""
    assert gloo.PAIR_BYTES <= gloo.SMALL_BYTES <= gloo.EXCHANGE_BYTES <= gloo.CHUNK_BYTES
    assert gloo.PIECE < 32768 and math.log2(gloo.CHUNK_BYTES).is_integer()
