"""``deepspeed.runtime.state_dict_factory``: the weights of one tensor-parallel rank, from files of
more or fewer ranks.

A loader is given the files of all ranks in their order. Where a run has fewer ranks than files,
what belongs to one rank is put together; where it has more, a file is cut. Which dimension is cut,
Megatron's names of parameters say. Files are read without running code in them, unless the script
gives a checkpoint engine of its own.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_checkpoint_deepspeed.reading.folder import load
from ds_core.errors import CheckpointError, ConfigError

AUTO_MODULE_KEY = "auto"

_COLUMNS = ("attention.dense.weight", "mlp.dense_4h_to_h.weight")
_ROWS = ("mlp.dense_h_to_4h.weight", "mlp.dense_h_to_4h.bias", "word_embeddings.weight")
_FUSED = "attention.query_key_value"
_ROWS_WHEN_SPLIT = (*_ROWS, "final_linear.weight")

State = dict[str, Any]


class SDLoaderFactory:
    """Makes loaders."""

    @staticmethod
    def get_sd_loader_json(
        json_file: str | Path | Mapping[str, Any], checkpoint_engine: Any = None
    ) -> Any:
        """The loader that a description names (``type``, ``checkpoints``, ``version``), a file or a
        dict.

        One of type ``bloom`` or ``ds_model`` is returned as it is: `init_inference` reads those.
        """
        data = (
            json_file if isinstance(json_file, Mapping) else json.loads(Path(json_file).read_text())
        )
        if lacking := {"type", "checkpoints", "version"} - data.keys():
            raise ConfigError(f"the description of a checkpoint lacks {', '.join(sorted(lacking))}")
        if str(data["type"]).lower() in ("bloom", "ds_model"):
            return data
        return SDLoaderFactory.get_sd_loader(
            data["checkpoints"], checkpoint_engine, data["type"], data["version"]
        )

    @staticmethod
    def get_sd_loader(
        ckpt_list: Sequence[str | Path],
        checkpoint_engine: Any = None,
        sd_type: str = "Megatron",
        version: float | None = None,
    ) -> MegatronSDLoader:
        """A loader of these files. Raises ConfigError for another type than Megatron."""
        if sd_type != "Megatron":
            raise ConfigError(f"checkpoints of type {sd_type!r} cannot be loaded; Megatron's can")
        return MegatronSDLoader(ckpt_list, version, checkpoint_engine)


class SDLoaderBase(ABC):
    """Finds the files that belong to a rank; what is derived from it says how weights are put
    together and cut.
    """

    def __init__(
        self,
        ckpt_list: Sequence[str | Path],
        version: float | None = None,
        checkpoint_engine: Any = None,
    ) -> None:
        self.module_key: str | None = None
        self.ckpt_list = ckpt_list
        self.version = version
        self.checkpoint_engine = checkpoint_engine
        self.check_ckpt_list()

    def load(
        self,
        mp_world_size: int,
        mp_rank: int,
        module_key: str | None = AUTO_MODULE_KEY,
        is_pipe_parallel: bool = False,
        quantize: bool = False,
        quantize_bits: int = 8,
        quantize_groups: int = 64,
        mlp_extra_grouping: bool = True,
    ) -> tuple[str | Path, State, tuple[None, int]]:
        """(the rank's first file, what it is to load, (None, the number of files that were put
        together)).

        module_key: where a file has the weights: a key of it, ``auto`` for ``module`` or ``model``,
            None for the whole file.
        is_pipe_parallel: with a key, files of another number of ranks have all the same in them.
        """
        _refuse_quantizing(quantize)
        self.module_key = module_key
        count = len(self.ckpt_list)
        first = mp_rank * count // mp_world_size
        if is_pipe_parallel and module_key is not None and mp_world_size != count:
            # The weights of a pipeline are in files of layers, so these have what is the same on
            # all ranks.
            mp_world_size = count
            first = 0
        path = self.ckpt_list[first]
        merged = 1
        # As many ranks as files: nothing is changed. Fewer: files are put together. More: one is
        # cut.
        if count == mp_world_size:
            state = self._read(path)
        elif count > mp_world_size:
            state, _, merged = self.merge_state_dict(mp_world_size, mp_rank, quantize)
        else:
            state, _ = self.split_state_dict(mp_world_size, mp_rank, quantize)
        return path, state, (None, merged)

    def get_merge_state_dicts(self, mp_world_size: int, mp_rank: int) -> list[State]:
        """What is in the files that `mp_rank` of `mp_world_size` puts together."""
        each = _quotient(
            len(self.ckpt_list),
            mp_world_size,
            f"{len(self.ckpt_list)} files on {mp_world_size} ranks",
        )
        return [self._read(path) for path in self.ckpt_list[each * mp_rank : each * (mp_rank + 1)]]

    def get_split_state_dict(self, mp_world_size: int, mp_rank: int) -> tuple[State, int, int]:
        """(what is in the file that `mp_rank` takes a part of, the number of parts, which part)."""
        count = len(self.ckpt_list)
        parts = _quotient(mp_world_size, count, f"{count} files on {mp_world_size} ranks")
        return self._read(self.ckpt_list[mp_rank // parts]), parts, mp_rank % parts

    def get_module(self, sd: State) -> State:
        """The weights in what a file holds."""
        key = self._key(sd)
        found: State = sd if key is None else sd[key]
        return found

    def set_module(self, sd: State, module: State) -> State:
        """What a file holds with other weights."""
        key = self._key(sd)
        return module if key is None else {**sd, key: module}

    def check_ckpt_list(self) -> None:
        """Raises CheckpointError without files, and where a file says that it is one of another
        number.
        """
        if not self.ckpt_list:
            raise CheckpointError("a loader of checkpoint files was given none")
        said = self._read(self.ckpt_list[0]).get("mp_world_size", len(self.ckpt_list))
        if said != len(self.ckpt_list):
            raise CheckpointError(
                f"{self.ckpt_list[0]} is one of {said} files, and {len(self.ckpt_list)} are given; "
                "give all"
            )

    def _read(self, path: str | Path) -> State:
        if self.checkpoint_engine is None:
            found: State = load(Path(path), links=True)
            return found
        given: State = self.checkpoint_engine.load(path, map_location="cpu")
        return given

    def _key(self, sd: State) -> str | None:
        if self.module_key != AUTO_MODULE_KEY:
            return self.module_key
        keys = [key for key in ("module", "model") if key in sd]
        if len(keys) != 1:
            raise CheckpointError(
                f"{self.ckpt_list[0]} has {' and '.join(keys) or 'neither module nor model'} as "
                "keys; "
                "load(module_key=...) says where the weights are"
            )
        return keys[0]

    @abstractmethod
    def merge_state_dict(
        self,
        mp_world_size: int,
        mp_rank: int,
        quantize: bool = False,
        quantize_bits: int = 8,
        groups: int = 64,
        mlp_extra_grouping: bool = True,
    ) -> tuple[State, None, int]:
        """(what `mp_rank` loads of several files, None, the number of files)."""

    @abstractmethod
    def split_state_dict(
        self,
        mp_world_size: int,
        mp_rank: int,
        quantize: bool = False,
        quantize_bits: int = 8,
        groups: int = 64,
        mlp_extra_grouping: bool = True,
    ) -> tuple[State, None]:
        """(what `mp_rank` loads of one file, None)."""

    @abstractmethod
    def sanity_check(self, ckpt_file_name: str | Path) -> None:
        """Raises CheckpointError where a file is not of this kind."""


class MegatronSDLoader(SDLoaderBase):
    """Megatron's names.

    Its rows of queries, keys and values lie in one of three orders, by the checkpoint's version.

    [Note: versions of Megatron's checkpoints] 0, also where a checkpoint names none: all queries,
    then all keys, then all values. 1.0: head by head, and in a head the three of each number. 2.0:
    head by head, and in a head its queries, keys and values. So 0 is put together and cut in three
    parts, and the others as they lie.
    """

    def merge_state_dict(
        self,
        mp_world_size: int,
        mp_rank: int,
        quantize: bool = False,
        quantize_bits: int = 8,
        groups: int = 64,
        mlp_extra_grouping: bool = True,
    ) -> tuple[State, None, int]:
        """(what `mp_rank` loads of several files, None, the number of files)."""
        _refuse_quantizing(quantize)
        self.sanity_check(self.ckpt_list[0])
        states = self.get_merge_state_dicts(mp_world_size, mp_rank)
        modules = [self.get_module(state) for state in states]
        version = self.get_checkpoint_version(states[0])
        # Files of different models have no common state.
        for path, module in zip(self.ckpt_list[len(states) * mp_rank :], modules, strict=False):
            if odd := sorted(module.keys() ^ modules[0].keys()):
                raise CheckpointError(
                    f"{path} has other parameters than the files before it: {', '.join(odd[:3])}"
                )

        def merged(key: str) -> Any:
            values = [module[key] for module in modules]
            if _has(key, _COLUMNS):
                return torch.cat(values, 1)
            if _FUSED in key:
                return self.merge_query_key_value(values, version)
            return torch.cat(values) if _has(key, _ROWS) else values[0]

        return (
            self.set_module(states[0], {key: merged(key) for key in modules[0]}),
            None,
            len(modules),
        )

    def split_state_dict(
        self,
        mp_world_size: int,
        mp_rank: int,
        quantize: bool = False,
        quantize_bits: int = 8,
        groups: int = 64,
        mlp_extra_grouping: bool = True,
    ) -> tuple[State, None]:
        """(what `mp_rank` loads of one file, None)."""
        _refuse_quantizing(quantize)
        state, parts, part = self.get_split_state_dict(mp_world_size, mp_rank)
        version = self.get_checkpoint_version(state)

        def split(key: str, value: Any) -> Any:
            if _has(key, _COLUMNS):
                return _part(value, parts, part, 1)
            if _FUSED in key:
                return self.split_query_key_value(value, parts, part, version)
            return _part(value, parts, part, 0) if _has(key, _ROWS_WHEN_SPLIT) else value

        module = {key: split(key, value) for key, value in self.get_module(state).items()}
        return self.set_module(state, module), None

    def merge_query_key_value(self, param_list: Sequence[Tensor], ckpt_ver: float) -> Tensor:
        """Several ranks' queries, keys and values in one tensor."""
        return _by_version(param_list, ckpt_ver, torch.cat)

    def split_query_key_value(
        self, param: Tensor, num_to_split: int, offset: int, ckpt_ver: float
    ) -> Tensor:
        """One rank's queries, keys and values out of a tensor with those of `num_to_split`."""
        return _by_version(
            [param], ckpt_ver, lambda tensors: _part(tensors[0], num_to_split, offset, 0)
        )

    def sanity_check(self, ckpt_file_name: str | Path) -> None:
        """Raises CheckpointError where a file lacks the parameters of Megatron's layers."""
        module = self.get_module(self._read(ckpt_file_name))
        for wanted in (*_COLUMNS, _FUSED, *_ROWS[:2]):
            if not any(wanted in key for key in module):
                raise CheckpointError(
                    f"{ckpt_file_name} has no parameter {wanted}: it is not Megatron's"
                )

    def get_checkpoint_version(self, state_dict: State) -> float:
        """What was given, else what the checkpoint says, else 0."""
        version: float = (
            state_dict.get("checkpoint_version", 0) if self.version is None else self.version
        )
        return version


def _by_version(
    tensors: Sequence[Tensor], version: float, change: Callable[[list[Tensor]], Tensor]
) -> Tensor:
    """`change` of rows as they lie, or of queries, of keys and of values each. [Note: versions of
    Megatron's ...]
    """
    if version in (1.0, 2.0):
        return change(list(tensors))
    if version != 0:
        raise CheckpointError(f"Megatron checkpoints have version 0, 1.0 or 2.0, not {version}")
    # Version 0: queries, keys and values are three blocks, which ranks divide one by one.
    thirds = [
        tensor.split(_quotient(len(tensor), 3, f"{len(tensor)} rows of queries, keys and values"))
        for tensor in tensors
    ]
    return torch.cat([change([third[kind] for third in thirds]) for kind in range(3)])


def _part(tensor: Tensor, parts: int, part: int, dim: int) -> Tensor:
    """One of equal parts, a copy: a view would keep the whole, and save the whole."""
    size = _quotient(
        tensor.shape[dim], parts, f"dimension {dim} of a parameter of shape {tuple(tensor.shape)}"
    )
    return tensor.narrow(dim, part * size, size).clone()


def _quotient(number: int, by: int, what: str) -> int:
    if number % by:
        raise CheckpointError(f"{what}: {number} cannot be divided into {by} equal parts")
    return number // by


def _has(key: str, parts: Sequence[str]) -> bool:
    return any(part in key for part in parts)


def _refuse_quantizing(quantize: bool) -> None:
    if quantize:
        raise ConfigError(
            "weights are loaded as they are; init_inference(quant=...) quantizes them afterwards"
        )
