"""What compiled providers share: lists of tensors sorted into calls that compiled code can take.

A step arrives as a name, plain numbers and lists of tensors (`StepSpec.compiled`). `sorted_out`
makes one call for the places of each kind, and leaves those that compiled code cannot take to the
reference. The rest allocates and checks what quantisation fills.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ds_core.errors import KernelError
from ds_kernel_kit import references
from ds_kernel_kit.steps import (
    GRADS,
    STEPS,
    Run,
)
from ds_kernel_kit.steps import (
    Lists as Lists,
)
from ds_kernel_kit.steps import (
    Reference as Reference,
)
from ds_kernel_kit.steps import (
    Tensors as Tensors,
)

K = TypeVar("K", bound=Hashable)
Row = tuple[Tensor, ...]


def compiled_steps(run: Run) -> dict[str, Callable[..., list[float] | None]]:
    """Every operation of `STEPS` with its reference's signature, carried out by `run`."""
    return {op: spec.compiled(run) for op, spec in STEPS.items()}


# -- lists of tensors ------------------------------------------------------------------------------


def sorted_out(
    lists: Sequence[Tensors],
    has_copies: bool,
    reference: Reference,
    kind_of: Callable[[Row], Hashable | None],
    call: Callable[[Lists], list[float]],
) -> list[float]:
    """One `call` for the places of each kind, `reference` for those of kind None; the values of
    all, in order.

    What `call` is given has its memory in one order at each place.

    has_copies: the last list is `reference`'s copies.
    """
    kinds: dict[Hashable | None, list[int]] = {}
    rows: list[Row] = list(zip(*lists, strict=True))
    for place, row in enumerate(rows):
        kinds.setdefault(kind_of(row), []).append(place)
    out: dict[int, float] = {}
    for kind, places in kinds.items():
        members = [rows[i] for i in places]
        if kind is None:
            columns = [list(c) for c in zip(*members, strict=True)]
            copies = columns.pop() if has_copies else None
            values = reference(columns, copies) or []
        else:
            flat = [in_one_order(row) for row in members]
            values = call([list(c) for c in zip(*flat, strict=True)])
            for row, worked in zip(members, flat, strict=True):
                for index, (tensor, copy) in enumerate(zip(row, worked, strict=True)):
                    if copy is not tensor and index != GRADS:
                        tensor.detach().copy_(copy)
        out.update(zip(places, values, strict=bool(values)))
    return [out[i] for i in sorted(out)]


def in_one_order(row: Row) -> Row:
    """`row` itself where its tensors' memory is in one order without gaps, else contiguous tensors
    with its values.
    """
    if _alike(row):
        return row
    return tuple(t.detach().contiguous() for t in row)


def pairs_by_kind(
    into: Tensors, added: Tensors, kind_of: Callable[[Tensor, Tensor], K | None]
) -> Iterator[tuple[K | None, list[Tensor], list[Tensor]]]:
    """The pairs of `references.accumulate` by kind; None too where a pair's memory is not in one
    order.
    """
    kinds: dict[K | None, tuple[list[Tensor], list[Tensor]]] = {}
    for total, more in zip(into, added, strict=True):
        totals, mores = kinds.setdefault(
            kind_of(total, more) if _alike((total, more)) else None, ([], [])
        )
        totals.append(total)
        mores.append(more)
    for kind, (totals, mores) in kinds.items():
        yield kind, totals, mores


def accumulation(
    kind_of: Callable[[Tensor, Tensor], K | None],
    call: Callable[[K, Tensors, Tensors, float], None],
) -> Callable[..., None]:
    """`references.accumulate` over compiled code.

    kind_of: what one call needs to have in common, None where compiled code cannot take a pair.
    call: adds ``scale`` times the second list to the first, all pairs of one kind.
    """

    def accumulate(into: Tensors, added: Tensors, *, scale: float = 1.0) -> None:
        """See `ds_kernel_kit.references.accumulate`."""
        if list(map(Tensor.numel, into)) != list(map(Tensor.numel, added)):
            raise KernelError(sizes_differ([into, added]))
        for kind, totals, mores in pairs_by_kind(into, added, kind_of):
            if kind is None:
                references.accumulate(totals, mores, scale=scale)
                continue
            call(kind, totals, mores, scale)
            # Compiled code writes by address, unseen by autograd's check of saved tensors.
            torch.autograd.graph.increment_version(totals)

    return accumulate


def can_step(
    dtypes: Sequence[torch.dtype], has_copies: bool, types: Container[torch.dtype]
) -> bool:
    """Whether compiled steps have a path for parameters, gradients, states and copies of these
    dtypes.

    All must be among `types`, the states alike, and only fp32 parameters have copies.
    """
    states = dtypes[2:-1] if has_copies else dtypes[2:]
    if any(d not in types for d in dtypes) or len(set(states)) > 1:
        return False
    return not has_copies or dtypes[0] is torch.float32


def sizes_differ(lists: Sequence[Tensors], first: int = 0) -> str:
    """What is wrong with lists whose tensors differ in size, place by place; first: the number of
    the first place.
    """
    counts = [len(ts) for ts in lists]
    if len(set(counts)) > 1:
        return f"lists of one operation have {counts} tensors; each must have as many as the first"
    place = next(
        i for i, row in enumerate(zip(*lists, strict=True)) if len({t.numel() for t in row}) > 1
    )
    return (
        f"tensors at place {first + place} have {[ts[place].numel() for ts in lists]} "
        "elements; "
        "they must be the same"
    )


def _alike(row: Row) -> bool:
    strides = row[0].stride()
    return all(t.stride() == strides for t in row) and references.is_dense(row[0])


# -- quantisation ----------------------------------------------------------------------------------


def room_for_quantized(
    numel: int,
    device: torch.device,
    *,
    bits: int,
    group: int,
    symmetric: bool,
    out: references.Quantized | None,
) -> references.Quantized:
    """Room for what `references.quantize` makes of `numel` elements: q, scales and lows; `out`, if
    it is given.

    KernelError when `out` is not of the sizes, dtypes and device that are needed, or has gaps.
    """
    if out is None:
        q = torch.empty(_length(numel, bits), dtype=_dtype(bits, symmetric), device=device)
        scales = torch.empty((numel + group - 1) // group, device=device)
        return q, scales, None if symmetric else torch.empty_like(scales)
    if symmetric != (out[2] is None):
        raise KernelError("room for lows is needed exactly where quantisation is not symmetric")
    given, alike = quantized_parts(*out, bits=bits, group=group, numel=numel)
    if not alike or any(t.device != device or not t.is_contiguous() for t in given):
        raise KernelError(
            f"room for values of {bits} bits must be contiguous, on {device}, and of dtypes "
            f"{_dtype(bits, symmetric)} "
            "and torch.float32; given are "
            f"{[(t.dtype, str(t.device), t.is_contiguous()) for t in given]}"
        )
    return out


def room_for_values(
    numel: int, dtype: torch.dtype, device: torch.device, out: Tensor | None
) -> Tensor:
    """Room for what `references.dequantize` makes; `out`, if it is given.

    KernelError when that does not fit.
    """
    if out is None:
        return torch.empty(numel, dtype=dtype, device=device)
    if (
        out.numel() != numel
        or out.dtype != dtype
        or out.device != device
        or not out.is_contiguous()
    ):
        raise KernelError(
            f"room for {numel} values of {dtype} on {device} must be contiguous; given are "
            f"{out.numel()} of "
            f"{out.dtype} on {out.device}"
        )
    return out.view(-1)


def quantized_rows(q: Tensor, scales: Tensor, *, bits: int, group: int, numel: int) -> bool:
    """Whether rows of q and scales have the dtypes that `references.quantize` gives, each
    contiguous.

    KernelError when their sizes are not those of `numel` elements.
    """
    groups = (numel + group - 1) // group
    size = _length(numel, bits)
    if (
        q.dim() != 2
        or scales.dim() != 2
        or (*q.shape, *scales.shape) != (len(q), size, len(q), groups)
    ):
        raise KernelError(
            f"{numel} elements in groups of {group} at {bits} bits are rows of {size} in q and of "
            f"{groups} in scales; "
            f"given are {tuple(q.shape)} and {tuple(scales.shape)}"
        )
    alike = q.dtype == _dtype(bits, True) and scales.dtype == torch.float32
    return alike and all(t.shape[1] < 2 or t.stride(1) == 1 for t in (q, scales))


def quantized_parts(
    q: Tensor, scales: Tensor, lows: Tensor | None, *, bits: int, group: int, numel: int
) -> tuple[list[Tensor], bool]:
    """Those of q, scales and lows that there are, and whether they have the dtypes that
    `references.quantize` gives.

    KernelError when their sizes are not those of `numel` elements.
    """
    groups = (numel + group - 1) // group
    size = _length(numel, bits)
    given = [q, scales, *([] if lows is None else [lows])]
    if q.numel() != size or any(t.numel() != groups for t in given[1:]):
        raise KernelError(
            f"{numel} elements in groups of {group} at {bits} bits are {size} in q and {groups} in "
            "scales and lows; "
            f"given are {q.numel()}, {scales.numel()} and {0 if lows is None else lows.numel()}"
        )
    wanted = [_dtype(bits, lows is None), torch.float32, torch.float32]
    return given, all(t.dtype == w for t, w in zip(given, wanted, strict=False))


def _length(numel: int, bits: int) -> int:
    return numel if bits == 8 else (numel + 1) // 2


def _dtype(bits: int, symmetric: bool) -> torch.dtype:
    return torch.int8 if bits == 8 and symmetric else torch.uint8
