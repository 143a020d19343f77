"""Kernel ``inference_program`` by the CUDA sources, emulated."""

from __future__ import annotations

import pytest
from ds_inference_kit import checks
from ds_kernel_kit.comparisons import check  # noqa: F401
from ds_ops_cuda import programs

CASES = list(checks.inference_program(programs.load, "cpu", ("float32", "bfloat16", "float16")))


@pytest.mark.parametrize("number", range(len(CASES)), ids=[name for name, _ in CASES])
def test_case(number: int, device: list[str]) -> None:
    CASES[number][1]()
