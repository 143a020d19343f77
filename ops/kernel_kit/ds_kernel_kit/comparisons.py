"""Comparing a provider of an operation with the operation's pure-torch reference.

`check` does one provider: it is what ``dscore ops test`` and `ds_testing.KernelConformance` run.
Sizes are 0, 1, odd, around powers of two and large; memory contiguous, transposed, with gaps, off
alignment; dtypes alone and mixed in one call; several calls with different factors, as for several
parameter groups.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ds_core.entries import KernelEntry, resolve
from ds_kernel_kit import references
from ds_kernel_kit.steps import STEPS, StepSpec

SIZES = (0, 1, 3, 17, 255, 1024, 1025, 4099, 70_001)
# Of a tensor, none a multiple of a vector.
_PARTS = (1, 2, 14, 238, 769, 1)
F64 = torch.float64
F32 = torch.float32
BF16 = torch.bfloat16
F16 = torch.float16
# Parameters, gradients, states.
MIXTURES = (
    (F32, F32, F32),
    (F32, BF16, F32),
    (F32, F16, F32),
    (BF16, BF16, F32),
    (BF16, BF16, BF16),
    (BF16, F32, F32),
    (F16, F16, F32),
    (F16, F16, F16),
    (F32, F32, BF16),
    (F64, F64, F64),
)
# Relative error that rounding explains: of single operations in another order, then of the last
# cast.
_ROUNDING = {F64: 1e-12, F32: 4e-6, BF16: 2**-7, F16: 2**-9}

Lists = list[list[Tensor]]
Function = Callable[..., Any]


def has_check(entry: KernelEntry) -> bool:
    """Whether `check` knows what `entry` is to be compared with."""
    return entry.check is not None or entry.op in CHECKS


def check(entry: KernelEntry, device: str = "cpu") -> int:
    """Compare `entry` with its operation's reference; the number of comparisons.

    AssertionError says what differs.
    """
    function: Function = resolve(entry.load)
    done = 0
    comparisons: Comparisons = CHECKS[entry.op] if entry.check is None else resolve(entry.check)
    for what, compare in comparisons(function, device, entry.dtypes):
        try:
            compare()
        except Exception as error:
            raise AssertionError(f"{entry.op} by {entry.provider}, {what}: {error}") from error
        done += 1
    assert done, f"{entry.op} by {entry.provider}: none of its dtypes {entry.dtypes} is checked"
    return done


Cases = Iterator[tuple[str, Callable[[], None]]]
Comparisons = Callable[[Function, str, tuple[str, ...]], Cases]


# -- tensors ---------------------------------------------------------------------------------------


def tensor(n: int, dtype: torch.dtype, device: str, layout: str, seed: int) -> Tensor:
    """`n` numbers, all multiples of 1/64 below 2 in size, so that many sums of them are exact in
    every order.
    """
    generator = torch.Generator().manual_seed(seed)
    # Two elements of memory for each, so that layouts with gaps have values between.
    room = torch.randint(-127, 128, (2 * n + 8,), generator=generator).to(device, dtype).div_(64)
    if layout == "contiguous":
        return room[:n].clone()
    if layout == "off alignment":
        return room[1 : n + 1]
    if layout == "with gaps":
        return room[: 2 * n : 2]
    side = next(d for d in (7, 5, 3, 2, 1) if n % d == 0)  # "transposed"
    return room[:n].view(-1, side).t() if n else room[:0]


LAYOUTS = ("contiguous", "off alignment", "with gaps", "transposed")


def _copies(lists: Lists) -> Lists:
    """The same values in the same layouts, in memory of their own."""
    return [[_like(t) for t in tensors] for tensors in lists]


def _like(t: Tensor) -> Tensor:
    """A copy with the strides of `t`, gaps included."""
    # As far as the strides go; three elements in front put the copy off alignment.
    reach = (
        sum((s - 1) * st for s, st in zip(t.shape, t.stride(), strict=True)) + 1 if t.numel() else 0
    )
    out = torch.zeros(reach + 3, dtype=t.dtype, device=t.device)[3:].as_strided(t.shape, t.stride())
    return out.copy_(t)


def _close(kind: str, got: Lists, wanted: Lists, loosest: float) -> None:
    for number, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        for place, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            limit = max(_ROUNDING[a.dtype], loosest)
            where = f"{kind}: list {number}, tensor {place}: "
            torch.testing.assert_close(a, b, rtol=limit, atol=limit / 8, msg=where.__add__)


# -- optimizer steps -------------------------------------------------------------------------------


def _operands(
    spec: StepSpec, mixture: tuple[torch.dtype, ...], device: str, layouts: tuple[str, ...]
) -> Lists:
    """Parameters, gradients and states; a state that holds squares is at least 1, so that updates
    are of size 1.
    """
    kinds = [mixture[0], mixture[1], *[mixture[2] for _ in spec.states]]
    squares = spec.tensors.index(spec.squares) if spec.squares is not None else None
    lists = []
    for number, kind in enumerate(kinds):
        members = [
            tensor(n, kind, device, layouts[i % len(layouts)], seed=97 * number + i)
            for i, n in enumerate(SIZES)
        ]
        lists.append([_like(t).abs_().add_(1) if number == squares else t for t in members])
    return lists


def _calls(
    spec: StepSpec, function: Function, lists: Lists, copies: list[Tensor] | None
) -> list[Any]:
    """All trials of the step, on these tensors; what they return."""
    return [function(*lists, copies=copies, **options) for options in spec.trials]


def _steps(spec: StepSpec) -> Comparisons:
    width = len(spec.tensors)

    def same(function: Function, lists: Lists, copy: torch.dtype | None) -> None:
        """Gradients stay as they are; parameters, states, copies and returned values are the
        reference's.
        """
        mine = _copies(lists)
        theirs = _copies(lists)
        copies = None if copy is None else [torch.full_like(p, 3.0, dtype=copy) for p in mine[0]]
        others = None if copy is None else [torch.full_like(p, 3.0, dtype=copy) for p in theirs[0]]
        got = _calls(spec, function, mine, copies)
        wanted = _calls(spec, spec.reference, theirs, others)
        # What has few digits is rounded in every step, and each rounding carries into what follows.
        kept = {t.dtype for tensors in (lists[0], *lists[2:]) for t in tensors}
        coarse = 2 * max((_ROUNDING[d] for d in kept & {BF16, F16}), default=0.0)
        _close("after the steps", mine, theirs, coarse)
        for a, b in zip(mine[1], lists[1], strict=True):
            assert torch.equal(a, b), "the step changed gradients"
        if copies is not None and others is not None:
            _close("copies", [copies], [others], coarse)
        for a, b in zip(got, wanted, strict=True):
            assert (a is None) == (b is None), f"returned {a}, not {b}"
            if b is not None:
                torch.testing.assert_close(
                    torch.tensor(a), torch.tensor(b), rtol=1e-4 + 4 * coarse, atol=1e-6
                )

    def cases(function: Function, device: str, dtypes: tuple[str, ...]) -> Cases:
        mixtures = [m for m in MIXTURES if not dtypes or str(m[0]).removeprefix("torch.") in dtypes]
        for number, mixture in enumerate(mixtures):
            # Copies of each dtype take turns over the mixtures.
            copy = (None, BF16, F16, F32)[number % 4] if mixture[0] is F32 else None
            for layouts in (("contiguous",), LAYOUTS):
                lists = _operands(spec, mixture, device, layouts)
                kinds = "/".join(str(d).removeprefix("torch.") for d in mixture)
                what = f"{kinds} {layouts[-1]}, copies {copy}"
                yield what, lambda lists=lists, copy=copy: same(function, lists, copy)  # type: ignore[misc]
        some = [_operands(spec, m, device, ("contiguous",)) for m in mixtures[:5]]
        mixed = [[t for lists in some for t in lists[i][1:5]] for i in range(width)]
        yield "several dtypes in one call", lambda: same(function, mixed, None)
        uneven = [
            [
                tensor(n, F32, device, LAYOUTS[(i + k) % 4], 5 * k + i).abs()
                for i, n in enumerate(SIZES)
            ]
            for k in range(width)
        ]
        flat = [[t.reshape(-1) for t in ts] for ts in uneven]
        yield "each operand in another layout", lambda: same(function, flat, BF16)
        yield "no tensors", lambda: same(function, [[] for _ in range(width)], None)
        # LAMB's update of an element is by norms of its tensor.
        if spec.op != "lamb":
            yield from _places(spec, function, mixtures, device)
        if spec.op == "sgd":
            yield "no momentum", lambda: _no_momentum(function, device)

    return cases


def _places(
    spec: StepSpec, function: Function, mixtures: Iterable[tuple[torch.dtype, ...]], device: str
) -> Cases:
    for mixture in mixtures:
        lists = _unrounded(spec, mixture, device)
        what = f"elements at other places, {mixture[0]}/{mixture[1]}/{mixture[2]}"
        yield what, lambda lists=lists: _same_in_parts(spec, function, lists)  # type: ignore[misc]


def _unrounded(spec: StepSpec, mixture: tuple[torch.dtype, ...], device: str) -> Lists:
    """A tensor of each kind, of values whose sums and products are rounded."""
    generator = torch.Generator().manual_seed(0)
    kinds = [mixture[0], mixture[1], *[mixture[2] for _ in spec.states]]
    return [[torch.rand(1025, generator=generator).to(device, kind)] for kind in kinds]


def _same_in_parts(spec: StepSpec, function: Function, lists: Lists) -> None:
    """Parts of a tensor get the bits that they get in the whole; see `references`,
    [Note: position].
    """
    whole = _copies(lists)
    _calls(spec, function, whole, None)
    parts = [[p.clone() for p in tensors[0].split(_PARTS)] for tensors in lists]
    _calls(spec, function, parts, None)
    for name, (all_of_it,), cut in zip(spec.tensors, whole, parts, strict=True):
        differ = (torch.cat(cut) != all_of_it).sum()
        assert not differ, f"{name}: {int(differ)} elements depend on where they stand"


def _no_momentum(function: Function, device: str) -> None:
    lists = _operands(STEPS["sgd"], (F32, F32, F32), device, LAYOUTS)[:2]
    mine = _copies(lists)
    theirs = _copies(lists)
    factors = {
        "lr": 0.1,
        "momentum": 0.0,
        "dampening": 0.0,
        "weight_decay": 0.125,
        "nesterov": False,
        "first": False,
    }
    function(*mine, None, **factors)
    references.sgd(theirs[0], theirs[1], None, **factors)  # type: ignore[arg-type]
    _close("after the step", mine, theirs, 0.0)


# -- the other operations --------------------------------------------------------------------------


def _norms(function: Function, device: str, dtypes: tuple[str, ...]) -> Cases:
    def same(tensors: list[Tensor]) -> None:
        exact = math.fsum(float(t.double().square().sum()) for t in tensors)
        got = function(tensors)
        assert got.dim() == 0
        # torch's is off by 5e-5
        assert math.isclose(float(got), exact, rel_tol=1e-4), f"{float(got)}, not {exact}"

    def not_finite(value: float) -> None:
        for place in (0, 1023, 1024, 2999):
            bad = torch.ones(3000, device=device)
            bad[place] = value
            got = float(function([torch.ones(5, device=device), bad]))
            assert not math.isfinite(got), f"{value} at {place} is lost"

    for kind in (F32, BF16, F16, F64):
        if not dtypes or str(kind).removeprefix("torch.") in dtypes:
            for layout in LAYOUTS:
                members = [tensor(n, kind, device, layout, i) for i, n in enumerate(SIZES)]
                yield f"{kind} {layout}", lambda members=members: same(members)  # type: ignore[misc]
    yield (
        "small numbers",
        lambda: same([torch.full((2000,), 1e-15, device=device), torch.zeros(9, device=device)]),
    )
    yield (
        "several dtypes",
        lambda: same([tensor(1025, k, device, "contiguous", 3) for k in (F32, BF16, F16)]),
    )
    for value in (math.inf, -math.inf, math.nan):
        yield f"{value}", lambda value=value: not_finite(value)  # type: ignore[misc]
    yield "no tensors", lambda: same([])


def _accumulations(function: Function, device: str, dtypes: tuple[str, ...]) -> Cases:
    def same(into: list[Tensor], added: list[Tensor], scale: float) -> None:
        mine = _copies([into])[0]
        theirs = _copies([into])[0]
        function(mine, added, scale=scale)
        references.accumulate(theirs, added, scale=scale)
        _close("sums", [mine], [theirs], 0.0)

    for kind in (F32, BF16, F16):
        if dtypes and str(kind).removeprefix("torch.") not in dtypes:
            continue
        for layout in LAYOUTS:
            into = [tensor(n, F32, device, layout, i) for i, n in enumerate(SIZES)]
            added = [tensor(n, kind, device, layout, 50 + i) for i, n in enumerate(SIZES)]
            yield f"{kind} {layout}", lambda a=into, b=added: same(a, b, 1.0)  # type: ignore[misc]
            yield f"{kind} {layout} scaled", lambda a=into, b=added: same(a, b, 0.3)  # type: ignore[misc]


def _quantisations(function: Function, device: str, dtypes: tuple[str, ...]) -> Cases:
    def same(x: Tensor, bits: int, group: int, symmetric: bool) -> None:
        room = references.quantize(
            torch.zeros(x.numel(), device=device), bits=bits, group=group, symmetric=symmetric
        )
        mine = function(
            x, bits=bits, group=group, symmetric=symmetric, out=room if x.numel() % 2 else None
        )
        assert not x.numel() % 2 or mine[0] is room[0], "`out` is not what is returned"
        theirs = references.quantize(x, bits=bits, group=group, symmetric=symmetric)
        for a, b in zip(mine, theirs, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert a.dtype == b.dtype
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)

    for what, x, bits, group, symmetric in _quantised_cases(device, dtypes):
        yield what, lambda a=(x, bits, group, symmetric): same(*a)  # type: ignore[misc]


def _quantised_cases(
    device: str, dtypes: tuple[str, ...]
) -> Iterator[tuple[str, Tensor, int, int, bool]]:
    for kind in (F32, BF16, F16):
        if dtypes and str(kind).removeprefix("torch.") not in dtypes:
            continue
        for bits in (8, 4):
            for symmetric in (True, False):
                for i, n in enumerate(SIZES):
                    x = tensor(n, kind, device, LAYOUTS[i % 4], i)
                    what = (
                        f"{kind}, {bits} bits, {'symmetric' if symmetric else 'asymmetric'}, "
                        f"{n} "
                        "elements"
                    )
                    yield what, x, bits, (64, 2, 2048, 6)[i % 4], symmetric
        odd = torch.ones(64, dtype=kind, device=device)
        odd[7] = math.nan
        odd[20] = math.inf
        odd[33] = -math.inf
        yield f"{kind}, groups without steps", odd, 8, 16, False
        yield f"{kind}, groups without symmetric steps", torch.cat([odd, odd * 0]), 4, 16, True


def _dequantisations(function: Function, device: str, dtypes: tuple[str, ...]) -> Cases:
    def same(x: Tensor, bits: int, group: int, symmetric: bool) -> None:
        q, scales, lows = references.quantize(x, bits=bits, group=group, symmetric=symmetric)
        how: dict[str, Any] = {"bits": bits, "group": group, "numel": x.numel(), "dtype": x.dtype}
        room = (
            torch.full((x.numel(),), 3.0, dtype=x.dtype, device=device) if x.numel() % 2 else None
        )
        mine = function(q, scales, lows, **how, out=room)
        theirs = references.dequantize(q, scales, lows, **how)
        assert room is None or mine.data_ptr() == room.data_ptr(), "`out` is not what is returned"
        assert mine.dtype == theirs.dtype
        _close("values", [[mine]], [[theirs]], 0.0)

    for what, x, bits, group, symmetric in _quantised_cases(device, dtypes):
        if "without" not in what:
            yield what, lambda a=(x, bits, group, symmetric): same(*a)  # type: ignore[misc]


def _sums(function: Function, device: str, dtypes: tuple[str, ...]) -> Cases:
    """Of 0 to 5 rows with gaps between them."""

    def same(rows: int, n: int, bits: int, group: int, into: torch.dtype | None) -> None:
        q, scales = _rows(rows, n, bits, group, device)
        how: dict[str, Any] = {"bits": bits, "group": group, "numel": n}
        reference: Function = references.requantize_sum
        if into is not None:
            how["dtype"] = into
            reference = references.dequantize_sum
        mine = function(q, scales, **how)
        theirs = reference(q, scales, **how)
        for a, b in zip(
            *([mine], [theirs]) if into is not None else (mine[:2], theirs[:2]), strict=True
        ):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        room = tuple(
            None if t is None else torch.full_like(t, 3)
            for t in ([mine] if into is not None else mine)
        )
        filled = function(q, scales, **how, out=room[0] if into is not None else room)
        for a, b in zip([filled] if into is not None else filled[:2], room[:2], strict=True):
            assert b is not None and a.data_ptr() == b.data_ptr(), "`out` is not what is returned"
        for a, b in zip(room, [mine] if into is not None else mine, strict=True):
            assert a is None or torch.equal(a.nan_to_num(), b.nan_to_num()), (
                "`out` has other values"
            )

    kinds = [k for k in (F32, BF16, F16) if not dtypes or str(k).removeprefix("torch.") in dtypes]
    summed = "dtype" in inspect.signature(function).parameters
    for into in kinds if summed else [None]:
        for bits in (8, 4):
            for i, n in enumerate(SIZES):
                what = f"{i % 6} rows of {n} elements, {bits} bits, {into}"
                group = (64, 2, 2048, 6)[i % 4]
                yield what, lambda a=(i % 6, n, bits, group, into): same(*a)  # type: ignore[misc]


def _rows(rows: int, n: int, bits: int, group: int, device: str) -> tuple[Tensor, Tensor]:
    """Quantised tensors as rows of one buffer; one group is without steps."""
    made = []
    for row in range(rows):
        x = tensor(n, F32, device, "contiguous", 11 * row + n).mul_(1.25**row)
        if row == 2:
            x[n // 2 :] = math.inf
        made.append(references.quantize(x, bits=bits, group=group, symmetric=True))
    if not made:
        made = [
            references.quantize(
                tensor(n, F32, device, "contiguous", 0), bits=bits, group=group, symmetric=True
            )
        ]
    parts = []
    for part in (torch.stack([q for q, _, _ in made]), torch.stack([s for _, s, _ in made])):
        gaps = torch.zeros(len(part), part.shape[1] + 5, dtype=part.dtype, device=device)
        gaps[:, : part.shape[1]] = part
        parts.append(gaps[:rows, : part.shape[1]])
    return parts[0], parts[1]


CHECKS: dict[str, Comparisons] = {
    **{op: _steps(spec) for op, spec in STEPS.items()},
    "squared_norm": _norms,
    "accumulate": _accumulations,
    "quantize": _quantisations,
    "dequantize": _dequantisations,
    "dequantize_sum": _sums,
    "requantize_sum": _sums,
}
"""Per operation of the core: given a provider's function, device and dtypes (empty: any),
comparisons and their names. A comparison raises AssertionError. A plugin's own operations bring
theirs as `KernelEntry.check`."""
