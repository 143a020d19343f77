"""The core's operations on CUDA tensors: checks, addresses and sizes, one call into C++ for all tensors of a kind.

A call takes, at each place of its lists, tensors on one device whose memory is in one order: contiguous, or dense with
the same strides. Others are worked on as contiguous copies and copied back; what C++ cannot take at all (fp64, tensors
of several devices at one place) goes to the reference, which means the same.

[Note: what is checked] Addresses bypass torch's own checks, so a wrong size, type or device would be memory written at
random. Every list is looked through in whole, attribute by attribute with `map`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ds_core.errors import KernelError
from ds_core.kernels import references
from ds_core.params import squared_norm as reference_squared_norm
from ds_ops_cuda import native
from ds_ops_cuda.native import NONE, TYPES

__all__ = ["accumulate", "adagrad", "adam", "dequantize", "lamb", "lion", "quantize", "sgd", "squared_norm"]

Tensors = Sequence[Tensor]
Row = tuple[Tensor, ...]
Lists = list[list[Tensor]]
Reference = Callable[[Lists, "list[Tensor] | None"], "list[float] | None"]

_NORM_TYPES = {**TYPES, torch.float64: 3}
_dtype, _device = attrgetter("dtype"), attrgetter("device")


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

    def reference(lists: Lists, copies: list[Tensor] | None) -> None:
        references.adam(
            *lists, step=step, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, decoupled=decoupled,
            bias_correction=bias_correction, scale=scale, copies=copies,
        )  # fmt: skip

    numbers = (scale, lr, beta1, beta2, eps, weight_decay, decoupled, correction1, correction2)
    _step("adam", reference, numbers, [params, grads, exp_avgs, exp_avg_sqs], copies)


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

    def reference(lists: Lists, copies: list[Tensor] | None) -> None:
        references.adagrad(*lists, lr=lr, eps=eps, weight_decay=weight_decay, scale=scale, copies=copies)

    _step("adagrad", reference, (scale, lr, eps, weight_decay), [params, grads, sums], copies)


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

    def reference(lists: Lists, copies: list[Tensor] | None) -> None:
        references.lion(*lists, lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, scale=scale, copies=copies)

    _step("lion", reference, (scale, lr, beta1, beta2, weight_decay), [params, grads, exp_avgs], copies)


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

    def reference(lists: Lists, copies: list[Tensor] | None) -> None:
        references.sgd(
            lists[0], lists[1], lists[2] if len(lists) > 2 else None, lr=lr, momentum=momentum, dampening=dampening,
            weight_decay=weight_decay, nesterov=nesterov, first=first, scale=scale, copies=copies,
        )  # fmt: skip

    numbers = (scale, lr, momentum, 1 - dampening, weight_decay, nesterov, first)
    _step("sgd", reference, numbers, [params, grads, *([] if momenta is None else [momenta])], copies)


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
    """See `ds_core.kernels.references.lamb`; reading the trust ratios waits for the device once."""
    size = lr * (1 - beta2**step) ** 0.5 / (1 - beta1**step) if bias_correction else lr

    def reference(lists: Lists, copies: list[Tensor] | None) -> list[float]:
        return references.lamb(
            *lists, step=step, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay,
            bias_correction=bias_correction, eps_inside_sqrt=eps_inside_sqrt, min_coeff=min_coeff,
            max_coeff=max_coeff, scale=scale, copies=copies,
        )  # fmt: skip

    numbers = (scale, size, beta1, beta2, eps, eps_inside_sqrt, weight_decay, min_coeff, max_coeff)
    return _step("lamb", reference, numbers, [params, grads, exp_avgs, exp_avg_sqs], copies)


def _step(
    name: str, reference: Reference, numbers: tuple[float, ...], lists: Sequence[Tensors], copies: Tensors | None
) -> list[float]:
    """Call `name` for the places that C++ can take, `reference` for the others; the values of all, in order.

    lists: parameters, gradients and states.
    """
    params = lists[0]
    everything = [*lists, copies] if copies is not None else lists
    sizes = list(map(Tensor.numel, params))
    if any(list(map(Tensor.numel, other)) != sizes for other in everything[1:]):
        raise KernelError(sizes_differ(everything))
    if not params:
        return []
    kinds = [set(map(_dtype, tensors)) for tensors in everything]
    devices = set().union(*(map(_device, ts) for ts in everything))
    plain = all(len(k) == 1 for k in kinds) and takes([next(iter(k)) for k in kinds], copies is not None)
    plain = plain and len(devices) == 1 and native.serves(next(iter(devices)))
    if plain and all(all(map(Tensor.is_contiguous, ts)) for ts in everything):
        out = _call(name, numbers, everything, copies is not None)
    else:
        out = _sorted_out(name, reference, numbers, everything, copies is not None)
    torch.autograd.graph.increment_version([*params, *(copies or ())])
    return out


def _call(name: str, numbers: tuple[float, ...], lists: Sequence[Tensors], has_copies: bool) -> list[float]:
    """One call into C++; each list is of one dtype that it takes, every tensor's memory in the order of its place."""
    device = lists[0][0].device
    sizes = list(map(Tensor.numel, lists[0]))
    types = [TYPES[ts[0].dtype] for ts in lists]
    addresses = [list(map(Tensor.data_ptr, ts)) for ts in lists]
    copies, copy_type = (addresses.pop(), types.pop()) if has_copies else ([], NONE)
    addresses += [[]] * (4 - len(addresses)) + [copies]
    kinds = (types[0], types[1], types[2] if len(types) > 2 else NONE, copy_type)
    if name != "lamb":
        native.call(name, device, sizes, kinds, addresses, *numbers)
        return []
    partials = torch.empty(2 * _blocks(sizes), dtype=torch.float64, device=device)
    coeffs = torch.ones(len(sizes), device=device)  # tensors without elements keep it
    native.call(name, device, sizes, kinds, addresses, partials.data_ptr(), coeffs.data_ptr(), *numbers)
    found: list[float] = coeffs.tolist()
    return found


def takes(dtypes: Sequence[torch.dtype], has_copies: bool) -> bool:
    """Whether C++ has a path for parameters, gradients, states (all alike) and copies of these dtypes."""
    if any(d not in TYPES for d in dtypes) or len(set(dtypes[2:-1] if has_copies else dtypes[2:])) > 1:
        return False
    return not has_copies or dtypes[0] is torch.float32


def _sorted_out(
    name: str, reference: Reference, numbers: tuple[float, ...], lists: Sequence[Tensors], has_copies: bool
) -> list[float]:
    """Tensors of several kinds: one call for each, by the reference where C++ cannot."""
    kinds: dict[tuple[Any, ...] | None, list[int]] = {}
    rows: list[Row] = list(zip(*lists, strict=True))
    for place, row in enumerate(rows):
        dtypes = tuple(t.dtype for t in row)
        device = row[0].device
        fits = takes(dtypes, has_copies) and native.serves(device) and all(t.device == device for t in row)
        kinds.setdefault((device, *dtypes) if fits else None, []).append(place)
    out: dict[int, float] = {}
    for kind, places in kinds.items():
        members = [rows[i] for i in places]
        if kind is None:
            columns = [list(c) for c in zip(*members, strict=True)]
            copies = columns.pop() if has_copies else None
            values = reference(columns, copies) or []
        else:
            flat = [in_one_order(row) for row in members]
            values = _call(name, numbers, [list(c) for c in zip(*flat, strict=True)], has_copies)
            for row, worked in zip(members, flat, strict=True):
                for index, (tensor, copy) in enumerate(zip(row, worked, strict=True)):
                    if copy is not tensor and index != 1:
                        tensor.detach().copy_(copy)
        out.update(zip(places, values, strict=bool(values)))
    return [out[i] for i in sorted(out)]


def in_one_order(row: Row) -> Row:
    """`row` itself where its tensors' memory is in one order without gaps, else contiguous tensors with its values."""
    strides = row[0].stride()
    if all(t.stride() == strides for t in row) and references.is_dense(row[0]):
        return row
    return tuple(t.detach().contiguous() for t in row)


def sizes_differ(lists: Sequence[Tensors]) -> str:
    """What is wrong with lists whose tensors do not have the same sizes, place by place."""
    counts = [len(ts) for ts in lists]
    if len(set(counts)) > 1:
        return f"lists of one operation have {counts} tensors; each must have as many as the first"
    place = next(i for i, row in enumerate(zip(*lists, strict=True)) if len({t.numel() for t in row}) > 1)
    return f"tensors at place {place} have {[ts[place].numel() for ts in lists]} elements; they must be alike"


def _blocks(sizes: Sequence[int]) -> int:
    chunk: int = native.native().CHUNK
    return sum((n + chunk - 1) // chunk for n in sizes)


# -- sums --------------------------------------------------------------------------------------------------------------


def squared_norm(tensors: list[Tensor]) -> Tensor:
    """See `ds_core.params.squared_norm`; fp64, so finite exactly when all elements are. Never waits for the device."""
    devices = set(map(_device, tensors))
    kinds = [_NORM_TYPES.get(d, NONE) for d in map(_dtype, tensors)]
    if len(devices) != 1 or not native.serves(next(iter(devices))) or NONE in kinds:
        return reference_squared_norm(tensors)
    device = next(iter(devices))
    tensors = [t if references.is_dense(t) else t.detach().contiguous() for t in tensors]
    sizes, addresses = list(map(Tensor.numel, tensors)), list(map(Tensor.data_ptr, tensors))
    room = torch.empty(_blocks(sizes) + 1, dtype=torch.float64, device=device)
    total = torch.empty((), dtype=torch.float64, device=device)
    native.call("squared_norm", device, sizes, kinds, addresses, room.data_ptr(), total.data_ptr())
    return total


def accumulate(into: Tensors, added: Tensors, *, scale: float = 1.0) -> None:
    """See `ds_core.kernels.references.accumulate`."""
    if list(map(Tensor.numel, into)) != list(map(Tensor.numel, added)):
        raise KernelError(sizes_differ([into, added]))
    kinds: dict[tuple[torch.device, torch.dtype] | None, tuple[list[Tensor], list[Tensor]]] = {}
    for total, more in zip(into, added, strict=True):
        alike = total.stride() == more.stride() and total.device == more.device and references.is_dense(total)
        fits = total.dtype is torch.float32 and more.dtype in TYPES and native.serves(total.device) and alike
        totals, mores = kinds.setdefault((total.device, more.dtype) if fits else None, ([], []))
        totals.append(total)
        mores.append(more)
    for kind, (totals, mores) in kinds.items():
        if kind is None:
            references.accumulate(totals, mores, scale=scale)
            continue
        lists = [list(map(Tensor.data_ptr, totals)), list(map(Tensor.data_ptr, mores))]
        native.call("accumulate", kind[0], list(map(Tensor.numel, totals)), TYPES[kind[1]], lists, scale)
        torch.autograd.graph.increment_version(totals)


# -- quantisation ------------------------------------------------------------------------------------------------------


def quantize(x: Tensor, *, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `ds_core.kernels.references.quantize`; the same bits."""
    references.check_quantize(bits, group)
    if x.dtype not in TYPES or not native.serves(x.device):
        return references.quantize(x, bits=bits, group=group, symmetric=symmetric)
    x = x.detach().contiguous()
    n = x.numel()
    kind = torch.int8 if bits == 8 and symmetric else torch.uint8
    q = torch.empty(n if bits == 8 else (n + 1) // 2, dtype=kind, device=x.device)
    scales = torch.empty((n + group - 1) // group, device=x.device)
    lows = None if symmetric else torch.empty_like(scales)
    native.call(
        "quantize", x.device, n, TYPES[x.dtype], x.data_ptr(), group, bits, symmetric, q.data_ptr(),
        scales.data_ptr(), 0 if lows is None else lows.data_ptr(),
    )  # fmt: skip
    return q, scales, lows


def dequantize(
    q: Tensor, scales: Tensor, lows: Tensor | None, *, bits: int, group: int, numel: int, dtype: torch.dtype
) -> Tensor:
    """See `ds_core.kernels.references.dequantize`; the same bits."""
    references.check_quantize(bits, group)
    groups, size = (numel + group - 1) // group, numel if bits == 8 else (numel + 1) // 2
    given = [q, scales, *([] if lows is None else [lows])]
    if q.numel() != size or any(t.numel() != groups for t in given[1:]):
        raise KernelError(
            f"{numel} elements in groups of {group} at {bits} bits are {size} in q and {groups} in scales and lows; "
            f"given are {q.numel()}, {scales.numel()} and {0 if lows is None else lows.numel()}"
        )
    kind = torch.int8 if bits == 8 and lows is None else torch.uint8
    wanted = [kind, torch.float32, torch.float32][: len(given)]
    alike = [t.dtype for t in given] == wanted and all(native.serves(t.device) and t.device == q.device for t in given)
    if dtype not in TYPES or not alike:
        return references.dequantize(q, scales, lows, bits=bits, group=group, numel=numel, dtype=dtype)
    given = [t.detach().contiguous() for t in given]
    out = torch.empty(numel, dtype=dtype, device=q.device)
    native.call(
        "dequantize", q.device, numel, TYPES[dtype], out.data_ptr(), group, bits, given[0].data_ptr(),
        given[1].data_ptr(), 0 if lows is None else given[2].data_ptr(),
    )  # fmt: skip
    return out
