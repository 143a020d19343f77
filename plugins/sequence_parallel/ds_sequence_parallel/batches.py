"""Batches that are cut before the model sees them: for pipelines, and for loaders that give each rank
samples of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_core import comm
from ds_core.errors import UsageError
from ds_sequence_parallel.attention.layout import cut


def cut_batches(
    batches: Iterable[Any],
    group: ProcessGroup | None,
    dims: Mapping[Any, int],
    *,
    zigzag: bool = False,
) -> Iterator[Any]:
    """This rank's part of each batch, of which all ranks of `group` have the whole.

    dims: the dimension that is cut, by name in a mapping, or by place in a tuple or list (also
    inside others: the places of the tensors, from left to right).
    """
    for batch in batches:
        yield _cut(batch, group, dims, zigzag)


def _cut(batch: Any, group: ProcessGroup | None, dims: Mapping[Any, int], zigzag: bool) -> Any:
    if isinstance(batch, Mapping):
        return {name: _part(value, dims.get(name), group, zigzag) for name, value in batch.items()}
    # Tensors in nested tuples are counted from left to right, as a pipeline counts its inputs.
    place = iter(range(1 << 30))

    def walk(item: Any) -> Any:
        if isinstance(item, (tuple, list)):
            return type(item)(walk(inner) for inner in item)
        return _part(item, dims.get(next(place)), group, zigzag)

    return walk(batch)


def _part(value: Any, dim: int | None, group: ProcessGroup | None, zigzag: bool) -> Any:
    return (
        value
        if dim is None or not isinstance(value, Tensor)
        else cut(value, group, dim, zigzag=zigzag).contiguous()
    )


class UlyssesSPDataLoaderAdapter:
    """For a loader that gives each rank other samples: the ranks of a group work on each other's
    batches in turn.

    Each batch of the loader (a mapping with ``input_ids``, ``position_ids`` and ``labels``) becomes
    as many as the group has ranks: this rank's part of the batch of every rank. Labels are shifted
    and called ``shift_labels``. All ranks of the group iterate together.
    """

    def __init__(
        self,
        dl: Iterable[Mapping[str, Tensor]],
        sp_rank: int | None = None,
        sp_group: ProcessGroup | None = None,
        sp_world_size: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.dl = dl
        self.group = sp_group
        self.device = device
        self.rank = comm.rank(sp_group)
        self.ranks = comm.world_size(sp_group)
        for name, given, real in (
            ("sp_rank", sp_rank, self.rank),
            ("sp_world_size", sp_world_size, self.ranks),
        ):
            if given not in (None, real):
                raise UsageError(
                    f"UlyssesSPDataLoaderAdapter: {name} is {given}, and sp_group says {real}"
                )

    def __len__(self) -> int:
        return len(self.dl) * self.ranks  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for batch in self.dl:
            mine = {
                name: value.to(self.device) if self.device else value
                for name, value in batch.items()
            }
            # Shifted before the cut: the label of a part's last token is on the next rank.
            if "labels" in mine:
                labels = mine.pop("labels")
                mine["shift_labels"] = torch.nn.functional.pad(labels, (0, 1), value=-100)[
                    ..., 1:
                ].contiguous()
            if "position_ids" not in mine:
                tokens = mine["input_ids"]
                mine["position_ids"] = torch.arange(tokens.shape[1], device=tokens.device).expand(
                    tokens.shape[0], -1
                )
            mask = mine.pop("attention_mask", None)
            if mask is not None and not bool(mask.all()):
                raise UsageError(
                    "UlyssesSPDataLoaderAdapter: pack sequences by position_ids; padding is not "
                    "supported"
                )
            yield from self._everyones(mine)

    def _everyones(self, mine: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """This rank's part of each rank's batch. Collective."""
        shapes = comm.all_gather_json(
            {name: list(value.shape) for name, value in mine.items()}, self.group
        )
        lengths = [shape["input_ids"][1] for shape in shapes]
        if bad := [length for length in lengths if length % self.ranks]:
            raise UsageError(
                f"UlyssesSPDataLoaderAdapter: a batch has {bad[0]} tokens; make it a multiple of "
                f"{self.ranks}"
            )
        # Each rank's batch is broadcast in turn, in one order of names; then every rank has all
        # batches, and uses its part of each.
        whole: list[dict[str, Tensor]] = [{} for _ in shapes]
        for name in sorted(mine):
            for owner, shape in enumerate(shapes):
                value = (
                    mine[name].contiguous()
                    if owner == self.rank
                    else mine[name].new_empty(shape[name])
                )
                comm.broadcast(value, _global(self.group, owner), self.group)
                whole[owner][name] = value
        for batch in whole:
            yield {name: cut(value, self.group, 1).contiguous() for name, value in batch.items()}


def _global(group: ProcessGroup | None, rank: int) -> int:
    import torch.distributed as dist

    return (
        dist.get_global_rank(group, rank) if group is not None and dist.is_initialized() else rank
    )
