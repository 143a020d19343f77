"""The core's operations on CUDA tensors: checks, addresses and sizes, one call into C++ for all
tensors of a kind.

A call takes, at each place of its lists, tensors on one device whose memory is in one order:
contiguous, or dense with the same strides. Others are worked on as contiguous copies and copied
back; what C++ cannot take at all (fp64, tensors of several devices at one place) goes to the
reference, which means the same.

[Note: what is checked] Addresses bypass torch's own checks, so a wrong size, type or device would
be memory written at random. Every list is looked through in whole, attribute by attribute with
`map`.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from ds_kernel_kit import references
from ds_kernel_kit.marshal import (
    Reference,
    Row,
    Tensors,
    accumulation,
    can_step,
    compiled_steps,
    sizes_differ,
    sorted_out,
)
from ds_kernel_kit.quantized import quantized_operations
from torch import Tensor

from ds_core.errors import KernelError
from ds_core.partition import squared_norm as reference_squared_norm
from ds_ops_cuda import native
from ds_ops_cuda.native import NONE, TYPES

_NORM_TYPES = {**TYPES, torch.float64: 3}
_dtype = attrgetter("dtype")
_device = attrgetter("device")


# -- optimizer steps -------------------------------------------------------------------------------


def _step(
    name: str,
    reference: Reference,
    numbers: tuple[float, ...],
    lists: Sequence[Tensors],
    copies: Tensors | None,
) -> list[float]:
    """Call `name` for the places that C++ can take, `reference` for the others; see
    `ds_kernel_kit.steps.Run`.
    """
    params = lists[0]
    has_copies = copies is not None
    everything = [*lists, copies] if copies is not None else lists
    sizes = list(map(Tensor.numel, params))
    if any(list(map(Tensor.numel, other)) != sizes for other in everything[1:]):
        raise KernelError(sizes_differ(everything))
    if not params:
        return []

    def kind_of(row: Row) -> tuple[Any, ...] | None:
        dtypes = tuple(map(_dtype, row))
        device = row[0].device
        fits = (
            can_step(dtypes, has_copies, TYPES)
            and native.serves(device)
            and all(t.device == device for t in row)
        )
        return (device, *dtypes) if fits else None

    def call(columns: Sequence[Tensors]) -> list[float]:
        return _call(name, numbers, columns, has_copies)

    # Looked at by sets: a step has few dtypes and one device, and then goes in one call.
    kinds = [set(map(_dtype, tensors)) for tensors in everything]
    devices = set().union(*(map(_device, ts) for ts in everything))
    plain = all(len(k) == 1 for k in kinds) and can_step(
        [next(iter(k)) for k in kinds], has_copies, TYPES
    )
    plain = plain and len(devices) == 1 and native.serves(next(iter(devices)))
    if plain and all(all(map(Tensor.is_contiguous, ts)) for ts in everything):
        out = call(everything)
    else:
        out = sorted_out(everything, has_copies, reference, kind_of, call)
    # Written by address, unseen by autograd's check of saved tensors.
    torch.autograd.graph.increment_version([*params, *(copies or ())])
    return out


_STEPS = compiled_steps(_step)
adam, adagrad, lion, sgd, lamb = (_STEPS[op] for op in ("adam", "adagrad", "lion", "sgd", "lamb"))


def _call(
    name: str, numbers: tuple[float, ...], lists: Sequence[Tensors], has_copies: bool
) -> list[float]:
    """One call into C++; each list is of one dtype that it takes, every tensor's memory in the
    order of its place.
    """
    device = lists[0][0].device
    sizes = list(map(Tensor.numel, lists[0]))
    types = [TYPES[ts[0].dtype] for ts in lists]
    addresses = [list(map(Tensor.data_ptr, ts)) for ts in lists]
    copies, copy_type = (addresses.pop(), types.pop()) if has_copies else ([], NONE)
    # C++ takes five lists: parameters, gradients, two states, copies.
    addresses += [[]] * (4 - len(addresses)) + [copies]
    kinds = (types[0], types[1], types[2] if len(types) > 2 else NONE, copy_type)
    if name != "lamb":
        native.call(name, device, sizes, kinds, addresses, *numbers)
        return []
    # LAMB needs the norms of a whole tensor before its update: partial sums, then coefficients, on
    # the device.
    partials = torch.empty(2 * _blocks(sizes), dtype=torch.float64, device=device)
    coeffs = torch.ones(len(sizes), device=device)  # tensors without elements keep it
    native.call(
        name, device, sizes, kinds, addresses, partials.data_ptr(), coeffs.data_ptr(), *numbers
    )
    found: list[float] = coeffs.tolist()
    return found


def _blocks(sizes: Sequence[int]) -> int:
    chunk: int = native.native().CHUNK
    return sum((n + chunk - 1) // chunk for n in sizes)


# -- sums ------------------------------------------------------------------------------------------


def squared_norm(tensors: list[Tensor]) -> Tensor:
    """See `ds_core.partition.squared_norm`; fp64, so finite exactly when all elements are.

    Never waits for the device.
    """
    devices = set(map(_device, tensors))
    kinds = [_NORM_TYPES.get(d, NONE) for d in map(_dtype, tensors)]
    if len(devices) != 1 or not native.serves(next(iter(devices))) or NONE in kinds:
        return reference_squared_norm(tensors)
    device = next(iter(devices))
    tensors = [t if references.is_dense(t) else t.detach().contiguous() for t in tensors]
    sizes = list(map(Tensor.numel, tensors))
    addresses = list(map(Tensor.data_ptr, tensors))
    # A partial sum for each block, added up in a fixed order: the same bits in every run.
    room = torch.empty(_blocks(sizes) + 1, dtype=torch.float64, device=device)
    total = torch.empty((), dtype=torch.float64, device=device)
    native.call("squared_norm", device, sizes, kinds, addresses, room.data_ptr(), total.data_ptr())
    return total


def _place_and_dtype(total: Tensor, more: Tensor) -> tuple[torch.device, torch.dtype] | None:
    fits = total.dtype is torch.float32 and more.dtype in TYPES and native.serves(total.device)
    return (total.device, more.dtype) if fits and total.device == more.device else None


def _accumulate(
    kind: tuple[torch.device, torch.dtype], totals: Tensors, mores: Tensors, scale: float
) -> None:
    device, dtype = kind
    lists = [list(map(Tensor.data_ptr, totals)), list(map(Tensor.data_ptr, mores))]
    native.call("accumulate", device, list(map(Tensor.numel, totals)), TYPES[dtype], lists, scale)


accumulate = accumulation(_place_and_dtype, _accumulate)


# -- quantisation ----------------------------------------------------------------------------------


def _call_late(name: str, device: torch.device, *arguments: Any) -> None:
    native.call(name, device, *arguments)


def _serves(device: torch.device) -> bool:
    return native.serves(device)


quantize, dequantize, dequantize_sum, requantize_sum = quantized_operations(
    _call_late, _serves, TYPES, none=NONE, scale_bytes=1
)
