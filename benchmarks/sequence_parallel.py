"""Causal attention over a divided sequence, forward and backward: ours and torch's context
parallelism, in one run.

fp32 on 2 cores: 2 ranks of 1 thread over gloo. Contestants run in interleaved blocks, so that a
noisy machine hits all alike; a step takes as long as on the slower rank. All use the same kernel
for a block (torch's fused attention of the CPU).

    python benchmarks/sequence_parallel.py [--lengths 2048 8192] [--heads 8] [--key-heads 8 2]
    [--ranks 2]

torch's `context_parallel` is tried as its documentation has it, first. It dispatches the fused
kernels of CUDA alone, so on a CPU torch's own ring is called directly, with both of its ways to
rotate and the kernel of the CPU as its operation.

speed: torch's best time over the contestant's. sent: bytes that the rank that sends most gives to
    others, both ways.
off: the largest difference to attention in one process, of output and gradients.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from ds_core import comm

SIZE = 64
RING = "ds ring"
ULYSSES = "ds ulysses"
THEIRS = "torch, all-to-all"
THEIR_ALL = "torch, all-gather"
Step = Callable[[list[Tensor], Tensor], Tensor]
"""(query, key, value of this rank), gradient of the output -> output; gradients are in ``.grad``"""


class Sent(TorchDispatchMode):
    """Adds up what torch's functional collectives send to others."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ranks = dist.get_world_size()
        if any(name in str(func) for name in ("all_to_all_single", "all_gather_into_tensor")):
            size = args[0].numel() * args[0].element_size()
            self.total += size * (ranks - 1) if "gather" in str(func) else size
        return func(*args, **(kwargs or {}))


class Given(comm.Interceptor):
    """Adds up what this rank's all-to-alls send to others."""

    total = 0

    def around(self, collective: comm.Collective, call: Callable[[], Any]) -> Any:
        """Count one collective."""
        given = collective.arguments["input"]
        rank = dist.get_rank()
        rows = collective.arguments.get("input_split_sizes") or [
            len(given) // dist.get_world_size()
        ] * (rank + 1)
        own = rows[rank] * (given.numel() // max(1, len(given)))
        self.total += (given.numel() - own) * given.element_size()
        return call()

    def __enter__(self) -> Given:
        comm.add_interceptor(self)
        return self

    def __exit__(self, *error: object) -> None:
        comm.remove_interceptor(self)


def theirs(way: str) -> Step:
    """torch's ring, with the kernel of the CPU."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as cp

    aten = torch.ops.aten

    def forward(
        query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, **_: Any
    ) -> Any:
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal)

    def backward(
        *,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        is_causal: bool,
        **_: Any,
    ) -> Any:
        function = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return function(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)

    def step(parts: list[Tensor], grad: Tensor) -> Tensor:
        cp.set_rotate_method(way)
        group: Any = dist.group.WORLD
        with torch.no_grad():
            plain = [part.detach() for part in parts]
            out, lse, *_ = cp._templated_ring_attention(group, 2, forward, *plain, is_causal=True)
            grads = cp._templated_ring_attention_backward(
                group, 2, backward, grad, "grad_out", *plain, out, lse, is_causal=True
            )
        for part, found in zip(parts, grads, strict=False):
            part.grad = found
        return out

    return step


def ours(kind: str, layout: Any) -> Step:
    """Ring or Ulysses of dscore-sequence-parallel."""
    from ds_sequence_parallel import ring_attention
    from ds_sequence_parallel.attention.ulysses import ulysses

    def attend(query: Tensor, key: Tensor, value: Tensor, repeated: bool) -> Tensor:
        return plain(query, key, value)

    def step(parts: list[Tensor], grad: Tensor) -> Tensor:
        for part in parts:
            part.grad = None
        if kind == ULYSSES:
            out = ulysses(attend, *parts, None, heads=1, sequence=2)  # type: ignore[misc]
        else:
            out = ring_attention(*parts, None, layout)  # type: ignore[misc]
        out.backward(grad)
        return out.detach()

    return step


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    times = query.shape[1] // key.shape[1]
    key, value = (x if times == 1 else x.repeat_interleave(times, 1) for x in (key, value))
    return scaled_dot_product_attention(query, key, value, is_causal=True)


def documented(layout: Any) -> str:
    """What torch's `context_parallel` does on this device, as its documentation uses it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    length = 256
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    whole = [torch.randn(1, 2, length, SIZE) for _ in range(3)]
    wanted = plain(*whole)
    parts = [x.clone() for x in whole]
    try:
        with context_parallel(
            init_device_mesh("cpu", (ranks,)), buffers=parts, buffer_seq_dims=[2, 2, 2]
        ):
            out = scaled_dot_product_attention(*parts, is_causal=True)
            shape = tuple(out.shape)
            found = out.full_tensor() if hasattr(out, "full_tensor") else out
            right = bool(
                torch.allclose(
                    found, layout(length, ranks, True).cut(wanted, dist.get_rank(), 2), atol=1e-5
                )
            )
    except Exception as error:  # whatever it is, it is the answer
        return f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"
    return f"output {shape}, {'right' if right else 'wrong: each rank attends to its own part'}"


def bytes_of(step: Step, name: str, parts: list[Tensor], grad: Tensor) -> int:
    if name in (RING, ULYSSES):
        with Given() as given:
            step(parts, grad)
        return given.total
    with Sent() as sent:
        step(parts, grad)
    return sent.total


def measure(
    arguments: argparse.Namespace, length: int, key_heads: int
) -> dict[str, dict[str, float]]:
    from ds_sequence_parallel import Layout

    rank = dist.get_rank()
    ranks = dist.get_world_size()
    made = torch.Generator().manual_seed(0)
    heads = (arguments.heads, key_heads, key_heads, arguments.heads)
    *whole, grad = [torch.randn(1, h, length, SIZE, generator=made) for h in heads]
    for x in whole:
        x.requires_grad_()
    wanted = plain(*whole)
    wanted.backward(grad)
    steps: dict[str, Step] = {
        RING: ours(RING, Layout(length, ranks, True)),
        ULYSSES: ours(ULYSSES, None),
    }
    if key_heads == arguments.heads:
        steps |= {THEIRS: theirs("alltoall"), THEIR_ALL: theirs("allgather")}
    found: dict[str, dict[str, float]] = {}
    runs = {}
    for name, step in steps.items():
        layout = Layout(length, ranks, name != ULYSSES)
        parts = [layout.cut(x.detach(), rank, 2).contiguous().requires_grad_() for x in whole]
        mine = layout.cut(grad, rank, 2).contiguous()
        out = step(parts, mine)
        pairs = [(out, wanted), *((p.grad, x.grad) for p, x in zip(parts, whole, strict=True))]
        off = max(float((a - layout.cut(b, rank, 2)).detach().abs().max()) for a, b in pairs)
        sent = torch.tensor([bytes_of(step, name, parts, mine)])
        dist.all_reduce(sent, dist.ReduceOp.MAX)
        found[name] = {"off": off, "sent": int(sent)}
        runs[name] = functools.partial(step, parts, mine)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(arguments.rounds):
        for name, run in runs.items():
            dist.barrier()
            start = time.perf_counter()
            run()
            slowest = torch.tensor([time.perf_counter() - start])
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times[name].append(float(slowest))
    for name in steps:
        found[name] |= {"best": min(times[name]), "median": median(times[name])}
    return found


def work(arguments: argparse.Namespace) -> None:
    from ds_core.plugins import Plugins
    from ds_core.plugins.registry import PluginSettings

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    comm.use_providers(comm.choose_providers(Plugins(PluginSettings()), None))
    from ds_sequence_parallel import Layout

    rows: list[Any] = [documented(Layout)]
    rows += [
        [length, heads, measure(arguments, length, heads)]
        for length in arguments.lengths
        for heads in arguments.key_heads
    ]
    if dist.get_rank() == 0:
        show(arguments, rows)
    dist.barrier()
    dist.destroy_process_group()


def show(arguments: argparse.Namespace, rows: list[Any]) -> None:
    print(f"torch {torch.__version__}, context_parallel on the CPU: {rows[0]}\n")
    print("| tokens | heads | | best ms | median ms | speed | sent MB | off |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for length, key_heads, found in rows[1:]:
        bests = [row["best"] for name, row in found.items() if name in (THEIRS, THEIR_ALL)]
        for name, row in found.items():
            best = row["best"] * 1e3
            middle = row["median"] * 1e3
            speed = f"{min(bests) * 1e3 / best:.2f}" if bests else ""
            cells = [
                f"{best:.1f}",
                f"{middle:.1f}",
                speed,
                f"{row['sent'] / 1e6:.2f}",
                f"{row['off']:.1e}",
            ]
            print(f"| {length} | {arguments.heads}/{key_heads} | {name} | {' | '.join(cells)} |")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--key-heads", type=int, nargs="+", default=[8, 2])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        work(arguments)
        return
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={arguments.ranks}",
        *sys.argv,
    ]
    os.execv(sys.executable, [sys.executable, *command])


if __name__ == "__main__":
    main()
