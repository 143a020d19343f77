"""Batches of this rank, of which each sample counts once; and a batch for ranks that have none."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from ds_core import comm
from ds_core.engine import DistributedLoader, make_loader
from ds_core.errors import UsageError
from ds_core.nested import map_leaves

if TYPE_CHECKING:
    from ds_core.context import Context


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch of this rank."""

    values: Any
    counts: bool = True
    """False: all its samples are repeated ones, by which a sampler fills up a rank's share."""


def batches_of(data: Any, ctx: Context) -> Iterator[Batch]:
    """This rank's batches of a dataset or of a loader."""
    loader = _loader_of(data, ctx) if isinstance(data, Dataset) else data
    if not isinstance(loader, Iterable):
        raise UsageError(
            f"evaluate needs a torch.utils.data.Dataset or a loader, not a {type(data).__name__}"
        )
    own, size = _own_samples(loader)
    for index, values in enumerate(loader):
        if own is None:
            yield Batch(values)
            continue
        # A loader that resumes in the middle of an epoch knows where it is.
        place = loader.position - 1 if isinstance(loader, DistributedLoader) else index
        left = own - place * size
        if left > 0:
            yield Batch(map_leaves(functools.partial(_first, left), values))
        else:
            yield Batch(values, counts=False)


def _first(samples: int, leaf: Any) -> Any:
    return leaf[:samples] if isinstance(leaf, Tensor) and leaf.dim() else leaf


def _loader_of(dataset: Any, ctx: Context) -> Iterable[Any]:
    """A loader of every n-th sample, without the repeated ones that training needs."""
    if isinstance(dataset, IterableDataset):
        return make_loader(ctx, dataset, route="eval", drop_last=False)
    mine = range(ctx.mesh.index("batch"), len(dataset), ctx.mesh.size("batch"))
    # A loader must not be empty.
    return make_loader(ctx, dataset, route="eval", sampler=mine, drop_last=False) if mine else ()


def _own_samples(loader: Any) -> tuple[int | None, int]:
    """How many samples a loader with a DistributedSampler yields before those that it repeats, so
    that all ranks get equally many, and its batch size; (None, 0) of another loader.
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return None, 0
    if not isinstance(loader, (DataLoader, DistributedLoader)) or loader.batch_size is None:
        return None, 0
    # The sampler deals the dataset out one by one, then begins again.
    samples: Any = sampler.dataset
    return len(range(sampler.rank, len(samples), sampler.num_replicas)), loader.batch_size


# -- a batch for ranks that have none --------------------------------------------------------------


def shared(batch: Any, counts: Sequence[int], device: torch.device) -> Any:
    """`batch`, or on a rank that has none a copy of another rank's. Collective.

    counts: how many batches each rank has.
    """
    if all(counts):
        return batch
    source = next(rank for rank, n in enumerate(counts) if n)
    tensors: list[Tensor] = []
    mine = comm.rank() == source
    described = comm.all_gather_json(_describe(batch, tensors) if mine else None)[source]
    built = batch
    if not mine:
        tensors = []
        built = _build(described, tensors, device)
    for tensor in tensors:
        comm.broadcast(tensor.to(device).contiguous() if mine else tensor, source)
    return batch if counts[comm.rank()] else built


def _describe(value: Any, tensors: list[Tensor]) -> Any:
    """What JSON can hold of a batch; its tensors are added to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": [str(value.dtype).removeprefix("torch."), *value.shape]}
    if isinstance(value, Mapping):
        return {"mapping": [[key, _describe(item, tensors)] for key, item in value.items()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_describe(item, tensors) for item in value]}
    if value is None or isinstance(value, (str, int, float, bool)):
        return {"value": value}
    raise UsageError(
        f"a rank has no batch, and a {type(value).__name__} in another rank's cannot be sent to "
        "it; give every rank at least one batch"
    )


def _build(described: Any, tensors: list[Tensor], device: torch.device) -> Any:
    """The batch that `_describe` has described, with tensors still to be filled."""
    ((kind, held),) = described.items()
    if kind == "tensor":
        dtype, *shape = held
        tensors.append(torch.empty(shape, dtype=getattr(torch, dtype), device=device))
        return tensors[-1]
    if kind == "mapping":
        return {key: _build(item, tensors, device) for key, item in held}
    if kind == "value":
        return held
    items = [_build(item, tensors, device) for item in held]
    return tuple(items) if kind == "tuple" else items
