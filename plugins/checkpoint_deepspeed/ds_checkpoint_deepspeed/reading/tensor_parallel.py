"""Joining what tensor-parallel ranks hold, by the rules that DeepSpeed's universal checkpoints have
for it.

The framework of the model says in ``universal_checkpoint_info``, by patterns of names, which
parameters are equal on all ranks, which are averaged, cut by columns, made of two or more
sub-parameters, or padded vocabularies; all others are cut by rows. Without it nothing can be
joined: what differs stays as it is cut.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from ds_run_state.slices import param_of
from ds_run_state.states import StateTensor
from torch import Tensor

from ds_checkpoint_deepspeed.reading.folder import Data
from ds_checkpoint_deepspeed.reading.foreign import Part, put_together, whole
from ds_core.errors import CheckpointError


def join(
    parts: Sequence[Part], info: dict[str, Any] | None
) -> tuple[Part, list[list[StateTensor]], list[str]]:
    """(what is the same for all ranks, per rank what is not, what the user is to know).

    parts: one per rank.
    """
    first = parts[0]
    if len(parts) == 1:
        return first, [], []
    by_rank = [put_together(part.pieces) for part in parts]
    if any(states.keys() != by_rank[0].keys() for states in by_rank):
        odd = sorted({name for states in by_rank for name in states.keys() ^ by_rank[0].keys()})
        raise CheckpointError(
            f"tensor-parallel ranks have different states ({', '.join(odd[:3])}); copy all files"
        )
    # A parameter is replicated where all of its states are equal: its weight alone may be so by
    # chance, before the first step.
    equal = _equal_params(by_rank)
    pieces = []
    cut = [list[StateTensor]() for _ in parts]
    for name in by_rank[0]:
        slices = [states[name] for states in by_rank]
        if param_of(name) in equal or (slices[0].dim() == 0 and name.startswith("optimizer/")):
            pieces.append(whole(name, slices[0]))
        elif info is not None:
            pieces.append(whole(name, _joined(param_of(name), slices, info)))
        else:
            for mine, tensor in zip(cut, slices, strict=True):
                mine.append(dataclasses.replace(whole(name, tensor), held=("tp",)))
    notes = []
    if any(cut):
        count = len({param_of(p.name) for p in cut[0]})
        notes = [
            f"{count} parameters stay as {len(parts)} tensor-parallel ranks had them: nothing in "
            "the checkpoint says "
            "how they are cut (universal_checkpoint_info), so it can be loaded with as many ranks "
            "only"
        ]
    return dataclasses.replace(first, pieces=pieces), cut if any(cut) else [], notes


def _equal_params(by_rank: Sequence[Mapping[str, Tensor]]) -> set[str]:
    """The parameters all of whose states are equal on all ranks."""
    differ = set()
    for name, tensor in by_rank[0].items():
        if any(
            t.shape != tensor.shape or not torch.equal(t, tensor)
            for t in (s[name] for s in by_rank[1:])
        ):
            differ.add(param_of(name))
    return {param_of(name) for name in by_rank[0]} - differ


def _joined(param: str, slices: Sequence[Tensor], info: Mapping[str, Any]) -> Tensor:
    """One state of a parameter, out of the ranks' slices.

    A rule of the checkpoint's own decides.
    """

    def said(rule: str) -> bool:
        return any(re.match(pattern, param) for pattern in info.get(rule) or ())

    if said("autotp_unsupported_parameter_patterns"):
        raise CheckpointError(f"parameter {param!r} was cut by AutoTP in a way that it cannot undo")
    if said("tp_replicated_parameter_patterns"):
        return slices[0]
    if said("parameter_to_average_patterns"):
        return (sum(s.float() for s in slices) / len(slices)).to(slices[0].dtype)  # type: ignore[union-attr]
    if said("parameter_with_2_sub_params_cat_dim_0"):
        halves = [s.chunk(2) for s in slices]
        return torch.cat([h[i] for i in (0, 1) for h in halves])
    if (shape := _sub_params(param, info)) is not None:
        return _join_sub_params(param, slices, *shape, info)
    joined = torch.cat(list(slices), 1 if said("parameter_with_row_parallelism_patterns") else 0)
    if (
        said("vocabulary_parameter_patterns")
        and (size := info.get("original_vocab_size")) is not None
    ):
        joined = joined[: int(size)]
    return joined


def _sub_params(param: str, info: Mapping[str, Any]) -> tuple[str, Sequence[Any], int] | None:
    """(pattern, shape, the dimension that is cut) of a parameter that is made of several."""
    for row in info.get("parameter_with_sub_params") or ():
        fields = vars(row) if isinstance(row, Data) else dict(row)
        for pattern in fields["patterns"]:
            if re.match(pattern, param):
                return pattern, fields["shape"], int(fields["partition_dim"])
    return None


def _join_sub_params(
    param: str,
    slices: Sequence[Tensor],
    pattern: str,
    shape: Sequence[Any],
    dim: int,
    info: Mapping[str, Any],
) -> Tensor:
    """Each rank holds a part of each sub-parameter; widths: per sub-parameter, of each rank."""
    total = sum(s.shape[dim] for s in slices)
    count = len(slices)
    sizes = shape[dim]
    sizes = list(sizes) if isinstance(sizes, (tuple, list)) else [total // sizes] * int(sizes)
    said = (info.get("sub_param_shard_widths") or {}).get(pattern)
    # Without widths, every rank has an equal part of each sub-parameter.
    widths = said if said is not None else [[size // count] * count for size in sizes]
    if sum(map(sum, widths)) != total:
        raise CheckpointError(
            f"parameter {param!r}: its sub-parameters {sizes} are not what {count} ranks hold"
        )
    pieces = []
    places = [0] * count
    # One sub-parameter after the other, each out of the parts of all ranks.
    for row in widths:
        for rank, width in enumerate(row):
            pieces.append(slices[rank].narrow(dim, places[rank], width))
            places[rank] += width
    return torch.cat(pieces, dim)
