"""Forward and backward of one mixture-of-experts layer, as a fraction of the speed of a dense layer
of the same FLOPs.

fp32 on 2 cores: 1 rank of 2 threads, and 2 ranks of 1 thread with half of the experts each (ep 2),
over gloo. Tokens are per rank. The dense layer is what one could have at best: the same matrix
products in one piece, no gate, nothing sent. Beside it: this layer; tokens sorted by expert in
plain torch, with the experts in a loop; DeepSpeed's layer, without dropping and dropping. None of
the others drops a token. Contestants run in interleaved blocks of a few steps, so that a noisy
machine hits all alike; DeepSpeed has processes of its own, which run in turn with the others.

    python benchmarks/moe.py [--experts 8 64] [--k 1 2] [--ranks 1 2] [--deepspeed-python PYTHON]

fraction: the dense layer's time over the contestant's, of the best steps of both, and of the
    medians; a step takes as long as on the slower rank. off: the largest difference of outputs to
    plain torch's, where both compute the same.
kept: bytes per token that forward keeps for backward.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from zero_step import Processes

DENSE = "dense"
OURS = "ds_moe"
SORTED = "torch, sorted"
THEIRS = "DeepSpeed"
DROPPING = "DeepSpeed, dropping"
Layer = Callable[[Tensor], tuple[Tensor, Any]]
"""tokens -> (output, auxiliary loss or None)"""


def ffn(hidden: int, inner: int) -> nn.Module:
    return nn.Sequential(nn.Linear(hidden, inner), nn.GELU(), nn.Linear(inner, hidden))


def gate_weight(arguments: argparse.Namespace, experts: int) -> Tensor:
    """Orthogonal rows: each expert's share is 1 / experts but for chance."""
    random = torch.randn(arguments.hidden, experts, generator=torch.Generator().manual_seed(1))
    return torch.linalg.qr(random)[0].t()


class Sorted(nn.Module):
    """Tokens sorted by expert, an all-to-all each way, the experts one after another."""

    def __init__(self, arguments: argparse.Namespace, experts: int, k: int, world: int) -> None:
        super().__init__()
        self.wg = nn.Linear(arguments.hidden, experts, bias=False)
        self.k = k
        self.num = experts
        self.world = world
        torch.manual_seed(0)
        one = ffn(arguments.hidden, arguments.inner)
        self.experts = nn.ModuleList(
            ffn(arguments.hidden, arguments.inner) for _ in range(experts // world)
        )
        for expert in self.experts:
            expert.load_state_dict(one.state_dict())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gates = self.wg(x).softmax(1)
        weights, chosen = gates.topk(self.k, 1)
        if self.k > 1:
            weights = weights / weights.sum(1, keepdim=True)
        counts = chosen.view(-1).bincount(minlength=self.num)
        order = chosen.view(-1).argsort(stable=True)
        rows = order // self.k
        out = torch.zeros_like(x)
        done = self.run(x[rows], counts)
        aux = self.num * (gates.mean(0) * counts / counts.sum()).sum()
        return out.index_add(0, rows, done * weights.view(-1)[order, None]), aux

    def run(self, x: Tensor, counts: Tensor) -> Tensor:
        if self.world == 1:
            return self.each(x, counts.tolist())
        from torch.distributed.nn.functional import all_to_all_single

        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        theirs = theirs.view(self.world, -1)
        given = counts.view(self.world, -1).sum(1).tolist()
        taken = theirs.sum(1).tolist()
        rows = all_to_all_single(x.new_empty(sum(taken), x.shape[1]), x, taken, given)
        here = (
            torch.arange(theirs.shape[1]).repeat(self.world).repeat_interleave(theirs.reshape(-1))
        )
        order = here.argsort(stable=True)
        done = self.each(rows[order], theirs.sum(0).tolist())
        return all_to_all_single(torch.empty_like(x), done[order.argsort()], given, taken)

    def each(self, x: Tensor, sizes: list[int]) -> Tensor:
        return torch.cat([e(part) for e, part in zip(self.experts, x.split(sizes), strict=True)])


def ours(arguments: argparse.Namespace, experts: int, k: int, world: int) -> nn.Module:
    from ds_moe import MoE

    import ds_core

    torch.manual_seed(0)
    options = {"drop_tokens": False, "top2_2nd_expert_sampling": False}
    layer = MoE(
        arguments.hidden,
        ffn(arguments.hidden, arguments.inner),
        experts,
        ep_size=world,
        k=k,
        **options,
    )
    engine, *_ = ds_core.initialize(model=layer, config={"train_micro_batch_size_per_gpu": 1})
    engine.no_sync().__enter__()  # gradients of the gate are not averaged here, by nobody
    return layer


def theirs(
    arguments: argparse.Namespace, experts: int, k: int, world: int, drop: bool
) -> nn.Module:
    import deepspeed  # type: ignore[import-not-found]
    from deepspeed.moe.layer import MoE  # type: ignore[import-not-found]

    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    options = {"drop_tokens": drop, "top2_2nd_expert_sampling": False}
    layer: nn.Module = MoE(
        arguments.hidden,
        ffn(arguments.hidden, arguments.inner),
        experts,
        ep_size=world,
        k=k,
        **options,
    )
    layer.set_deepspeed_parallelism()  # type: ignore[operator]
    return layer


def make(
    kind: str, experts: int, k: int, arguments: argparse.Namespace
) -> tuple[Layer, list[nn.Parameter]]:
    world = dist.get_world_size() if dist.is_initialized() else 1
    if kind == DENSE:
        dense = ffn(arguments.hidden, arguments.inner * k)
        return lambda x: (dense(x), None), list(dense.parameters())
    if kind == SORTED:
        layer: nn.Module = Sorted(arguments, experts, k, world)
    elif kind == OURS:
        layer = ours(arguments, experts, k, world)
    else:
        layer = theirs(arguments, experts, k, world, kind == DROPPING)
    for name, param in layer.named_parameters():
        if name.endswith("wg.weight"):
            param.data.copy_(gate_weight(arguments, experts))
    return lambda x: layer(x)[:2], list(layer.parameters())


# -- one rank, and the one who asks ----------------------------------------------------------------


def kept(layer: Layer, weights: list[nn.Parameter], x: Tensor) -> float:
    """Bytes per token that forward keeps; tensors that share memory count once."""
    seen = {p.untyped_storage().data_ptr() for p in weights}
    total = 0

    def note(t: Tensor) -> Tensor:
        nonlocal total
        place = t.untyped_storage().data_ptr()
        if place not in seen:
            seen.add(place)
            total += t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        layer(x)
    return total / len(x)


def serve(rank: int, arguments: argparse.Namespace) -> None:
    world = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(max(2 // world, 1))
    if world > 1 and os.environ.get("MOE_BENCHMARK_DEEPSPEED") != "yes":
        dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(arguments.tokens, arguments.hidden, generator=generator).requires_grad_()
    grad = torch.randn(arguments.tokens, arguments.hidden, generator=generator)
    made: dict[tuple[str, int, int], tuple[Layer, list[nn.Parameter]]] = {}
    for line in sys.stdin:
        (kind, experts, k), steps = json.loads(line)
        answer: dict[str, Any] = {"walls": []}
        if (kind, experts, k) not in made:
            made[kind, experts, k] = make(kind, experts, k, arguments)
            with torch.no_grad():
                answer["output"] = made[kind, experts, k][0](x)[0][::97, ::31].flatten().tolist()
            answer["kept"] = kept(*made[kind, experts, k], x)
        layer, weights = made[kind, experts, k]
        for _ in range(steps):
            for t in (x, *weights):
                t.grad = None
            if world > 1:
                dist.barrier()
            start = time.perf_counter()
            out, aux = layer(x)
            roots = [out] if aux is None else [out, aux]
            torch.autograd.backward(
                roots, [grad] if aux is None else [grad, torch.full_like(aux, 0.01)]
            )
            answer["walls"].append(time.perf_counter() - start)
        print("ANSWER " + json.dumps(answer), flush=True)
    os._exit(0)


def measure(
    arguments: argparse.Namespace, world: int, cache: str
) -> dict[tuple[str, int, int], list[Any]]:
    kinds = [DENSE, OURS, SORTED, *([THEIRS, DROPPING] if arguments.deepspeed_python else [])]
    chosen = [
        (kind, experts, k) for experts in arguments.experts for k in arguments.k for kind in kinds
    ]
    found: dict[tuple[str, int, int], list[Any]] = {c: [] for c in chosen}
    sets: dict[bool, Processes] = {}
    try:
        for block in range(arguments.blocks + 1):
            for kind, experts, k in chosen:
                other = kind in (THEIRS, DROPPING)
                if other not in sets:
                    os.environ["MOE_BENCHMARK_DEEPSPEED"] = "yes" if other else ""
                    python = arguments.deepspeed_python if other else sys.executable
                    sets[other] = Processes.start(python, world, cache, __file__)
                steps = arguments.steps if block else 2
                found[kind, experts, k].append(sets[other].block([kind, experts, k], steps))  # type: ignore[arg-type]
    finally:
        for processes in sets.values():
            processes.stop()
    return found


def summary(
    found: dict[tuple[str, int, int], list[Any]], arguments: argparse.Namespace, world: int
) -> None:
    for experts in arguments.experts:
        for k in arguments.k:
            rows = {
                kind: blocks for (kind, e, n), blocks in found.items() if (e, n) == (experts, k)
            }
            walls = {
                kind: [
                    max(times)
                    for block in blocks[1:]
                    for times in zip(*(a["walls"] for a in block), strict=True)
                ]
                for kind, blocks in rows.items()
            }
            plain = [x for a in rows[SORTED][0] for x in a["output"]]
            print(
                f"\n| {world} ranks, {experts} experts, top-{k} | best | median | off | kept |\n"
                + "| --- " * 5
                + "|"
            )
            for kind, blocks in rows.items():
                best = min(walls[DENSE]) / min(walls[kind])
                middle = median(walls[DENSE]) / median(walls[kind])
                told = f"{best:.3f}" if kind != DENSE else f"{min(walls[kind]) * 1e3:.1f} ms"
                output = [x for a in blocks[0] for x in a["output"]]
                off = max(abs(a - b) for a, b in zip(output, plain, strict=True))
                shown = "" if kind in (DENSE, DROPPING) else f"{off:.0e}"
                print(
                    f"| {kind} | {told} | {middle:.3f} | {shown} | {blocks[0][0]['kept']:,.0f} |",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {"hidden": 256, "inner": 1024, "tokens": 4096, "steps": 3, "blocks": 8}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, given in {"experts": [8, 64], "k": [1, 2], "ranks": [1, 2]}.items():
        parser.add_argument(f"--{name}", type=int, nargs="+", default=given)
    parser.add_argument(
        "--deepspeed-python", metavar="PYTHON", help="an interpreter that has deepspeed installed"
    )
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        serve(arguments.child, arguments)
    print(
        f"torch {torch.__version__}, {arguments.tokens} tokens of {arguments.hidden}, inner width "
        f"{arguments.inner}"
    )
    with tempfile.TemporaryDirectory() as cache:
        for world in arguments.ranks:
            try:
                found = measure(arguments, world, os.environ.get("TORCH_EXTENSIONS_DIR", cache))
            finally:
                for leftover in glob.glob("/dev/shm/deepspeed_allreduce_buffer_*"):
                    os.unlink(leftover)
            summary(found, arguments, world)


if __name__ == "__main__":
    main()
