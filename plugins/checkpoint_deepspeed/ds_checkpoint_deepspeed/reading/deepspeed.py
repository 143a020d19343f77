"""Reading checkpoints that DeepSpeed wrote, so that a run can move over in mid-training.

How the data flows: the files of each model-parallel rank become a `Part`, pieces of states by name
(`zero`, `stage0`); the parts of pipeline stages are put side by side, those of tensor-parallel
ranks are joined (`tensor_parallel`). Universal checkpoints have whole states (`universal`). Names
are DeepSpeed's; `names` gives them ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_run_state.slices import param_of
from torch import Tensor

from ds_checkpoint_deepspeed.reading.folder import Files, list_files, load, module_of
from ds_checkpoint_deepspeed.reading.foreign import Foreign, Part, client_of, optimizer_of, run_of
from ds_checkpoint_deepspeed.reading.pipeline_layers import stages_without_zero, with_layers
from ds_checkpoint_deepspeed.reading.renaming import in_our_names
from ds_checkpoint_deepspeed.reading.stage0 import read_stage0
from ds_checkpoint_deepspeed.reading.tensor_parallel import join
from ds_checkpoint_deepspeed.reading.universal import read_universal
from ds_checkpoint_deepspeed.reading.zero import expert_place, read_stage3, read_stages_1_2
from ds_core.errors import CheckpointError, DSError


def read_deepspeed(folder: Path, *, our_names: bool = False) -> Foreign:
    """All that can be taken over of the checkpoint in `folder`; CheckpointError naming the file
    when it cannot be read.

    our_names: DeepSpeed's weights get the names that ds_core's modules have, else they keep
    DeepSpeed's.

    Of any ZeRO stage and world size, of pipelines, tensor-parallel runs and mixtures of experts;
    regular or universal.
    """
    try:
        return in_our_names(_read(folder)) if our_names else _read(folder)
    except DSError:
        raise
    # What is in the files is a stranger's: any value may be of another kind than DeepSpeed writes.
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise CheckpointError(
            f"{folder} holds other values than DeepSpeed writes ({type(error).__name__}: {error}); "
            "copy it again"
        ) from error


def _read(folder: Path) -> Foreign:
    files = list_files(folder)
    first = load(next(iter(files.models.values())))
    if files.universal:
        return read_universal(files, first)
    if first.get("ds_autoep_layers") or first.get("autoep_layers"):
        raise CheckpointError(
            f"{folder} was saved with AutoEP, whose experts are stored by rank; convert it with "
            "DeepSpeed's "
            "ds_to_universal, and import that"
        )
    tp = _tensor_parallel_ranks(files, first)
    models = {0: first} | {mp: load(files.models[mp, 0]) for mp in range(1, files.mp)}
    columns = [_column(files, models, range(rank, files.mp, tp)) for rank in range(tp)]
    info = first.get("universal_checkpoint_info")
    part, cut, notes = join(columns, dict(info) if isinstance(info, Mapping) else None)
    run = run_of(first, part)
    if any("optimizer's states are left out" in note for note in part.missing):
        run |= {"optimizer_groups": [], "optimizer_params": []}
    optimizer = optimizer_of(first) if part.groups else None
    return Foreign(
        folder.name,
        part.pieces,
        part.shared,
        part.frozen,
        run,
        client_of(first),
        optimizer,
        [*part.missing, *notes],
        cut,
        bool(files.layers),
    )


def _tensor_parallel_ranks(files: Files, model: Mapping[str, Any]) -> int:
    """Their number; a model-parallel rank is ``pipeline stage * number + tensor-parallel rank``."""
    said = model.get("checkpoint_parallel_dimensions")
    if isinstance(said, Mapping) and said.get("pp_degree") and said.get("tp_degree"):
        stages = int(said["pp_degree"])
        tp = int(said["tp_degree"])
    else:
        tp = len({rank for _, rank in files.layers}) if files.layers else files.mp
        stages = files.mp // tp
    if stages * tp != files.mp:
        raise CheckpointError(
            f"{files.folder} has the files of {files.mp} model-parallel ranks, and was saved by "
            f"{stages} pipeline "
            f"stages of {tp} tensor-parallel ranks; copy all files"
        )
    return tp


def _column(files: Files, models: dict[int, dict[str, Any]], ranks: range) -> Part:
    """What the stages of one pipeline hold; ranks: their model-parallel ranks."""
    if files.layers and models[0].get("param_shapes") is None:
        return _side_by_side(stages_without_zero(files, [models[mp] for mp in ranks], ranks[0]))
    found = _side_by_side([_read_rank(files, models[mp], mp) for mp in ranks])
    if not files.layers:
        return found
    return with_layers(
        files, ranks[0], {n for mp in ranks for n in models[mp].get("buffer_names") or ()}, found
    )


def _read_rank(files: Files, model: dict[str, Any], mp: int) -> Part:
    """What model-parallel rank `mp` holds."""
    experts = {n: t for rank, path in files.experts if rank == mp for n, t in load(path).items()}
    shards = [
        load(path)["optimizer_state_dict"] for (rank, _), path in files.parts.items() if rank == mp
    ]
    if model.get("param_shapes") is None:
        return _without_zero(files, model, mp, experts)
    if not shards:
        raise CheckpointError(
            f"{files.folder} has no *_optim_states.pt, which hold the weights of ZeRO; copy all "
            "files"
        )
    if "fp32_flat_groups" in shards[0]:
        others = [load(path) for (rank, dp), path in files.models.items() if rank == mp and dp > 0]
        return read_stage3(files.folder, [model, *others], shards)
    model = model | {"module": module_of(model) | experts}
    return read_stages_1_2(files.folder, model, shards)


def _without_zero(files: Files, model: dict[str, Any], mp: int, experts: dict[str, Tensor]) -> Part:
    """Stage 0.

    Each expert-parallel rank has an optimizer's file, of all that is no expert's and of its
    experts.
    """
    buffers = set(model.get("buffer_names") or ())
    module = module_of(model)
    ranks = [path for (rank, _), path in files.expert_parts.items() if rank == mp]
    if not ranks:
        return read_stage0(module | experts, buffers, model.get("optimizer"))
    parts = []
    for rank, path in enumerate(ranks):
        local = {n: t for n, t in experts.items() if _belongs(n, rank, len(ranks), experts)}
        parts.append(read_stage0(module | local, buffers, load(path).get("optimizer")))
    return _side_by_side(parts)


def _belongs(name: str, rank: int, size: int, experts: Mapping[str, Tensor]) -> bool:
    """Whether expert-parallel rank `rank` of `size` has the expert of that name."""
    place = expert_place(name)
    if place is None:
        return True
    count = 1 + max(
        other[1] for n in experts if (other := expert_place(n)) is not None and other[0] == place[0]
    )
    return place[1] // max(count // size, 1) == rank


def _side_by_side(parts: list[Part]) -> Part:
    """What several ranks hold that have different parameters; of what several have, the first one's
    counts.

    Groups are taken to be the same on all of them, as those of a pipeline that one script makes
    are.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    pieces = list(first.pieces)
    known = {param_of(p.name) for p in first.pieces}
    shared = dict(first.shared)
    frozen = list(first.frozen)
    missing = list(first.missing)
    order = [list(names) for names in first.order]
    for part in parts[1:]:
        pieces += [p for p in part.pieces if param_of(p.name) not in known]
        for index, names in enumerate(part.order):
            if index == len(order):
                order.append([])
            order[index] += [n for n in names if n not in known]
        known |= {param_of(p.name) for p in part.pieces}
        shared |= part.shared
        frozen += [n for n in part.frozen if n not in frozen]
        missing += [m for m in part.missing if m not in missing]
    return Part(pieces, shared, frozen, first.groups, order, first.scaler, missing)
