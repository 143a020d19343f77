"""A pipeline's micro-batches: read from the iterator before any work, and agreed on by all
ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ds_core import comm
from ds_core.errors import UsageError
from ds_core.nested import map_leaves
from ds_core.nested import to_device as to_device

if TYPE_CHECKING:
    from ds_core.context import Context


class BatchRequest(NamedTuple):
    """The arguments of a `train_batch` or `eval_batch`, which must be equal on all ranks."""

    micros: int
    train: bool
    with_loss: bool

    def __str__(self) -> str:
        kind = "train_batch" if self.train else "eval_batch"
        return f"{kind} of {self.micros} micro-batches{'' if self.with_loss else ' without a loss'}"


def take_micro_batches(
    batches: Iterator[Any], count: int, fn: Callable[[Any], Any] | None, needs_labels: bool
) -> list[tuple[Any, Any]]:
    """Read `count` pairs (inputs, labels) from `batches`; `fn` is applied to each first.

    Raises StopIteration when there are fewer, UsageError when one is not a pair, or when the
    iterator has written to tensors that it returned before.
    """
    given: list[tuple[Any, Any]] = []
    versions: list[tuple[Tensor, int]] = []
    for _ in range(count):
        batch = next(batches)
        given.append(_pair(fn(batch) if fn is not None else batch, needs_labels))
        versions += [(t, t._version) for t in tensors_in(given[-1]) if not t.is_inference()]
    # A micro-batch that was changed after it was read would be trained on as it is now.
    if any(tensor._version != version for tensor, version in versions):
        raise UsageError(
            "the iterator changed the tensors of a micro-batch after returning it; a pipeline "
            "reads a batch "
            "before it begins, so each needs its own tensors (clone them)"
        )
    return given


def _pair(batch: Any, needs_labels: bool) -> tuple[Any, Any]:
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        inputs, labels = batch
    elif needs_labels or isinstance(batch, list):
        shown = (
            f"{type(batch).__name__} of {len(batch)}"
            if hasattr(batch, "__len__")
            else type(batch).__name__
        )
        raise UsageError(
            f"a pipeline's micro-batch is (inputs, labels), got a {shown}; bring it into that form "
            "with "
            "engine.set_batch_fn(function)"
        )
    else:
        inputs = batch
        labels = None
    return tuple(inputs) if isinstance(inputs, list) else inputs, labels


def agree(ctx: Context, work: BatchRequest, flags: list[bool]) -> list[bool]:
    """Each flag, true if any rank has set it.

    Raises UsageError on all ranks when their calls differ.
    """
    if ctx.world_size == 1:
        return flags
    # One all-reduce for all: the largest of x, and of -x, tell whether all ranks have the same x.
    mine = [work.micros, int(work.train), int(work.with_loss)]
    sent = torch.tensor(
        [*map(int, flags), *mine, *(-x for x in mine)], device=ctx.accelerator.current_device()
    )
    comm.all_reduce(sent, op=torch.distributed.ReduceOp.MAX)
    numbers: list[int] = sent.tolist()
    most = numbers[-6:-3]
    least = [-x for x in numbers[-3:]]
    if most != least:
        other = [
            low if high == own else high for own, low, high in zip(mine, least, most, strict=True)
        ]
        raise UsageError(
            f"ranks do not make the same call: this one is in {work}, another in "
            f"{BatchRequest(other[0], bool(other[1]), bool(other[2]))}; all call "
            "train_batch and eval_batch in the same order, with the same number of micro-batches"
        )
    return [bool(x) for x in numbers[:-6]]


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in `value`, in the order of its containers."""
    found: list[Any] = []
    map_leaves(found.append, value)
    return [leaf for leaf in found if isinstance(leaf, Tensor)]


def signature(inputs: Any) -> Any:
    """Structure, shapes and dtypes of `inputs`: equal for two micro-batches whose activations have
    the same shapes.
    """
    return map_leaves(
        lambda x: (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else type(x), inputs
    )
