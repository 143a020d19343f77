"""A training step of every ZeRO stage beside what else there is: DDP, FSDP2,
ZeroRedundancyOptimizer, DeepSpeed.

All train one GPT of 30 M parameters (examples/gpt/model.py) in fp32 with AdamW on the same data and
seeds, 2 ranks over gloo, one thread each. FSDP2 and stage 3 run both ways: weights gathered for
forward and again for backward (FSDP2's default), or kept from forward to backward (ds_core's).
Each contestant is driven in blocks of a few steps, which are interleaved, so that a noisy machine
hits all alike. DeepSpeed, which patches torch, has processes of its own, which run in turn with the
others.

    python benchmarks/zero_step.py [--clip 1.0] [--deepspeed-python PYTHON] [--only NAME ...]

samples/s: of all ranks together; best and median block. CPU: time of a rank's process (its threads
too) per step, median over blocks, mean over ranks. sent: elements per parameter, rank and step,
from the byte counter of the loopback interface, so with headers and with whatever else ran over it
(the least of all blocks counts). loss: the largest difference of a rank-mean loss to DDP's, over
all steps.
"""

from __future__ import annotations

import argparse
import glob
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ROOT = Path(__file__).parent.parent
LR = 1e-3
DECAY = 0.01
WARMUP = 2
KEPT = "FSDP2, weights kept"
AGAIN = "ds_core stage 3, weights gathered twice"
ONE_SET = (
    "DDP",
    "FSDP2",
    KEPT,
    "ZeroRedundancyOptimizer",
    *(f"ds_core stage {s}" for s in range(4)),
    AGAIN,
)
DEEPSPEED = tuple(f"DeepSpeed stage {s}" for s in (1, 2, 3))

Step = Callable[[Tensor, Tensor], Tensor]


def build(width: int, layers: int, context: int) -> nn.Module:
    spec = importlib.util.spec_from_file_location("gpt", ROOT / "examples/gpt/model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    model: nn.Module = module.GPT(context=context, width=width, layers=layers, heads=8)
    return model


# -- contestants: each gives a function (x, y) -> loss that does one whole step --------------------


def with_torch(wrapped: nn.Module, optimizer: torch.optim.Optimizer, clip: float) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = wrapped(x, y)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(wrapped.parameters(), clip)
        optimizer.step()
        return loss

    return step


def ddp(model: nn.Module, arguments: argparse.Namespace) -> Step:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=LR, weight_decay=DECAY, fused=True)
    return with_torch(wrapped, optimizer, arguments.clip)


def zero_redundancy(model: nn.Module, arguments: argparse.Namespace) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    kind = torch.optim.AdamW
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), kind, lr=LR, weight_decay=DECAY, fused=True
    )
    return with_torch(wrapped, optimizer, arguments.clip)


def fsdp2(model: nn.Module, arguments: argparse.Namespace, reshard: bool = True) -> Step:
    """reshard: free gathered weights after forward, and gather them again for backward."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, fused=True)
    return with_torch(model, optimizer, arguments.clip)


def settings(stage: int, arguments: argparse.Namespace, **optimizer: Any) -> dict[str, Any]:
    overlap = {"overlap_comm": True} if arguments.overlap else {}
    without = {"plugins": {"disable": ["dscore-ops-cpu"]}} if arguments.gloo else {}
    return {
        **without,
        "train_micro_batch_size_per_gpu": arguments.batch,
        "gradient_clipping": arguments.clip,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY, **optimizer}},
        **({"zero_optimization": {"stage": stage, **overlap}} if stage else {}),
    }


def with_engine(engine: Any) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = engine(x, y)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def ds_core_stage(model: nn.Module, arguments: argparse.Namespace, stage: int, **zero: Any) -> Step:
    import ds_core

    config = settings(stage, arguments)
    config.get("zero_optimization", {}).update(zero)
    return with_engine(ds_core.initialize(model=model, config=config)[0])


def deepspeed_stage(model: nn.Module, arguments: argparse.Namespace, stage: int) -> Step:
    import deepspeed  # type: ignore[import-not-found]

    config = settings(stage, arguments, torch_adam=True, fused=True)
    return with_engine(
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    )


def make(name: str, arguments: argparse.Namespace) -> Step:
    model = build(arguments.width, arguments.layers, arguments.context)
    whole = {"DDP": ddp, "FSDP2": fsdp2, "ZeroRedundancyOptimizer": zero_redundancy}
    if name in whole:
        return whole[name](model, arguments)
    if name == KEPT:
        return fsdp2(model, arguments, reshard=False)
    if name == AGAIN:
        return ds_core_stage(model, arguments, 3, max_reuse_distance=0)
    maker = ds_core_stage if name.startswith("ds_core") else deepspeed_stage
    return maker(model, arguments, int(name[-1]))


# -- one rank: reads names of contestants, answers with what a block of each took ------------------


def loopback() -> int:
    """Bytes sent over the loopback interface since the machine started; 0 where nobody counts."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return 0
    return next(
        (int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:")), 0
    )


def serve(rank: int, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps: dict[str, Step] = {}
    taken: dict[str, int] = {}
    for line in sys.stdin:
        name, count = json.loads(line)
        if name not in steps:
            steps[name] = make(name, arguments)
            taken[name] = 0
        losses = []
        dist.barrier()
        sent = loopback()
        cpu = time.process_time()
        start = time.perf_counter()
        for _ in range(count):
            random = torch.Generator().manual_seed(taken[name] * dist.get_world_size() + rank)
            tokens = torch.randint(
                0, 256, (arguments.batch, arguments.context + 1), generator=random
            )
            losses.append(steps[name](tokens[:, :-1], tokens[:, 1:]).detach())
            taken[name] += 1
        cpu = time.process_time() - cpu
        dist.barrier()
        found = {"wall": time.perf_counter() - start, "cpu": cpu, "sent": loopback() - sent}
        print("ANSWER " + json.dumps({**found, "losses": torch.stack(losses).tolist()}), flush=True)
    os._exit(0)  # engines and groups of several libraries, in any order of destruction


# -- the one who asks ------------------------------------------------------------------------------


@dataclass
class Processes:
    """The ranks of one interpreter."""

    ranks: list[subprocess.Popen[str]]
    errors: list[IO[str]]

    @classmethod
    def start(cls, python: str, nproc: int, cache: str, script: str = __file__) -> Processes:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = {
            **os.environ,
            "WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "TORCH_EXTENSIONS_DIR": cache,
        }
        command = [python, script, *sys.argv[1:], "--child"]
        pipe = subprocess.PIPE
        errors = [tempfile.TemporaryFile("w+") for _ in range(nproc)]  # noqa: SIM115
        ranks = [
            subprocess.Popen(
                [*command, str(rank)],
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=pipe,
                stdout=pipe,
                stderr=errors[rank],
                text=True,
            )
            for rank in range(nproc)
        ]
        return cls(ranks, errors)

    def block(self, name: str, steps: int) -> list[dict[str, Any]]:
        """Let every rank do `steps` steps of contestant `name`; their answers."""
        for process in self.ranks:
            assert process.stdin is not None
            process.stdin.write(json.dumps([name, steps]) + "\n")
            process.stdin.flush()
        return [self._answer(name, rank) for rank in range(len(self.ranks))]

    def _answer(self, name: str, rank: int) -> dict[str, Any]:
        process = self.ranks[rank]
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ANSWER "):
                answer: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
                return answer
        self.errors[rank].seek(0)
        raise SystemExit(
            f"{name}: rank {rank} ended with status "
            f"{process.wait()}\n{self.errors[rank].read()[-3000:]}"
        )

    def stop(self) -> None:
        for process in self.ranks:
            process.kill()
            process.wait()


def measure(arguments: argparse.Namespace, cache: str) -> dict[str, list[list[dict[str, Any]]]]:
    """Per contestant and block the answers of all ranks; the first block is the warm-up."""
    names = [n for n in (*ONE_SET, *DEEPSPEED) if not arguments.only or n in arguments.only]
    if arguments.deepspeed_python is None:
        names = [n for n in names if n not in DEEPSPEED]
    sets: dict[str, Processes] = {}
    found: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in names}
    try:
        for block in range(arguments.blocks + 1):
            for name in names:
                key = name if name in DEEPSPEED else ""
                if key not in sets:
                    python = arguments.deepspeed_python if key else sys.executable
                    sets[key] = Processes.start(python, arguments.nproc, cache)
                found[name].append(sets[key].block(name, arguments.steps if block else WARMUP))
    finally:
        for processes in sets.values():
            processes.stop()
    return found


def summary(
    found: dict[str, list[list[dict[str, Any]]]], arguments: argparse.Namespace, count: int
) -> None:
    def losses(name: str) -> list[float]:
        """Mean over ranks, step by step."""
        return [
            mean(ls)
            for block in found[name]
            for ls in zip(*(a["losses"] for a in block), strict=True)
        ]

    samples = arguments.batch * arguments.nproc * arguments.steps
    base = "DDP" if "DDP" in found else next(iter(found))
    base_cpu = 0.0
    print(
        "| | samples/s, best | median | CPU per step | to DDP | sent | loss - DDP's |\n"
        + "| --- " * 7
        + "|"
    )
    for name, blocks in found.items():
        walls = [max(a["wall"] for a in block) for block in blocks[1:]]
        cpu = median(mean(a["cpu"] for a in block) for block in blocks[1:]) / arguments.steps
        base_cpu = base_cpu or cpu
        sent = (
            min(a["sent"] for block in blocks[1:] for a in block)
            / 4
            / arguments.steps
            / arguments.nproc
            / count
        )
        off = max(abs(a - b) for a, b in zip(losses(name), losses(base), strict=True))
        print(
            f"| {name} | {samples / min(walls):.1f} | {samples / median(walls):.1f} | "
            f"{cpu * 1e3:.0f} ms "
            f"| {cpu / base_cpu:.2f}x | {sent:.2f} P | {off:.1e} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {
        "nproc": 2,
        "width": 512,
        "layers": 9,
        "context": 64,
        "batch": 2,
        "steps": 3,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--clip", type=float, default=0.0, help="gradient clipping; 0: none")
    parser.add_argument(
        "--overlap", action="store_true", help="set overlap_comm, which is off in stages 1 and 2"
    )
    parser.add_argument(
        "--gloo",
        action="store_true",
        help="ds_core without dscore-ops-cpu: all bytes go over gloo, as those of the others do",
    )
    parser.add_argument(
        "--deepspeed-python", metavar="PYTHON", help="an interpreter that has deepspeed installed"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        choices=(*ONE_SET, *DEEPSPEED),
        help="of the contestants",
    )
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        serve(arguments.child, arguments)
    count = sum(
        p.numel() for p in build(arguments.width, arguments.layers, arguments.context).parameters()
    )
    shown = (
        f"{count / 1e6:.1f}M parameters, {arguments.batch} x {arguments.context} tokens, clip "
        f"{arguments.clip:g}"
    )
    print(f"torch {torch.__version__}, {arguments.nproc} ranks over gloo, {shown}", flush=True)
    with tempfile.TemporaryDirectory() as cache:
        try:
            found = measure(arguments, cache)
        finally:
            # 66 MiB a rank, never unlinked
            for leftover in glob.glob("/dev/shm/deepspeed_allreduce_buffer_*"):
                os.unlink(leftover)
    summary(found, arguments, count)


if __name__ == "__main__":
    main()
