"""What ZeRO partitioned, of one model-parallel rank: pieces of states out of flat tensors.

Stages 1 and 2 lay the parameters of a group one after the other, and give each data-parallel rank a
stretch of all. Stage 3 cuts each parameter into one part per rank; a rank's parts lie one after the
other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ds_run_state.states import StateTensor
from torch import Tensor

from ds_checkpoint_deepspeed.reading.folder import Data, module_of
from ds_checkpoint_deepspeed.reading.foreign import Part, low_precision, narrowed, scaler_of, whole
from ds_core.errors import CheckpointError

_LOCAL_EXPERT = re.compile(
    r"(?P<before>.*\bdeepspeed_moe\.experts\.deepspeed_experts\.)(?P<index>\d+)\.(?P<rest>.*)"
)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """The elements [start, stop) of the flattened parameter `name`, from element `at` of a flat
    tensor on.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    at: int

    def piece(self, kind: str, flat: Tensor, dtype: torch.dtype | None = None) -> StateTensor:
        """The state ``kind/name``, out of `flat`."""
        found = flat[self.at : self.at + self.stop - self.start]
        if found.numel() != self.stop - self.start:
            raise CheckpointError(
                f"parameter {self.name!r} goes beyond the flat tensor of {flat.numel()} elements"
            )
        piece = StateTensor(
            f"{kind}/{self.name}", found, self.shape, self.start, self.stop, (), True
        )
        return narrowed(piece, dtype)


def _state_pieces(
    state: Mapping[str, Any], flat: Tensor, stretches: Sequence[_Stretch]
) -> Iterator[StateTensor]:
    """Moments of one flat tensor; a parameter's counter comes from the rank with its first
    element."""
    for key, value in state.items():
        # padding comes last
        if isinstance(value, Tensor) and value.dim() == 1 and value.numel() >= flat.numel():
            yield from (s.piece(f"optimizer/{key}", value) for s in stretches if s.stop > s.start)
        elif isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
            counter = torch.as_tensor(value, dtype=torch.float32).reshape(())
            yield from (
                whole(f"optimizer/{key}/{s.name}", counter) for s in stretches if s.start == 0
            )


# -- stages 1 and 2 --------------------------------------------------------------------------------


def read_stages_1_2(folder: Path, model: dict[str, Any], shards: list[dict[str, Any]]) -> Part:
    """Weights come from the file of model states where it has them, else (pipelines, experts) from
    the fp32 ones.
    """
    shared: dict[str, str] = dict(model.get("shared_params") or {})
    module = {n: t for n, t in module_of(model).items() if n not in shared}
    pieces = [whole(f"module/{name}", tensor) for name, tensor in module.items()]
    low = low_precision(model)
    order: list[list[str]] = []
    experts = _experts_per_rank(model["param_shapes"])
    for index, shapes in enumerate(model["param_shapes"]):
        order.append([])
        # A group of experts has a set of ranks for each expert rank; any other has all ranks.
        for ranks, rename in _partitions(folder, model, shards, index, experts):
            named = {rename(n): s for n, s in shapes.items()}
            order[-1] += named
            begin = 0
            paddings = _paddings(ranks[0], index, len(named))
            # The ranks' flat tensors are concatenated, with paddings between parameters.
            for shard in ranks:
                flat = shard["single_partition_of_fp32_groups"][index]
                stretches = list(_stretches(named, paddings, begin, flat.numel()))
                begin += flat.numel()
                held = [s for s in stretches if s.stop > s.start]
                pieces += [s.piece("module", flat, low) for s in held if s.name not in module]
                if low is not None:
                    pieces += [s.piece("master", flat) for s in held]
                pieces += _state_pieces(_state_of(shard, index), flat, stretches)
            total = sum(map(math.prod, named.values())) + sum(paddings[:-1])
            # A file that is missing at the end would leave the last parameters short.
            if begin < total:
                raise CheckpointError(
                    f"{folder}: group {index} has {total} elements, the files hold {begin}"
                )
    base = shards[0]["base_optimizer_state"]
    groups = base["param_groups"] if isinstance(base, dict) else shards[0].get("param_groups") or []
    scaler = scaler_of(vars(shards[0].get("loss_scaler") or Data()))
    frozen = list(model.get("frozen_param_shapes") or {})
    return Part(pieces, shared, frozen, groups, order, scaler)


def _state_of(shard: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """The optimizer's state of a group; an elastic checkpoint has a list of them."""
    base = shard["base_optimizer_state"]
    return dict(base["state"].get(index, {}) if isinstance(base, dict) else base[index])


def _paddings(shard: Mapping[str, Any], index: int, count: int) -> list[int]:
    found = shard.get("param_alignment_paddings")
    return list(found[index]) if found else [0] * count


def _partitions(
    folder: Path,
    model: Mapping[str, Any],
    shards: list[dict[str, Any]],
    index: int,
    experts: Mapping[str, int],
) -> Iterator[tuple[list[dict[str, Any]], Any]]:
    """The ranks that share a group, and how its names are to be changed: one set of ranks, or one
    per expert rank.

    Ranks of a group of experts hold different experts under the same names, which count from 0 on
    each.
    """
    counts = shards[0].get("partition_count")
    count = counts[index] if isinstance(counts, (list, tuple)) else len(shards)
    if count == len(shards):
        yield shards, lambda name: name
        return
    if not count or len(shards) % count:
        raise CheckpointError(
            f"{folder}: group {index} has {count} parts on {len(shards)} ranks; copy all files"
        )
    # Expert ranks form blocks, or alternate, depending on the mesh that DeepSpeed was given.
    size = len(shards) // count
    data_first = bool((model.get("ds_config") or {}).get("use_data_before_expert_parallelism"))
    for rank in range(size):
        ranks = shards[rank * count : (rank + 1) * count] if data_first else shards[rank::size]
        yield ranks, lambda name, rank=rank: _global(name, rank, experts)


def _experts_per_rank(groups: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How many experts a rank has of each MoE layer, by what their names begin with."""
    found: dict[str, int] = {}
    for name in (n for group in groups for n in group):
        if (place := expert_place(name)) is not None:
            found[place[0]] = max(found.get(place[0], 0), place[1] + 1)
    return found


def expert_place(name: str) -> tuple[str, int, str] | None:
    """(what comes before an expert's number, the number, the name inside of the expert); None: not
    an expert's.
    """
    found = _LOCAL_EXPERT.fullmatch(name)
    return None if found is None else (found["before"], int(found["index"]), found["rest"])


def _global(name: str, rank: int, experts: Mapping[str, int]) -> str:
    place = expert_place(name)
    if place is None:
        raise CheckpointError(
            f"parameter {name!r} differs between expert-parallel ranks, and is none of an expert's "
            "of MoE; convert the "
            "checkpoint with DeepSpeed's ds_to_universal, and import that"
        )
    before, index, rest = place
    return f"{before}{rank * experts[before] + index}.{rest}"


def _stretches(
    shapes: Mapping[str, Any], paddings: Sequence[int], begin: int, count: int
) -> Iterator[_Stretch]:
    """What of parameters that lie one after the other is in the elements [begin, begin + count) of
    all.
    """
    place = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        size = math.prod(shape)
        low = max(place, begin)
        high = min(place + size, begin + count)
        if high > low or (size == 0 and begin == 0):
            yield _Stretch(name, tuple(shape), low - place, max(high, low) - place, low - begin)
        place += size + padding


# -- stage 3 ---------------------------------------------------------------------------------------


def read_stage3(folder: Path, models: list[dict[str, Any]], shards: list[dict[str, Any]]) -> Part:
    """Weights are made of the fp32 ones; the files of model states have buffers and what is
    frozen."""
    if len(models) != len(shards):
        raise CheckpointError(
            f"{folder} has {len(models)} model files and {len(shards)} optimizer files; copy all"
        )
    first = models[0]
    low = low_precision(first)
    world = len(shards)
    shapes = {
        name: tuple(shape) for group in first["param_shapes"] for name, shape in group.items()
    }
    buffers = set(first.get("buffer_names") or ())
    pieces = [whole(f"module/{n}", t) for n, t in module_of(first).items() if n in buffers]
    for rank, shard in enumerate(shards):
        pieces += _trained(folder, rank, world, shard, shapes, low)
    frozen = {n: tuple(s) for n, s in (first.get("frozen_param_shapes") or {}).items()}
    for rank, model in enumerate(models):
        for name, shape in frozen.items():
            fragment = model["frozen_param_fragments"][name].reshape(-1)
            pieces.append(_part(name, shape, rank, world, 0).piece("module", fragment))
    groups = shards[0]["optimizer_state_dict"]["param_groups"]
    order = [list(group) for group in first["param_shapes"]]
    scaler = scaler_of(vars(shards[0].get("loss_scaler") or Data()))
    pieces = [p for p in pieces if p.stop > p.start or 0 in p.shape]
    return Part(pieces, dict(first.get("shared_params") or {}), list(frozen), groups, order, scaler)


def _trained(
    folder: Path,
    rank: int,
    world: int,
    shard: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    low: torch.dtype | None,
) -> Iterator[StateTensor]:
    names = iter(shapes.items())
    states = shard["optimizer_state_dict"]["state"]
    for index, flat in enumerate(shard["fp32_flat_groups"]):
        stretches = []
        place = 0
        # Flat tensors hold parameters in their order, as many as were in a sub-group.
        while place < flat.numel() and (row := next(names, None)) is not None:
            stretches.append(_part(*row, rank, world, place))
            place += -(-math.prod(row[1]) // world)
        if place != flat.numel():
            raise CheckpointError(
                f"{folder}: flat tensor {index} of rank {rank} has {flat.numel()} elements, its "
                "parameters "
                f"{place}; was the checkpoint saved in parts, or by another number of processes?"
            )
        for stretch in stretches:
            yield stretch.piece("module", flat, low)
            if low is not None:
                yield stretch.piece("master", flat)
        yield from _state_pieces(states.get(index, {}), flat, stretches)


def _part(name: str, shape: tuple[int, ...], rank: int, world: int, at: int) -> _Stretch:
    """Rank's part of a parameter, the last ones shorter or empty."""
    size = math.prod(shape)
    part = -(-size // world)
    return _Stretch(name, shape, min(rank * part, size), min((rank + 1) * part, size), at)
