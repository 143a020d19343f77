"""dscore-ops-cuda on one GPU: optimizer steps and fused operations, in GB/s and beside torch's own.

    python benchmarks/gpu_ops.py [--elements 1e8] [--tensors 1000]

GB/s counts what an operation has to read and write once. The limit beside it is a copy on the same
device, same run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from ds_kernel_kit import references
from ds_ops_cuda import fused, kernels
from ds_ops_cuda.extension import available
from torch import Tensor
from torch.nn import functional as F

from ds_core.partition import squared_norm

ADAM = {"step": 3, "lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
LION = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
LAMB = ADAM | {
    "bias_correction": True,
    "eps_inside_sqrt": False,
    "min_coeff": 0.01,
    "max_coeff": 10.0,
}


def seconds(work: Callable[[], Any], repeats: int = 20) -> float:
    """The median of `repeats`, by the device's own clock, after warming up."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[repeats // 2]


def row(what: str, moved: float, **works: Callable[[], Any]) -> None:
    cells = [f"{name} {moved / seconds(work) / 1e9:7.0f} GB/s" for name, work in works.items()]
    print(f"{what:42s} " + " | ".join(cells), flush=True)


def tensors(count: int, elements: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.rand(elements // count, device="cuda").to(dtype) for _ in range(count)]


def steps(elements: int, count: int) -> None:
    for kind in (torch.float32, torch.bfloat16):
        steps_of(kind, elements, count)


def steps_of(kind: torch.dtype, elements: int, count: int) -> None:
    copies_too = kind != torch.float32
    p, m, v = (tensors(count, elements, torch.float32) for _ in range(3))
    g = tensors(count, elements, kind)
    copies = tensors(count, elements, kind) if copies_too else None
    moved = elements * (24 + g[0].element_size() + (2 if copies_too else 0))
    where = f"{count} tensors, gradients {str(kind)[6:]}"
    for name, states, options in (
        ("adam", [m, v], ADAM),
        ("lion", [m], LION),
        ("lamb", [m, v], LAMB),
    ):
        bytes_moved = moved - elements * (8 if name == "lion" else 0)
        row(
            f"{name}, {where}",
            bytes_moved,
            ours=lambda n=name, s=states, o=options: getattr(kernels, n)(
                p, g, *s, **o, copies=copies
            ),
            torch=lambda n=name, s=states, o=options: getattr(references, n)(
                p, g, *s, **o, copies=copies
            ),
        )
    size = elements * g[0].element_size()
    row(
        f"squared_norm, {where}",
        size,
        ours=lambda: kernels.squared_norm(g),
        torch=lambda: squared_norm(g),
    )


def quantisation(elements: int) -> None:
    x = torch.randn(elements, device="cuda", dtype=torch.bfloat16)
    for bits in (8, 4):
        how: dict[str, Any] = {"bits": bits, "group": 256, "symmetric": True}
        row(
            f"quantize to {bits} bits",
            elements * (2 + bits / 8),
            ours=lambda how=how: kernels.quantize(x, **how),
            torch=lambda how=how: references.quantize(x, **how),
        )


def rows(dtype: torch.dtype) -> None:
    x = torch.randn(16384, 4096, device="cuda", dtype=dtype)
    line = torch.rand(4096, device="cuda", dtype=dtype)
    other = torch.randn_like(x)
    scores = torch.randn(16, 16, 1024, 1024, device="cuda", dtype=dtype)
    name = str(dtype)[6:]
    size = x.element_size()
    row(
        f"bias_gelu {name}",
        2 * size * x.numel(),
        ours=lambda: fused.bias_gelu(x, line),
        torch=lambda: F.gelu(x + line, approximate="tanh"),
    )
    row(
        f"layer_norm {name}",
        2 * size * x.numel(),
        ours=lambda: fused.layer_norm(x, line, line, eps=1e-5),
        torch=lambda: F.layer_norm(x, (4096,), line, line, 1e-5),
    )
    row(
        f"bias_dropout_add {name}",
        3 * size * x.numel(),
        ours=lambda: fused.bias_dropout_add(x, line, other, p=0.1, seed=1),
        torch=lambda: other + F.dropout(x + line, 0.1),
    )
    row(
        f"softmax_dropout {name}",
        3 * size * scores.numel(),
        ours=lambda: fused.softmax_dropout(scores, p=0.1, seed=1),
        torch=lambda: F.dropout(F.softmax(scores, -1), 0.1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=float, default=1e8)
    parser.add_argument("--tensors", type=int, default=1000)
    chosen = parser.parse_args()
    if (reason := available()) is not None:
        sys.exit(f"nothing to measure: {reason}")
    n = int(chosen.elements)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {n} elements")
    a = torch.rand(n, device="cuda")
    b = torch.rand(n, device="cuda")
    row("limit: copy", 8 * n, torch=lambda: a.copy_(b))
    steps(n, 1)
    steps(n, chosen.tensors)
    quantisation(n)
    for dtype in (torch.float16, torch.float32):
        rows(dtype)


if __name__ == "__main__":
    main()
