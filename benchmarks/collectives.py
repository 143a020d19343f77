"""Plain torch.distributed over gloo against ds_core.comm, in one run: median milliseconds per call
and GB/s.

    python benchmarks/collectives.py [--ranks 2,4] [--dtypes fp32,bf16] [--sizes 1K,64K,1M,16M,64M]
    [--ops all_reduce]
                                     [--shared] [--budget 1.5]

Each size is the whole buffer in bytes (what all_gather produces, what reduce_scatter and all_reduce
take). The sides take turns within a measurement, so that a busy machine slows them alike. --shared:
ds_core.comm through shared memory too (of dscore-ops-cpu); its columns are then gloo's own,
ds_core.comm over gloo, through shared memory, and the gain of the last over the better of the
others.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from ds_comm_gloo import GlooCollectives
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.multiprocessing import spawn  # type: ignore[attr-defined]

from ds_core import comm

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
OPERATIONS: dict[
    str, tuple[Callable[[Tensor, Tensor], object], Callable[[Tensor, Tensor], object]]
] = {
    "all_gather": (GATHER, comm.all_gather_into_tensor),
    "reduce_scatter": (
        lambda whole, part: SCATTER(part, whole),
        lambda whole, part: comm.reduce_scatter_tensor(part, whole),
    ),
    "all_reduce": (
        lambda whole, part: dist.all_reduce(whole),
        lambda whole, part: comm.all_reduce(whole),
    ),
}


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    ops: tuple[str, ...]
    dtypes: tuple[str, ...]
    sizes: tuple[int, ...]
    shared: bool
    budget: float  # seconds for one line of the table


def median_times(calls: list[Callable[[], object]], budget: float) -> list[float]:
    """Median seconds of each call, on the slowest rank; the calls take turns."""
    spent: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    rounds = 5
    while len(spent[0]) < rounds:
        for times, call in zip(spent, calls, strict=True):
            dist.barrier()
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        if len(spent[0]) == 3:  # every rank must choose the same number
            share = torch.tensor(budget / max(sum(t[-1] for t in spent), 1e-6))
            dist.broadcast(share, 0)
            rounds = min(101, max(5, int(share)))
    medians = torch.tensor([sorted(times)[len(times) // 2] for times in spent])
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return [float(m) for m in medians]


def worker(rank: int, ranks: int, store: str, plan: Plan) -> None:
    """Measure on one rank; rank 0 prints."""
    dist.init_process_group("gloo", store=FileStore(store, ranks), rank=rank, world_size=ranks)
    comm.use_providers({("cpu", "gloo"): GlooCollectives})
    for op in plan.ops:
        for dtype_name in plan.dtypes:
            for size in plan.sizes:
                dtype = DTYPES[dtype_name]
                part = torch.zeros(max(1, size // dtype.itemsize // ranks), dtype=dtype)
                whole = torch.zeros(part.numel() * ranks, dtype=dtype)
                calls: list[Callable[[], object]] = [
                    functools.partial(f, whole, part) for f in OPERATIONS[op]
                ]
                if plan.shared:
                    calls.append(functools.partial(through_memory, calls[1]))
                plain, ours, *memory = median_times(calls, plan.budget)
                if rank == 0:
                    gain = min(plain, ours) / memory[0] if memory else plain / ours
                    figures = [plain, ours, *memory]
                    print(
                        f"{ranks:5d} {op:15s} {dtype_name:5s} {size:10d} "
                        + " ".join(f"{t * 1e3:10.3f}" for t in figures)
                        + "".join(f" {size / t / 1e9:8.3f}" for t in figures)
                        + f" {gain:6.2f}x",
                        flush=True,
                    )
    dist.destroy_process_group()


def through_memory(call: Callable[[], object]) -> None:
    """`call` with the collectives of dscore-ops-cpu."""
    from ds_ops_cpu.shared import collectives

    comm.use_providers({("cpu", "gloo"): collectives})
    call()
    comm.use_providers({("cpu", "gloo"): GlooCollectives})


def size_of(text: str) -> int:
    """``"64K"`` -> 65536."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return (
        int(float(text[:-1]) * units[text[-1].upper()]) if text[-1].upper() in units else int(text)
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--sizes", default="1K,16K,256K,1M,4M,16M,64M")
    parser.add_argument("--ops", default=",".join(OPERATIONS))
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--budget", type=float, default=1.5)
    args = parser.parse_args()
    plan = Plan(
        tuple(args.ops.split(",")),
        tuple(args.dtypes.split(",")),
        tuple(size_of(s) for s in args.sizes.split(",")),
        args.shared,
        args.budget,
    )
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, gloo, one machine")
    names = ["plain", "ours", *(["shared"] if args.shared else [])]
    columns = " ".join(f"{n + ' ms':>10s}" for n in names) + "".join(
        f" {n[:3] + ' GB/s':>8s}" for n in names
    )
    print(f"ranks operation       dtype      bytes {columns}   gain")
    for ranks in (int(r) for r in args.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            spawn(worker, (ranks, str(Path(folder) / "store"), plan), nprocs=ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
