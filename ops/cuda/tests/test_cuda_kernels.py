"""The table's operations by the CUDA sources, emulated, against the core's references."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from ds_kernel_kit import references
from ds_ops_cuda import kernels
from torch import Tensor

from ds_core.errors import KernelError
from ds_core.partition import squared_norm as reference_norm

SIZES = ((), (1,), (0,), (3,), (8192,), (8193,), (5, 7), (20_001,), (2,), (64, 64))
F32 = torch.float32
BF16 = torch.bfloat16
F16 = torch.float16
F64 = torch.float64
ADAM = {"step": 3, "lr": 0.02, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1}
LAMB = ADAM | {"min_coeff": 0.01, "max_coeff": 10.0}
SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1}
# name, how many states, options
STEPS: list[tuple[str, int, dict[str, Any]]] = [
    ("adam", 2, ADAM),
    ("adam", 2, ADAM | {"decoupled": False}),
    ("adam", 2, ADAM | {"bias_correction": False, "beta1": 0.3}),
    ("adagrad", 1, {"lr": 0.02, "eps": 1e-6, "weight_decay": 0.1}),
    ("lion", 1, {"lr": 0.02, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}),
    ("sgd", 1, SGD | {"nesterov": False, "first": True}),
    ("sgd", 1, SGD | {"nesterov": True, "first": False}),
    ("sgd", 0, SGD | {"momentum": 0.0, "nesterov": False, "first": False}),
    ("lamb", 2, LAMB | {"bias_correction": True, "eps_inside_sqrt": False}),
    (
        "lamb",
        2,
        LAMB
        | {
            "bias_correction": False,
            "eps_inside_sqrt": True,
            "weight_decay": 0.0,
            "max_coeff": 0.5,
        },
    ),
]
# parameters, gradients, states, copies
KINDS = [
    (F32, F32, F32, None),
    (F32, BF16, F32, BF16),
    (F32, F16, F32, F16),
    (BF16, BF16, BF16, None),
    (F16, F16, F32, None),
    (F32, F32, BF16, F32),
    (F64, F64, F64, None),
]


def lists(
    kinds: tuple[torch.dtype | None, ...], states: int, sizes: Any = SIZES, seed: int = 0
) -> list[list[Tensor]]:
    """Parameters, gradients, states and, if `kinds` ends with a type, copies; second moments are
    not negative.
    """
    torch.manual_seed(seed)
    param, grad, state, copy = kinds
    made = [[torch.randn(s).to(param) for s in sizes], [torch.randn(s).to(grad) for s in sizes]]
    made += [[torch.rand(s).to(state) for s in sizes] for _ in range(states)]
    return made + ([[torch.zeros(s, dtype=copy) for s in sizes]] if copy is not None else [])


def run(
    function: Any, tensors: list[list[Tensor]], has_copies: bool, absent: bool, **options: Any
) -> Any:
    *given, copies = tensors if has_copies else [*tensors, None]
    return function(*given, *([None] if absent else []), **options, copies=copies)


def clone(tensors: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[t.clone() for t in ts] for ts in tensors]


def check_step(name: str, states: int, options: dict[str, Any], kinds: Any, scale: float) -> None:
    mine = lists(kinds, states)
    if name == "lion":  # where the average is 0 but for rounding, its sign is anybody's
        for g, m in zip(mine[1], mine[2], strict=True):
            g[torch.lerp(m.double(), g.double() * scale, 1 - options["beta1"]).abs() < 1e-5] = 1.0
    theirs = clone(mine)
    before = clone(mine)
    absent = name == "sgd" and states == 0
    options = options | {"scale": scale}
    got = run(getattr(kernels, name), mine, kinds[3] is not None, absent, **options)
    wanted = run(getattr(references, name), theirs, kinds[3] is not None, absent, **options)
    if name == "lamb":
        assert got == pytest.approx(wanted, rel=1e-5)
    for mine_each, their_each in zip(mine, theirs, strict=True):
        for a, b in zip(mine_each, their_each, strict=True):
            # one rounding of the type may fall the other way; some of torch's own round a 16-bit
            # step once more
            rtol, atol = {F32: (1e-5, 2e-6), BF16: (2**-7, 1e-4), F16: (2**-10, 2e-5), F64: (0, 0)}[
                a.dtype
            ]
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
    assert all(torch.equal(a, b) for a, b in zip(mine[1], before[1], strict=True)), (
        "gradients were changed"
    )


@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_steps_equal_their_references(kinds: Any, device: list[str]) -> None:
    for name, states, options in STEPS:
        for scale in (1.0, 0.25):
            device.clear()
            check_step(name, states, options, kinds, scale)
            assert bool(device) == (kinds[0] != F64), f"{name} took the wrong path"


def test_copies_are_the_cast_parameters(device: list[str]) -> None:
    tensors = lists((F32, F32, F32, F16), 2)
    run(kernels.adam, tensors, True, False, **ADAM)
    assert device == ["adam"]
    assert all(torch.equal(p.to(F16), c) for p, c in zip(tensors[0], tensors[4], strict=True))


def test_many_tensors_take_several_launches_and_one_call(device: list[str]) -> None:
    """More than one table holds, of sizes that begin new blocks at every place."""
    sizes = [(1 + 37 * i % 900,) for i in range(333)]
    for name, states, options in (STEPS[0], STEPS[8]):
        mine = lists((F32, F32, F32, None), states, sizes)
        theirs = clone(mine)
        device.clear()
        run(getattr(kernels, name), mine, False, False, **options)
        run(getattr(references, name), theirs, False, False, **options)
        assert device == [name]
        for a, b in zip(chain(*mine), chain(*theirs), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


def test_odd_addresses_strides_and_neighbours(device: list[str]) -> None:
    """Slices that start anywhere keep what is beside them; transposed and gapped tensors are worked
    on too.
    """
    torch.manual_seed(0)
    for offset in range(5):
        room = [torch.randn(9000) for _ in range(4)]
        room[3].abs_()
        kept = clone([room])[0]
        rows = [[r[offset : offset + 8500]] for r in room]
        wanted = [[k[offset : offset + 8500].clone()] for k in kept]
        run(kernels.adam, rows, False, False, **ADAM)
        run(references.adam, wanted, False, False, **ADAM)
        for r, k, w in zip(room, kept, wanted, strict=True):
            torch.testing.assert_close(r[offset : offset + 8500], w[0], rtol=1e-5, atol=2e-6)
            assert torch.equal(r[:offset], k[:offset]) and torch.equal(
                r[offset + 8500 :], k[offset + 8500 :]
            )
    views = [lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[3:, 1:]]
    for view in views:
        base = [torch.rand(40, 30) for _ in range(4)]
        other = [b.clone() for b in base]
        run(kernels.adam, [[view(b)] for b in base], False, False, **ADAM)
        run(references.adam, [[view(b)] for b in other], False, False, **ADAM)
        torch.testing.assert_close(base, other, rtol=1e-5, atol=2e-6)
    assert set(device) == {"adam"}


def test_mixed_types_in_one_call_keep_their_order(device: list[str]) -> None:
    kinds = [F32, F64, BF16, F32]
    rows = [[torch.rand(4, 5).to(k) for k in kinds] for _ in range(4)]
    theirs = clone(rows)
    options = LAMB | {"bias_correction": True, "eps_inside_sqrt": False}
    got = kernels.lamb(*rows, **options)
    assert got == pytest.approx(references.lamb(*theirs, **options), rel=1e-5)
    assert len(set(got)) == 4 and device == ["lamb", "lamb"]
    for a, b in zip(rows[0], theirs[0], strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-5)


def test_what_is_not_finite_stays_visible(device: list[str]) -> None:
    for name, states, options in STEPS:
        rows = lists((F32, F32, F32, None), states, [(9,)])
        rows[1][0][4] = torch.nan
        theirs = clone(rows)
        run(getattr(kernels, name), rows, False, name == "sgd" and not states, **options)
        run(getattr(references, name), theirs, False, name == "sgd" and not states, **options)
        for mine, wanted in zip(rows, theirs, strict=True):
            assert torch.equal(mine[0].isnan(), wanted[0].isnan()), name
        assert any(ts[0].isnan().any() for i, ts in enumerate(rows) if i != 1), name


def test_sizes_that_differ_are_refused(device: list[str]) -> None:
    a = [torch.zeros(3)]
    b = [torch.zeros(4)]
    with pytest.raises(KernelError, match=r"place 0 have \[3, 3, 4, 3\] elements"):
        kernels.adam(a, a, b, a, **ADAM)
    with pytest.raises(KernelError, match=r"lists of one operation have \[1, 2\] tensors"):
        kernels.accumulate(a, [*a, *b])
    with pytest.raises(KernelError, match="are 8 in q and 2 in scales"):
        kernels.dequantize(
            torch.zeros(7), torch.zeros(2), None, bits=8, group=4, numel=8, dtype=F32
        )
    assert not device


def test_steps_change_versions(device: list[str]) -> None:
    """Autograd must notice that saved parameters were changed."""
    p = torch.ones(3, requires_grad=True)
    loss = (p * p).sum()
    kernels.sgd(
        [p], [torch.ones(3)], None, **SGD | {"momentum": 0.0, "nesterov": False, "first": False}
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_squared_norm(device: list[str]) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(s).to(k) for s in SIZES for k in (F32, BF16, F16, F64)] * 3
    tensors += [torch.randn(30, 20).t(), torch.randn(30, 20)[:, ::3]]
    got = kernels.squared_norm(tensors)
    exact = sum(t.double().square().sum() for t in tensors)
    assert got.shape == () and got.dtype == F64
    assert torch.allclose(got, exact, rtol=1e-12)
    assert torch.allclose(got, reference_norm(tensors).double(), rtol=1e-6)
    assert kernels.squared_norm([torch.full((4,), 1e30)]).item() == pytest.approx(4e60)
    for bad in (torch.inf, torch.nan):
        tensors[5] = torch.full((8193,), 1.0)
        tensors[5][8192] = bad
        assert not kernels.squared_norm(tensors).isfinite()
    assert kernels.squared_norm([torch.zeros(0)]).item() == 0
    assert set(device) == {"squared_norm"}
    assert kernels.squared_norm([]).item() == 0


def test_accumulate(device: list[str]) -> None:
    torch.manual_seed(0)
    into = [torch.randn(s) for s in SIZES] + [torch.randn(6, 5).t()]
    added = [torch.randn(t.shape).to((F32, BF16, F16)[i % 3]) for i, t in enumerate(into)]
    wanted = [t.clone() for t in into]
    references.accumulate(wanted, added, scale=0.5)
    kernels.accumulate(into, added, scale=0.5)
    torch.testing.assert_close(into, wanted, rtol=1e-6, atol=1e-6)
    assert len(device) == 3


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantisation_has_the_bits_of_the_reference(
    bits: int, symmetric: bool, device: list[str]
) -> None:
    torch.manual_seed(bits)
    for dtype in (F32, BF16, F16):
        for n, group in ((0, 4), (1, 2), (7, 4), (1000, 64), (1001, 6), (5000, 2050), (4096, 256)):
            x = (torch.randn(n) * 3).to(dtype)
            if n > 900:
                x[:group] = 0
                x[group * 2 - 1] = torch.inf if n == 1000 else torch.nan
            mine = kernels.quantize(x, bits=bits, group=group, symmetric=symmetric)
            theirs = references.quantize(x, bits=bits, group=group, symmetric=symmetric)
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
            options = {"bits": bits, "group": group, "numel": n, "dtype": dtype}
            back = kernels.dequantize(*mine, **options), references.dequantize(*theirs, **options)
            torch.testing.assert_close(*back, rtol=0, atol=0, equal_nan=True)
    assert set(device) == {"quantize", "dequantize"}


@pytest.mark.parametrize("bits", [4, 8])
def test_sums_of_quantised_rows_have_the_bits_of_the_reference(
    bits: int, device: list[str]
) -> None:
    torch.manual_seed(bits)
    for rows, n, group in (
        (1, 7, 4),
        (3, 1000, 64),
        (2, 1001, 6),
        (5, 5000, 2050),
        (0, 9, 2),
        (3, 0, 4),
    ):
        parts = [
            references.quantize(torch.randn(n), bits=bits, group=group, symmetric=True)
            for _ in range(rows + 1)
        ]
        q, scales = (torch.stack([p[i] for p in parts])[1:] for i in (0, 1))
        if n == 1001:
            scales[1, 3] = torch.nan
        how = {"bits": bits, "group": group, "numel": n}
        mine = kernels.requantize_sum(q, scales, **how)
        theirs = references.requantize_sum(q, scales, **how)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
        for dtype in (F32, BF16, F16):
            sums = [f.dequantize_sum(q, scales, **how, dtype=dtype) for f in (kernels, references)]
            torch.testing.assert_close(*sums, rtol=0, atol=0, equal_nan=True)
    assert set(device) == {"dequantize_sum"}
