"""Data parallelism over gloo: wall time per step of ds_core's `Replicated` against torch's
DistributedDataParallel.

Both train the same model on the same ranks in the same run, in interleaved blocks; the median block
counts.

    python benchmarks/data_parallel.py [--nproc 2] [--width 1024] [--layers 6]
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

BATCH = 32
STEPS = 4
BLOCKS = 25


def build(layers: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.GELU())))


def worker(rank: int, arguments: argparse.Namespace, port: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(arguments.nproc))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    import ds_core

    x = torch.randn(BATCH, arguments.width)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    engine, *_ = ds_core.initialize(model=build(arguments.layers, arguments.width), config=config)
    ddp = nn.parallel.DistributedDataParallel(
        build(arguments.layers, arguments.width), gradient_as_bucket_view=True
    )
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3, fused=True)

    def ours() -> None:
        engine.backward(engine(x).square().mean())
        engine.step()

    def theirs() -> None:
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()

    times: dict[str, list[float]] = {"torch DDP": [], "ds_core": []}
    for block in range(BLOCKS + 1):
        for name, step in (("torch DDP", theirs), ("ds_core", ours)):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(STEPS):
                step()
            dist.barrier()
            if block:
                times[name].append((time.perf_counter() - start) / STEPS * 1e3)
    if rank == 0:
        base = median(times["torch DDP"])
        count = sum(p.numel() for p in ddp.parameters())
        print(
            f"torch {torch.__version__}, {arguments.nproc} ranks over gloo, {count / 1e6:.1f}M "
            "parameters"
        )
        for name, values in times.items():
            print(f"{name:10s} {median(values):8.1f} ms/step  {median(values) / base:5.2f}x DDP")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6)
    arguments = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(worker, (arguments, port), arguments.nproc)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
