"""A pipeline's micro-batches: taken from the iterator before any work, and what ranks agree on about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ds_core import comm
from ds_core.errors import UsageError
from ds_core.nested import map_leaves, tensors_of

if TYPE_CHECKING:
    from ds_core.context import Context

__all__ = ["Work", "agree", "signature", "take", "to_device"]


class Work(NamedTuple):
    """What `train_batch` or `eval_batch` was asked for."""

    micros: int
    train: bool
    with_loss: bool

    def __str__(self) -> str:
        kind = "train_batch" if self.train else "eval_batch"
        return f"{kind} of {self.micros} micro-batches{'' if self.with_loss else ' without a loss'}"


def take(
    batches: Iterator[Any], count: int, fn: Callable[[Any], Any] | None, needs_labels: bool
) -> list[tuple[Any, Any]]:
    """`count` pairs (inputs, labels) out of `batches`, each through `fn` first. StopIteration when there are fewer.

    Raises UsageError for what is no such pair, and when the iterator filled the same tensors again.
    """
    given: list[tuple[Any, Any]] = []
    versions: list[tuple[Tensor, int]] = []
    for _ in range(count):
        batch = next(batches)
        given.append(_pair(fn(batch) if fn is not None else batch, needs_labels))
        versions += [(t, t._version) for t in tensors_of(given[-1]) if not t.is_inference()]
    if any(tensor._version != version for tensor, version in versions):
        raise UsageError(
            "the iterator changed the tensors of a micro-batch after it had given them; a pipeline takes all of a "
            "batch before it begins, so each micro-batch needs tensors of its own (clone them)"
        )
    return given


def _pair(batch: Any, needs_labels: bool) -> tuple[Any, Any]:
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        inputs, labels = batch
    elif needs_labels or isinstance(batch, list):
        shown = f"{type(batch).__name__} of {len(batch)}" if hasattr(batch, "__len__") else type(batch).__name__
        raise UsageError(
            f"a pipeline's micro-batch is (inputs, labels), got a {shown}; bring it into that form with "
            "engine.set_batch_fn(function)"
        )
    else:
        inputs, labels = batch, None
    return tuple(inputs) if isinstance(inputs, list) else inputs, labels


def agree(ctx: Context, work: Work, flags: list[bool]) -> list[bool]:
    """Of each flag, whether any rank has set it. UsageError on all ranks when they are not at the same work."""
    if ctx.world_size == 1:
        return flags
    mine = [work.micros, int(work.train), int(work.with_loss)]
    told = torch.tensor([*map(int, flags), *mine, *(-x for x in mine)], device=ctx.accelerator.current_device())
    comm.all_reduce(told, op=torch.distributed.ReduceOp.MAX)
    numbers: list[int] = told.tolist()
    most, least = numbers[-6:-3], [-x for x in numbers[-3:]]
    if most != least:
        other = [low if high == own else high for own, low, high in zip(mine, least, most, strict=True)]
        raise UsageError(
            f"ranks are not at the same work: this one is in {work}, another in "
            f"{Work(other[0], bool(other[1]), bool(other[2]))}; all call "
            "train_batch and eval_batch in the same order, with the same number of micro-batches"
        )
    return [bool(x) for x in numbers[:-6]]


def to_device(value: Any, device: torch.device) -> Any:
    """`value` with its tensors on `device`."""
    return map_leaves(lambda x: x.to(device, non_blocking=True) if isinstance(x, Tensor) else x, value)


def signature(inputs: Any) -> Any:
    """Structure, shapes and dtypes of `inputs`: equal for two micro-batches whose activations have the same shapes."""
    return map_leaves(lambda x: (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else type(x), inputs)
