"""``deepspeed.checkpoint.DeepSpeedCheckpoint`` and ``ZeROCheckpoint``: DeepSpeed's folders as fewer
ranks see them.

Tools of Megatron-DeepSpeed read checkpoints by them: layers of a pipeline, put together for fewer
tensor-parallel ranks, what each place has, and the optimizer's states of one rank. Files are read
without running code in them.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from ds_checkpoint.folder.format import MANIFEST
from torch import Tensor

from ds_checkpoint_deepspeed.ranks.rank_maps import (
    get_model_3d_descriptor,
    get_model_3d_descriptor_from_metadata,
    meg_2d_parallel_map,
    model_3d_desc,
    reshape_meg_2d_parallel,
)
from ds_checkpoint_deepspeed.ranks.rank_states import (
    basic_folder_validation,
    get_files,
    get_files_with_prefix,
    get_zero_files,
    merge_state,
    partition_data,
    validate_files,
)
from ds_checkpoint_deepspeed.reading.folder import load
from ds_core.errors import CheckpointError

_LAYER = re.compile(r"layer_(\d+)-model_.*")
_OPTIMIZER = "optimizer_state_dict"
# What each tensor-parallel rank has whole of a layer of Megatron's, and what is cut along its
# second dimension.
_ALIKE = frozenset({
    "input_layernorm.weight", "input_layernorm.bias", "self_attention.dense.bias", "post_attention_layernorm.weight",
    "post_attention_layernorm.bias", "mlp.dense_4h_to_h.bias", "position_embeddings.weight",
})  # fmt: skip
_COLUMNS = frozenset({"self_attention.dense.weight", "mlp.dense_4h_to_h.weight"})

State = dict[str, Any]


class ZeROCheckpoint:
    """The files of optimizer states in a folder, and which of them make up a rank."""

    def __init__(self, dir: str | os.PathLike[str], source_3d: model_3d_desc | None = None) -> None:
        basic_folder_validation(dir)
        self.dir = dir
        self.file_list = get_zero_files(dir)
        self.num_files = len(self.file_list)
        if not self.file_list:
            raise CheckpointError(f"{dir} has no files of ZeRO's optimizer states{_ours(dir)}")
        self.src_3d = get_model_3d_descriptor(dir) if source_3d is None else source_3d
        self.reshape(
            model_3d_desc(self.src_3d.pp_degree, self.src_3d.tp_degree, self.src_3d.dp_degree)
        )

    def reshape(self, target_3d_desc: model_3d_desc) -> None:
        """From now on ranks are those of the target."""
        self.target_3d = target_3d_desc
        self._maps = self.src_3d.reshape(target_3d_desc)

    def get_src_world_size(self) -> int:
        """The number of ranks that wrote the folder."""
        return self.src_3d.world_size()

    def get_src_tp_degree(self) -> int:
        """Of its tensor-parallel ranks."""
        return self.src_3d.tp_degree

    def get_src_pp_degree(self) -> int:
        """Of its pipeline stages."""
        return self.src_3d.pp_degree

    def get_src_dp_degree(self) -> int:
        """Of its data-parallel ranks."""
        return self.src_3d.dp_degree

    def get_file_indices_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[int]:
        """The places in `file_list` of the files that make up a rank."""
        valid, errors = self.target_3d.is_valid(pp_index, tp_index, dp_index)
        if not valid:
            raise CheckpointError(", ".join(errors))
        return self._maps[dp_index].get_data(pp_index, tp_index)

    def get_files_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        """The files that make up a rank."""
        return [
            self.file_list[index]
            for index in self.get_file_indices_for_rank(pp_index, tp_index, dp_index)
        ]

    def get_state_for_rank(
        self,
        pp_index: int,
        tp_index: int,
        dp_index: int,
        keys_to_ignore: Sequence[str] = (),
        strip_tensor_paddings: bool = True,
    ) -> State:
        """The states of a rank: those of its files one after the other, without padding by
        default.
        """
        merged: State | None = None
        for path in self.get_files_for_rank(pp_index, tp_index, dp_index):
            state = {
                key: value for key, value in load(Path(path)).items() if key not in keys_to_ignore
            }
            if strip_tensor_paddings:
                _strip_paddings(state)
            merged = state if merged is None else merge_state(merged, state)
        assert merged is not None  # every place has a file
        optimizer = merged.get(_OPTIMIZER) or {}
        if counts := optimizer.get("partition_count"):
            optimizer["partition_count"] = [self.target_3d.dp_degree] * len(counts)
        if strip_tensor_paddings and (paddings := optimizer.get("group_paddings")):
            optimizer["group_paddings"] = [0] * len(paddings)
        return merged

    def print_3d_index_map(self, tag: str | None = None) -> None:
        """Print which files make up each rank, by their places."""
        if tag:
            print(f"3D index map: {tag}")
        for dp_index, places in enumerate(self._maps):
            places.print_data(f"dp = {dp_index}")

    def print_3d_file_map(self, tag: str | None = None) -> None:
        """Print which files make up each rank, by their names."""
        if tag:
            print(f"3D file map: {tag}")
        for dp in range(self.target_3d.dp_degree):
            for pp in range(self.target_3d.pp_degree):
                for tp in range(self.target_3d.tp_degree):
                    print(f"{pp}, {tp}, {dp} => {self.get_files_for_rank(pp, tp, dp)}")


def _strip_paddings(state: State) -> None:
    """Cut what fills a rank's flat moments up to a whole number of elements for each rank."""
    optimizer = state.get(_OPTIMIZER) or {}
    paddings = optimizer.get("group_paddings")
    groups = (optimizer.get("base_optimizer_state") or {}).get("state")
    if paddings is None or not isinstance(groups, dict):
        return
    for key, group in groups.items():
        for name, value in group.items():
            if paddings[key] and name != "step" and isinstance(value, Tensor):
                group[name] = value[: len(value) - paddings[key]].clone()


class DeepSpeedCheckpoint:
    """A folder of DeepSpeed's as ranks of other, not greater, degrees see it.

    None: as it was written.
    """

    def __init__(
        self,
        dir: str | os.PathLike[str],
        tp_degree: int | None = None,
        pp_degree: int | None = None,
        dp_degree: int | None = None,
        final_layer_norm_idx: int = -1,
    ) -> None:
        basic_folder_validation(dir)
        self.dir = dir
        self.final_layer_norm_idx = final_layer_norm_idx
        self.file_list = get_files(dir)
        self.layer_files = sorted(
            path for path in self.file_list if _LAYER.fullmatch(os.path.basename(path))
        )
        self.mp_rank_files = get_files_with_prefix(self.file_list, "mp_rank_")
        self._check_folder()
        source = get_model_3d_descriptor_from_metadata(
            self.file_list, get_zero_files(dir), self._read_metadata()
        )
        self.zero_checkpoint = ZeROCheckpoint(dir, source)
        self.tp_degree = source.tp_degree if tp_degree is None else tp_degree
        self.pp_degree = source.pp_degree if pp_degree is None else pp_degree
        self.dp_degree = source.dp_degree if dp_degree is None else dp_degree
        self.original_world_size = source.world_size()
        self.world_size = self.tp_degree * self.pp_degree * self.dp_degree
        self.zero_checkpoint.reshape(model_3d_desc(self.pp_degree, self.tp_degree, self.dp_degree))
        self.old_2d_map = meg_2d_parallel_map(source.pp_degree, source.tp_degree)
        self.old_2d_map.simple_init()
        self.new_2d_map = reshape_meg_2d_parallel(
            source.pp_degree, source.tp_degree, self.pp_degree, self.tp_degree
        )

    # -- what the folder has -----------------------------------------------------------------------

    def _check_folder(self) -> None:
        if not self.mp_rank_files:
            raise CheckpointError(
                f"{self.dir} is no DeepSpeed checkpoint: it has no mp_rank_* files{_ours(self.dir)}"
            )

    def _read_metadata(self) -> list[tuple[str, Mapping[str, Any]]]:
        """What the files of model states say of the degrees; the first one's other values are
        kept."""
        found: list[tuple[str, Mapping[str, Any]]] = []
        self.global_state: State = {}
        for path in self.mp_rank_files:
            state = load(Path(path))
            key = "checkpoint_parallel_dimensions"
            found.append((path, {key: state.get(key)}))
            if not self.global_state:
                self.global_state = {"iteration": state.get("iteration", 0)}
                for key in ("args", "checkpoint_info", "universal_checkpoint_info"):
                    self.global_state[key] = state.get(key)
        return found

    @functools.cached_property
    def layer_keys(self) -> list[str]:
        """The layers that have files, such as ``layer_01``, in their order."""
        numbers = {_LAYER.fullmatch(os.path.basename(path))[1] for path in self.layer_files}  # type: ignore[index]
        return [f"layer_{number}" for number in sorted(numbers, key=int)]

    @property
    def layer_count(self) -> int:
        """The number of layers."""
        return len(self.layer_keys)

    # Found when they are asked for: tools that read the optimizer's states alone need no even
    # stages.

    @functools.cached_property
    def pp_to_transformer_map(self) -> dict[int, list[str]]:
        """The layers of each stage: all between the first, the embeddings, and the last norm."""
        inner = self.layer_keys[1 : self.final_layer_norm_idx]
        return dict(enumerate(partition_data(inner, self.pp_degree)))

    @functools.cached_property
    def transformer_file_map(self) -> dict[tuple[int, int], list[list[str]]]:
        """(tensor-parallel rank, stage) -> the files of each of its layers."""
        found: dict[tuple[int, int], list[list[str]]] = {}
        for stage, keys in self.pp_to_transformer_map.items():
            files = [self._layer_files(key) for key in keys]
            for rank in range(self.tp_degree):
                found[rank, stage] = [shares[rank] for shares in files]
        return found

    @functools.cached_property
    def tp_to_embedding_map(self) -> dict[int, list[str]]:
        """Tensor-parallel rank -> its files of the first layer."""
        return dict(enumerate(self._layer_files(self.layer_keys[0]))) if self.layer_keys else {}

    @functools.cached_property
    def tp_to_final_norm_map(self) -> dict[int, list[str]]:
        """Tensor-parallel rank -> its files of the last norm."""
        last = self.layer_keys[self.final_layer_norm_idx] if self.layer_keys else ""
        return dict(enumerate(self._layer_files(last))) if last else {}

    def _layer_files(self, key: str) -> list[list[str]]:
        """The files of a layer, shared by the tensor-parallel ranks."""
        return partition_data(get_files_with_prefix(self.layer_files, f"{key}-"), self.tp_degree)

    def is_change_tp_degree(self) -> bool:
        """Whether there are fewer tensor-parallel ranks than files are for."""
        return self.tp_degree != self.zero_checkpoint.get_src_tp_degree()

    def is_change_pp_degree(self) -> bool:
        """Whether there are fewer stages than files are for."""
        return self.pp_degree != self.zero_checkpoint.get_src_pp_degree()

    def is_change_dp_degree(self) -> bool:
        """Whether there are fewer data-parallel ranks than files are for."""
        return self.dp_degree != self.zero_checkpoint.get_src_dp_degree()

    def validate_files(self) -> None:
        """Print the files that have gone since."""
        validate_files(self.file_list)

    # -- values and states -------------------------------------------------------------------------

    def get_iteration(self) -> int:
        """The number of the iteration that Megatron saved, else 0."""
        return int(self.global_state["iteration"])

    def get_args(self) -> Any:
        """The arguments that Megatron saved, an `argparse.Namespace`; None without."""
        return self.global_state["args"]

    def get_checkpoint_info(self, info_key: str = "checkpoint_info") -> Any:
        """What model states have under a key; None without."""
        if info_key not in self.global_state:
            self.global_state[info_key] = load(Path(self.mp_rank_files[0])).get(info_key)
        return self.global_state[info_key]

    def get_zero_checkpoint_state(
        self, pp_index: int, tp_index: int, dp_index: int, strip_tensor_paddings: bool = True
    ) -> State:
        """The optimizer's states of a rank."""
        return self.zero_checkpoint.get_state_for_rank(
            pp_index, tp_index, dp_index, ["param_shapes"], strip_tensor_paddings
        )

    def get_zero_files(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        """The files that those come from."""
        return self.zero_checkpoint.get_files_for_rank(pp_index, tp_index, dp_index)

    def get_2d_parallel_files(self, tp_index: int, pp_index: int) -> list[str]:
        """The files of model states that make up a place."""
        return [self.mp_rank_files[index] for index in self.new_2d_map.get_data(pp_index, tp_index)]

    def get_2d_parallel_state(self, tp_index: int, pp_index: int) -> State:
        """What they hold, tensors one after the other."""
        first, *others = (
            load(Path(path)) for path in self.get_2d_parallel_files(tp_index, pp_index)
        )
        for other in others:
            first = merge_state(first, other)
        merged: State = first
        return merged

    def get_embedding_layer_id(self) -> str:
        """The first layer, such as ``layer_01``."""
        return self.layer_keys[0]

    def get_final_norm_layer_id(self) -> str:
        """The layer of the last norm."""
        return self.layer_keys[self.final_layer_norm_idx]

    def get_embedding_files(self, tp_index: int) -> list[str]:
        """The files of the first layer that make up a rank."""
        return self.tp_to_embedding_map[tp_index]

    def get_embedding_state(self, tp_index: int) -> State:
        """The embeddings of a rank."""
        return _layer(self.tp_to_embedding_map[tp_index])

    def get_final_norm_files(self, tp_index: int) -> list[str]:
        """The files of the last norm that make up a rank."""
        return self.tp_to_final_norm_map[tp_index]

    def get_final_norm_state(self, tp_index: int) -> State:
        """The last norm: all ranks have the same."""
        return _layer(self.tp_to_final_norm_map[tp_index][:1])

    def get_pp_transformer_map(self, pp_index: int) -> list[str]:
        """The layers of a stage, without the first and the last norm."""
        return self.pp_to_transformer_map[pp_index]

    def get_transformer_state(self, tp_index: int, pp_index: int) -> list[State]:
        """The weights of each layer of a place."""
        return [_layer(files) for files in self.transformer_file_map[tp_index, pp_index]]

    # -- what tools print --------------------------------------------------------------------------

    def show_2d_mapping(self) -> None:
        """Print which files of model states make up each place."""
        print("files of each place, by stage and tensor-parallel rank")
        for pp in range(self.pp_degree):
            for tp in range(self.tp_degree):
                print(f"[{pp}, {tp}] = {self.get_2d_parallel_files(tp, pp)}")

    def show_tp_embedding_map(self) -> None:
        """Print the files of the first layer."""
        _show("tp_to_embedding_layers", self.tp_to_embedding_map)

    def show_tp_final_norm_map(self) -> None:
        """Print the files of the last norm."""
        _show("tp_to_final_norm_layers", self.tp_to_final_norm_map)

    def show_pp_transformer_map(self) -> None:
        """Print the layers of each stage."""
        _show("pp_to_transformer_layers", self.pp_to_transformer_map)

    def show_transformer_file_map(self) -> None:
        """Print the files of each place's layers."""
        _show("rank_to_transformer_files", self.transformer_file_map)


def _layer(files: Sequence[str]) -> State:
    """The weights of one layer out of the files of its ranks, by Megatron's names."""
    states = [load(Path(path)) for path in files]

    def merged(key: str) -> Any:
        if key in _ALIKE:
            return states[0][key]
        return torch.cat([state[key] for state in states], 1 if key in _COLUMNS else 0)

    return {key: merged(key) for key in states[0]}


def _show(tag: str, rows: Mapping[Any, Any]) -> None:
    print(f"Dump mapping: {tag}")
    for key, value in rows.items():
        print(f"{key} = {value}")


def _ours(folder: str | os.PathLike[str]) -> str:
    """What to do with a folder of ds_core's."""
    if (Path(folder) / MANIFEST).is_file():
        return "; it is ds_core's: `dscore checkpoint export-deepspeed` writes it as DeepSpeed does"
    return ""
