"""Which ranks' files make up which rank, when a checkpoint of DeepSpeed's is read by fewer ranks.

These are the numbers behind ``deepspeed.checkpoint``: a model is divided over pipeline stages (pp),
tensor-parallel ranks (tp) and data-parallel ranks (dp); files are numbered with tp innermost, then
pp, then dp. Degrees can only fall.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from ds_checkpoint_deepspeed.ranks.rank_states import (
    get_files,
    get_files_with_prefix,
    get_zero_files,
    partition_data,
)
from ds_checkpoint_deepspeed.reading.folder import load
from ds_core.errors import CheckpointError

_DIMENSIONS = "checkpoint_parallel_dimensions"


class meg_2d_parallel_map:
    """A list for each place (pipeline stage, tensor-parallel rank); `map` has it under
    ``"stage,rank"``.
    """

    def __init__(self, pp_degree: int, tp_degree: int) -> None:
        self.pp_degree = pp_degree
        self.tp_degree = tp_degree
        self.map: dict[str, list[int]] = {}

    def simple_init(self) -> None:
        """Number the places, tensor-parallel ranks first."""
        self.map = {
            f"{i // self.tp_degree},{i % self.tp_degree}": [i]
            for i in range(self.pp_degree * self.tp_degree)
        }

    def add_data(self, pp_index: int, tp_index: int, data: list[int]) -> None:
        """Append to the list of a place. Raises CheckpointError for a place that is not there."""
        self._check(pp_index, tp_index)
        self.map.setdefault(f"{pp_index},{tp_index}", []).extend(data)

    def get_data(self, pp_index: int | None = None, tp_index: int | None = None) -> list[int]:
        """The list of a place; None: of all stages, or of all ranks, in their order."""
        self._check(pp_index, tp_index)
        stages = range(self.pp_degree) if pp_index is None else [pp_index]
        ranks = range(self.tp_degree) if tp_index is None else [tp_index]
        return [
            value for stage, rank in product(stages, ranks) for value in self.map[f"{stage},{rank}"]
        ]

    def print_data(self, tag: str) -> None:
        """Print all lists."""
        print(tag)
        for key, value in self.map.items():
            print(f"{key} = {value}")

    def _check(self, pp_index: int | None, tp_index: int | None) -> None:
        if (pp_index or 0) >= self.pp_degree or (tp_index or 0) >= self.tp_degree:
            raise CheckpointError(
                f"no place {pp_index},{tp_index} among {self.pp_degree} stages of {self.tp_degree} "
                "ranks"
            )


def reshape_meg_2d_parallel(
    old_pp_degree: int,
    old_tp_degree: int,
    new_pp_degree: int,
    new_tp_degree: int,
    verbose: bool = False,
) -> meg_2d_parallel_map:
    """Which of the old places make up each of the new ones.

    Raises CheckpointError where a degree would grow.
    """
    _refuse_growth((old_pp_degree, new_pp_degree, "PP"), (old_tp_degree, new_tp_degree, "TP"))
    old = meg_2d_parallel_map(old_pp_degree, old_tp_degree)
    old.simple_init()
    fewer_ranks = meg_2d_parallel_map(old_pp_degree, new_tp_degree)
    for stage in range(old_pp_degree):
        for rank, places in enumerate(partition_data(old.get_data(pp_index=stage), new_tp_degree)):
            fewer_ranks.add_data(stage, rank, places)
    new = meg_2d_parallel_map(new_pp_degree, new_tp_degree)
    for rank in range(new_tp_degree):
        for stage, places in enumerate(
            partition_data(fewer_ranks.get_data(tp_index=rank), new_pp_degree)
        ):
            new.add_data(stage, rank, places)
    if verbose:
        old.print_data("before:")
        new.print_data("after:")
    return new


class model_3d_desc:
    """How many stages, tensor-parallel and data-parallel ranks a model is divided over."""

    def __init__(self, pp_degree: int = 1, tp_degree: int = 1, dp_degree: int = 1) -> None:
        self.pp_degree = pp_degree
        self.tp_degree = tp_degree
        self.dp_degree = dp_degree

    def reshape(
        self, target_3d_desc: model_3d_desc, verbose: bool = False
    ) -> list[meg_2d_parallel_map]:
        """For each data-parallel rank of the target, which of this model's files make up each
        place.
        """
        fits, errors = self.can_reshape(target_3d_desc)
        if not fits:
            raise CheckpointError(", ".join(errors))
        places = reshape_meg_2d_parallel(
            self.pp_degree,
            self.tp_degree,
            target_3d_desc.pp_degree,
            target_3d_desc.tp_degree,
            verbose,
        )
        flat = flatten_dp_dimension(places, self.pp_degree * self.tp_degree, self.dp_degree)
        return unflatten_dp_dimension(flat, target_3d_desc.dp_degree)

    def get_desc(self) -> str:
        """The degrees as text."""
        return f"PP,TP,DP = ({self.pp_degree}, {self.tp_degree}, {self.dp_degree})"

    def world_size(self) -> int:
        """The number of ranks."""
        return self.pp_degree * self.tp_degree * self.dp_degree

    def is_valid(self, pp_index: int, tp_index: int, dp_index: int) -> tuple[bool, list[str]]:
        """(whether there is such a rank, why not)."""
        rows = [
            (pp_index, self.pp_degree, "PP"),
            (tp_index, self.tp_degree, "TP"),
            (dp_index, self.dp_degree, "DP"),
        ]
        errors = [
            f"{name} index {index} is not below the degree {degree}"
            for index, degree, name in rows
            if index >= degree
        ]
        return not errors, errors

    def can_reshape(self, target_3d_desc: model_3d_desc) -> tuple[bool, list[str]]:
        """(whether files of this model make up ranks of the target, why not)."""
        errors = list(
            _growths(
                *(
                    (getattr(self, degree), getattr(target_3d_desc, degree), name)
                    for degree, name in (
                        ("pp_degree", "PP"),
                        ("tp_degree", "TP"),
                        ("dp_degree", "DP"),
                    )
                )
            )
        )
        return not errors, errors


def flatten_dp_dimension(
    meg_2d_map: meg_2d_parallel_map, src_2d_size: int, dp_degree: int
) -> meg_2d_parallel_map:
    """The map with the files of all data-parallel ranks in each place."""
    flat = meg_2d_parallel_map(meg_2d_map.pp_degree, meg_2d_map.tp_degree)
    for stage, rank in product(range(flat.pp_degree), range(flat.tp_degree)):
        for index in meg_2d_map.get_data(stage, rank):
            flat.add_data(stage, rank, [index + dp * src_2d_size for dp in range(dp_degree)])
    return flat


def unflatten_dp_dimension(
    meg_2d_map: meg_2d_parallel_map, dp_degree: int
) -> list[meg_2d_parallel_map]:
    """The maps of `dp_degree` ranks, which share the files of each place in order."""
    maps = [
        meg_2d_parallel_map(meg_2d_map.pp_degree, meg_2d_map.tp_degree) for _ in range(dp_degree)
    ]
    for stage, rank in product(range(meg_2d_map.pp_degree), range(meg_2d_map.tp_degree)):
        for one, share in zip(
            maps, partition_data(meg_2d_map.get_data(stage, rank), dp_degree), strict=True
        ):
            one.add_data(stage, rank, share)
    return maps


def get_model_3d_descriptor(dir: str | os.PathLike[str]) -> model_3d_desc:
    """The degrees of the run that wrote the checkpoint in a folder."""
    files = get_files(dir)
    models = get_files_with_prefix(files, "mp_rank_")
    metadata = [(path, {_DIMENSIONS: load(Path(path)).get(_DIMENSIONS)}) for path in models]
    return get_model_3d_descriptor_from_metadata(files, get_zero_files(dir), metadata)


def get_model_3d_descriptor_from_metadata(
    file_list: Sequence[str],
    zero_file_list: Sequence[str],
    model_state_metadata: Sequence[tuple[str, Mapping[str, Any]]],
) -> model_3d_desc:
    """The degrees, from the names of files and what their model states say of them.

    model_state_metadata: (path, its ``checkpoint_parallel_dimensions``); files of before DeepSpeed
        0.19 have none, and their names are counted.

    Raises CheckpointError where files contradict each other.
    """
    models = len(model_state_metadata)
    said = [(path, values.get(_DIMENSIONS)) for path, values in model_state_metadata]
    if any(dimensions is not None for _, dimensions in said):
        pp_degree, tp_degree = _agreed(said)
        if models != pp_degree * tp_degree:
            raise CheckpointError(
                f"{models} files of model states for {pp_degree} stages of {tp_degree} ranks; "
                "copy all"
            )
    else:
        layers = get_files_with_prefix(file_list, "layer_")
        first = os.path.basename(layers[0]).partition("-")[0] if layers else ""
        layer = len(get_files_with_prefix(layers, f"{first}-"))
        tp_degree = layer or max(1, models)
        pp_degree = models // tp_degree if layer else 1
    places = pp_degree * tp_degree
    if places == 0 or len(zero_file_list) % places:
        raise CheckpointError(
            f"{len(zero_file_list)} ZeRO files of {pp_degree} stages of {tp_degree} ranks; copy all"
        )
    return model_3d_desc(pp_degree, tp_degree, max(1, len(zero_file_list) // places))


def _agreed(said: Sequence[tuple[str, Any]]) -> tuple[int, int]:
    """(stages, tensor-parallel ranks) that all files say."""
    found: set[tuple[int, int]] = set()
    for path, dimensions in said:
        known = dimensions if isinstance(dimensions, dict) else {}
        pp_degree = known.get("pp_degree")
        tp_degree = known.get("tp_degree")
        if (
            type(pp_degree) is not int
            or type(tp_degree) is not int
            or min(pp_degree, tp_degree) < 1
        ):
            raise CheckpointError(
                f"{path}: its {_DIMENSIONS} is {dimensions!r}, not pp_degree and tp_degree"
            )
        found.add((pp_degree, tp_degree))
    if len(found) != 1:
        raise CheckpointError(f"files of model states disagree on {_DIMENSIONS}: {sorted(found)}")
    return found.pop()


def get_mpu_ranks(
    tp_size: int = 1, pp_size: int = 1, dp_size: int = 1, virtual_pp_size: int | None = None
) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """The groups of ranks that Megatron makes: (tensor-parallel, of one whole model each,
    data-parallel).
    """
    world = tp_size * pp_size * dp_size
    stage = tp_size * dp_size
    data = [
        list(range(first + rank, first + stage, tp_size))
        for first in range(0, world, stage)
        for rank in range(tp_size)
    ]
    models = [[group[index] for group in data] for index in range(dp_size)]
    tensors = [list(range(first, first + tp_size)) for first in range(0, world, tp_size)]
    return tensors, models, data


def _growths(*rows: tuple[int, int, str]) -> Iterator[str]:
    for old, new, name in rows:
        if new > old:
            yield f"{name} cannot grow from {old} to {new}: files are put together, none is cut"


def _refuse_growth(*rows: tuple[int, int, str]) -> None:
    if errors := list(_growths(*rows)):
        raise CheckpointError(", ".join(errors))
