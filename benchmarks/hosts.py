"""A training step on several hosts with a slow link between them: torch DDP, FSDP2, ds_core flat
and in two levels.

Hosts are `ds_testing_hosts.lab.Lab`'s (root and Linux), 2 with 2 ranks each unless told otherwise. All
contestants train one GPT (examples/gpt/model.py) in fp32 with AdamW on the same data and seeds, one
thread each, driven in interleaved blocks of a few steps. Flat: ds_core's collectives over gloo as
if every rank had a host of its own.

    python benchmarks/hosts.py [--hosts 2] [--ranks 2] [--rate 1e9] [--latency 1e-3] [--less 2]
    [--overlap]
        [--only NAME ...]

"less": the same engines and bytes with sequences of `--less` tokens, against DDP's with as many.
Where these rows are better than the others, arithmetic keeps the link waiting.

ms: best and median block. link: bytes sent and received by the first host's interface per step,
    with headers, against the ideal: every byte of gradients crosses once per host in each
    direction, 2 P (H - 1) for H hosts. filled: the larger direction's bytes against what the rate
    lets through in the time of the steps. cores busy: all cores of this machine, with whatever else
    ran. queued: how long threads of a rank were ready to run and had no core, per step; it should
    be small beside the step, else the machine is the limit and not the link. CPU: of a rank's
    process per step.
loss: the largest difference of a rank-mean loss to DDP's, over all steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from zero_step import Step, build, ddp, ds_core_stage, fsdp2

ROOT = Path(__file__).parent.parent
WARMUP = 2
STAGES = tuple(f"ds_core stage {s}" for s in range(4))
FLAT = ", flat"
LESS = ", less"
WHOLE = ("DDP", "FSDP2", *STAGES)
NAMES = (*WHOLE, *(f"{name}{LESS}" for name in WHOLE), *(f"{name}{FLAT}" for name in STAGES[:3]))


# -- one rank --------------------------------------------------------------------------------------


def make(name: str, arguments: argparse.Namespace) -> Step:
    model = build(arguments.width, arguments.layers, arguments.context)
    if name in ("DDP", "FSDP2"):
        return {"DDP": ddp, "FSDP2": fsdp2}[name](model, arguments)
    return ds_core_stage(model, arguments, int(name.removesuffix(FLAT)[-1]))


def go_flat() -> None:
    """Let the collectives of this process take every rank for a host of its own."""
    from ds_comm_gloo import GlooCollectives
    from ds_ops_cpu import shared

    shared.collectives = lambda group, messages: GlooCollectives(
        group, messages, key=lambda: str(dist.get_rank())
    )


def queued() -> float:
    """Seconds that the threads of this process have waited for a core while they could run."""
    waits = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            waits.append(int((task / "schedstat").read_text().split()[1]))
    return sum(waits) / 1e9


def serve(
    arguments: argparse.Namespace, make: Callable[[str, argparse.Namespace], Step] = make
) -> None:
    """Read names of contestants, answer with what a block of each took."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    steps: dict[str, Step] = {}
    taken: dict[str, int] = {}
    for line in sys.stdin:
        name, count = json.loads(line)
        # Rows with less arithmetic train the same engine, so that nothing else differs, its memory
        # neither.
        length = arguments.less if name.endswith(LESS) else arguments.context
        name = name.removesuffix(LESS)
        if name.endswith(FLAT):
            go_flat()
        if name not in steps:
            steps[name] = make(name, arguments)
            taken[name] = 0
        losses = []
        dist.barrier()
        print("READY", flush=True)
        sys.stdin.readline()  # who asks has read the interface's counters
        waited = queued()
        cpu = time.process_time()
        start = time.perf_counter()
        for _ in range(count):
            random = torch.Generator().manual_seed(taken[name] * dist.get_world_size() + rank)
            tokens = torch.randint(0, 256, (arguments.batch, length + 1), generator=random)
            losses.append(steps[name](tokens[:, :-1], tokens[:, 1:]).detach())
            taken[name] += 1
        found = {"wall": time.perf_counter() - start, "cpu": time.process_time() - cpu}
        found["queued"] = queued() - waited
        print(json.dumps({**found, "losses": torch.stack(losses).tolist()}), flush=True)
    os._exit(0)  # engines and groups of several libraries, in any order of destruction


# -- the one who asks ------------------------------------------------------------------------------


def core_ticks() -> tuple[int, int]:
    """Ticks of all cores since the machine started: those without work, and all."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


class Job:
    """The ranks of one job, on the hosts of a lab; each runs `script` with this process's
    arguments.
    """

    def __init__(
        self, lab: Any, arguments: argparse.Namespace, port: int, script: str = __file__
    ) -> None:
        self.first = lab.hosts[0]
        self.ranks = []
        for number, host in enumerate(lab.hosts):
            for local in range(arguments.ranks):
                env = {
                    **os.environ,
                    "MASTER_ADDR": self.first.address,
                    "MASTER_PORT": str(port),
                    "WORLD_SIZE": str(arguments.hosts * arguments.ranks),
                    "RANK": str(number * arguments.ranks + local),
                    "LOCAL_RANK": str(local),
                    "OMP_NUM_THREADS": "1",
                    "DS_ACCELERATOR": "cpu",
                }
                command = [sys.executable, script, *sys.argv[1:], "--child"]
                self.ranks.append(
                    host.popen(command, env=env, cwd=ROOT, stdin=subprocess.PIPE, stderr=None)
                )

    def block(self, name: str, steps: int) -> dict[str, Any]:
        """Let every rank do `steps` steps of contestant `name`."""
        self._tell(json.dumps([name, steps]))
        for rank in self.ranks:
            assert self._line(name, rank) == "READY"
        before = self.first.sent, self.first.received
        idle, ticks = core_ticks()
        self._tell("")
        answers = [json.loads(self._line(name, rank)) for rank in self.ranks]
        sent = self.first.sent - before[0]
        received = self.first.received - before[1]
        now_idle, now_ticks = core_ticks()
        busy = 1.0 - (now_idle - idle) / max(1, now_ticks - ticks)
        return {"ranks": answers, "steps": steps, "sent": sent, "received": received, "busy": busy}

    def _tell(self, line: str) -> None:
        for rank in self.ranks:
            rank.stdin.write(line + "\n")
            rank.stdin.flush()

    def _line(self, name: str, rank: subprocess.Popen[str]) -> str:
        assert rank.stdout is not None
        for line in rank.stdout:
            if line.startswith(("READY", "{")):
                return line.strip()
        raise SystemExit(f"{name}: a rank ended with status {rank.wait()}")


def measure(arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Per contestant its blocks; the first is the warm-up."""
    from ds_testing_hosts.lab import Lab

    names = [
        n
        for n in NAMES
        if n in (arguments.only or NAMES) and (arguments.less or not n.endswith(LESS))
    ]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    jobs: dict[bool, Job] = {}
    with Lab(*(f"host{i}" for i in range(arguments.hosts))) as lab:
        # between two hosts the way is one's alone, among more half of each's
        for number, host in enumerate(lab.hosts):
            share = (number > 0) if arguments.hosts == 2 else 0.5
            host.link(rate=arguments.rate, latency=arguments.latency * share)
        for block in range(arguments.blocks + 1):
            for name in names:
                flat = name.endswith(FLAT)
                if flat not in jobs:
                    jobs[flat] = Job(lab, arguments, 29500 + flat)
                found[name].append(jobs[flat].block(name, arguments.steps if block else WARMUP))
    return found


def summary(
    found: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace, count: int
) -> None:
    def losses(name: str) -> list[float]:
        """Mean over ranks, step by step."""
        return [
            mean(ls)
            for block in found[name]
            for ls in zip(*(a["losses"] for a in block["ranks"]), strict=True)
        ]

    ideal = 2 * 4 * count * (arguments.hosts - 1)

    def seconds(name: str) -> list[float]:
        """Of a step of the slowest rank, block by block; without the warm-up."""
        return [
            max(a["wall"] for a in block["ranks"]) / block["steps"] for block in found[name][1:]
        ]

    print(
        "| | ms, best | median | DDP's / its | MB, link | to 2 P | filled | cores busy | queued | "
        "CPU | loss off |\n" + "| --- " * 11 + "|"
    )
    for name, blocks in found.items():
        wanted = f"DDP{LESS}" if name.endswith(LESS) else "DDP"
        base = wanted if wanted in found else next(iter(found))
        times = seconds(name)
        widest = median(
            max(block["sent"], block["received"]) / block["steps"] for block in blocks[1:]
        )
        ratio = median(seconds(base)) / median(times)
        filled = widest * 8 / arguments.rate / median(times)
        wait = median(
            mean(a["queued"] for a in block["ranks"]) / block["steps"] for block in blocks[1:]
        )
        busy = median(block["busy"] for block in blocks[1:])
        cpu = median(
            mean(a["cpu"] for a in block["ranks"]) / block["steps"] for block in blocks[1:]
        )
        link = median((block["sent"] + block["received"]) / block["steps"] for block in blocks[1:])
        off = max(abs(a - b) for a, b in zip(losses(name), losses(base), strict=True))
        print(
            f"| {name} | {min(times) * 1e3:.0f} | {median(times) * 1e3:.0f} | {ratio:.2f}x "
            f"| {link / 1e6:.1f} | {link / ideal:.3f} | {filled:.2f} | {busy:.2f} "
            f"| {wait * 1e3:.0f} ms | {cpu * 1e3:.0f} ms | {off:.1e} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {
        "hosts": 2,
        "ranks": 2,
        "width": 512,
        "layers": 7,
        "context": 32,
        "batch": 1,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--rate", type=float, default=1e9, help="of each host's link, in bit/s")
    parser.add_argument(
        "--latency", type=float, default=1e-3, help="between two hosts, one way, in seconds"
    )
    parser.add_argument(
        "--less",
        type=int,
        default=2,
        help="tokens of the rows with less arithmetic; 0: no such rows",
    )
    parser.add_argument("--clip", type=float, default=0.0, help="gradient clipping; 0: none")
    parser.add_argument(
        "--overlap", action="store_true", help="set overlap_comm, which is off in stages 1 and 2"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=NAMES, help="of the contestants"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        serve(arguments)
    count = sum(
        p.numel() for p in build(arguments.width, arguments.layers, arguments.context).parameters()
    )
    shown = f"{arguments.hosts} hosts x {arguments.ranks} ranks, {arguments.rate / 1e9:g} Gbit/s"
    shown += f", {arguments.latency * 1e3:g} ms, {count / 1e6:.1f}M parameters"
    print(
        f"torch {torch.__version__}, {shown}, {arguments.batch} x {arguments.context} tokens a "
        "rank",
        flush=True,
    )
    summary(measure(arguments), arguments, count)


if __name__ == "__main__":
    main()
