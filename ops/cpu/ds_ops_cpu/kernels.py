"""The functions that the kernel table serves: checks, addresses and sizes, one call into C++ for all tensors.

What C++ takes is memory in one order: for each place of the lists, tensors that are contiguous, or dense with the same
strides. Others are worked on as contiguous copies and copied back. What it cannot take at all (fp64) goes to the
reference, which means the same.

[Note: what is checked] Addresses bypass all of torch's own checks, so a wrong size, type or device would be memory
written at random. Every tensor is looked at anew in every call; a cache of what was checked before could be deceived by
``tensor.data = ...``. C++ does it (cpp/tensors.h), or Python with a torch that does not offer what that needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ds_core.errors import KernelError
from ds_core.kernels import build, references
from ds_core.params import squared_norm as reference_squared_norm
from ds_ops_cpu.extension import EXTENSION

__all__ = ["accumulate", "adagrad", "adam", "dequantize", "lamb", "lion", "quantize", "sgd", "squared_norm"]

Tensors = Sequence[Tensor]
Row = tuple[Tensor, ...]

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NORM_TYPES = {**_TYPES, torch.float64: 3}
_dtype, _on_cpu = attrgetter("dtype"), attrgetter("is_cpu")
_native: ModuleType | None = None


def native() -> ModuleType:
    """The compiled module, built now if it never was."""
    global _native
    if _native is None:
        _native = build.load(EXTENSION)
    return _native


# -- optimizer steps -------------------------------------------------------------------------------------------------


def adam(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool = True,
    bias_correction: bool = True,
    scale: float = 1.0,
    copies: Tensors | None = None,
) -> None:
    """See `ds_core.kernels.references.adam`."""
    correction1 = 1 - beta1**step if bias_correction else 1.0
    correction2 = 1 - beta2**step if bias_correction else 1.0
    numbers = (scale, lr, beta1, beta2, eps, weight_decay, decoupled, correction1, correction2)

    def reference(lists: list[list[Tensor]], copies: list[Tensor] | None) -> None:
        references.adam(
            *lists, step=step, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, decoupled=decoupled,
            bias_correction=bias_correction, scale=scale, copies=copies,
        )  # fmt: skip

    _step(native().adam, reference, numbers, [params, grads, exp_avgs, exp_avg_sqs], copies)


def adagrad(
    params: Tensors,
    grads: Tensors,
    sums: Tensors,
    *,
    lr: float,
    eps: float,
    weight_decay: float,
    scale: float = 1.0,
    copies: Tensors | None = None,
) -> None:
    """See `ds_core.kernels.references.adagrad`."""

    def reference(lists: list[list[Tensor]], copies: list[Tensor] | None) -> None:
        references.adagrad(*lists, lr=lr, eps=eps, weight_decay=weight_decay, scale=scale, copies=copies)

    _step(native().adagrad, reference, (scale, lr, eps, weight_decay), [params, grads, sums], copies)


def lion(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    scale: float = 1.0,
    copies: Tensors | None = None,
) -> None:
    """See `ds_core.kernels.references.lion`."""

    def reference(lists: list[list[Tensor]], copies: list[Tensor] | None) -> None:
        references.lion(*lists, lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, scale=scale, copies=copies)

    _step(native().lion, reference, (scale, lr, beta1, beta2, weight_decay), [params, grads, exp_avgs], copies)


def sgd(
    params: Tensors,
    grads: Tensors,
    momenta: Tensors | None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    first: bool,
    scale: float = 1.0,
    copies: Tensors | None = None,
) -> None:
    """See `ds_core.kernels.references.sgd`."""

    def reference(lists: list[list[Tensor]], copies: list[Tensor] | None) -> None:
        references.sgd(
            lists[0], lists[1], lists[2] if len(lists) > 2 else None, lr=lr, momentum=momentum, dampening=dampening,
            weight_decay=weight_decay, nesterov=nesterov, first=first, scale=scale, copies=copies,
        )  # fmt: skip

    numbers = (scale, lr, momentum, 1 - dampening, weight_decay, nesterov, first)
    _step(native().sgd, reference, numbers, [params, grads, *([] if momenta is None else [momenta])], copies)


def lamb(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bias_correction: bool,
    eps_inside_sqrt: bool,
    min_coeff: float,
    max_coeff: float,
    scale: float = 1.0,
    copies: Tensors | None = None,
) -> list[float]:
    """See `ds_core.kernels.references.lamb`."""
    size = lr * (1 - beta2**step) ** 0.5 / (1 - beta1**step) if bias_correction else lr
    numbers = (scale, size, beta1, beta2, eps, eps_inside_sqrt, weight_decay, min_coeff, max_coeff)

    def reference(lists: list[list[Tensor]], copies: list[Tensor] | None) -> list[float]:
        return references.lamb(
            *lists, step=step, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay,
            bias_correction=bias_correction, eps_inside_sqrt=eps_inside_sqrt, min_coeff=min_coeff,
            max_coeff=max_coeff, scale=scale, copies=copies,
        )  # fmt: skip

    return _step(native().lamb, reference, numbers, [params, grads, exp_avgs, exp_avg_sqs], copies)


def _step(
    run: Callable[..., list[float] | None],
    reference: Callable[[list[list[Tensor]], list[Tensor] | None], list[float] | None],
    numbers: tuple[float, ...],
    lists: Sequence[Tensors],
    copies: Tensors | None,
) -> list[float]:
    """Call `run` for the places that C++ can take, `reference` for the others; the values of all, in order.

    lists: parameters, gradients and states.
    """
    params, has_copies = lists[0], copies is not None
    if not params:
        return []
    everything = [*lists, copies] if copies is not None else list(lists)
    given = None
    if _takes([ts[0].dtype for ts in everything if ts], has_copies):
        given = _plain(everything)
    if given is not None:
        out = run(torch.get_num_threads(), given, has_copies, *numbers) or []
    else:
        if len({len(ts) for ts in everything}) > 1:
            raise KernelError(_sizes_differ(everything))
        sizes = list(map(Tensor.numel, params))
        if any(list(map(Tensor.numel, other)) != sizes for other in everything[1:]):
            raise KernelError(_sizes_differ(everything))
        out = _sorted_out(run, reference, numbers, everything, has_copies)
    torch.autograd.graph.increment_version(params)
    return out


_EXCHANGE = getattr(Tensor, "__dlpack_c_exchange_api__", None)


def _plain(lists: Sequence[Tensors], mixed: bool = False) -> Any:
    """The lists for C++, when all is plain: on the CPU, contiguous, sizes and dtypes alike. Else None.

    mixed: a list may hold several dtypes.
    """
    if _EXCHANGE is not None:  # torch >= 2.10
        return native().from_tensors(_EXCHANGE, list(lists), mixed)
    sizes = list(map(Tensor.numel, lists[0]))
    for tensors in lists:
        dtypes = list(map(_dtype, tensors))
        if list(map(Tensor.numel, tensors)) != sizes or not (mixed or len(set(dtypes)) == 1):
            return None
        if not all(d in _NORM_TYPES for d in set(dtypes)) or not all(map(_on_cpu, tensors)):
            return None
        if not all(map(Tensor.is_contiguous, tensors)):
            return None
    return _numbers(sizes, lists, mixed)


def _numbers(sizes: list[int], lists: Sequence[Tensors], mixed: bool = False) -> Any:
    """The lists for C++; each place's memory is known to be in one order."""
    kinds = [[_NORM_TYPES[t.dtype] for t in (ts if mixed else ts[:1])] for ts in lists]
    return native().from_numbers(sizes, kinds, [list(map(Tensor.data_ptr, ts)) for ts in lists])


def _takes(dtypes: Sequence[torch.dtype], has_copies: bool) -> bool:
    """Whether C++ has a path for parameters, gradients, states (all alike) and copies of these dtypes."""
    if any(d not in _TYPES for d in dtypes) or len(set(dtypes[2:-1] if has_copies else dtypes[2:])) > 1:
        return False
    return not has_copies or (dtypes[0] is torch.float32 and dtypes[-1] is not torch.float32)


def _sorted_out(
    run: Callable[..., list[float] | None],
    reference: Callable[[list[list[Tensor]], list[Tensor] | None], list[float] | None],
    numbers: tuple[float, ...],
    lists: Sequence[Tensors],
    has_copies: bool,
) -> list[float]:
    """Tensors of several kinds: one call for each, by the reference where C++ cannot."""
    kinds: dict[tuple[torch.dtype, ...] | None, list[int]] = {}
    rows: list[Row] = list(zip(*lists, strict=True))
    for place, row in enumerate(rows):
        dtypes = tuple(t.dtype for t in row)
        fits = _takes(dtypes, has_copies) and all(t.is_cpu for t in row)
        kinds.setdefault(dtypes if fits else None, []).append(place)
    out: dict[int, float] = {}
    for kind, places in kinds.items():
        members = [rows[i] for i in places]
        if kind is None:
            columns = [list(c) for c in zip(*members, strict=True)]
            copies = columns.pop() if has_copies else None
            values = reference(columns, copies) or []
        else:
            flat = [_in_one_order(row) for row in members]
            columns = [list(c) for c in zip(*flat, strict=True)]
            given = _numbers([r[0].numel() for r in flat], columns)
            values = run(torch.get_num_threads(), given, has_copies, *numbers) or []
            for row, worked in zip(members, flat, strict=True):
                for index, (tensor, copy) in enumerate(zip(row, worked, strict=True)):
                    if copy is not tensor and index != 1:
                        tensor.detach().copy_(copy)
        out.update(zip(places, values, strict=bool(values)))
    return [out[i] for i in sorted(out)]


def _in_one_order(row: Row) -> Row:
    """`row` itself where its tensors' memory is in one order without gaps, else contiguous tensors with its values."""
    strides = row[0].stride()
    if all(t.stride() == strides for t in row) and references.is_dense(row[0]):
        return row
    return tuple(t.detach().contiguous() for t in row)


def _sizes_differ(lists: Sequence[Tensors]) -> str:
    counts = [len(ts) for ts in lists]
    if len(set(counts)) > 1:
        return f"lists of one optimizer step have {counts} tensors; each must have one for every parameter"
    place = next(i for i, row in enumerate(zip(*lists, strict=True)) if len({t.numel() for t in row}) > 1)
    return f"tensors at place {place} have {[ts[place].numel() for ts in lists]} elements; they must be alike"


# -- sums --------------------------------------------------------------------------------------------------------------


def squared_norm(tensors: list[Tensor]) -> Tensor:
    """See `ds_core.params.squared_norm`; summed in fp64, so finite exactly when every element is."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    given = _plain([tensors], mixed=True)
    if given is None:
        tensors = [t if references.is_dense(t) else t.contiguous() for t in tensors]
        if not all(map(_on_cpu, tensors)) or any(t.dtype not in _NORM_TYPES for t in tensors):
            return reference_squared_norm(tensors)
        given = _numbers(list(map(Tensor.numel, tensors)), [tensors], mixed=True)
    total = native().squared_norm(torch.get_num_threads(), given)
    return torch.tensor(total, dtype=torch.float64)


def accumulate(into: Tensors, added: Tensors, *, scale: float = 1.0) -> None:
    """See `ds_core.kernels.references.accumulate`."""
    sizes = list(map(Tensor.numel, into))
    if sizes != list(map(Tensor.numel, added)):
        raise KernelError(_sizes_differ([into, added]))
    for dtype, totals, more in _by_kind(into, added):
        if dtype is None:
            references.accumulate(totals, more, scale=scale)
            continue
        given = _numbers(list(map(Tensor.numel, totals)), [totals, more])
        native().accumulate(torch.get_num_threads(), given, scale)
        torch.autograd.graph.increment_version(totals)


def _by_kind(into: Tensors, added: Tensors) -> Iterator[tuple[torch.dtype | None, list[Tensor], list[Tensor]]]:
    """The pairs by what is added; None for those that C++ cannot take."""
    kinds: dict[torch.dtype | None, tuple[list[Tensor], list[Tensor]]] = {}
    for total, more in zip(into, added, strict=True):
        alike = total.stride() == more.stride() and references.is_dense(total)
        fits = total.dtype is torch.float32 and more.dtype in _TYPES and total.is_cpu and more.is_cpu and alike
        totals, mores = kinds.setdefault(more.dtype if fits else None, ([], []))
        totals.append(total)
        mores.append(more)
    for kind, (totals, mores) in kinds.items():
        yield kind, totals, mores


# -- quantisation ------------------------------------------------------------------------------------------------------


def quantize(x: Tensor, *, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `ds_core.kernels.references.quantize`."""
    references.check_quantize(bits, group)
    if x.dtype not in _TYPES or not x.is_cpu:
        return references.quantize(x, bits=bits, group=group, symmetric=symmetric)
    x = x.detach().contiguous()
    n = x.numel()
    groups = (n + group - 1) // group
    kind = torch.int8 if bits == 8 and symmetric else torch.uint8
    q = torch.empty(n if bits == 8 else (n + 1) // 2, dtype=kind)
    scales = torch.empty(groups)
    lows = None if symmetric else torch.empty(groups)
    native().quantize(
        torch.get_num_threads(), n, _TYPES[x.dtype], x.data_ptr(), group, bits, symmetric, q.data_ptr(),
        scales.data_ptr(), 0 if lows is None else lows.data_ptr(),
    )  # fmt: skip
    return q, scales, lows


def dequantize(
    q: Tensor, scales: Tensor, lows: Tensor | None, *, bits: int, group: int, numel: int, dtype: torch.dtype
) -> Tensor:
    """See `ds_core.kernels.references.dequantize`."""
    references.check_quantize(bits, group)
    groups, size = (numel + group - 1) // group, numel if bits == 8 else (numel + 1) // 2
    kind = torch.int8 if bits == 8 and lows is None else torch.uint8
    sized = q.numel() == size and scales.numel() == groups and (lows is None or lows.numel() == groups)
    if not sized:
        raise KernelError(
            f"{numel} elements in groups of {group} at {bits} bits are {size} in q and {groups} in scales and lows; "
            f"given are {q.numel()}, {scales.numel()} and {0 if lows is None else lows.numel()}"
        )
    given: list[Any] = [q, scales, *([] if lows is None else [lows])]
    wanted = [kind, torch.float32, torch.float32][: len(given)]
    if dtype not in _TYPES or [t.dtype for t in given] != wanted or not all(t.is_cpu for t in given):
        return references.dequantize(q, scales, lows, bits=bits, group=group, numel=numel, dtype=dtype)
    given = [t.detach().contiguous() for t in given]
    out = torch.empty(numel, dtype=dtype)
    native().dequantize(
        torch.get_num_threads(), numel, _TYPES[dtype], out.data_ptr(), group, bits, given[0].data_ptr(),
        given[1].data_ptr(), given[2].data_ptr() if len(given) > 2 else 0,
    )  # fmt: skip
    return out
