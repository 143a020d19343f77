"""A batch through 2 pipeline stages on 2 cores, beside one process, torch.distributed.pipelining
and DeepSpeed.

All train the same residual MLP blocks in fp32 with AdamW on the same data, 2 ranks over gloo, one
thread each; the one process is rank 0 alone, while rank 1 waits. Contestants run in interleaved
blocks of a few batches, so that a noisy machine hits all alike. DeepSpeed has processes of its own,
which run in turn with the others. The C library keeps freed memory in all of them, as ds_core asks
it to: else page faults, which depend on who ran before, decide.

    python benchmarks/pipeline.py [--micro-batches 2 4 8] [--deepspeed-python PYTHON]

A batch takes seconds; with --width 256 --batch 128 --blocks 25 a quarter of one, where messages and
calls count more.

speed-up: the one process's wall time over the contestant's; of the best blocks of both, and of the
medians. ideal: what a perfect 1F1B has, 2m / (m + 1). CPU: of both ranks together, against the one
process, least of all blocks. loss: the largest difference to the one process's, over all batches.
"""

from __future__ import annotations

import argparse
import copy
import glob
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from zero_step import Processes

LR = 1e-3
DECAY = 0.01
WARMUP = 2
KINDS = ("one process", "torch 1F1B", "torch ZBV", "ds_core 1f1b", "ds_core zero_bubble")
DEEPSPEED = "DeepSpeed"
mse = nn.functional.mse_loss

Batch = list[tuple[Tensor, Tensor]]
Step = Callable[[Batch], float]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


def build(arguments: argparse.Namespace) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block(arguments.width) for _ in range(arguments.layers)]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=DECAY, fused=True)


def one_process(arguments: argparse.Namespace, count: int) -> Step:
    model = nn.Sequential(*build(arguments))
    optimizer = adamw(model.parameters())

    def step(batch: Batch) -> float:
        optimizer.zero_grad()
        losses = [_backward(mse(model(x), y) / count) for x, y in batch]
        optimizer.step()
        return sum(losses)

    return step if dist.get_rank() == 0 else lambda batch: 0.0


def _backward(loss: Tensor) -> float:
    loss.backward()
    return loss.item()


def with_torch(arguments: argparse.Namespace, count: int, kind: str) -> Step:
    from torch.distributed import pipelining

    rank = dist.get_rank()
    layers = build(arguments)
    # ZBV has two parts per rank, in the shape of a V: the first and the last on rank 0.
    places = [rank] if kind == "torch 1F1B" else [rank, 3 - rank]
    total = 2 * len(places)
    size = len(layers) // total
    parts = [nn.Sequential(*layers[p * size : (p + 1) * size]) for p in places]
    stages = [
        pipelining.PipelineStage(part, p, total, torch.device("cpu"))
        for p, part in zip(places, parts, strict=True)
    ]
    last_rank = total - 1 in places
    if kind == "torch 1F1B":
        schedule: Any = pipelining.Schedule1F1B(stages[0], count, loss_fn=mse)
    else:
        schedule = pipelining.ScheduleZBVZeroBubble(stages, count, loss_fn=mse)
    optimizer = adamw([p for part in parts for p in part.parameters()])

    def step(batch: Batch) -> float:
        optimizer.zero_grad()
        inputs, targets = (torch.cat(side) for side in zip(*batch, strict=True))
        losses: list[Tensor] = []
        first = [inputs] if rank == 0 else []
        schedule.step(*first, **({"target": targets, "losses": losses} if last_rank else {}))
        optimizer.step()
        return sum(x.item() for x in losses) / count

    return step


def settings(arguments: argparse.Namespace, count: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "gradient_accumulation_steps": count,
        "gradient_clipping": 0.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LR, "weight_decay": DECAY, **more.pop("optimizer", {})},
        },
        **more,
    }


def with_ds_core(arguments: argparse.Namespace, count: int, kind: str) -> Step:
    from ds_pipeline import PipelineModule

    import ds_core

    model = PipelineModule(build(arguments), num_stages=2, loss_fn=mse, partition_method="uniform")
    config = settings(arguments, count, pipeline={"schedule": kind.split()[1]})
    engine, *_ = ds_core.initialize(model=model, config=config)
    return lambda batch: engine.train_batch(iter(batch)).item()


def with_deepspeed(arguments: argparse.Namespace, count: int) -> Step:
    import deepspeed  # type: ignore[import-not-found]
    from deepspeed.pipe import PipelineModule as Theirs  # type: ignore[import-not-found]

    deepspeed.init_distributed("gloo")
    model = Theirs(build(arguments), num_stages=2, loss_fn=mse, partition_method="uniform")
    config = settings(
        arguments, count, steps_per_print=10**9, optimizer={"torch_adam": True, "fused": True}
    )
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[
        0
    ]
    return lambda batch: float(engine.train_batch(iter(batch)))


def make(kind: str, count: int, arguments: argparse.Namespace) -> Step:
    if kind == KINDS[0]:
        return one_process(arguments, count)
    if kind == DEEPSPEED:
        return with_deepspeed(arguments, count)
    return (with_torch if kind.startswith("torch") else with_ds_core)(arguments, count, kind)


# -- one rank, and the one who asks ----------------------------------------------------------------


def batches(arguments: argparse.Namespace, count: int) -> Iterator[Batch]:
    random = torch.Generator().manual_seed(0)
    while True:
        rows = torch.randn(count, 2, arguments.batch, arguments.width, generator=random)
        yield [(x, y) for x, y in rows]


def serve(rank: int, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if arguments.deepspeed_child != "yes":
        dist.init_process_group("gloo")
    steps: dict[tuple[str, int], tuple[Step, Iterator[Batch]]] = {}
    for line in sys.stdin:
        (kind, count), times = json.loads(line)
        if (kind, count) not in steps:
            steps[kind, count] = make(kind, count, arguments), batches(arguments, count)
        step, data = steps[kind, count]
        given = [copy.copy(next(data)) for _ in range(times)]
        dist.barrier()
        cpu = time.process_time()
        start = time.perf_counter()
        losses = [step(batch) for batch in given]
        cpu = time.process_time() - cpu
        wall = time.perf_counter() - start
        dist.barrier()
        print("ANSWER " + json.dumps({"wall": wall, "cpu": cpu, "losses": losses}), flush=True)
    os._exit(0)


def measure(
    arguments: argparse.Namespace, count: int, cache: str
) -> dict[str, list[list[dict[str, Any]]]]:
    """kind -> blocks -> what each rank found.

    The processes are new ones: memory that others left decides a lot.
    """
    kinds = [*KINDS, *([DEEPSPEED] if arguments.deepspeed_python else [])]
    # ZBV wants two micro-batches per rank and two more.
    found: dict[str, list[list[dict[str, Any]]]] = {
        k: [] for k in kinds if k != "torch ZBV" or count >= 4
    }
    sets: dict[bool, Processes] = {}
    try:
        for block in range(arguments.blocks + 1):
            for kind, blocks in found.items():
                theirs = kind == DEEPSPEED
                if theirs not in sets:
                    python = arguments.deepspeed_python if theirs else sys.executable
                    os.environ["PIPELINE_BENCHMARK_DEEPSPEED"] = "yes" if theirs else ""
                    sets[theirs] = Processes.start(python, 2, cache, __file__)
                blocks.append(
                    sets[theirs].block([kind, count], arguments.steps if block else WARMUP)
                )
    finally:
        for processes in sets.values():
            processes.stop()
    return found


def summary(rows: dict[str, list[list[dict[str, Any]]]], count: int, steps: int) -> None:
    base = rows[KINDS[0]]
    base_walls = [b[0]["wall"] for b in base[1:]]
    base_cpu = min(b[0]["cpu"] for b in base[1:])
    base_losses = [x for b in base for x in b[0]["losses"]]
    print(
        f"\n| {count} micro-batches, ideal {2 * count / (count + 1):.2f} | speed-up, best | median "
        "| CPU | loss |"
    )
    print("| --- " * 5 + "|")
    for kind, blocks in rows.items():
        walls = [max(a["wall"] for a in block) for block in blocks[1:]]
        cpu = min(sum(a["cpu"] for a in b) if kind != KINDS[0] else b[0]["cpu"] for b in blocks[1:])
        losses = [
            max(a["losses"][i] for a in b) for b in blocks for i in range(len(b[0]["losses"]))
        ]
        off = max(abs(a - b) for a, b in zip(losses, base_losses, strict=True))
        best = min(base_walls) / min(walls)
        middle = median(base_walls) / median(walls)
        shown = f"{min(base_walls) / steps * 1e3:.0f} ms" if kind == KINDS[0] else f"{best:.2f}"
        print(
            f"| {kind} | {shown} | {middle:.2f} | {cpu / base_cpu:.2f}x | {off:.1e} |", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {"width": 512, "layers": 8, "batch": 512, "steps": 1, "blocks": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument(
        "--deepspeed-python", metavar="PYTHON", help="an interpreter that has deepspeed installed"
    )
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.deepspeed_child = os.environ.get("PIPELINE_BENCHMARK_DEEPSPEED", "")
    if arguments.child is not None:
        serve(arguments.child, arguments)
    count = sum(p.numel() for layer in build(arguments) for p in layer.parameters())
    print(
        f"torch {torch.__version__}, {count / 1e6:.1f}M parameters, {arguments.batch} x "
        f"{arguments.width} a micro-batch"
    )
    os.environ.update(MALLOC_MMAP_THRESHOLD_=str(1 << 25), MALLOC_TRIM_THRESHOLD_=str(1 << 30))
    with tempfile.TemporaryDirectory() as cache:
        for count in arguments.micro_batches:
            try:
                summary(measure(arguments, count, cache), count, arguments.steps)
            finally:
                for leftover in glob.glob("/dev/shm/deepspeed_allreduce_buffer_*"):
                    os.unlink(leftover)


if __name__ == "__main__":
    main()
