"""The references: torch's own numbers where torch has the update, and the sizes and layouts that
they take.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from ds_kernel_kit import references
from ds_kernel_kit.comparisons import CHECKS
from ds_kernel_kit.marshal import compiled_steps
from ds_kernel_kit.steps import STEPS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_adam_is_torchs(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(0)
    mine = torch.randn(50, dtype=dtype)
    theirs = torch.nn.Parameter(mine.clone())
    grads = [torch.randn(50, dtype=dtype) for _ in range(5)]
    optimizer = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.1, foreach=False)
    m = torch.zeros_like(mine)
    v = torch.zeros_like(mine)
    for step, grad in enumerate(grads, 1):
        theirs.grad = grad * scale
        optimizer.step()
        references.adam(
            [mine],
            [grad],
            [m],
            [v],
            step=step,
            lr=0.1,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            weight_decay=0.1,
            scale=scale,
        )
    if dtype == torch.bfloat16:
        # torch rounds every operation to 16 bits.
        torch.testing.assert_close(mine, theirs.detach(), rtol=0.05, atol=0.01)
    else:
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("op", [op for op in STEPS if op != "lamb"])
def test_an_element_does_not_depend_on_its_place(op: str) -> None:
    for what, compare in CHECKS[op](getattr(references, op), "cpu", ()):
        if "places" in what:
            compare()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sgd_updates_every_element(dtype: torch.dtype) -> None:
    """torch's fused function leaves those of 16-bit parameters alone in a first step."""
    p, g, m = (torch.ones(65, dtype=dtype) for _ in range(3))
    references.sgd(
        [p],
        [g],
        [m],
        lr=0.5,
        momentum=0.5,
        dampening=0.0,
        weight_decay=0.0,
        nesterov=False,
        first=True,
    )
    assert torch.equal(p, torch.full_like(p, 0.5)) and torch.equal(m, torch.ones_like(m))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_quantising_is_off_by_half_a_step(bits: int, symmetric: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(1001)
    q, scales, lows = references.quantize(x, bits=bits, group=64, symmetric=symmetric)
    back = references.dequantize(
        q, scales, lows, bits=bits, group=64, numel=1001, dtype=torch.float32
    )
    steps = scales.repeat_interleave(64)[:1001]
    assert ((back - x).abs() <= steps / 2 * 1.0001).all()
    assert q.numel() * q.element_size() == (1001 if bits == 8 else 501)


@pytest.mark.parametrize(("bits", "group"), [(3, 64), (8, 0), (4, 7)])
def test_sizes_that_there_are_not(bits: int, group: int) -> None:
    with pytest.raises(ValueError, match="use 4 or 8|at least 1"):
        references.quantize(torch.ones(8), bits=bits, group=group, symmetric=True)


def test_a_tensor_without_gaps_is_known() -> None:
    x = torch.zeros(4, 6)
    dense = [
        x,
        x.t(),
        x.view(2, 2, 6).permute(2, 0, 1),
        x[:0],
        x[2],
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ]
    assert all(references.is_dense(t) for t in dense)
    gaps = [x[:, ::2], x[:, :3], x[:1].expand(4, 6), x.as_strided((2, 2, 2), (1, 1, 5))]
    assert not any(references.is_dense(t) for t in gaps)


# -- the records of steps --------------------------------------------------------------------------


def test_a_compiled_step_has_its_references_arguments() -> None:
    calls: list[tuple[Any, ...]] = []

    def run(name: str, reference: Any, numbers: Any, lists: Any, copies: Any) -> list[float]:
        calls.append((name, numbers, len(lists)))
        return reference(lists, copies) or []

    steps = compiled_steps(run)
    assert {op: str(inspect.signature(f)) for op, f in steps.items()} == {
        op: str(inspect.signature(getattr(references, op))) for op in STEPS
    }
    p = [torch.ones(3)]
    g = [torch.ones(3)]
    plain = {
        "lr": 0.5,
        "momentum": 0.0,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
        "first": False,
    }
    assert steps["sgd"](p, g, None, **plain, scale=2.0) is None
    assert calls == [("sgd", (2.0, 0.5, 0.0, 1.0, 0.0, False, False), 2)] and torch.equal(
        p[0], torch.zeros(3)
    )
    with pytest.raises(TypeError, match="'lrr'"):
        steps["sgd"](p, g, None, **plain, lrr=1.0)
    with pytest.raises(TypeError, match="'first'"):
        steps["sgd"](p, g, None, **{k: v for k, v in plain.items() if k != "first"})
    with pytest.raises(TypeError, match="'momenta'"):
        steps["sgd"](p, g, **plain)
