"""Whole matrices from any parts, and back; sums over them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from ds_optimizer_kit import (
    Held,
    Lane,
    Layout,
    MatrixExchange,
    MatrixOptimizer,
    ParamPart,
    plan_exchange,
)
from ds_optimizer_kit.exchange import product_cost
from ds_run_state.slices import Slice
from ds_testing import Traffic, run_ranks
from torch import Tensor

SHAPES = [(5, 7), (8, 3), (6, 6), (4, 5, 3), (1, 9), (3, 2, 2)]
STACKED = [0, 0, 0, 1, 0, 1]


def halves(shape: tuple[int, ...], dim: int, at: int, how: str) -> Slice:
    """The slice of one of two ranks along tp."""
    size = shape[dim]
    if how == "fused":  # two ranges: as of queries and keys in one parameter
        cut = size // 2
        ranges = ((0, cut // 2), (cut, (size - cut) // 2))
        if at:
            ranges = (
                (cut // 2, cut - cut // 2),
                (cut + (size - cut) // 2, size - cut - (size - cut) // 2),
            )
        return Slice.of(shape).keep("tp", dim, ranges)
    return Slice.of(shape).cut("tp", dim, (size // 3) * at, size - size // 3 if at else size // 3)


def parts_of(world: int, seed: int) -> list[tuple[tuple[int, ...], list[Held]]]:
    """What each of `world` ranks has of each parameter: whole, cut by ranges, by slices, or both."""
    rng = random.Random(seed)
    found = []
    for shape in SHAPES:
        how = rng.choice(["whole", "ranges", "slices", "fused", "both"])
        dim = rng.randrange(len(shape))
        if how == "fused":
            dim = max(range(len(shape)), key=lambda d: shape[d])
        ranks = []
        for rank in range(world):
            tp = rank % 2 if how in ("slices", "fused", "both") else 0
            piece = (
                halves(shape, dim, tp, how) if how not in ("whole", "ranges") else Slice.of(shape)
            )
            size = torch.Size(piece.size).numel()
            if how == "ranges":
                ends = [size * i // world for i in range(world + 1)]
                ranks.append(Held(piece, ends[rank], ends[rank + 1]))
            elif how == "both":
                count = world // 2
                ends = [size * i // count for i in range(count + 1)]
                ranks.append(Held(piece, ends[rank // 2], ends[rank // 2 + 1]))
            else:
                ranks.append(Held(piece, 0, size))
        found.append((shape, ranks))
    return found


def exchanged(seed: int) -> list[int]:
    """Doubles every matrix on its owner, and looks at what comes back."""
    from ds_core import comm

    rank = comm.rank()
    world = comm.world_size()
    lane = Lane(("dp",), torch.distributed.group.WORLD, torch.device("cpu"))  # type: ignore[arg-type]
    full = []
    stacked: dict[Tensor, int] = {}
    values: dict[Tensor, Tensor] = {}
    wanted: dict[Tensor, Any] = {}
    for number, (shape, ranks) in enumerate(parts_of(world, seed)):
        generator = torch.Generator().manual_seed(number)
        full.append(torch.randn(shape, generator=generator, dtype=torch.float64))
        held = ranks[rank]
        mine = held.slice.take(full[-1]).reshape(-1)[held.start : held.stop].clone()
        lane.parts[mine] = ParamPart(str(number), shape, tuple(ranks), rank)
        stacked[mine] = STACKED[number]
        values[mine] = mine
        wanted[mine] = full[-1]
    layout = Layout([lane])
    sums = layout.sums({t: t.square().sum().view(1) for t in values if t.numel()})
    for tensor, total in sums.items():
        torch.testing.assert_close(total[0], wanted[tensor].square().sum())
    exchange = MatrixExchange(layout, stacked)
    left_out = {t for t in stacked if lane.parts[t].name == "1"}
    for used in (set(stacked), set(stacked) - left_out):
        exchange.start({t: v for t, v in values.items() if t in used and t.numel()}, used)
        owned = [pair for some in exchange.finish() for pair in some]
        for unit, matrix in owned:
            assert matrix.shape == unit.shape
            whole = full[int(unit.name)]
            assert any(
                torch.equal(matrix, each)
                for each in (whole if whole.shape != unit.shape else whole[None])
            ), unit.name
        back = exchange.give_back({unit: 2 * matrix for unit, matrix in owned})
        assert {t for t in used if t.numel()} == set(back)
        for tensor, result in back.items():
            assert torch.equal(result, 2 * tensor), lane.parts[tensor].name
    return [len(owned)]


@pytest.mark.parametrize("seed", range(6))
def test_whole_matrices_and_back(seed: int) -> None:
    counts = run_ranks(4, exchanged, seed)
    # without one matrix that was left out, each is transformed once
    matrices = sum(shape[0] if stack else 1 for shape, stack in zip(SHAPES, STACKED, strict=True))
    assert sum(count for (count,) in counts) == matrices - 1


def test_one_process_has_full_tensors() -> None:
    tensors = [torch.randn(3, 4), torch.randn(2, 3, 2)]
    exchange = MatrixExchange(Layout.local(tensors), {tensors[0]: 0, tensors[1]: 1})
    exchange.start({t: t for t in tensors}, tensors)
    ((*owned,),) = exchange.finish()
    assert [unit.shape for unit, _ in owned] == [(3, 4), (3, 2), (3, 2)]
    back = exchange.give_back({unit: -matrix for unit, matrix in owned})
    for tensor in tensors:
        assert torch.equal(back[tensor].view_as(tensor), -tensor)


def sent() -> int:
    """Bytes that this rank sends for two matrices: one cut in half, one that it has or lacks."""
    from ds_core import comm

    rank = comm.rank()
    lane = Lane(("dp",), torch.distributed.group.WORLD, torch.device("cpu"))  # type: ignore[arg-type]
    whole = Slice.of((8, 8))
    halved = tuple(Held(whole, 32 * r, 32 * (r + 1)) for r in range(2))
    first = tuple(Held(whole, 0, 64 if r == 0 else 0) for r in range(2))
    tensors = [torch.zeros(32), torch.zeros(64 if rank == 0 else 0)]
    for tensor, ranks in zip(tensors, (halved, first), strict=True):
        lane.parts[tensor] = ParamPart(str(ranks), (8, 8), ranks, rank)
    exchange = MatrixExchange(Layout([lane]), dict.fromkeys(tensors, 0))
    comm.add_interceptor(traffic := Traffic())
    exchange.start({t: t for t in tensors if t.numel()}, set(tensors))
    exchange.give_back(dict(pair for some in exchange.finish() for pair in some))
    comm.remove_interceptor(traffic)
    return sum(row.bytes for row in traffic.sent)


def test_a_rank_keeps_what_it_has_and_half_of_what_is_cut_travels() -> None:
    # Rank 0 keeps the matrix that it has, rank 1 gets the other: half of it there, half back.
    assert run_ranks(2, sent) == [32 * 4, 32 * 4]


def over_model() -> list[float]:
    """A matrix of which each rank has a half, one that both have, and one of the second rank's alone."""
    from ds_core import comm

    rank = comm.rank()
    everyone: Any = torch.distributed.group.WORLD
    tensors = [torch.full((32,), 1.0 + rank), torch.full((4,), 5.0), torch.full((2 * rank,), 7.0)]
    whole = Slice.of((8, 8))
    halved = tuple(Held(whole, 32 * r, 32 * (r + 1)) for r in range(2))
    lane = Lane(("tp",), everyone, torch.device("cpu"))
    lane.parts[tensors[0]] = ParamPart("cut", (8, 8), halved, rank, held=("tp",))
    lane.parts[tensors[1]] = ParamPart("both", (4,), (Held(Slice.of((4,)), 0, 4),) * 2, rank)
    if rank:
        held = (Held(Slice.of((2,)), 0, 2),)
        lane.parts[tensors[2]] = ParamPart("last", (2,), held, 0, held=("tp",))
    alone = comm.ALONE, torch.device("cpu")
    layout = Layout([lane], {(): alone, ("tp",): (everyone, torch.device("cpu"))})
    sums = {t: t.double().sum().reshape(1) for t in lane.parts}
    (first,) = layout.maxima({tensors[0]: tensors[0].double().max().reshape(1)}).values()
    return [layout.over_model(sums).item(), first.item()]


def test_sums_over_the_model_count_each_element_once() -> None:
    # 32 ones, 32 twos, four fives that both ranks have, two sevens; the largest of the first.
    assert run_ranks(2, over_model) == [[32 + 64 + 20 + 14, 2.0]] * 2


def planned_and_sent(sharded: bool) -> list[int]:
    """Bytes of three matrices, as planned and as sent by both ranks."""
    from ds_core import comm

    rank = comm.rank()
    shapes = [(8, 8), (4, 8), (8, 2)]
    lane = Lane(("dp",), torch.distributed.group.WORLD, torch.device("cpu"))  # type: ignore[arg-type]
    for number, shape in enumerate(shapes):
        count = shape[0] * shape[1]
        ends = (0, count // 2, count) if sharded else (0, count)
        ranges = [ends[r : r + 2] if sharded else (0, count) for r in range(2)]
        held = tuple(Held(Slice.of(shape), *r) for r in ranges)
        tensor = torch.zeros(held[rank].numel)
        lane.parts[tensor] = ParamPart(str(number), shape, held, rank)
    exchange = MatrixExchange(Layout([lane]), dict.fromkeys(lane.parts, 0))
    comm.add_interceptor(traffic := Traffic())
    exchange.start({t: t for t in lane.parts}, set(lane.parts))
    exchange.give_back(dict(pair for some in exchange.finish() for pair in some))
    comm.remove_interceptor(traffic)
    planned = plan_exchange(shapes, 2, product_cost, sharded=sharded)
    return [planned.sent, sum(row.bytes for row in traffic.sent)]


@pytest.mark.parametrize("sharded", [False, True])
def test_what_is_planned_is_what_the_busiest_rank_sends(sharded: bool) -> None:
    found = run_ranks(2, planned_and_sent, sharded)
    assert found[0][0] == max(sent for _, sent in found)


def test_a_matrix_without_elements_has_no_state() -> None:
    class Summing(MatrixOptimizer):
        def update(self, stack: Any, group: Any, states: Any, step: int) -> Any:
            states["sums"] = stack.sum(-1)
            return stack

    empty = torch.nn.Parameter(torch.zeros(0, 4))
    weight = torch.nn.Parameter(torch.ones(3, 4))
    optimizer = Summing([empty, weight], {"lr": 0.1})
    weight.grad = torch.ones(3, 4)
    optimizer.step()
    assert optimizer.whole_state(empty, "sums") is None
    sums = optimizer.whole_state(weight, "sums")
    assert sums is not None and sums.tolist() == [4.0, 4.0, 4.0]
