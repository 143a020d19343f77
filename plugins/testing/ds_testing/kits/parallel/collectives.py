"""The conformance kit for providers of collectives (hook ``ds_collectives``); ds_core tests its
plain ones with it too.

Everything runs in worker processes, through `ds_core.comm`, and is compared with what one process
calculates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_core import comm
from ds_core.errors import CommError
from ds_testing.pool import run_ranks

LOW = (torch.float16, torch.bfloat16)
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
)
OPS = {name: getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "MAX", "MIN", "PRODUCT")}


class CollectivesConformance:
    """Tests of a provider of collectives: inherit, and set `provider`.

    Name it as in ``class TestMine(CollectivesConformance)``, so that pytest collects it.
    """

    provider: ClassVar[str | None] = None
    """The entry's `load`, ``"package.module:function"``; None: torch.distributed alone."""

    rank_order: ClassVar[bool] = False
    """Whether sums are, to the bit, those in rank order (in fp32 for 16-bit floats); else only near
    them.
    """

    polls: ClassVar[bool] = True
    """Whether the works of messages can be polled with `is_completed`."""

    thresholds: ClassVar[tuple[int, ...]] = (1 << 17, 1 << 20)
    """Bytes at which the provider changes its algorithm: lengths on both sides of each are reduced.
    """

    ranks: ClassVar[tuple[int, ...]] = (2, 3)

    @pytest.mark.parametrize(
        "check",
        [
            "small_reductions",
            "averages_at_the_edge_of_fp16",
            "strides_and_parameters",
            "gathers_in_place",
            "other_collectives",
            "messages",
            "many_under_way",
            "groups",
            "objects",
        ],
    )
    def test_holds(self, check: str) -> None:
        """One kind of collective, on each number of ranks."""
        for size in self.ranks:
            run_ranks(size, _checked, self.provider, self.rank_order, check)

    def test_reductions_around_the_thresholds(self) -> None:
        """Small and large reductions agree with the reference on both sides of each threshold."""
        for size in self.ranks:
            run_ranks(size, _around, self.provider, self.rank_order, list(self.thresholds))

    def test_works_of_messages_can_be_polled(self) -> None:
        """A work that says that it is completed is; of messages only where the provider says so."""
        run_ranks(max(self.ranks), _polled, self.provider, self.polls)

    def test_wrong_arguments_are_named(self) -> None:
        """Lengths, dtypes, split sizes and averages of bool."""
        run_ranks(2, _wrong, self.provider)


def serve_by(provider: str | None) -> None:
    """In a worker: serve gloo's groups on the CPU by ``package.module:function`` from here on;
    None: by torch alone.
    """
    from ds_core.entries import resolve

    comm.use_providers({} if provider is None else {("cpu", "gloo"): resolve(provider)})


def contribution(length: int, dtype: torch.dtype, rank: int) -> Tensor:
    """What `rank` contributes; sums of these are not exact in 16 bits, so that the order and the
    rounding show.
    """
    generator = torch.Generator().manual_seed(1000 + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, (length,), generator=generator).bool()
    if not dtype.is_floating_point:
        return torch.randint(-9 if dtype.is_signed else 0, 9, (length,), generator=generator).to(
            dtype
        )
    return torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)


def expected(parts: list[Tensor], op: str) -> Tensor:
    """The reduction of `parts`, rank by rank, in fp32 for 16-bit sums."""
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
        total = (
            total / len(parts)
            if dtype.is_floating_point
            else torch.div(total, len(parts), rounding_mode="trunc")
        )
    return total.to(dtype)


def check_reductions(
    length: int,
    dtype: torch.dtype,
    op: str,
    async_op: bool,
    group: Any = None,
    rank_order: bool = True,
) -> None:
    """all_reduce, reduce_scatter_tensor and all_gather_into_tensor with `length` elements per
    rank."""
    size = comm.world_size(group)
    rank = comm.rank(group)
    case = f"{length} x {dtype} {op} async={async_op} on {size}"

    def near(mine: Tensor, wanted: Tensor) -> bool:
        if rank_order or not dtype.is_floating_point or op in ("MAX", "MIN"):
            return torch.equal(mine, wanted)
        slack = 4 * torch.finfo(dtype).eps * size
        return torch.allclose(mine.double(), wanted.double(), rtol=slack, atol=slack)

    parts = [contribution(length, dtype, r) for r in range(size)]
    mine = parts[rank].clone()
    _finish(comm.all_reduce(mine, OPS[op], group=group, async_op=async_op), async_op)
    assert near(mine, expected(parts, op)), f"all_reduce {case}"
    seen = torch.empty(length * size, dtype=dtype)
    comm.all_gather_into_tensor(seen, mine, group=group)
    assert torch.equal(seen, mine.repeat(size)), f"all_reduce gave ranks different bits: {case}"

    whole = [contribution(length * size, dtype, r) for r in range(size)]
    out = torch.empty(length, dtype=dtype)
    before = whole[rank].clone()
    _finish(
        comm.reduce_scatter_tensor(out, whole[rank], OPS[op], group=group, async_op=async_op),
        async_op,
    )
    assert near(out, expected(whole, op)[rank * length : (rank + 1) * length]), (
        f"reduce_scatter {case}"
    )
    assert torch.equal(whole[rank], before), f"reduce_scatter changed its input: {case}"

    gathered = torch.empty(length * size, dtype=dtype)
    _finish(
        comm.all_gather_into_tensor(gathered, parts[rank], group=group, async_op=async_op), async_op
    )
    assert torch.equal(gathered, torch.cat(parts)), f"all_gather {case}"


def _finish(work: Any, async_op: bool) -> None:
    assert (work is not None) == async_op
    if async_op:
        work.wait()
        assert work.is_completed()


def _checked(provider: str | None, rank_order: bool, check: str) -> None:
    serve_by(provider)
    CHECKS[check](rank_order)


def _around(provider: str | None, rank_order: bool, thresholds: list[int]) -> None:
    serve_by(provider)
    for turn, total in enumerate(thresholds):
        for extra in (0, 7):
            dtype = (torch.float32, torch.bfloat16)[turn % 2]
            op = "SUM" if extra else "AVG"
            check_reductions(
                total // dtype.itemsize + extra, dtype, op, bool(extra), rank_order=rank_order
            )


def _small(rank_order: bool) -> None:
    for dtype in DTYPES:
        for row, length in enumerate((0, 1, 3, 1001)):
            for column, op in enumerate(("SUM", "AVG", "MAX", "MIN")):
                # Each operation of each dtype in both ways, at every other length.
                check_reductions(length, dtype, op, (row + column) % 2 == 0, rank_order=rank_order)
    check_reductions(17, torch.float32, "PRODUCT", False, rank_order=rank_order)
    check_reductions(17, torch.bfloat16, "PRODUCT", True, rank_order=rank_order)
    check_reductions(5, torch.int16, "SUM", False, rank_order=rank_order)
    for op in ("MAX", "MIN", "SUM"):
        check_reductions(5, torch.bool, op, False, rank_order=rank_order)


def _edge(rank_order: bool) -> None:
    for length in (3, 1 << 17):
        big = torch.full((length,), 60000.0, dtype=torch.float16)
        comm.all_reduce(big, OPS["AVG"])
        assert torch.equal(big, torch.full_like(big, 60000.0)), "an average in fp16 overflowed"


def _strides(rank_order: bool) -> None:
    size = comm.world_size()
    rank = comm.rank()
    scalar = torch.tensor(rank + 1.0)
    comm.all_reduce(scalar)
    assert scalar.item() == size * (size + 1) / 2
    for async_op in (False, True):
        base = torch.zeros(40, 50)
        base.t()[:, ::2] = rank + 1.0
        _finish(comm.all_reduce(base.t()[:, ::2], async_op=async_op), async_op)
        assert torch.equal(base[::2], torch.full((20, 50), size * (size + 1) / 2))
        assert torch.equal(base[1::2], torch.zeros(20, 50))
        out = torch.zeros(6, size * 4)[:, ::2]
        _finish(
            comm.all_gather_into_tensor(
                out, torch.full((4, 3), float(rank)).t(), async_op=async_op
            ),
            async_op,
        )
        assert torch.equal(
            out.reshape(size, -1), torch.arange(float(size)).unsqueeze(1).expand(size, 12)
        )
    weight = torch.nn.Parameter(torch.full((5,), rank + 1.0))
    comm.all_reduce(weight)  # a leaf that requires grad
    assert weight.tolist() == [size * (size + 1) / 2] * 5 and weight.grad_fn is None
    with torch.inference_mode():
        frozen = torch.full((1_000_000,), rank + 1.0)
        _finish(comm.all_reduce(frozen, OPS["MAX"], async_op=True), True)
        assert frozen.min() == size


def _in_place(rank_order: bool) -> None:
    size = comm.world_size()
    rank = comm.rank()
    for length in (3, 70_001, 400_002):
        for dtype in (torch.bfloat16, torch.float32, torch.int16, torch.bool):
            for async_op in (False, True):
                parts = [
                    torch.arange(length).mul(r + 1).remainder(251).to(dtype) for r in range(size)
                ]
                whole = torch.full((size * length,), 99).to(dtype)
                mine = whole[rank * length : (rank + 1) * length]
                mine.copy_(parts[rank])
                _finish(comm.all_gather_into_tensor(whole, mine, async_op=async_op), async_op)
                assert torch.equal(whole, torch.cat(parts)), f"{length} x {dtype} in place"


def _others(rank_order: bool) -> None:
    size = comm.world_size()
    rank = comm.rank()
    last = size - 1
    for async_op in (False, True):
        tensor = torch.full((3,), float(rank))
        _finish(comm.broadcast(tensor, last, async_op=async_op), async_op)
        assert tensor.tolist() == [float(last)] * 3
        for dtype in (torch.float32, torch.float16):
            tensor = torch.tensor([rank + 1.0], dtype=dtype)
            _finish(comm.reduce(tensor, last, OPS["AVG"], async_op=async_op), async_op)
            if rank == last:
                assert tensor.item() == (size + 1) / 2
        sent = torch.arange(float(size)) + 10 * rank
        back = torch.empty(size)
        _finish(comm.all_to_all_single(back, sent, async_op=async_op), async_op)
        assert back.tolist() == [10.0 * r + rank for r in range(size)]
        _finish(comm.barrier(async_op=async_op), async_op)
    # rows that are no contiguous memory
    uneven = torch.empty(size * (rank + 1), 2).t().contiguous().t()
    given_rows = torch.cat([torch.full((r + 1, 2), float(rank)) for r in range(size)])
    comm.all_to_all_single(uneven, given_rows, [rank + 1] * size, [r + 1 for r in range(size)])
    assert uneven[:, 1].tolist() == [float(r) for r in range(size) for _ in range(rank + 1)]


def _messages(rank_order: bool) -> None:
    size = comm.world_size()
    rank = comm.rank()
    if size == 1:
        return
    right = (rank + 1) % size
    left = (rank - 1) % size
    group = dist.new_group()
    comm.open_transport(group)
    got = torch.empty(4)
    works = [comm.isend(torch.full((4,), rank + 0.0), right, group), comm.irecv(got, left, group)]
    for work in works:
        work.wait()
    assert got.tolist() == [float(left)] * 4
    if rank == 0:
        comm.send(torch.tensor([7.0]), 1, group)
    elif rank == 1:
        comm.recv(got[:1], 0, group)
        assert got[0] == 7
    lengths = (1, 3, 1000, 70_001, 700_003)
    sent = [torch.arange(n) * 7 + rank for n in lengths]
    ahead, late = ([torch.zeros_like(t) for t in sent] for _ in range(2))
    works = [comm.irecv(t, left, group) for t in ahead] + [
        comm.isend(t, right, group) for t in sent
    ]
    comm.all_reduce(torch.ones(5), group=group)
    works += [comm.isend(t, left, group) for t in sent]
    for work in [comm.irecv(t, right, group) for t in late][::-1] + works:
        work.wait()
    assert all(torch.equal(t, s - rank + left) for t, s in zip(ahead, sent, strict=True))
    assert all(torch.equal(t, s - rank + right) for t, s in zip(late, sent, strict=True))
    comm.barrier(group)
    dist.destroy_process_group(group)


def _under_way(rank_order: bool) -> None:
    """Long and short collectives of all kinds started together, and waited for in an order of each
    rank's own.
    """
    size = comm.world_size()
    rank = comm.rank()
    lengths = [1_100_001, 11, 150_001]
    tensors = []
    works = []
    for length in lengths:
        tensors.append(contribution(length, torch.int64, rank))
        works.append(comm.all_reduce(tensors[-1], async_op=True))
        whole = contribution(length * size, torch.int64, rank)
        tensors.append(torch.empty(length, dtype=torch.int64))
        works.append(comm.reduce_scatter_tensor(tensors[-1], whole, async_op=True))
        tensors.append(torch.empty(size * length, dtype=torch.int64))
        works.append(
            comm.all_gather_into_tensor(
                tensors[-1], contribution(length, torch.int64, rank), async_op=True
            )
        )
    late = contribution(500_001, torch.float32, rank)
    comm.all_reduce(late, OPS["MAX"])  # a blocking one after them
    assert torch.equal(
        late, expected([contribution(500_001, torch.float32, r) for r in range(size)], "MAX")
    )
    for work in works[::-1] if rank else works:
        assert work is not None
        work.wait()
    for index, length in enumerate(lengths):
        reduced, scattered, gathered = tensors[3 * index : 3 * index + 3]
        parts = [contribution(length, torch.int64, r) for r in range(size)]
        assert torch.equal(reduced, expected(parts, "SUM"))
        assert torch.equal(gathered, torch.cat(parts))
        total = expected([contribution(length * size, torch.int64, r) for r in range(size)], "SUM")
        assert torch.equal(scattered, total[rank * length : (rank + 1) * length])


def _groups(rank_order: bool) -> None:
    size = comm.world_size()
    rank = comm.rank()
    rows = [list(range(size)), sorted({0, size - 1}), [0]]
    groups = [dist.new_group(row) for row in rows]
    for row, group in zip(rows, groups, strict=True):
        if rank in row:
            check_reductions(1001, torch.float32, "AVG", False, group, rank_order)
            check_reductions(70_001, torch.bfloat16, "SUM", True, group, rank_order)
            tensor = torch.tensor([float(rank)])
            comm.broadcast(tensor, row[-1], group=group)
            assert tensor.item() == row[-1]
        else:
            with pytest.raises(CommError, match=f"rank {rank} is not in the group"):
                comm.all_reduce(torch.ones(3), group=group)
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def _objects(rank_order: bool) -> None:
    size = comm.world_size()
    rank = comm.rank()
    objects = [
        {"rank": r, "text": "é" * 1000 * r, "none": None, "list": [1.5, True]} for r in range(size)
    ]
    assert comm.all_gather_json(objects[rank]) == objects
    assert comm.all_gather_json("") == [""] * size


CHECKS: dict[str, Callable[[bool], None]] = {
    "small_reductions": _small,
    "averages_at_the_edge_of_fp16": _edge,
    "strides_and_parameters": _strides,
    "gathers_in_place": _in_place,
    "other_collectives": _others,
    "messages": _messages,
    "many_under_way": _under_way,
    "groups": _groups,
    "objects": _objects,
}


def _polled(provider: str | None, messages: bool) -> None:
    serve_by(provider)
    size = comm.world_size()
    rank = comm.rank()
    for length in (100, 3_000_000):
        out = torch.empty(length)
        work = comm.reduce_scatter_tensor(
            out, torch.full((size * length,), rank + 1.0), async_op=True
        )
        assert work is not None
        while not work.is_completed():
            pass
        assert torch.equal(out, torch.full((length,), size * (size + 1) / 2))  # without a wait
        work.wait()
        assert out[0] == size * (size + 1) / 2  # the sum is made once
        sent = torch.full((length,), rank + 0.5)
        works = [comm.irecv(out, (rank - 1) % size), comm.isend(sent, (rank + 1) % size)]
        while messages and not all(w.is_completed() for w in works):
            pass
        for message in works:
            message.wait()
            message.wait()  # once more, which would never end over plain gloo
        assert out[0] == (rank - 1) % size + 0.5


def _wrong(provider: str | None) -> None:
    serve_by(provider)
    with pytest.raises(
        CommError, match="input has 5 elements, output 3; input must have 2 x 3 = 6"
    ):
        comm.reduce_scatter_tensor(torch.empty(3), torch.empty(5))
    with pytest.raises(CommError, match="output has 5 elements"):
        comm.all_gather_into_tensor(torch.empty(5), torch.empty(3))
    with pytest.raises(CommError, match=r"torch.float64, input torch.float32"):
        comm.all_gather_into_tensor(torch.empty(2, dtype=torch.float64), torch.empty(1))
    with pytest.raises(CommError, match="split sizes"):
        comm.all_to_all_single(torch.empty(4), torch.empty(4), [4, 4], [1, 1])
    with pytest.raises(CommError, match="divide"):
        comm.all_to_all_single(torch.empty(3), torch.empty(3))
    with pytest.raises(CommError, match="must be equal"):
        comm.all_to_all_single(torch.empty(2), torch.empty(2).double())
    with pytest.raises(CommError, match="a message to oneself is a copy"):
        comm.isend(torch.empty(1), comm.rank())
    work = comm.all_reduce(torch.ones(3, dtype=torch.bool), OPS["AVG"], async_op=True)
    assert work is not None
    with pytest.raises(CommError, match="average of bool"):
        work.wait()
