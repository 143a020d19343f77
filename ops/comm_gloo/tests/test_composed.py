"""The composed collectives: the kit of providers, each algorithm at its borders, and what becomes
of the queues.
"""

from __future__ import annotations

import gc
import math
import threading

import pytest
import torch
import torch.distributed as dist
from ds_comm_gloo import gloo
from ds_testing import CollectivesConformance, run_ranks
from ds_testing.kits.parallel.collectives import (
    OPS,
    check_reductions,
    contribution,
    expected,
    serve_by,
)

from ds_core import comm
from ds_core.comm import collectives
from ds_core.errors import CommError

PROVIDER = "ds_comm_gloo:GlooCollectives"


@pytest.mark.fast_cases(
    test_holds=(
        "small_reductions",
        "averages_at_the_edge_of_fp16",
        "strides_and_parameters",
        "gathers_in_place",
        "other_collectives",
        "messages",
        "groups",
        "objects",
    ),
    test_reductions_around_the_thresholds=(),
)
class TestComposed(CollectivesConformance):
    """The same bits as one process that adds in rank order."""

    provider = PROVIDER
    rank_order = True
    ranks = (2, 3, 4)


# In bytes of the whole buffer around every threshold, so that each algorithm runs, also over
# several chunks.
KIB = 1 << 10
BYTES = (128 * KIB, 512 * KIB, 2048 * KIB, 4096 * KIB)


def sweep_large(dtype: torch.dtype, ops: list[str]) -> None:
    serve_by(PROVIDER)
    for total in BYTES:
        for extra in (0, 7):
            length = total // dtype.itemsize + extra
            check_reductions(length, dtype, ops[0], async_op=bool(extra))
    # more than two rounds of the chunked algorithms, with a ragged end
    for op in ops:
        check_reductions(2 * gloo.CHUNK_BYTES // dtype.itemsize + 5, dtype, op, async_op=False)
        check_reductions(2 * gloo.CHUNK_BYTES // dtype.itemsize + 5, dtype, op, async_op=True)


@pytest.mark.fast_cases("2-dtype0-ops0")
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
def test_sizes_around_the_thresholds_and_beyond(
    size: int, dtype: torch.dtype, ops: list[str]
) -> None:
    run_ranks(size, sweep_large, dtype, ops)


def several_blocks(rounds: int) -> None:
    serve_by(PROVIDER)
    size = comm.world_size()
    length = rounds * size * gloo.CHUNK_BYTES // 8 + 3
    parts = [contribution(length, torch.float64, r) for r in range(size)]
    mine = parts[comm.rank()].clone()
    comm.all_reduce(mine)
    assert torch.equal(mine, expected(parts, "SUM"))


@pytest.mark.fast_cases("3")
@pytest.mark.parametrize("size", [3, 4])
def test_all_reduce_over_several_blocks(size: int) -> None:
    run_ranks(size, several_blocks, 2)


def bool_average() -> None:
    serve_by(PROVIDER)
    work = comm.all_reduce(torch.ones(3, dtype=torch.bool), OPS["AVG"], async_op=True)
    assert work is not None
    with pytest.raises(CommError, match="average of bool"):
        work.wait()
    # on the lane
    long = comm.all_reduce(torch.ones(9_000_000, dtype=torch.bool), OPS["AVG"], async_op=True)
    assert long is not None
    with pytest.raises(CommError, match="average of bool"):
        long.wait()
    after = torch.ones(3_000_000)
    comm.all_reduce(after, OPS["MAX"])  # one failure does not hold up the next
    assert after.sum() == 3_000_000


def test_an_error_of_an_asynchronous_collective_comes_with_wait() -> None:
    run_ranks(2, bool_average)


def queues_of_stopped_groups() -> int:
    serve_by(PROVIDER)
    before = set(threading.enumerate())  # of the world, which an earlier test may have used
    for _ in range(5):
        group = dist.new_group(backend="gloo")
        work = comm.all_reduce(torch.ones(1 << 21), group=group, async_op=True)
        assert work is not None
        work.wait()
        dist.destroy_process_group(group)
        del group, work
        gc.collect()
    threads = [
        t for t in threading.enumerate() if t.name == "ds_comm_gloo queue" and t not in before
    ]
    for thread in threads:
        thread.join(10)
    return sum(thread.is_alive() for thread in threads)


def test_a_queue_ends_with_its_group() -> None:
    """Its thread too: 100 starts and stops left more than 100 of them."""
    assert run_ranks(3, queues_of_stopped_groups) == [0, 0, 0]


def changing() -> None:
    """A provider is made once per group, and comes back; messages go where the first one went."""
    group = dist.new_group()
    # by torch, since nothing else is in use
    works = [comm.irecv(torch.empty(3), 1 - comm.rank(), group)]
    serve_by(None)
    comm.all_reduce(torch.ones(3), group=group)
    serve_by(PROVIDER)
    comm.all_reduce(torch.ones(3), group=group)
    known = collectives._groups[group]
    plain, made = known.made.values()
    serve_by(None)
    comm.all_reduce(torch.ones(3), group=group)
    serve_by(PROVIDER)
    comm.all_reduce(torch.ones(3), group=group)
    assert list(known.made.values()) == [plain, made]
    works.append(comm.isend(torch.ones(3), 1 - comm.rank(), group))
    assert known.carriers == {"cpu": plain}
    for work in works:
        work.wait()
    dist.destroy_process_group(group)


def test_providers_change_between_collectives() -> None:
    run_ranks(2, changing)


def test_the_algorithm_depends_only_on_what_all_ranks_share() -> None:
    """Thresholds keep their order, so that each algorithm has sizes of its own."""
    assert gloo.PAIR_BYTES <= gloo.SMALL_BYTES <= gloo.EXCHANGE_BYTES <= gloo.CHUNK_BYTES
    assert gloo.PIECE < 32768 and math.log2(gloo.CHUNK_BYTES).is_integer()
