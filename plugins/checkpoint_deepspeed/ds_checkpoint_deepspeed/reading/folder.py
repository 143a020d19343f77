"""The files of a checkpoint folder that DeepSpeed wrote, and reading one of them without running
code in it.

Its files are pickles, so they are read by `ds_run_state.torch_files`: tensors and plain values come
out, and the few classes of DeepSpeed's that may occur are stood in for by `Data`, which does
nothing. Any other class is an error that names it. Tensors are looked at in place: the files are
mapped, not read.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_checkpoint.folder.files import read_latest
from ds_checkpoint.folder.format import check_tag
from ds_run_state.opening import read_small
from ds_run_state.torch_files import StandIn, read_torch_file

from ds_core.errors import CheckpointError

_MODEL = re.compile(r"(zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_PART = re.compile(r"(bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
_LAYER = re.compile(r"layer_(?P<layer>\d+)(-model_(?P<tp>\d+))?-model_states\.pt")
_EXPERT = re.compile(
    r"(layer_(?P<layer>\d+)_)?expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt"
)
_EXPERT_PART = re.compile(r"expp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
UNIVERSAL = "zero"
"""The folder of a universal checkpoint with one folder per parameter."""


class Data:
    """Stands for an instance of one of DeepSpeed's classes; holds what it was made from."""

    def __init__(self, *given: Any) -> None:
        self.given = given


_STAND_INS: list[StandIn] = [
    (Data, name)
    for name in (
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
        # Members of an Enum, as Python 3.11.0 to 3.11.3 write them: nothing is looked up, whatever
        # a file asks for.
        "builtins.getattr",
    )
]
# The arguments of Megatron's command line: a plain object, of which its tools read and set
# attributes.
_STAND_INS.append((argparse.Namespace, "argparse.Namespace"))

Grid = dict[tuple[int, int], Path]


@dataclass(frozen=True, slots=True)
class Files:
    """A folder's files by what they hold. Keys are (model-parallel rank, data-parallel rank).

    layers: (layer, tensor-parallel rank) -> file of a pipeline.
    experts: those of `mp` ranks.
    expert_parts: optimizers at stage 0, by expert-parallel rank.
    universal: whether it has a folder per parameter.
    """

    folder: Path
    models: Grid
    parts: Grid
    layers: Grid
    experts: list[tuple[int, Path]]
    expert_parts: Grid
    universal: bool

    @property
    def mp(self) -> int:
        """Number of model-parallel ranks: pipeline stages times tensor-parallel ranks."""
        return len({mp for mp, _ in self.models})


def find_deepspeed(path: Path, tag: str | None) -> Path | None:
    """The folder of a DeepSpeed checkpoint: `path` itself, ``path/tag``, or what ``path/latest``
    (else ``path/latest_universal``) names; None: none."""
    if tag is None and path.is_dir() and not _is_checkpoint(path):
        tag = read_latest(path)
        if tag is None and (path / "latest_universal").is_file():
            tag = check_tag(
                read_small(path / "latest_universal", 1 << 12).decode(errors="replace").strip()
            )
    folder = path if tag is None else path / check_tag(tag)
    return folder if _is_checkpoint(folder) else None


def _is_checkpoint(folder: Path) -> bool:
    return folder.is_dir() and any(_MODEL.fullmatch(p.name) for p in folder.iterdir())


def list_files(folder: Path) -> Files:
    """What is in `folder`; CheckpointError where ranks are missing, or for what cannot be read."""
    names = sorted(folder.iterdir())
    models = _grid(names, _MODEL)
    parts = _grid(names, _PART)
    experts = [(int(m["mp"]), p) for p in names if (m := _EXPERT.fullmatch(p.name))]
    layers = {
        (int(m["layer"]), int(m["tp"] or 0)): p for p in names if (m := _LAYER.fullmatch(p.name))
    }
    universal = (folder / UNIVERSAL).is_dir()
    if any(p.name == "offloaded_tensors" for p in names):
        raise CheckpointError(
            f"{folder} has states on NVMe (offloaded_tensors), which cannot be imported"
        )
    # A rank that is missing would leave a gap that nothing else shows.
    for rows in (models, parts):
        _refuse_missing(folder, rows)
    if parts and {mp for mp, _ in parts} != {mp for mp, _ in models}:
        raise CheckpointError(
            f"{folder} has model files and optimizer files of different ranks; copy all"
        )
    return Files(folder, models, parts, layers, experts, _grid(names, _EXPERT_PART), universal)


def _grid(paths: Iterable[Path], pattern: re.Pattern[str]) -> Grid:
    found = [(pattern.fullmatch(path.name), path) for path in paths]
    return dict(
        sorted(((int(m["mp"]), int(m["dp"] or 0)), path) for m, path in found if m is not None)
    )


def _refuse_missing(folder: Path, rows: Grid) -> None:
    """Every model-parallel rank must have the same data-parallel ranks, from 0 on."""
    if not rows:
        return
    world = max(dp for _, dp in rows) + 1
    for mp in range(max(mp for mp, _ in rows) + 1):
        for dp in range(world):
            if (mp, dp) not in rows:
                near = next(iter(rows.values())).name
                raise CheckpointError(
                    f"{folder} lacks the file of rank {dp} (mp_rank {mp}), next to {near}; copy all"
                )


def load(path: Path, *, kind: type | tuple[type, ...] = dict, links: bool = False) -> Any:
    """What is in a file of `torch.save`; CheckpointError unless it is a `kind` and can be read
    without running code.

    links: whether `path` may be a link, as the files of a cache of downloads are.
    """
    found = read_torch_file(path, stand_ins=_STAND_INS, links=links)
    if not isinstance(found, kind):
        raise CheckpointError(
            f"{path} holds a {type(found).__name__}, not what DeepSpeed writes there"
        )
    return found


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """The path of a file of model states."""
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt")


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    """The path of a rank's file of ZeRO's optimizer states."""
    return os.path.join(
        base_folder, f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt"
    )


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: str, tp_rank: int) -> str:
    """The path of a pipeline layer's file; layer_id: such as ``layer_01``."""
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}_model_states.pt")


def module_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """The weights and buffers in a file of model states; pipelines have none there."""
    return dict(model.get("module") or {})
