"""What `comms_guard` costs: a training step of every ZeRO stage with the guard on, against the same
with it off.

One engine at a time, 2 ranks over gloo, one thread each, a GPT (examples/gpt/model.py), AdamW,
clipping. Blocks with the guard on and off alternate, each pair in the other order than the last.
"mean of pairs" is the mean of the ratios of neighbouring blocks, with the standard error of that
mean (where there are several pairs).

    python benchmarks/guard.py [--nproc 2] [--width 256] [--layers 4] [--stages 0 1 2 3]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import time
from pathlib import Path
from statistics import mean, median, stdev

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).parent.parent
BATCH = 2
CONTEXT = 64


def build(width: int, layers: int) -> nn.Module:
    spec = importlib.util.spec_from_file_location("gpt", ROOT / "examples/gpt/model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    model: nn.Module = module.GPT(context=CONTEXT, width=width, layers=layers, heads=4)
    return model


def measure(
    rank: int, stage: int, arguments: argparse.Namespace
) -> dict[bool, list[tuple[float, float]]]:
    """By whether the guard is on: wall and CPU seconds per step of each block."""
    from ds_comms_guard.config import CommsGuard
    from ds_comms_guard.guard import guard_of_job

    import ds_core
    from ds_core import comm
    from ds_core.comm import interceptor

    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "comms_guard": {"enabled": True},
        **({"zero_optimization": {"stage": stage}} if stage else {}),
    }
    engine, *_ = ds_core.initialize(model=build(arguments.width, arguments.layers), config=config)
    random = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, 256, (BATCH, CONTEXT + 1), generator=random)
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for block in range(2 * (arguments.blocks + 1)):
        on = block % 4 in (0, 3)
        interceptor.reset()
        if on and (guard := guard_of_job(CommsGuard(enabled=True))) is not None:
            comm.add_interceptor(guard)
        dist.barrier()
        wall = time.perf_counter()
        cpu = time.process_time()
        for _ in range(arguments.steps):
            engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
            engine.step()
        dist.barrier()
        taken = (time.perf_counter() - wall, time.process_time() - cpu)
        if block > 1:
            found[on].append((taken[0] / arguments.steps, taken[1] / arguments.steps))
    if rank == 0 and stage == arguments.stages[0]:
        count = sum(p.numel() for p in engine.module.parameters())
        print(
            f"torch {torch.__version__}, {arguments.nproc} ranks over gloo, {count / 1e6:.1f}M "
            "parameters"
        )
        print(
            "| stage | off, ms/step | on | mean of pairs | CPU off | CPU on | mean of pairs |\n"
            + "| --- " * 7
            + "|"
        )
    engine.destroy()
    interceptor.reset()
    return found


def worker(rank: int, arguments: argparse.Namespace, port: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(arguments.nproc))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DS_ACCELERATOR="cpu")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for stage in arguments.stages:
        found = measure(rank, stage, arguments)
        if rank:
            continue
        cells = []
        for kind in (0, 1):
            off, on = ([taken[kind] * 1e3 for taken in found[on]] for on in (False, True))
            ratios = [b / a for a, b in zip(off, on, strict=True)]
            error = f" ± {stdev(ratios) / len(ratios) ** 0.5:.3f}" if len(ratios) > 1 else ""
            cells += [f"{median(off):.2f}", f"{median(on):.2f}", f"{mean(ratios):.3f}x{error}"]
        print(f"| {stage} | " + " | ".join(cells) + " |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {"nproc": 2, "width": 256, "layers": 4, "steps": 10, "blocks": 20}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    arguments = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(worker, (arguments, port), arguments.nproc)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
