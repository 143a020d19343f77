"""The kernel kit finds what it is there to find: each of these wrong kernels is told from the right
one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from ds_kernel_kit import references
from ds_kernel_kit.comparisons import CHECKS, check
from ds_testing import KernelConformance

from ds_core.entries import KernelEntry
from ds_core.partition import squared_norm


def without(op: str, **fixed: Any) -> Callable[..., Any]:
    """The reference that takes no notice of some factors."""
    return lambda *lists, **factors: getattr(references, op)(*lists, **{**factors, **fixed})


def loses_the_tail(params: Any, grads: Any, sums: Any, **factors: Any) -> None:
    whole = [t.numel() // 16 * 16 for t in params]
    cut = [
        [t.flatten()[:n] if t.is_contiguous() else t for t, n in zip(ts, whole, strict=True)]
        for ts in (params, grads, sums)
    ]
    references.adagrad(*cut, **{**factors, "copies": None})
    if factors.get("copies"):
        for copy, param in zip(factors["copies"], params, strict=True):
            copy.copy_(param)


def ignores_strides(params: Any, grads: Any, momenta: Any, **factors: Any) -> None:
    flat = [[t.as_strided((t.numel(),), (1,)) for t in ts] for ts in (params, grads, momenta)]
    references.lion(*flat, **{**factors, "copies": None})
    for copy, param in zip(factors.get("copies") or (), params, strict=False):
        copy.copy_(param)


def changes_gradients(
    params: Any, grads: Any, *states: Any, scale: float = 1.0, **factors: Any
) -> None:
    for grad in grads:
        grad.mul_(scale)
    references.adam(params, grads, *states, **factors)


WRONG: dict[str, tuple[str, Callable[..., Any]]] = {
    "adam without scale": ("adam", without("adam", scale=1.0)),
    "adam always decoupled": ("adam", without("adam", decoupled=True)),
    "adam always corrected": ("adam", without("adam", bias_correction=True)),
    "adam without copies": ("adam", without("adam", copies=None)),
    "adam that scales gradients": ("adam", changes_gradients),
    "adagrad without the tail": ("adagrad", loses_the_tail),
    "lion that ignores strides": ("lion", ignores_strides),
    "sgd that is never the first": ("sgd", without("sgd", first=False)),
    "sgd without nesterov": ("sgd", without("sgd", nesterov=False)),
    "lamb without limits": ("lamb", without("lamb", max_coeff=1e9)),
    "lamb with eps outside": ("lamb", without("lamb", eps_inside_sqrt=False)),
    "a norm that drops NaN": (
        "squared_norm",
        lambda ts: squared_norm([t.nan_to_num() for t in ts]),
    ),
    "a norm that underflows": (
        "squared_norm",
        lambda ts: torch.tensor(sum(float(t.half().float().square().sum()) for t in ts)),
    ),
    "accumulation without scale": (
        "accumulate",
        lambda into, added, scale=1.0: references.accumulate(into, added),
    ),
    "quantisation to 127": (
        "quantize",
        lambda x, **how: tuple(
            t if i or t is None else t.clamp(max=100)
            for i, t in enumerate(references.quantize(x, **how))
        ),
    ),
    "a sum of the first row": (
        "dequantize_sum",
        lambda q, s, **how: references.dequantize_sum(q[:1], s[:1], **how),
    ),
    "a sum quantised in other groups": (
        "requantize_sum",
        lambda q, s, **how: tuple(
            t if i != 1 else t * 2 for i, t in enumerate(references.requantize_sum(q, s, **how))
        ),
    ),
    "dequantisation without lows": (
        "dequantize",
        lambda q, s, lows, **how: references.dequantize(
            q, s, None if lows is None else lows * 0, **how
        ),
    ),
}


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[..., Any]], KernelEntry]:
    def make(op: str, function: Callable[..., Any]) -> KernelEntry:
        module: Any = ModuleType("kernel_kit_subject")
        module.run = function
        made = KernelEntry(op, "subject", "kernel_kit_subject:run", 10)
        module.ds_kernels = lambda: [made]
        monkeypatch.setitem(sys.modules, "kernel_kit_subject", module)
        return made

    return make


@pytest.mark.parametrize("fault", WRONG)
def test_a_fault_is_found(fault: str, entry: Callable[..., KernelEntry]) -> None:
    op, function = WRONG[fault]
    with pytest.raises(AssertionError, match=f"{op} by subject, "):
        check(entry(op, function))


@pytest.mark.parametrize(
    "op",
    ["adam", *(pytest.param(op, marks=pytest.mark.slow) for op in sorted(CHECKS) if op != "adam")],
)
def test_the_reference_passes(op: str, entry: Callable[..., KernelEntry]) -> None:
    right = squared_norm if op == "squared_norm" else getattr(references, op)
    assert check(entry(op, right)) > 10


def test_a_kit_with_nothing_to_test_fails(entry: Callable[..., KernelEntry]) -> None:
    entry("adam", references.adam)
    kit = KernelConformance()
    kit.plugin = "kernel_kit_subject"
    kit.test_offers_something_that_runs_here()
    sys.modules["kernel_kit_subject"].ds_kernels = list  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="offers no kernel for cpu"):
        kit.test_offers_something_that_runs_here()
    sys.modules["kernel_kit_subject"].ds_kernels = lambda: [KernelEntry("own", "x", "a:b", 1)]  # type: ignore[attr-defined]
    with pytest.raises(AssertionError):
        kit.test_every_operation_has_a_check()
