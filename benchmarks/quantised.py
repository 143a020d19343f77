"""Stage 3 over a slow link between hosts: plain, qwZ, qgZ and hpZ, alone and together, beside
FSDP2.

Hosts are `ds_testing_hosts.lab.Lab`'s (root and Linux): namespaces of one machine, the link between
them shaped by tc. All train one GPT (examples/gpt/model.py) with AdamW on the same data and seeds,
one thread a rank, driven in interleaved blocks of a few steps; first with the link as fast as it
is, then shaped. "kept": weights stay gathered from forward to backward (`max_reuse_distance`);
without the word they are gathered twice, as FSDP2 does.

    python benchmarks/quantised.py [--hosts 2] [--ranks 2] [--rate 1e9] [--bf16] [--only NAME ...]

MB: sent and received by the first host's interface, with headers: of a step, and of a forward
without gradients, which is one gather of the weights. What a step sends beside its two gathers are
gradients.
"""

from __future__ import annotations

import argparse
import os
from statistics import mean, median
from typing import Any

import torch
from hosts import WARMUP, Job, serve
from torch import Tensor
from zero_step import Step, build, fsdp2, settings, with_engine

QWZ = {"zero_quantized_weights": True}
QGZ = {"zero_quantized_gradients": True}
AGAIN = {"max_reuse_distance": 0}
KEPT = {"max_reuse_distance": 1_000_000_000}
STAGE_3: dict[str, dict[str, Any]] = {
    "stage 3": AGAIN,
    "qwZ": {**AGAIN, **QWZ},
    "qgZ": {**AGAIN, **QGZ},
    "hpZ": {**AGAIN, "hpz": True},
    "qwZ + qgZ": {**AGAIN, **QWZ, **QGZ},
    "qwZ + qgZ + hpZ": {**AGAIN, **QWZ, **QGZ, "hpz": True},
    "stage 3, kept": KEPT,
    "qwZ + qgZ, kept": {**KEPT, **QWZ, **QGZ},
}
NAMES = ("FSDP2", *STAGE_3)
FORWARD = ("stage 3", "qwZ")  # of which a forward alone is measured too
engines: dict[str, Any] = {}


# -- one rank --------------------------------------------------------------------------------------


def make(name: str, arguments: argparse.Namespace) -> Step:
    if name.endswith(", forward"):
        engine = engines[name.removesuffix(", forward")]

        @torch.no_grad()
        def forward(x: Tensor, y: Tensor) -> Tensor:
            loss: Tensor = engine(x, y)
            return loss

        return forward
    model = build(arguments.width, arguments.layers, arguments.context)
    if name == "FSDP2":
        return fsdp2(model.bfloat16() if arguments.bf16 else model, arguments)
    import ds_core

    zero = dict(STAGE_3[name])
    if zero.pop("hpz", False):
        zero["zero_hpz_partition_size"] = arguments.ranks
    config = {**settings(3, arguments), "bf16": {"enabled": arguments.bf16}}
    config["zero_optimization"] |= zero
    engines[name] = ds_core.initialize(model=model, config=config)[0]
    return with_engine(engines[name])


# -- the one who asks ------------------------------------------------------------------------------

Found = dict[str, list[dict[str, Any]]]


def measure(arguments: argparse.Namespace) -> tuple[Found, Found]:
    """Per contestant its blocks with the link as it is, and shaped."""
    from ds_testing_hosts.lab import Lab

    names = [n for n in NAMES if not arguments.only or n in arguments.only]
    names += [f"{n}, forward" for n in FORWARD if n in names]
    free: Found = {name: [] for name in names}
    shaped: Found = {name: [] for name in names}
    with Lab(*(f"host{i}" for i in range(arguments.hosts))) as lab:
        job = Job(lab, arguments, 29500, os.path.abspath(__file__))
        for name in names:
            job.block(name, WARMUP)
        for _ in range(arguments.blocks):
            for name in names:
                free[name].append(job.block(name, arguments.steps))
        for host in lab.hosts:
            host.link(rate=arguments.rate)
        for _ in range(arguments.blocks):
            for name in names:
                shaped[name].append(job.block(name, arguments.steps))
    return free, shaped


def seconds(blocks: list[dict[str, Any]]) -> float:
    return median(max(a["wall"] for a in block["ranks"]) / block["steps"] for block in blocks)


def best(blocks: list[dict[str, Any]]) -> float:
    return min(max(a["wall"] for a in block["ranks"]) / block["steps"] for block in blocks)


def megabytes(blocks: list[dict[str, Any]]) -> float:
    return median((block["sent"] + block["received"]) / block["steps"] for block in blocks) / 1e6


def summary(free: Found, shaped: Found, arguments: argparse.Namespace) -> None:
    base = "stage 3" if "stage 3" in free else next(iter(free))
    print(
        f"| | MB of a step | to {base} | {arguments.rate / 1e9:g} Gbit/s: ms, best | median | "
        f"{base}'s / its "
        f"| FSDP2's / its | unshaped: ms, best | median | {base}'s / its | CPU, ms | last loss |\n"
        + "| --- " * 12
        + "|"
    )
    for name, blocks in shaped.items():
        if name.endswith(", forward"):
            continue
        own = free[name]
        cpu = median(mean(a["cpu"] for a in b["ranks"]) / b["steps"] for b in own)
        loss = mean(a["losses"][-1] for a in blocks[-1]["ranks"])
        times = f"{best(blocks) * 1e3:.0f} | {seconds(blocks) * 1e3:.0f}"
        fsdp = f"{seconds(shaped['FSDP2']) / seconds(blocks):.2f}x" if "FSDP2" in shaped else ""
        print(
            f"| {name} | {megabytes(blocks):.1f} | "
            f"{megabytes(blocks) / megabytes(shaped[base]):.3f} "
            f"| {times} | {seconds(shaped[base]) / seconds(blocks):.2f}x "
            f"| {fsdp} | {best(own) * 1e3:.0f} | {seconds(own) * 1e3:.0f} | "
            f"{seconds(free[base]) / seconds(own):.2f}x "
            f"| {cpu * 1e3:.0f} | {loss:.4f} |"
        )
    if not {"stage 3", "qwZ", "qgZ", "hpZ"} <= shaped.keys():
        return
    step = {name: megabytes(shaped[name]) for name in shaped}
    gather = step["stage 3, forward"]
    small = step["qwZ, forward"]
    gradients = step["stage 3"] - 2 * gather
    print(f"\none gather: {gather:.1f} MB plain, {small:.1f} MB by qwZ: {small / gather:.3f}x")
    print(
        f"gradients: {gradients:.1f} MB plain, {step['qgZ'] - 2 * gather:.1f} MB by qgZ", end=": "
    )
    print(f"{(step['qgZ'] - 2 * gather) / gradients:.3f}x")
    print(
        f"gathers of backward: {gather:.1f} MB plain, {step['hpZ'] - gather - gradients:.2f} MB "
        "by hpZ"
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
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--rate", type=float, default=1e9, help="of each host's link, in bit/s")
    parser.add_argument("--clip", type=float, default=0.0, help="gradient clipping; 0: none")
    parser.set_defaults(overlap=False)
    parser.add_argument("--bf16", action="store_true", help="train in bf16; default fp32")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=NAMES, help="of the contestants"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        serve(arguments, make)
    count = sum(
        p.numel() for p in build(arguments.width, arguments.layers, arguments.context).parameters()
    )
    shown = f"{arguments.hosts} hosts x {arguments.ranks} ranks, {arguments.rate / 1e9:g} Gbit/s"
    shown += f", {count / 1e6:.1f}M parameters in {'bf16' if arguments.bf16 else 'fp32'}"
    print(
        f"torch {torch.__version__}, {shown}, {arguments.batch} x {arguments.context} tokens a "
        "rank",
        flush=True,
    )
    summary(*measure(arguments), arguments)


if __name__ == "__main__":
    main()
