"""Feed-forward experts by the compiled kernel: fp32 on the CPU.

Its matrix products are those of torch's own BLAS.

[Note: what is kept] Of an expert's inner values only those before the activation are kept for
backward, which makes the others again: half of what separate layers keep.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from ds_kernel_kit.build import load, why_not
from ds_kernel_kit.work import tell, watched
from torch import Tensor

from ds_moe.dispatch import DispatchPlan
from ds_moe.ffn import FFN
from ds_moe.kernels.extension import EXTENSION
from ds_moe.kernels.grouped import Groups

ACTS = ("relu", "silu", "gelu", "gelu_tanh")
ROWS = 1024
"""The most rows that go through both layers at a time: their inner values shall stay in the cache.
"""
COLUMNS = 1024
"""The most inner columns of one product in backward, for the same reason."""
HUGE = 1 << 22
"""Tensors of at least so many bytes that are made here are put on huge pages, where the system has
them.
"""

Given = tuple[int, int, int, int, int, int]
NOTHING: Given = (0, 0, 0, 0, 0, 0)


def available() -> str | None:
    """None when the kernel is built or can be, and torch brings a BLAS; else the reason."""
    if _gemm() is None:
        return "torch's library has no sgemm_ that others may call"
    return why_not(EXTENSION)


@functools.cache
def _gemm() -> int | None:
    """The address of torch's sgemm."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        path = Path(torch.__file__).parent / "lib" / name
        if path.exists():
            function = getattr(ctypes.CDLL(str(path)), "sgemm_", None)
            return None if function is None else ctypes.cast(function, ctypes.c_void_p).value
    return None


@functools.cache
def _module() -> ModuleType:
    module = load(EXTENSION)
    module.use_gemm(_gemm())
    return module


def ffn(x: Tensor, what: FFN, weights: Mapping[str, Tensor | None], groups: Groups) -> Tensor:
    """See `ds_moe.ffn.ffn`."""
    names = (what.gate or what.up, what.up if what.gate else None, what.down)
    tensors = [
        None if n is None else weights[f"{n}.{p}"] for n in names for p in ("weight", "bias")
    ]
    if wrong := [t.dtype for t in tensors if t is not None and t.dtype != torch.float32]:
        raise TypeError(
            f"tokens are torch.float32, but experts have weights of {wrong[0]}; cast one of them"
        )
    tensors = [t if t is None or t.is_contiguous() else t.contiguous() for t in tensors]
    out: Tensor = _FFN.apply(x.contiguous(), ACTS.index(what.act), groups, *tensors)  # type: ignore[no-untyped-call]
    return out


def weigh_back(
    grad: Tensor, y: Tensor, weights: Tensor, plan: DispatchPlan
) -> tuple[Tensor, Tensor]:
    """See `ds_moe.dispatch.weigh_back`."""
    if grad.dtype != y.dtype or weights.dtype != y.dtype:
        raise TypeError(
            f"the experts' output is {y.dtype}, its gradient {grad.dtype}, its weights "
            f"{weights.dtype}"
        )
    given = [t.contiguous() for t in (grad, y, weights, plan.rows, plan.order)]
    of_y = torch.empty_like(given[1])
    of_weights = torch.zeros_like(given[2])
    addresses = [t.data_ptr() for t in (*given, of_y, of_weights)]
    _module().weigh_back(*addresses, *y.shape, torch.get_num_threads())
    return of_y, of_weights


def sums(y: Tensor, plan: DispatchPlan, weights: Tensor | None) -> Tensor:
    """See `ds_moe.dispatch.sums`."""
    if weights is not None and weights.dtype != y.dtype:
        raise TypeError(f"the experts' output is {y.dtype}, its weights are {weights.dtype}")
    begins = None if plan.begins is None else plan.begins.contiguous()
    tokens = len(plan.places if begins is None else begins)
    out = y.new_empty(tokens, y.shape[1])
    y = y.contiguous()
    weights = None if weights is None else weights.contiguous()
    addresses = [0 if t is None else t.data_ptr() for t in (y, plan.places, begins, weights, out)]
    _module().sums(*addresses, tokens, len(plan.places), y.shape[1], torch.get_num_threads())
    return out


def plan(experts: Tensor, num_experts: int) -> DispatchPlan:
    """See `ds_moe.dispatch.plan`; by counting, where torch sorts.

    ValueError for an expert that there is not.
    """
    tokens, k = experts.shape
    experts = experts.to(torch.int64).contiguous()
    counts = experts.new_empty(num_experts + 1)
    if not _module().count(experts.data_ptr(), tokens * k, num_experts, counts.data_ptr()):
        found = f"{int(experts.min())} to {int(experts.max())}"
        raise ValueError(
            f"experts are 0 to {num_experts - 1}, or -1 for none, but here they are {found}"
        )
    dropped = int(counts[0])
    order, rows, places = experts.new_empty(3, tokens * k - dropped)
    choices = torch.empty_like(order) if dropped else None
    begins = experts.new_empty(tokens) if dropped or k > 1 else None
    addresses = [
        0 if t is None else t.data_ptr() for t in (counts, order, rows, choices, places, begins)
    ]
    _module().plan(experts.data_ptr(), tokens, k, num_experts, *addresses)
    return DispatchPlan(order, rows, counts[1:], choices, places, begins)


def _fresh(made: Tensor) -> Tensor:
    if made.nbytes >= HUGE:
        _module().huge(made.data_ptr(), made.nbytes)
    return made


def _given(
    weight: Tensor | None, bias: Tensor | None, grads: tuple[Tensor | None, Tensor | None]
) -> Given:
    if weight is None:
        return NOTHING
    addresses = [0 if t is None else t.data_ptr() for t in (weight, bias, *grads)]
    return (*addresses, weight.stride(0), 0 if bias is None else bias.stride(0))  # type: ignore[return-value]


class _FFN(torch.autograd.Function):
    """first: the gate, or the only layer into the inner width; second: the other one where there is
    a gate.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: int, groups: Groups, *weights: Tensor | None) -> Tensor:
        first, _, second, _, down, _ = weights
        assert first is not None and down is not None
        h = _fresh(x.new_empty(x.shape[0], first.shape[1]))
        u = None if second is None else _fresh(torch.empty_like(h))
        y = x.new_empty(x.shape[0], down.shape[1])
        shape = (x.shape[1], first.shape[1], down.shape[1])
        given = [
            _given(w, b, (None, None)) for w, b in zip(weights[::2], weights[1::2], strict=True)
        ]
        addresses = [0 if t is None else t.data_ptr() for t in (x, y, h, u)]
        _module().forward(
            *addresses, *given, groups.sizes, shape, act, ROWS, torch.get_num_threads()
        )
        if watched():
            tell(x, len(x) * sum(w[0].numel() for w in weights[::2] if w is not None), h.numel())
        ctx.save_for_backward(x, h, u, *weights)
        ctx.options = act, groups, shape
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, h, u, *weights = ctx.saved_tensors
        act, groups, shape = ctx.options
        grad = grad.contiguous()
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        grads = [
            None if t is None or not needed else _fresh(torch.empty_like(t))
            for t, needed in zip(weights, ctx.needs_input_grad[3:], strict=True)
        ]
        given = [_given(weights[i], weights[i + 1], (grads[i], grads[i + 1])) for i in (0, 2, 4)]
        addresses = [0 if t is None else t.data_ptr() for t in (x, grad, dx, h, u)]
        _module().backward(
            *addresses, *given, groups.sizes, shape, act, ROWS, COLUMNS, torch.get_num_threads()
        )
        if watched():  # products for the weights that have a gradient, and those that lead to x
            needs = [
                bool(n) + (i == 4 or dx is not None) for i, n in enumerate(ctx.needs_input_grad[3:])
            ]
            tell(
                x,
                len(x)
                * sum(
                    w[0].numel() * n
                    for w, n in zip(weights[::2], needs[::2], strict=True)
                    if w is not None
                ),
            )
        return dx, None, None, *grads
