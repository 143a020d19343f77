"""What compiled providers of the core's operations share, whatever they are compiled for.

`Steps` turns each optimizer step of the table into a name, plain numbers and lists of tensors, which is all that
compiled code wants to know. The rest is for the lists: sorting them into calls that compiled code can take, with the
reference for what it cannot; and the memory that quantisation fills.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ds_core.errors import KernelError
from ds_kernel_kit import references

__all__ = [
    "Lists",
    "Reference",
    "Row",
    "Steps",
    "Tensors",
    "empty_quantized",
    "in_one_order",
    "pairs_by_kind",
    "quantized_parts",
    "sizes_differ",
    "sorted_out",
]

K = TypeVar("K", bound=Hashable)
Tensors = Sequence[Tensor]
Row = tuple[Tensor, ...]
Lists = list[list[Tensor]]
Reference = Callable[[Lists, "list[Tensor] | None"], "list[float] | None"]
"""An operation's reference with its options: lists and copies -> what it returns."""


class Run(Protocol):
    """Carries out one step; returns the values of all places, in order, if the step has any."""

    def __call__(
        self,
        name: str,
        reference: Reference,
        numbers: tuple[float, ...],
        lists: Sequence[Tensors],
        copies: Tensors | None,
    ) -> list[float]:
        """lists: parameters, gradients and states. numbers: the options, in the order of the compiled `name`."""


class Steps:
    """The optimizer steps of `ds_kernel_kit.references`, carried out by `run`."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def adam(
        self,
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
        """See `ds_kernel_kit.references.adam`."""
        correction1 = 1 - beta1**step if bias_correction else 1.0
        correction2 = 1 - beta2**step if bias_correction else 1.0
        numbers = (scale, lr, beta1, beta2, eps, weight_decay, decoupled, correction1, correction2)

        def reference(lists: Lists, copies: list[Tensor] | None) -> None:
            references.adam(
                *lists, step=step, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay,
                decoupled=decoupled, bias_correction=bias_correction, scale=scale, copies=copies,
            )  # fmt: skip

        self._run("adam", reference, numbers, [params, grads, exp_avgs, exp_avg_sqs], copies)

    def adagrad(
        self,
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
        """See `ds_kernel_kit.references.adagrad`."""

        def reference(lists: Lists, copies: list[Tensor] | None) -> None:
            references.adagrad(*lists, lr=lr, eps=eps, weight_decay=weight_decay, scale=scale, copies=copies)

        self._run("adagrad", reference, (scale, lr, eps, weight_decay), [params, grads, sums], copies)

    def lion(
        self,
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
        """See `ds_kernel_kit.references.lion`."""

        def reference(lists: Lists, copies: list[Tensor] | None) -> None:
            references.lion(
                *lists, lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, scale=scale, copies=copies
            )

        self._run("lion", reference, (scale, lr, beta1, beta2, weight_decay), [params, grads, exp_avgs], copies)

    def sgd(
        self,
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
        """See `ds_kernel_kit.references.sgd`."""

        def reference(lists: Lists, copies: list[Tensor] | None) -> None:
            references.sgd(
                lists[0], lists[1], lists[2] if len(lists) > 2 else None, lr=lr, momentum=momentum,
                dampening=dampening, weight_decay=weight_decay, nesterov=nesterov, first=first, scale=scale,
                copies=copies,
            )  # fmt: skip

        numbers = (scale, lr, momentum, 1 - dampening, weight_decay, nesterov, first)
        self._run("sgd", reference, numbers, [params, grads, *([] if momenta is None else [momenta])], copies)

    def lamb(
        self,
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
        """See `ds_kernel_kit.references.lamb`; on a GPU, reading the trust ratios waits for the device once."""
        size = lr * (1 - beta2**step) ** 0.5 / (1 - beta1**step) if bias_correction else lr
        numbers = (scale, size, beta1, beta2, eps, eps_inside_sqrt, weight_decay, min_coeff, max_coeff)

        def reference(lists: Lists, copies: list[Tensor] | None) -> list[float]:
            return references.lamb(
                *lists, step=step, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay,
                bias_correction=bias_correction, eps_inside_sqrt=eps_inside_sqrt, min_coeff=min_coeff,
                max_coeff=max_coeff, scale=scale, copies=copies,
            )  # fmt: skip

        return self._run("lamb", reference, numbers, [params, grads, exp_avgs, exp_avg_sqs], copies)


# -- lists of tensors --------------------------------------------------------------------------------------------------


def sorted_out(
    lists: Sequence[Tensors],
    has_copies: bool,
    reference: Reference,
    kind_of: Callable[[Row], Hashable | None],
    call: Callable[[Lists], list[float]],
) -> list[float]:
    """One `call` for the places of each kind, `reference` for those of kind None; the values of all, in order.

    What `call` is given has its memory in one order at each place. has_copies: the last list is `reference`'s copies.
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
                    if copy is not tensor and index != 1:
                        tensor.detach().copy_(copy)
        out.update(zip(places, values, strict=bool(values)))
    return [out[i] for i in sorted(out)]


def in_one_order(row: Row) -> Row:
    """`row` itself where its tensors' memory is in one order without gaps, else contiguous tensors with its values."""
    if _alike(row):
        return row
    return tuple(t.detach().contiguous() for t in row)


def pairs_by_kind(
    into: Tensors, added: Tensors, kind_of: Callable[[Tensor, Tensor], K | None]
) -> Iterator[tuple[K | None, list[Tensor], list[Tensor]]]:
    """The pairs of `references.accumulate` by kind; None too where a pair's memory is not in one order."""
    kinds: dict[K | None, tuple[list[Tensor], list[Tensor]]] = {}
    for total, more in zip(into, added, strict=True):
        totals, mores = kinds.setdefault(kind_of(total, more) if _alike((total, more)) else None, ([], []))
        totals.append(total)
        mores.append(more)
    for kind, (totals, mores) in kinds.items():
        yield kind, totals, mores


def sizes_differ(lists: Sequence[Tensors], first: int = 0) -> str:
    """What is wrong with lists whose tensors differ in size, place by place; first: the number of the first place."""
    counts = [len(ts) for ts in lists]
    if len(set(counts)) > 1:
        return f"lists of one operation have {counts} tensors; each must have as many as the first"
    place = next(i for i, row in enumerate(zip(*lists, strict=True)) if len({t.numel() for t in row}) > 1)
    return f"tensors at place {first + place} have {[ts[place].numel() for ts in lists]} elements; they must be alike"


def _alike(row: Row) -> bool:
    strides = row[0].stride()
    return all(t.stride() == strides for t in row) and references.is_dense(row[0])


# -- quantisation ------------------------------------------------------------------------------------------------------


def empty_quantized(x: Tensor, *, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Room for what `references.quantize` makes of `x`: q, scales and lows, on its device."""
    n = x.numel()
    q = torch.empty(_length(n, bits), dtype=_dtype(bits, symmetric), device=x.device)
    scales = torch.empty((n + group - 1) // group, device=x.device)
    return q, scales, None if symmetric else torch.empty_like(scales)


def quantized_parts(
    q: Tensor, scales: Tensor, lows: Tensor | None, *, bits: int, group: int, numel: int
) -> tuple[list[Tensor], bool]:
    """Those of q, scales and lows that there are, and whether they have the dtypes that `references.quantize` gives.

    KernelError when their sizes are not those of `numel` elements.
    """
    groups, size = (numel + group - 1) // group, _length(numel, bits)
    given = [q, scales, *([] if lows is None else [lows])]
    if q.numel() != size or any(t.numel() != groups for t in given[1:]):
        raise KernelError(
            f"{numel} elements in groups of {group} at {bits} bits are {size} in q and {groups} in scales and lows; "
            f"given are {q.numel()}, {scales.numel()} and {0 if lows is None else lows.numel()}"
        )
    wanted = [_dtype(bits, lows is None), torch.float32, torch.float32]
    return given, all(t.dtype == w for t, w in zip(given, wanted, strict=False))


def _length(numel: int, bits: int) -> int:
    return numel if bits == 8 else (numel + 1) // 2


def _dtype(bits: int, symmetric: bool) -> torch.dtype:
    return torch.int8 if bits == 8 and symmetric else torch.uint8
