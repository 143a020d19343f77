"""The kit's checks: of the CUDA sources under the emulated device, and on a GPU where there is
one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ds_kernel_kit.comparisons import check
from ds_ops_cuda.plugin import FUSED, OPS, ds_kernels
from ds_testing import KernelConformance

from ds_core.entries import KernelEntry

ENTRIES = {e.op: e for e in ds_kernels() if e.provider == "cuda"}


@pytest.mark.parametrize("op", OPS)
def test_sources_pass_the_kit(op: str, device: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # quantisation in groups of two takes a long time here
    more = () if "quantize" in op else (8199,)
    monkeypatch.setattr("ds_kernel_kit.comparisons.SIZES", (0, 1, 3, 255, 1025, *more))
    assert check(replace(ENTRIES[op], devices=("cpu",))) > 0
    assert device, "the kernels were not called"


@pytest.mark.parametrize("op", FUSED)
def test_sources_pass_the_package_s_own_checks(
    op: str, device: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds_ops_cuda.checks.COLUMNS", (1, 64, 1100))
    monkeypatch.setattr("ds_ops_cuda.checks.ROWS", (3, 4))
    assert check(replace(ENTRIES[op], devices=("cpu",))) > 0
    assert device, "the kernels were not called"


@pytest.mark.gpu
class TestOnTheGpu(KernelConformance):
    """Everything, the fused operations too."""

    plugin = "ds_ops_cuda.plugin"
    device = "cuda"

    def entries(self) -> list[KernelEntry]:
        """Those of the GPU; references are what they are compared with."""
        return [e for e in super().entries() if e.provider == "cuda"]
