"""What providers of dscore-moe's kernels are compared with, by ``dscore ops test`` and the conformance
kit.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from ds_moe.dispatch import DispatchPlan, plan, sums, weigh_back
from ds_moe.ffn import ACTIVATIONS, FFN, ffn
from ds_moe.kernels.grouped import Groups

Case = tuple[str, Callable[[], None]]

SIZES = {
    "even": [6, 6, 6],
    "uneven": [0, 17, 1],
    "one": [0, 40, 0],
    "none": [0, 0, 0],
    "large": [1100, 0, 3],
}
"""Rows of three experts."""
# Differences that rounding explains, as a share of the largest value.
ROUNDING = {"float64": 1e-13, "float32": 2e-6, "float16": 5e-3, "bfloat16": 4e-2}


def expert_ffn(
    function: Callable[..., Tensor], device: str, dtypes: tuple[str, ...]
) -> Iterator[Case]:
    """Values and gradients of `ds_moe.ffn.ffn`, against fp64."""
    for dtype, act, gated in itertools.product(dtypes or ("float32",), ACTIVATIONS, (False, True)):
        what = FFN("up", "down", act, "gate" if gated else None)
        for case, bias in itertools.product(SIZES, (True, False)):
            case_name = (
                f"{dtype}, {act}{', gated' if gated else ''}, {case}{', bias' if bias else ''}"
            )
            yield (
                case_name,
                functools.partial(_compare_ffn, function, device, dtype, what, case, bias),
            )


def _compare_ffn(
    function: Callable[..., Tensor], device: str, dtype: str, what: FFN, case: str, bias: bool
) -> None:
    """Also that a second backward gives the same."""
    sizes = SIZES[case]
    generator = torch.Generator().manual_seed(0)
    hidden, inner, out = (7, 37, 5) if case != "large" else (16, 48, 16)
    exact: dict[str, Tensor | None] = {
        "x": torch.randn(sum(sizes), hidden, dtype=torch.float64, generator=generator) * 3,
        **random_weights(what, bias, (hidden, inner, out), generator),
    }
    grad = torch.randn(sum(sizes), out, dtype=torch.float64, generator=generator)
    groups = Groups(torch.tensor(sizes, device=device))
    results = []
    for kind, work in ((torch.float64, ffn), (getattr(torch, dtype), function)):
        mine = {
            n: None if t is None else t.to(device, kind).requires_grad_() for n, t in exact.items()
        }
        leaves = [t for t in mine.values() if t is not None]
        x = mine.pop("x")
        assert x is not None
        y = work(x, what, mine, groups)
        grads = torch.autograd.grad(y, leaves, grad.to(y), retain_graph=True)
        again = torch.autograd.grad(y, leaves, grad.to(y))
        assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True)), (
            "a second backward differs"
        )
        results.append([y.detach(), *grads])
    _near(results[1], results[0], ROUNDING[dtype])


def expert_weigh_back(
    function: Callable[..., tuple[Tensor, Tensor]], device: str, dtypes: tuple[str, ...]
) -> Iterator[Case]:
    """`ds_moe.dispatch.weigh_back`, against fp64."""
    for dtype, tokens, k, dropped in itertools.product(
        dtypes or ("float32",), (0, 1, 7, 300), (1, 2), (False, True)
    ):
        case_name = f"{dtype}, {tokens} tokens, top-{k}{', some dropped' if dropped else ''}"
        yield (
            case_name,
            functools.partial(_compare_weigh_back, function, device, dtype, tokens, k, dropped),
        )


def _compare_weigh_back(
    function: Callable[..., tuple[Tensor, Tensor]],
    device: str,
    dtype: str,
    tokens: int,
    k: int,
    dropped: bool,
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    kind = getattr(torch, dtype)
    experts = torch.randint(-1 if dropped else 0, 4, (tokens, k), generator=generator).to(device)
    where = plan(experts, 4)
    # in another order than rows
    grad = torch.randn(19, tokens, generator=generator).t().to(device, kind)
    y = torch.randn(len(where.order), 19, generator=generator).to(device, kind)
    weights = torch.rand(tokens * k, generator=generator).to(device, kind)
    wanted = weigh_back(grad.double(), y.double(), weights.double(), where)
    _near(function(grad, y, weights, where), wanted, ROUNDING[dtype])


def expert_sums(
    function: Callable[..., Tensor], device: str, dtypes: tuple[str, ...]
) -> Iterator[Case]:
    """`ds_moe.dispatch.sums`, against fp64."""
    cases = itertools.product(
        dtypes or ("float32",), (0, 1, 7, 300), (1, 2), (False, True), (False, True)
    )
    for dtype, tokens, k, dropped, weighted in cases:
        case_name = (
            f"{dtype}, {tokens} tokens, "
            f"top-{k}{', some dropped' * dropped}{', weighted' * weighted}"
        )
        yield (
            case_name,
            functools.partial(_compare_sums, function, device, dtype, tokens, k, dropped, weighted),
        )


def _compare_sums(
    function: Callable[..., Tensor],
    device: str,
    dtype: str,
    tokens: int,
    k: int,
    dropped: bool,
    weighted: bool,
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    kind = getattr(torch, dtype)
    experts = torch.randint(-1 if dropped else 0, 4, (tokens, k), generator=generator).to(device)
    where = plan(experts, 4)
    # in another order than rows
    y = torch.randn(19, len(where.order), generator=generator).t().to(device, kind)
    weights = (
        torch.rand(len(where.order), generator=generator).to(device, kind) if weighted else None
    )
    wanted = sums(y.double().contiguous(), where, None if weights is None else weights.double())
    _near([function(y, where, weights)], [wanted], ROUNDING[dtype])


def expert_plan(
    function: Callable[..., DispatchPlan], device: str, dtypes: tuple[str, ...]
) -> Iterator[Case]:
    """`ds_moe.dispatch.plan`, to the last number."""
    for tokens, k, num, dropped in itertools.product(
        (0, 1, 7, 300), (1, 2, 4), (1, 5, 64), ("none", "some", "all")
    ):
        case_name = f"{tokens} tokens, top-{k} of {num}, {dropped} dropped"
        yield case_name, functools.partial(_compare_plan, function, device, tokens, k, num, dropped)


def _compare_plan(
    function: Callable[..., DispatchPlan], device: str, tokens: int, k: int, num: int, dropped: str
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    # in another order than rows
    experts = torch.randint(0, num, (k, tokens), generator=generator).t().to(device)
    if dropped != "none":
        experts = experts.masked_fill(
            torch.rand(tokens, k, generator=generator).to(device) < 0.3, -1
        )
    if dropped == "all":
        experts = torch.full_like(experts, -1)
    found = function(experts, num)
    wanted = plan(experts, num)
    for field in dataclasses.fields(DispatchPlan):
        got = getattr(found, field.name)
        want = getattr(wanted, field.name)
        alike = want is got if want is None or got is None else torch.equal(got, want)
        assert alike, f"{field.name}: {got} instead of {want}"


def random_weights(
    what: FFN, bias: bool, widths: tuple[int, int, int], generator: torch.Generator | None = None
) -> dict[str, Tensor | None]:
    """fp64 weights of three experts, as `ffn` takes them.

    widths: hidden, inner, out.
    """
    hidden, inner, out = widths
    weights: dict[str, Tensor | None] = {}
    for name in (what.up, what.gate, what.down):
        if name is not None:
            shape = (3, out, inner) if name == what.down else (3, inner, hidden)
            weights[f"{name}.weight"] = (
                torch.randn(*shape, dtype=torch.float64, generator=generator) * 0.3
            )
            more = torch.randn(*shape[:2], dtype=torch.float64, generator=generator)
            weights[f"{name}.bias"] = more if bias else None
    return weights


def _near(found: Iterable[Tensor], wanted: Iterable[Tensor], rounding: float) -> None:
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == want.shape, f"{tuple(got.shape)} instead of {tuple(want.shape)}"
        if want.numel():
            error = float((got.double() - want).abs().max()) / max(float(want.abs().max()), 1e-3)
            assert error < rounding, f"off by {error:.1e}"
