"""Writing a checkpoint in DeepSpeed's own forms, so that its engine, ``zero_to_fp32`` and
``ds_to_universal`` read it.

How the data flows: a `Saved` (of ds_core's checkpoints, or of DeepSpeed's) -> `Model`, whole states
under DeepSpeed's names, in the optimizer's order -> the files of a ZeRO stage for so many ranks, or
a universal checkpoint, for any.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from ds_checkpoint.folder import files
from ds_checkpoint.folder.format import check_name, check_tag
from ds_checkpoint.offline import Saved
from torch import Tensor

from ds_checkpoint_deepspeed.exported_model import Model, read_model
from ds_checkpoint_deepspeed.opened import open_any
from ds_checkpoint_deepspeed.saving import Later, fragment, loss_scaler, save, save_streamed
from ds_core.errors import CheckpointError

VERSION = "0.19.8+dscore"
"""What files say they were written by: the DeepSpeed whose form this is."""
_SUB_GROUP = 10**9  # DeepSpeed's default of zero_optimization.sub_group_size, in elements


def export_deepspeed(
    source: str | Path,
    output_dir: str | Path,
    *,
    tag: str | None = None,
    stage: int = 2,
    world_size: int = 1,
    sub_group_size: int = _SUB_GROUP,
) -> Path:
    """Write the checkpoint `source` (or ``source/tag``) for DeepSpeed at ZeRO `stage` on
    `world_size` ranks; its path.

    It goes below `output_dir`, under its tag, and ``latest`` there names it. DeepSpeed loads it
    with that stage and number of ranks only, and MoE layers with ep_size 1; `export_universal` fits
    any.

    sub_group_size: the config's, at stage 3. The files are pickles of plain values, which is the
        only form that DeepSpeed loads.

    CheckpointError for weights that differ along mesh axes, or an optimizer whose states the form
    cannot hold.
    """
    if stage not in (0, 1, 2, 3) or world_size < 1:
        raise CheckpointError(
            f"stage {stage} on {world_size} ranks: use stages 0 to 3, and at least one rank"
        )
    with open_any(source, tag) as saved:
        model = read_model(saved)
        folder = _new_folder(output_dir, saved.manifest.tag)
        if stage == 3:
            _write_stage3(folder, model, world_size, sub_group_size)
        elif stage == 0:
            _write_stage0(folder, model)
        else:
            _write_stages_1_2(folder, model, stage, world_size)
    # Last, so that it never names a checkpoint that is not whole.
    (Path(output_dir) / "latest").write_text(folder.name)
    return folder


def export_universal(
    source: str | Path, output_folder: str | Path, *, tag: str | None = None
) -> Path:
    """Write the checkpoint `source` (or ``source/tag``) as a universal one; its path.

    DeepSpeed loads it at stages 1 to 3 and any number of ranks, with ``checkpoint.load_universal``
    in its config; the file ``latest_universal`` above it names it.
    """
    with open_any(source, tag) as saved:
        return write_universal(saved, Path(output_folder))


def write_universal(saved: Saved, output: Path) -> Path:
    """The same of an opened checkpoint; one parameter is in memory at a time."""
    model = read_model(saved)
    folder = _new_folder(output.parent, check_tag(output.name))
    homes = _homes(folder / "zero", model)
    # A folder for each parameter, with a file for each of its states.
    for name in model.trained:
        step = model.step(name)
        if step is not None:
            save(step, homes[name] / "step.pt")
        save({"param": model.fp32(name), "cat_dim": 0}, homes[name] / "fp32.pt")
        for key in model.moments:
            save({"param": model.moment(key, name), "cat_dim": 0}, homes[name] / f"{key}.pt")
    for name in model.frozen:
        save({"param": model.fp32(name)}, homes[name] / "fp32.pt")
    # At stage 3 DeepSpeed reads one counter for all parameters.
    step = next((s for n in model.trained if (s := model.step(n)) is not None), torch.tensor(0.0))
    groups = [{**group, "params": [i]} for i, group in enumerate(model.groups)]
    common = {
        **_scale(model),
        "zero_stage": 2,
        "param_groups": groups,
        "partition_count": [1] * len(groups),
        "ds_version": VERSION,
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": groups},
    }
    save(common, folder / "zero" / "optimizer_state.pt")
    # Stages 1 and 2 look for the first of these files, stage 3 for the second.
    state = _model_state(model, model.module_later(), world_size=1, shapes=_by_group(model))
    save_streamed(state, folder / "mp_rank_00_model_states.pt")
    empty = {
        n: t if n in model.buffers else torch.empty(0, dtype=t.dtype)
        for n, t in state["module"].items()
    }
    save_streamed(state | {"module": empty}, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    (folder.parent / "latest_universal").write_text(folder.name)
    return folder


def _new_folder(root: str | Path, tag: str) -> Path:
    folder = Path(root) / check_tag(tag)
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder} is there already; remove it, or name another folder")
    files.make_root(Path(root))
    folder.mkdir(exist_ok=True)
    return folder


def _homes(root: Path, model: Model) -> dict[str, Path]:
    """A new folder for each parameter below `root`; CheckpointError, before any is made, for a name
    that leads out.
    """
    names = [*model.trained, *model.frozen]
    for word in (*names, *model.moments):
        check_name(word)
    if bad := [key for key in model.moments if "/" in key or key in ("fp32", "step")]:
        raise CheckpointError(
            f"{model.saved.path}: the form has no file for the optimizer's state {bad[0]!r}"
        )
    # A folder of a name's own must not be where a file of another's goes.
    if bad := [n for n in names if n == "optimizer_state.pt" or re.search(r"/.*\.pt(/|$)", n)]:
        raise CheckpointError(
            f"{model.saved.path}: the form has no folder for the parameter {bad[0]!r}"
        )
    root.mkdir()
    homes = {name: root / name for name in names}
    try:
        for home in homes.values():
            home.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # such as a name that is too long
        raise CheckpointError(f"no folder can be made for a parameter: {error}") from error
    return homes


# -- files -----------------------------------------------------------------------------------------


def _scale(model: Model) -> dict[str, Any]:
    scaler = model.run["scaler"] if model.low is torch.float16 else None
    return {
        "loss_scaler": loss_scaler(scaler),
        "dynamic_loss_scale": scaler is not None,
        "overflow": False,
    }


def _by_group(model: Model) -> list[dict[str, torch.Size]]:
    return [{n: model.shape(n) for n in names} for names in model.order]


def _model_state(
    model: Model,
    module: Mapping[str, Tensor] | Mapping[str, Later],
    *,
    world_size: int,
    shapes: list[dict[str, torch.Size]] | None,
) -> dict[str, Any]:
    """What a file of model states has, but for what depends on the stage."""
    low = "bf16" if model.low is torch.bfloat16 else "fp16" if model.low is torch.float16 else None
    run = model.run
    config = {low: {"enabled": True}} if low else {}
    return {
        "module": dict(module),
        "buffer_names": list(model.buffers),
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": {n: model.shape(n) for n in model.frozen}
        if shapes is not None
        else None,
        "shared_params": dict(model.shared) if shapes is not None else None,
        "frozen_param_fragments": {n: model.weight(n) for n in model.frozen}
        if shapes is not None
        else None,
        "lr_scheduler": run["lr_scheduler"],
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": run["skipped_steps"],
        "global_steps": run["global_steps"],
        "global_samples": run["global_samples"],
        "dp_world_size": world_size,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
        "ds_config": config,
        "ds_version": VERSION,
        **model.client,
    }


def _write_stage0(folder: Path, model: Model) -> None:
    if model.low is not None:
        raise CheckpointError("stage 0 has another form for each 16-bit mode; export for stage 1")
    state = _model_state(model, model.module(), world_size=1, shapes=None)
    # Stage 0 knows parameters by number, in the order of the groups.
    numbers = {name: i for i, name in enumerate(model.trained)}
    state["optimizer"] = {
        "state": {numbers[n]: _states_of(model, n) for n in model.trained},
        "param_groups": [
            {**group, "params": [numbers[n] for n in names]}
            for group, names in zip(model.groups, model.order, strict=True)
        ],
    }
    experts = _write_experts(folder, model, state)
    if experts:
        save({"optimizer": state["optimizer"]}, folder / "expp_rank_0_mp_rank_00_optim_states.pt")
        state["optimizer"] = None
    save(state, folder / "mp_rank_00_model_states.pt")


def _write_experts(folder: Path, model: Model, state: dict[str, Any]) -> bool:
    """Give each expert a file, and take them out of the model's `state`; whether there are any."""
    layers = model.experts
    if layers:
        state["num_experts"] = [len(experts) for experts in layers]
    for layer, experts in enumerate(layers):
        for row, names in enumerate(experts):
            weights = {name: state["module"].pop(name) for name in names}
            save(weights, folder / f"layer_{layer}_expert_{row}_mp_rank_00_model_states.pt")
    return bool(layers)


def _states_of(model: Model, name: str) -> dict[str, Tensor]:
    step = model.step(name)
    found = {} if step is None else {"step": step}
    return found | {key: model.moment(key, name) for key in model.moments}


def _steps(model: Model, names: list[str]) -> dict[str, Tensor]:
    """The one counter of a group; CheckpointError where its parameters have been updated different
    times.
    """
    steps = {float(s) for n in names if (s := model.step(n)) is not None}
    if len(steps) > 1:
        raise CheckpointError(
            f"{model.saved.path}: parameters of one group were updated {sorted(steps)} times"
        )
    return {"step": torch.tensor(steps.pop())} if steps else {}


def _file(kind: str, dp: int, low: torch.dtype | None) -> str:
    prefix = "bf16_" if low is torch.bfloat16 and kind == "optim" else ""
    return f"{prefix}zero_pp_rank_{dp}_mp_rank_00_{kind}_states.pt"


def _write_stages_1_2(folder: Path, model: Model, stage: int, world_size: int) -> None:
    """Each group's parameters one after the other, in `world_size` equal parts; the last ones are
    padded.
    """
    shards: list[dict[str, Any]] = [
        {"fp32": [], "state": {}, "maps": [], "paddings": []} for _ in range(world_size)
    ]
    for index, names in enumerate(model.order):
        total = sum(math.prod(model.shape(n)) for n in names)
        part = -(-total // (2 * world_size)) * 2  # DeepSpeed aligns to two elements per rank
        # The group as one flat tensor of each kind, of which each rank gets an equal part.
        flats = {"fp32": torch.zeros(part * world_size)} | {
            k: torch.zeros(part * world_size) for k in model.moments
        }
        places = {}
        begin = 0
        for name in names:
            size = math.prod(model.shape(name))
            flats["fp32"][begin : begin + size] = model.fp32(name).reshape(-1)
            for key in model.moments:
                flats[key][begin : begin + size] = model.moment(key, name).reshape(-1).float()
            places[name] = begin
            begin += size
        step = _steps(model, names)
        for rank, shard in enumerate(shards):
            low = rank * part
            high = (rank + 1) * part
            # Weights are stored without the padding, the optimizer's states with it.
            held = max(min(high, total) - low, 0)
            shard["fp32"].append(flats["fp32"][low : low + held].clone())
            shard["paddings"].append(part - held)
            shard["state"][index] = step | {k: flats[k][low:high].clone() for k in model.moments}
            shard["maps"].append(_fragments(model, places, low, high))
    groups = [{**group, "params": [i]} for i, group in enumerate(model.groups)]
    for rank, shard in enumerate(shards):
        optimizer = {
            **_scale(model),
            "base_optimizer_state": {"state": shard["state"], "param_groups": groups},
            "single_partition_of_fp32_groups": shard["fp32"],
            "zero_stage": stage,
            "group_paddings": shard["paddings"],
            "param_alignment_paddings": [[0] * len(names) for names in model.order],
            "partition_count": [world_size] * len(groups),
            "ds_version": VERSION,
            "param_slice_mappings": shard["maps"],
        }
        state = {"optimizer_state_dict": optimizer, "ds_config": {}, "ds_version": VERSION}
        save(state, folder / _file("optim", rank, model.low))
    state = _model_state(model, model.module(), world_size=world_size, shapes=_by_group(model))
    _write_experts(folder, model, state)
    save(state, folder / "mp_rank_00_model_states.pt")


def _fragments(model: Model, places: Mapping[str, int], low: int, high: int) -> dict[str, Any]:
    """Where in the part [low, high) of a group each parameter lies."""
    found = {}
    for name, begin in places.items():
        end = begin + math.prod(model.shape(name))
        if max(begin, low) < min(end, high):
            found[name] = fragment(max(begin, low) - low, min(end, high) - max(begin, low))
    return found


def _write_stage3(folder: Path, model: Model, world_size: int, sub_group_size: int) -> None:
    """Each parameter in `world_size` equal parts, the last one padded; a rank's parts one after the
    other.
    """
    subs = [
        (g, names)
        for g, names in enumerate(model.order)
        for names in _sub_groups(model, names, world_size, sub_group_size)
    ]
    shapes = [{n: model.shape(n) for n in names} for _, names in subs]
    groups = [
        {**group, "params": [i for i, (g, _) in enumerate(subs) if g == index]}
        for index, group in enumerate(model.groups)
    ]
    module = model.module()
    empty = {
        n: t if n in model.buffers else torch.empty(0, dtype=t.dtype) for n, t in module.items()
    }
    for rank in range(world_size):
        flats = [_parts([model.fp32(n) for n in names], rank, world_size) for _, names in subs]
        states = {
            i: _steps(model, names)
            | {
                k: _parts([model.moment(k, n) for n in names], rank, world_size)
                for k in model.moments
            }
            for i, (_, names) in enumerate(subs)
        }
        optimizer = {
            **_scale(model),
            "zero_stage": 3,
            "partition_count": world_size,
            "optimizer_state_dict": {"state": states, "param_groups": groups},
            "fp32_flat_groups": flats,
        }
        whole = {"optimizer_state_dict": optimizer, "ds_config": {}, "ds_version": VERSION}
        save(whole, folder / _file("optim", rank, model.low))
        state = _model_state(model, empty, world_size=world_size, shapes=shapes)
        state["frozen_param_fragments"] = {
            n: _parts([model.weight(n)], rank, world_size) for n in model.frozen
        }
        save(state, folder / _file("model", rank, None))


def _sub_groups(model: Model, names: list[str], world_size: int, most: int) -> Iterator[list[str]]:
    """A group's parameters, divided as DeepSpeed does it: a part ends with the parameter that fills
    it.
    """
    part: list[str] = []
    filled = 0
    for name in names:
        part.append(name)
        filled += -(-math.prod(model.shape(name)) // world_size)
        if filled >= most:
            yield part
            part = []
            filled = 0
    if part:
        yield part


def _parts(tensors: list[Tensor], rank: int, world_size: int) -> Tensor:
    """Rank's parts of tensors, one after the other."""
    found = []
    for tensor in tensors:
        size = -(-tensor.numel() // world_size)
        flat = torch.zeros(size * world_size, dtype=tensor.dtype)
        flat[: tensor.numel()] = tensor.reshape(-1)
        found.append(flat[rank * size : (rank + 1) * size])
    return torch.cat(found) if found else torch.empty(0)
