"""Comparisons of this package's own operations with references, for ``dscore ops test`` and
`KernelConformance`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ds_ops_cuda import references

COLUMNS = (1, 7, 64, 1024, 1100, 4096)
ROWS = (3, 70)

Cases = Iterator[tuple[str, Callable[[], None]]]


def _cases(op: str) -> Callable[[Any, str, tuple[str, ...]], Cases]:
    def cases(function: Any, device: str, dtypes: tuple[str, ...]) -> Cases:
        for dtype in dtypes or ("float32",):
            for cols in COLUMNS:
                compare = functools.partial(_compare, op, function, device, dtype, cols)
                yield f"{dtype}, {cols} columns", compare

    return cases


bias_dropout_add = _cases("bias_dropout_add")
bias_gelu = _cases("bias_gelu")
layer_norm = _cases("layer_norm")
softmax_dropout = _cases("softmax_dropout")


def _compare(op: str, function: Any, device: str, dtype: str, cols: int) -> None:
    """Results and gradients of one case."""
    generator = torch.Generator().manual_seed(cols)

    def make(*shape: int) -> torch.Tensor:
        x = torch.randn(*shape, generator=generator).to(device, getattr(torch, dtype))
        return x.requires_grad_()

    x = make(2, *ROWS, cols)
    line = make(cols)
    options: dict[str, Any] = {"p": 0.3, "seed": 2**60 + 1}
    given = [x, line]
    if op == "softmax_dropout":
        given = [x]
        options["mask"] = make(2, 1, 1, cols).detach()
    elif op == "layer_norm":
        # one column: no variance, eps alone divides
        given = [x, line, make(cols)]
        options = {"eps": 1e-5 if cols > 1 else 1.0}
    elif op == "bias_gelu":
        options = {}
    else:
        given.append(make(2, *ROWS, cols))
    found = []
    for each in (function, getattr(references, op)):
        out = each(*given, **options)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
        found.append([out, *torch.autograd.grad(out, given, weights)])
    limit = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}[dtype]
    for i, (a, b) in enumerate(zip(*found, strict=True)):
        # Of gradients that cancel to nothing only rounding is left, so small norms count as of
        # numbers of 0.1.
        error = (
            (a - b).double().norm() / b.double().norm().clamp(min=0.1 * b.numel() ** 0.5)
        ).item()
        assert error < limit, f"result {i} is off by {error:.1e}"
