"""Reading checkpoints that DeepSpeed wrote (ZeRO stages 0 to 3), so that a run can move over in mid-training.

Its files are pickles, so they are read by torch's weights-only loader: tensors and plain values come out, and the three
classes of DeepSpeed's that may occur are stood in for by `_Data`, which does nothing. Any other class is an error that
names it. Flat partitions are looked at in place (the files are mapped, not read), and become pieces of states.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ds_checkpoint.files import read_latest
from ds_checkpoint.format import check_tag
from ds_checkpoint.opening import open_plain
from ds_run_state.states import StateTensor
from torch import Tensor

from ds_core.errors import CheckpointError

__all__ = ["Foreign", "find_deepspeed", "read_deepspeed"]

_MODEL = re.compile(r"(zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(bf16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
_OWN_KEYS = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names"),
    *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version"),
    *("checkpoint_parallel_dimensions", "csr_tensor_module_names", "ds_checkpoint_info", "universal_checkpoint_info"),
}
_GROUP_KEYS = ("lr", "initial_lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "amsgrad")


@dataclass(frozen=True, slots=True)
class Foreign:
    """What a foreign checkpoint holds: pieces of states, further names of shared weights, and the run's values.

    optimizer: the class of the optimizer as that program called it. missing: what could not be taken over, and why.
    """

    tag: str
    pieces: list[StateTensor]
    shared: dict[str, str]
    frozen: list[str]
    run: dict[str, Any]
    client: dict[str, Any]
    optimizer: str | None
    missing: list[str]


class _Data:
    """Stands for an instance of one of DeepSpeed's classes; holds what it was made from."""

    def __init__(self, *given: Any) -> None:
        self.given = given


_STAND_INS = [
    (_Data, name)
    for name in (
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
        # Members of an Enum, as Python 3.11.0 to 3.11.3 write them: nothing is looked up, whatever a file asks for.
        "builtins.getattr",
    )
]


def find_deepspeed(path: Path, tag: str | None) -> Path | None:
    """The folder of a DeepSpeed checkpoint: `path` itself, ``path/tag``, or what ``path/latest`` names; None: none."""
    if tag is None and path.is_dir() and not _files(path, _MODEL):
        tag = read_latest(path)
    folder = path if tag is None else path / check_tag(tag)
    return folder if _files(folder, _MODEL) else None


def read_deepspeed(folder: Path) -> Foreign:
    """All that can be taken over of the checkpoint in `folder`; CheckpointError naming the file when it cannot be read.

    Data-parallel runs of any stage and world size. Tensor and pipeline parallelism, experts and NVMe are refused.
    """
    models, parts = _files(folder, _MODEL), _files(folder, _OPTIMIZER)
    _refuse_others(folder, models, parts)
    first = _load(models[0][1])
    kind = first.get("param_shapes")
    if kind is None:
        return _Plain(folder, first).foreign()
    shards = [_load(path)["optimizer_state_dict"] for _, path in parts]
    if not shards:
        raise CheckpointError(f"{folder} has no *_optim_states.pt, which hold the weights of ZeRO; copy all files")
    if len(models) > 1:
        return _Stage3(folder, [first, *(_load(path) for _, path in models[1:])], shards).foreign()
    return _Stage12(folder, first, shards).foreign()


def _files(folder: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    """(rank, file) of those that match, in order of rank."""
    if not folder.is_dir():
        return []
    found = [(pattern.fullmatch(path.name), path) for path in folder.iterdir()]
    return sorted((int(m["rank"] or 0), path) for m, path in found if m is not None)


def _refuse_others(folder: Path, models: list[tuple[int, Path]], parts: list[tuple[int, Path]]) -> None:
    names = [path.name for path in folder.iterdir()]
    for pattern, what in (("layer_*", "pipeline stages or experts"), ("expp_rank_*", "experts")):
        if any(Path(name).match(pattern) for name in names):
            raise CheckpointError(f"{folder} holds {what}, which cannot be imported yet; export its weights instead")
    if any("mp_rank_00" not in path.name for _, path in (*models, *parts)):
        raise CheckpointError(f"{folder} was saved by a tensor-parallel run, which cannot be imported yet")
    for rows in (models, parts):
        missing = sorted(set(range(len(rows))) - {rank for rank, _ in rows})
        if missing:
            raise CheckpointError(f"{folder} lacks the file of rank {missing[0]}, next to {rows[0][1].name}; copy all")


def _load(path: Path) -> dict[str, Any]:
    os.close(open_plain(path)[0])  # a FIFO would be waited for
    try:
        with torch.serialization.safe_globals(_STAND_INS):  # type: ignore[arg-type]
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # the loader raises what it comes upon: pickle, zip and runtime errors
        why = str(error).split("\n\n")[0].splitlines()
        raise CheckpointError(f"{path} cannot be read without running code in it: {' '.join(why[:2])}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not the dict that DeepSpeed writes")
    return found


def _is_16_bit(model: Mapping[str, Any]) -> torch.dtype | None:
    config = model.get("ds_config") or {}
    for name, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
        if (config.get(name) or {}).get("enabled") in (True, "true"):
            return dtype
    return None


def _run(
    model: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], scaler: dict[str, Any] | None
) -> dict[str, Any]:
    """The run's values in our own terms (`ds_run_state`)."""
    steps = int(model.get("global_steps") or 0)
    gas = (model.get("ds_config") or {}).get("gradient_accumulation_steps")
    schedule = model.get("lr_scheduler")
    return {
        "micro_steps": steps * (gas if isinstance(gas, int) else 1),
        "global_steps": steps,
        "global_samples": int(model.get("global_samples") or 0),
        "skipped_steps": int(model.get("skipped_steps") or 0),
        "scaler": scaler,
        "optimizer_groups": [{k: group[k] for k in _GROUP_KEYS if k in group} for group in groups],
        "lr_scheduler": dict(schedule) if isinstance(schedule, dict) else None,
        "data": None,
    }


def _scaler(values: Mapping[str, Any]) -> dict[str, Any] | None:
    if "cur_scale" not in values:
        return None
    return {
        "scale": float(values["cur_scale"]),
        "iteration": int(values.get("cur_iter", 0)),
        "last_overflow": int(values.get("last_overflow_iter", -1)),
        "current_hysteresis": int(values.get("cur_hysteresis", values.get("delayed_shift", 1))),
    }


def _client(model: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in model.items() if k not in _OWN_KEYS}


def _whole(name: str, tensor: Tensor) -> StateTensor:
    return StateTensor(name, tensor.detach(), tuple(tensor.shape), 0, tensor.numel(), (), True)


def _optimizer_name(model: Mapping[str, Any]) -> str:
    named = ((model.get("ds_config") or {}).get("optimizer") or {}).get("type")
    return f"deepspeed:{named or 'unknown'}"


# -- ZeRO ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stretch:
    """The elements [start, stop) of the flattened parameter `name`, from element `at` of a flat tensor on."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    at: int

    def piece(self, kind: str, flat: Tensor, dtype: torch.dtype | None = None) -> StateTensor:
        """The state ``kind/name``, out of `flat`."""
        found = flat[self.at : self.at + self.stop - self.start]
        if found.numel() != self.stop - self.start:
            raise CheckpointError(f"parameter {self.name!r} goes beyond the flat tensor of {flat.numel()} elements")
        found = found if dtype is None else found.to(dtype)
        return StateTensor(f"{kind}/{self.name}", found, self.shape, self.start, self.stop, (), True)


def _state_pieces(state: Mapping[str, Any], flat: Tensor, stretches: Sequence[_Stretch]) -> Iterator[StateTensor]:
    """Moments of one flat tensor; a parameter's counter comes from the rank with its first element."""
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() == 1 and value.numel() >= flat.numel():  # padding comes last
            yield from (s.piece(f"optimizer/{key}", value) for s in stretches if s.stop > s.start)
        elif isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
            counter = torch.as_tensor(value, dtype=torch.float32).reshape(())
            yield from (_whole(f"optimizer/{key}/{s.name}", counter) for s in stretches if s.start == 0)


class _Stage12:
    """Stages 1 and 2: whole weights in one file; of each group's flat fp32 weights, a stretch per rank."""

    def __init__(self, folder: Path, model: dict[str, Any], shards: list[dict[str, Any]]) -> None:
        self.folder, self.model, self.shards = folder, model, shards
        self.shared: dict[str, str] = dict(model.get("shared_params") or {})

    def foreign(self) -> Foreign:
        """See `read_deepspeed`."""
        module = {n: t for n, t in self.model["module"].items() if n not in self.shared}
        low = _is_16_bit(self.model) is not None
        pieces = [_whole(f"module/{name}", tensor) for name, tensor in module.items()]
        for index, shapes in enumerate(self.model["param_shapes"]):
            begin = 0
            for shard in self.shards:
                flat = shard["single_partition_of_fp32_groups"][index]
                stretches = _stretches(shapes, begin, flat.numel())
                begin += flat.numel()
                if low:
                    pieces += [s.piece("master", flat) for s in stretches if s.stop > s.start]
                pieces += _state_pieces(shard["base_optimizer_state"]["state"].get(index, {}), flat, stretches)
            total = sum(math.prod(shape) for shape in shapes.values())
            if begin < total:
                raise CheckpointError(f"{self.folder}: group {index} has {total} elements, the files hold {begin}")
        groups = self.shards[0]["base_optimizer_state"]["param_groups"]
        run = _run(self.model, groups, _scaler(vars(self.shards[0].get("loss_scaler") or _Data())))
        frozen = list(self.model.get("frozen_param_shapes") or {})
        optimizer = _optimizer_name(self.model)
        return Foreign(self.folder.name, pieces, self.shared, frozen, run, _client(self.model), optimizer, [])


def _stretches(shapes: Mapping[str, Any], begin: int, count: int) -> list[_Stretch]:
    """What of parameters that lie one after the other is in the elements [begin, begin + count) of all."""
    found, place = [], 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        low, high = max(place, begin), min(place + size, begin + count)
        if high > low or (size == 0 and begin == 0):
            found.append(_Stretch(name, tuple(shape), low - place, max(high, low) - place, low - begin))
        place += size
    return found


class _Stage3:
    """Stage 3: every parameter is cut into one part per rank; the parts lie one after the other in flat tensors."""

    def __init__(self, folder: Path, models: list[dict[str, Any]], shards: list[dict[str, Any]]) -> None:
        self.folder, self.models, self.shards = folder, models, shards
        self.shared: dict[str, str] = dict(models[0].get("shared_params") or {})
        if len(models) != len(shards):
            raise CheckpointError(f"{folder} has {len(models)} model files and {len(shards)} optimizer files; copy all")

    def foreign(self) -> Foreign:
        """See `read_deepspeed`."""
        first = self.models[0]
        low, world = _is_16_bit(first), len(self.shards)
        shapes = {name: tuple(shape) for group in first["param_shapes"] for name, shape in group.items()}
        buffers = set(first.get("buffer_names") or ())
        pieces = [_whole(f"module/{n}", t) for n, t in first["module"].items() if n in buffers]
        for rank, shard in enumerate(self.shards):
            pieces += self._trained(rank, world, shard, shapes, low)
        frozen = {n: tuple(s) for n, s in (first.get("frozen_param_shapes") or {}).items()}
        for rank, model in enumerate(self.models):
            for name, shape in frozen.items():
                fragment = model["frozen_param_fragments"][name].reshape(-1)
                pieces.append(_part(name, shape, rank, world, 0).piece("module", fragment))
        groups = self.shards[0]["optimizer_state_dict"]["param_groups"]
        run = _run(first, groups, _scaler(vars(self.shards[0].get("loss_scaler") or _Data())))
        pieces = [p for p in pieces if p.stop > p.start or 0 in p.shape]
        return Foreign(
            self.folder.name, pieces, self.shared, list(frozen), run, _client(first), _optimizer_name(first), []
        )

    def _trained(
        self, rank: int, world: int, shard: dict[str, Any], shapes: dict[str, tuple[int, ...]], low: torch.dtype | None
    ) -> Iterator[StateTensor]:
        names = iter(shapes.items())
        states = shard["optimizer_state_dict"]["state"]
        for index, flat in enumerate(shard["fp32_flat_groups"]):
            stretches, place = [], 0
            while place < flat.numel() and (row := next(names, None)) is not None:
                stretches.append(_part(*row, rank, world, place))
                place += -(-math.prod(row[1]) // world)
            if place != flat.numel():
                raise CheckpointError(
                    f"{self.folder}: flat tensor {index} of rank {rank} has {flat.numel()} elements, its parameters "
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


# -- no ZeRO -------------------------------------------------------------------------------------------------------


class _Plain:
    """Stage 0: one file; the optimizer knows its parameters by number only, so names follow from shapes and values."""

    def __init__(self, folder: Path, model: dict[str, Any]) -> None:
        self.folder, self.model = folder, model
        self.buffers = set(model.get("buffer_names") or ())
        self.shared: dict[str, str] = {}
        first: dict[tuple[Any, ...], str] = {}
        for name, tensor in model["module"].items():
            place = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
            if tensor.numel() and place in first:
                self.shared[name] = first[place]
            first.setdefault(place, name)

    def foreign(self) -> Foreign:
        """See `read_deepspeed`."""
        module = {n: t for n, t in self.model["module"].items() if n not in self.shared}
        pieces = [_whole(f"module/{n}", t) for n, t in module.items()]
        saved = self.model.get("optimizer")
        client = _client(self.model)
        if not isinstance(saved, dict):
            return Foreign(self.folder.name, pieces, self.shared, [], _run(self.model, [], None), client, None, [])
        inner = saved.get("optimizer_state_dict", saved)  # what wraps it under 16-bit modes
        run = _run(self.model, inner["param_groups"], _scaler(saved))
        names, why = self._names(inner, saved.get("fp32_groups"), module)
        if why:
            run = run | {"optimizer_groups": []}
            return Foreign(self.folder.name, pieces, self.shared, [], run, client, None, [why])
        masters = [m for group in saved.get("fp32_groups") or () for m in group]
        pieces += [_whole(f"master/{names[i]}", m) for i, m in enumerate(masters)]
        for index, state in inner["state"].items():
            shape = module[names[index]].shape
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == shape:
                    pieces.append(_whole(f"optimizer/{key}/{names[index]}", value))
                elif isinstance(value, (int, float, Tensor)):
                    counter = torch.as_tensor(value, dtype=torch.float32).reshape(())
                    pieces.append(_whole(f"optimizer/{key}/{names[index]}", counter))
        frozen = [n for n in module if n not in self.buffers and n not in names.values()]
        optimizer = _optimizer_name(self.model)
        return Foreign(self.folder.name, pieces, self.shared, frozen, run, client, optimizer, [])

    def _names(self, inner: dict[str, Any], masters: Any, module: dict[str, Tensor]) -> tuple[dict[int, str], str]:
        """The parameter of each number in the optimizer; or why it cannot be found."""
        free = [n for n in module if n not in self.buffers]
        values = [m for group in masters or () for m in group]
        shapes = {n: _shape_of(inner["state"].get(n, {})) for g in inner["param_groups"] for n in g["params"]}
        places = [{shapes[n] for n in g["params"]} for g in inner["param_groups"]]
        twice = {s for i, one in enumerate(places) for other in places[:i] for s in one & other}
        left = Counter(shapes.values())
        names: dict[int, str] = {}
        for number, shape in shapes.items():
            if values:
                same = [n for n in free if _rounds_to(values[number], module[n])]
            else:
                # In one group they come in the module's order, unless there are more of a shape than the optimizer has.
                same = [n for n in free if shape in (None, module[n].shape)]
                same = [] if shape in twice or len(same) != (len(free) if shape is None else left[shape]) else same
            if not same:
                return {}, (
                    "the optimizer's states are left out: stage 0 stores them without names, and no name fits "
                    f"parameter number {number}, of shape {tuple(shape or ())}; save with stage 1 to keep them"
                )
            left[shape] -= 1
            names[number] = same[0]
            free.remove(same[0])
        return names, ""


def _shape_of(state: Mapping[str, Any]) -> torch.Size | None:
    """Of a parameter, by its moments; None when it has none (plain SGD)."""
    return next((v.shape for v in state.values() if isinstance(v, Tensor) and v.dim()), None)


def _rounds_to(master: Tensor, weight: Tensor) -> bool:
    return master.shape == weight.shape and torch.equal(master.to(weight.dtype), weight)
