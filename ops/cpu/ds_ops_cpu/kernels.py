"""The functions that the kernel table serves: checks, addresses and sizes, one call into C++ for
all tensors.

What C++ takes is memory in one order: for each place of the lists, tensors that are contiguous, or
dense with the same strides. Others are worked on as contiguous copies and copied back. What it
cannot take at all (fp64) goes to the reference, which means the same.

[Note: what is checked] Addresses bypass all of torch's own checks, so a wrong size, type or device
would be memory written at random. Every tensor is looked at anew in every call; a cache of what was
checked before could be deceived by ``tensor.data = ...``. C++ does it (cpp/tensors.h), or Python
with a torch that does not offer what that needs.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
from ds_kernel_kit import build, references
from ds_kernel_kit.marshal import (
    Lists,
    Reference,
    Row,
    Tensors,
    accumulation,
    can_step,
    compiled_steps,
    sizes_differ,
    sorted_out,
)
from ds_kernel_kit.portions import portion_sizes
from ds_kernel_kit.quantized import quantized_operations
from torch import Tensor

from ds_core.errors import KernelError
from ds_core.partition import squared_norm as reference_squared_norm
from ds_ops_cpu.extension import EXTENSION

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NORM_TYPES = {**_TYPES, torch.float64: 3}
_dtype = attrgetter("dtype")
_on_cpu = attrgetter("is_cpu")
_native: ModuleType | None = None


def native() -> ModuleType:
    """The compiled module, built now if it never was."""
    global _native
    if _native is None:
        _native = build.load(EXTENSION)
    return _native


# -- optimizer steps -------------------------------------------------------------------------------


def _step(
    name: str,
    reference: Reference,
    numbers: tuple[float, ...],
    lists: Sequence[Tensors],
    copies: Tensors | None,
    first: int = 0,
) -> list[float]:
    """Call `name` for the places that C++ can take, `reference` for the others; see
    `ds_kernel_kit.steps.Run`.

    first: the number of the first place, for who reads of an error.
    """
    params = lists[0]
    has_copies = copies is not None
    if not params:
        return []
    run = getattr(native(), name)
    everything = [*lists, copies] if copies is not None else list(lists)
    # Inside `together` a call returns before its work is done.
    overlaps = name in OVERLAPPING
    portions: _Portions | None = getattr(_LOCAL, "portions", None) if overlaps else None
    # Many small tensors: the first portions are worked on while the others are looked at.
    if overlaps and portions is None and len(params) >= MANY and torch.get_num_threads() > 1:
        if len({len(ts) for ts in everything}) > 1:
            raise KernelError(sizes_differ(everything))
        together(functools.partial(_in_portions, name, reference, numbers, lists, copies))
        return []
    # The usual step is plain: one pass in C++ looks at all tensors, and makes the lists.
    given = None
    if _takes([ts[0].dtype for ts in everything if ts], has_copies):
        given = _plain(everything)
    torch.autograd.graph.increment_version(params)  # now that they are in the cache
    if copies is not None:
        torch.autograd.graph.increment_version(copies)
    if given is not None:
        if portions is not None:
            # C++ reads these until `together` ends.
            portions.kept.append((given, everything))
        threads = torch.get_num_threads() if portions is None else 0
        out: list[float] = run(threads, given, has_copies, *numbers) or []
    elif portions is not None:
        portions.later.append(
            functools.partial(_step, name, reference, numbers, lists, copies, first)
        )
        return []
    else:
        # Not plain: sorted into calls of one kind, and what C++ cannot read goes to the reference.
        out = _step_sorted(run, reference, numbers, everything, has_copies, first)
    return out


def _step_sorted(
    run: Callable[..., list[float] | None],
    reference: Reference,
    numbers: tuple[float, ...],
    everything: list[Tensors],
    has_copies: bool,
    first: int,
) -> list[float]:
    """`_step` for lists of unequal dtypes, devices or layouts; the values of all, in order."""
    if len({len(ts) for ts in everything}) > 1:
        raise KernelError(sizes_differ(everything))
    sizes = list(map(Tensor.numel, everything[0]))
    if any(list(map(Tensor.numel, other)) != sizes for other in everything[1:]):
        raise KernelError(sizes_differ(everything, first))

    def kind_of(row: Row) -> tuple[torch.dtype, ...] | None:
        dtypes = tuple(t.dtype for t in row)
        return dtypes if _takes(dtypes, has_copies) and all(map(_on_cpu, row)) else None

    def call(columns: Lists) -> list[float]:
        given = _numbers(list(map(Tensor.numel, columns[0])), columns)
        return run(torch.get_num_threads(), given, has_copies, *numbers) or []

    return sorted_out(everything, has_copies, reference, kind_of, call)


def _in_portions(
    name: str,
    reference: Reference,
    numbers: tuple[float, ...],
    lists: Sequence[Tensors],
    copies: Tensors | None,
) -> None:
    """The same, a portion of the places after the other."""
    low = 0
    sizes = portion_sizes()
    while low < len(lists[0]):
        some = slice(low, low + next(sizes))
        _step(
            name,
            reference,
            numbers,
            [ts[some] for ts in lists],
            None if copies is None else copies[some],
            low,
        )
        low = some.stop


OVERLAPPING = ("adam", "adagrad", "lion", "sgd")
MANY = 256
"""From so many tensors on it pays to begin before all have been looked at."""
_LOCAL = threading.local()


@dataclass(slots=True)
class _Portions:
    """Of one call of `together`: what must stay alive until its end, and what is to be done after
    it.
    """

    kept: list[Any] = field(default_factory=list)
    later: list[Callable[[], Any]] = field(default_factory=list)


def together(prepare: Callable[[], None]) -> None:
    """Call `prepare`; the steps that it asks for here begin at once on torch's other threads, and
    end before this does.

    So a step over many small tensors can be asked for in portions, each of which is worked on while
    the next is being prepared (those of `OVERLAPPING`). What `prepare` raises is raised when the
    steps that it has asked for are done.
    """
    # Within another call of `together`, which ends all of it.
    if hasattr(_LOCAL, "portions"):
        prepare()
        return
    portions = _LOCAL.portions = _Portions()
    try:
        native().together(torch.get_num_threads(), prepare)
    finally:
        del _LOCAL.portions
        # what C++ cannot take as it is, and some of which torch does on all threads
        for step in portions.later:
            step()


_STEPS = compiled_steps(_step)
for _op in OVERLAPPING:
    _STEPS[_op].together = together  # type: ignore[attr-defined]  # see [Note: portions] in `ds_kernel_kit.portions`
adam, adagrad, lion, sgd, lamb = (_STEPS[op] for op in ("adam", "adagrad", "lion", "sgd", "lamb"))

_EXCHANGE = getattr(Tensor, "__dlpack_c_exchange_api__", None)


@functools.cache
def _is_as_expected() -> bool:
    """Whether tensor objects lie in memory as `fetch` in cpp/tensors.h takes them to."""
    tensor = torch.zeros(1)
    try:
        implementation = int(tensor._cdata)
        storage = int(tensor.untyped_storage()._cdata)
    except AttributeError:
        return False
    # Behind Python's reference count and type a tensor object has the pointer to torch's tensor,
    # and that one likewise its storage.
    third = 2 * ctypes.sizeof(ctypes.c_void_p)
    inner = ctypes.c_void_p.from_address(implementation + third).value
    return (
        ctypes.c_void_p.from_address(id(tensor) + third).value == implementation
        and inner == storage
    )


def _plain(lists: Sequence[Tensors], mixed: bool = False) -> Any:
    """The lists for C++, when all is plain: on the CPU, contiguous, sizes and dtypes alike.

    Else None.

    mixed: a list may hold several dtypes.
    """
    if _EXCHANGE is not None:  # torch >= 2.10
        return native().from_tensors(_EXCHANGE, list(lists), mixed, _is_as_expected())
    # Older torch: the same checks by attributes, a list at a time.
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
    """Whether C++ has a path for these dtypes: copies are narrower than what they are copies of."""
    narrows = not has_copies or dtypes[-1] is not torch.float32
    return narrows and can_step(dtypes, has_copies, _TYPES)


# -- sums ------------------------------------------------------------------------------------------


def squared_norm(tensors: list[Tensor]) -> Tensor:
    """See `ds_core.partition.squared_norm`; summed in fp64, so finite exactly when every element
    is."""
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


def _added_dtype(total: Tensor, more: Tensor) -> torch.dtype | None:
    fits = total.dtype is torch.float32 and more.dtype in _TYPES and total.is_cpu and more.is_cpu
    return more.dtype if fits else None


def _accumulate(kind: torch.dtype, totals: Tensors, mores: Tensors, scale: float) -> None:
    given = _numbers(list(map(Tensor.numel, totals)), [totals, mores])
    native().accumulate(torch.get_num_threads(), given, scale)


accumulate = accumulation(_added_dtype, _accumulate)


# -- quantisation ----------------------------------------------------------------------------------


def _call(name: str, device: torch.device, *arguments: Any) -> None:
    getattr(native(), name)(torch.get_num_threads(), *arguments)


def _serves(device: torch.device) -> bool:
    return device.type == "cpu"


quantize, dequantize, dequantize_sum, requantize_sum = quantized_operations(
    _call, _serves, _TYPES, none=-1, scale_bytes=4
)
