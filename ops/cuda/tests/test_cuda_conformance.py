"""The kit's checks: of the CUDA sources under the emulated device, and on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from ds_ops_cuda import references
from ds_ops_cuda.plugin import FUSED, OPS, ds_kernels

from ds_core.entries import KernelEntry
from ds_core.testing.kernels import CHECKS, KernelConformance, check

ENTRIES = {e.op: e for e in ds_kernels() if e.provider == "cuda"}


@pytest.mark.parametrize("op", OPS)
def test_sources_pass_the_kit(op: str, device: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # quantisation in groups of two takes a long time here
    more = () if "quantize" in op else (8199,)
    monkeypatch.setattr("ds_core.testing.kernels.SIZES", (0, 1, 3, 255, 1025, *more))
    assert check(replace(ENTRIES[op], devices=("cpu",))) > 0
    assert device, "the kernels were not called"


def fused_cases(op: str) -> Any:
    """The kit's form of a check: name and comparison for each case."""

    def cases(function: Any, device: str, dtypes: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        for dtype in dtypes or ("float32",):
            for cols in (1, 7, 64, 1024, 1100, 4096):
                yield f"{dtype}, {cols} columns", lambda d=dtype, c=cols: compare(op, function, device, d, c)

    return cases


def compare(op: str, function: Any, device: str, dtype: str, cols: int) -> None:
    """Results and gradients of one case."""
    generator = torch.Generator().manual_seed(cols)

    def make(*shape: int) -> torch.Tensor:
        x = torch.randn(*shape, generator=generator).to(device, getattr(torch, dtype))
        return x.requires_grad_()

    x, line = make(2, 3, 70, cols), make(cols)
    options: dict[str, Any] = {"p": 0.3, "seed": 2**60 + 1}
    given = [x, line]
    if op == "softmax_dropout":
        given = [x]
        options["mask"] = make(2, 1, 1, cols).detach()
    elif op == "layer_norm":
        given, options = [x, line, make(cols)], {"eps": 1e-5}
    elif op == "bias_gelu":
        options = {}
    else:
        given.append(make(2, 3, 70, cols))
    found = []
    for each in (function, getattr(references, op)):
        out = each(*given, **options)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
        found.append([out, *torch.autograd.grad(out, given, weights)])
    limit = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}[dtype]
    for i, (a, b) in enumerate(zip(*found, strict=True)):
        error = ((a - b).double().norm() / b.double().norm().clamp(min=1e-3)).item()
        assert error < limit, f"result {i} is off by {error:.1e}"


@pytest.mark.gpu
class TestOnTheGpu(KernelConformance):
    """Everything, the fused operations too."""

    plugin = "ds_ops_cuda.plugin"
    device = "cuda"

    @pytest.fixture(autouse=True)
    def _checks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for op in FUSED:
            monkeypatch.setitem(CHECKS, op, fused_cases(op))

    def entries(self) -> list[KernelEntry]:
        """Those of the GPU; references are what they are compared with."""
        return [e for e in super().entries() if e.provider == "cuda"]
