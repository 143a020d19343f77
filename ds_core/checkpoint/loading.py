"""`load`: find -> check everything on all ranks -> only then change the engine."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ds_core import comm
from ds_core.checkpoint import background, files, rng
from ds_core.checkpoint.format import (
    COMMON,
    DAMAGED,
    LATEST,
    MANIFEST,
    Manifest,
    check_folder,
    local_file,
    parse_manifest,
)
from ds_core.checkpoint.state import (
    Checkpointed,
    HasRankState,
    SavedStates,
    Without,
    class_name,
    extra_modules,
    persistent_buffers,
    plugin_objects,
    set_optimizer_values,
)
from ds_core.checkpoint.together import on_every_rank, on_first_rank
from ds_core.checkpoint.values import decode
from ds_core.errors import CheckpointError
from ds_core.slices import SLICES

__all__ = ["load"]

log = logging.getLogger("ds_core.checkpoint")

CustomLoad = Callable[[dict[str, Tensor], nn.Module], None]


@dataclass(frozen=True, slots=True)
class _Want:
    """What is to be loaded; see `load`."""

    strict: bool
    optimizer: bool
    scheduler: bool
    module_only: bool
    custom: CustomLoad | None


def load(
    engine: Checkpointed,
    load_dir: str | os.PathLike[str],
    tag: str | None = None,
    *,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: CustomLoad | None = None,
    missing_ok: bool = False,
    fallback: bool = False,
) -> tuple[str | None, dict[str, Any] | None]:
    """Load ``load_dir/tag`` into `engine`, at any world size; returns (path, client_state). Collective.

    tag: default is the one that ``latest`` names. Without a tag and without that file nothing is loaded: the answer is
    (None, None), with a warning, or (None, {}), without one, where `missing_ok` says that this is expected. fallback:
    when the checkpoint cannot be loaded, take the newest that can. load_module_strict=False: weights that only one side
    has are left alone. load_optimizer_states=False: the optimizer, its hyperparameters and the loss scaler stay as they
    are. load_lr_scheduler_states=False: so does the schedule. load_module_only: only weights and buffers; client_state
    is {}. custom_load_fn gets the whole module tensors (CPU, by name) and the module, and does the loading of weights
    itself.

    Raises CheckpointError on every rank, naming the file and the mend, before anything in `engine` was changed, when
    the checkpoint is missing, damaged, of another format, or of another model.
    """
    background.wait(engine)
    action = f"cannot load a checkpoint from {load_dir!s:.200}"
    root, _ = on_every_rank(action, lambda: check_folder(load_dir, "load_dir"))
    found = on_first_rank(action, lambda: _candidates(root, tag, missing_ok=missing_ok, fallback=fallback))
    if not found:
        return None, {} if missing_ok else None
    want = _Want(load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only, custom_load_fn)
    path, plan, reports = _first_that_fits(engine, action, [root / name for name in found], want)
    try:
        _refuse_unexpected(action, want, reports)
        on_every_rank(f"loading {path} stopped half-way", lambda: _apply(engine, plan, want))
    finally:
        plan.source.close()
    log.info("loaded checkpoint %s (step %d, %d bytes read)", path, plan.manifest.step, plan.source.bytes_read)
    return str(path), {} if load_module_only else plan.client


def _candidates(root: Path, tag: str | None, *, missing_ok: bool, fallback: bool) -> list[str]:
    """The directories' names below `root` that may be loaded, the wanted one first, or none; rank 0 decides for all."""
    others = files.existing_tags(root)
    try:
        wanted = files.read_latest(root) if tag is None else tag
        if wanted is None:
            if fallback and others:
                log.warning("%s does not exist; taking %s", root / LATEST, others[0])
                return others
            there = f"there are {', '.join(others[:10])}; give one as tag=" if others else "and there is no checkpoint"
            level = logging.INFO if missing_ok else logging.WARNING
            log.log(level, "nothing was loaded: %s does not exist, and no tag was given; %s", root / LATEST, there)
            return []
        first = files.find(root, wanted).name
    except CheckpointError as error:
        if not (fallback and others):
            raise
        log.warning("%s; taking %s", error, others[0])
        return others
    return [first, *(name for name in others if name != first)] if fallback else [first]


def _first_that_fits(
    engine: Checkpointed, action: str, paths: list[Path], want: _Want
) -> tuple[Path, _Plan, list[list[str]]]:
    """Check one after the other, on all ranks; CheckpointError with the first one's fault when none will do."""
    first: CheckpointError | None = None
    for path in paths:
        check = functools.partial(_check, engine, path, want)
        try:
            plan, reports = on_every_rank(action, check, lambda plan: plan.unexpected)
        except CheckpointError as error:
            first = first or error
            if len(paths) > 1:
                log.warning("%s", error)
        else:
            return path, plan, reports
    assert first is not None
    raise first


# -- check ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plan:
    """A checkpoint that fits, with its values decoded. local: None where there are none of this rank's own."""

    manifest: Manifest
    source: SavedStates
    unexpected: list[str]
    run: dict[str, Any]
    client: dict[str, Any]
    local: dict[str, Any]
    own_local: bool
    buffers: dict[str, Tensor]
    module_extra: dict[str, Any]


def _check(engine: Checkpointed, path: Path, want: _Want) -> _Plan:
    """Everything that can be known to be wrong before a state changes."""
    manifest = parse_manifest(path / MANIFEST)
    source = SavedStates(path, manifest, engine.ctx.mesh, engine.ctx.stash.get(SLICES))
    try:
        if engine.ctx.rank == 0:
            source.check_files()
        if engine.ctx.config.core.checkpoint.verify:
            source.verify(engine.ctx.rank, engine.ctx.world_size)
        unexpected = _check_states(engine, source, want)
        own = engine.ctx.rank < manifest.world_size
        local = _local(source, engine.ctx.rank if own else 0)

        def common(key: str) -> Tensor:
            return _tensor(source, COMMON, key)

        run = decode(manifest.run, common, f"{path / MANIFEST}: run")
        _check_run(engine, manifest, run, want)
        client = decode(manifest.client, common, f"{path / MANIFEST}: client")
        buffers = _own_buffers(engine, source) if own else {}
        return _Plan(manifest, source, unexpected, run, client, local, own, buffers, _extra(engine, source))
    except BaseException:
        source.close()
        raise


def _check_states(engine: Checkpointed, source: SavedStates, want: _Want) -> list[str]:
    """Compare names and shapes with the module's (and optimizer's); returns the weights that this rank cannot place."""
    saved = set(source.names())
    optimizer = engine.optimizer if want.optimizer and not want.module_only else None
    mine = {s.name: s.shape for s in engine.partitioner.states(optimizer)}
    if want.custom is not None:
        return []
    missing = sorted(n for n in mine if n.startswith("module/") and n not in saved | set(source.manifest.excluded))
    if missing and want.strict:
        raise CheckpointError(
            f"{source.path} has no {_some(missing)}; load the model that was saved, or with load_module_strict=False"
        )
    wrong = [
        f"{n} has shape {source.shape(n)} there and {shape} here"
        for n, shape in sorted(mine.items())
        if n in saved and source.shape(n) != tuple(shape)
    ]
    if wrong:
        raise CheckpointError(f"{source.path}: {'; '.join(wrong[:5])}; load into the model that was saved")
    return sorted(n for n in saved if n.startswith("module/") and n not in mine)


def _refuse_unexpected(action: str, want: _Want, reports: list[list[str]]) -> None:
    """A weight that no rank can place is an error when strict."""
    unexpected = sorted(set.intersection(*(set(names) for names in reports)))
    if unexpected and want.strict:
        raise CheckpointError(
            f"{action}: the model has no {_some(unexpected)}; load into the model that was saved, or with "
            "load_module_strict=False"
        )
    if unexpected:
        log.info("not in the model, so left alone: %s", _some(unexpected))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(n.removeprefix("module/") for n in names[:5]) + more


def _check_run(engine: Checkpointed, manifest: Manifest, run: Any, want: _Want) -> None:
    optimizer = engine.optimizer
    if want.module_only or not want.optimizer or optimizer is None:
        return
    saved, here = len(run["optimizer_groups"]), len(optimizer.param_groups)
    if manifest.optimizer is None:
        log.warning("the checkpoint was saved without an optimizer; this run's starts as it is")
    elif saved != here:
        raise CheckpointError(
            f"the checkpoint has {saved} optimizer groups, this run {here}; use the same groups, or "
            "load_optimizer_states=False"
        )
    elif differs := _state_switch(run["optimizer_groups"], optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint's optimizer had {differs}: their states are not the same. Set it as it was, or start the "
            "optimizer afresh with load_optimizer_states=False"
        )
    elif manifest.optimizer.startswith("deepspeed:"):
        log.info("the optimizer's states are those of DeepSpeed's %s", manifest.optimizer.partition(":")[2])
    elif manifest.optimizer != class_name(optimizer):
        log.warning(
            "the checkpoint's optimizer states are of %s, this run has %s; load_optimizer_states=False starts afresh",
            manifest.optimizer,
            class_name(optimizer),
        )


def _state_switch(saved: list[dict[str, Any]], here: list[dict[str, Any]]) -> str:
    """How groups differ in a hyperparameter that adds a state to each parameter; empty where they do not.

    An optimizer whose class has no such hyperparameter keeps no such state.
    """
    words = {True: "on", False: "off"}
    for name in ("amsgrad", "centered"):  # of Adam's kind; of RMSprop
        for old, new in zip(saved, here, strict=True):
            was, is_now = bool(old.get(name)), bool(new.get(name))
            if was != is_now:
                return f"{name} {words[was]}, and this run has it {words[is_now]}"
    return ""


def _local(source: SavedStates, rank: int) -> dict[str, Any]:
    name = local_file(rank)
    file = source.file(name)
    try:
        data = json.loads(file.metadata["values"])
    except (KeyError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file.path}: its values cannot be read ({error}); {DAMAGED}") from error
    values: dict[str, Any] = decode(data, lambda key: _tensor(source, name, key), str(file.path))
    return values


def _own_buffers(engine: Checkpointed, source: SavedStates) -> dict[str, Tensor]:
    """The buffers in which this rank differed from the others."""
    name = local_file(engine.ctx.rank)
    here = persistent_buffers(engine.module)
    found = {key.removeprefix("buffer/"): key for key in source.file(name).tensors if key.startswith("buffer/")}
    return {buffer: _tensor(source, name, key) for buffer, key in found.items() if buffer in here}


def _tensor(source: SavedStates, name: str, key: str) -> Tensor:
    file = source.file(name)
    if key not in file.tensors:
        raise CheckpointError(f"{file.path} has no tensor {key!r}; {DAMAGED}")
    return file.read(key).view(file.tensors[key][1])


def _extra(engine: Checkpointed, source: SavedStates) -> dict[str, Any]:
    """The extra state of each of this rank's modules that was saved with one: its own, else any rank's."""
    ranks, found = source.manifest.module_extra, {}
    locals_: dict[int, dict[str, Any]] = {}
    for name in extra_modules(engine.module):
        if name in ranks:
            for rank in (engine.ctx.rank, ranks[name]):
                if rank < source.manifest.world_size and rank not in locals_:
                    locals_[rank] = _local(source, rank)["module_extra"]
                if name in locals_.get(rank, {}):
                    found[name] = locals_[rank][name]
                    break
    return found


# -- apply ---------------------------------------------------------------------------------------------------------


def _apply(engine: Checkpointed, plan: _Plan, want: _Want) -> None:
    """Change the engine; random states last, so that nothing done here draws from them."""
    takes = want.optimizer and not want.module_only and plan.manifest.optimizer is not None
    optimizer = engine.optimizer if takes else None
    if want.custom is not None:
        _load_by_hand(engine, plan, want.custom)
        # Without weights in the source, master weights are made from those that custom_load_fn has just set.
        weights = Without(plan.source, lambda name: name.startswith(("module/", "master/")))
        engine.partitioner.load_states(weights, optimizer, strict=False)
    else:
        strict = want.strict and not plan.manifest.excluded
        engine.partitioner.load_states(plan.source, optimizer, strict=strict)
        here = persistent_buffers(engine.module)
        for name, tensor in plan.buffers.items():
            here[name].data.copy_(tensor)
        modules = extra_modules(engine.module)
        for name, state in plan.module_extra.items():
            modules[name].set_extra_state(state)
    if want.module_only:
        return
    if optimizer is not None:
        set_optimizer_values(optimizer, plan.local["optimizer"])
        if isinstance(optimizer, HasRankState) and engine.ctx.world_size == plan.manifest.world_size:
            # Checkpoints of other programs, and of ds_core before it kept this, have none.
            optimizer.load_rank_state_dict(plan.local.get("optimizer_rank") or {})
    engine.load_run_state(plan.run, optimizer=optimizer is not None, scheduler=want.scheduler)
    _load_plugins(engine, plan.local["plugins"])
    if plan.own_local and plan.local["random"] is not None:  # None: imported from another program
        rng.restore(plan.local["random"], engine.ctx.accelerator)
    else:
        log.debug("rank %d is new: it keeps its random state and takes rank 0's plugin states", comm.rank())


def _load_by_hand(engine: Checkpointed, plan: _Plan, custom: CustomLoad) -> None:
    source = plan.source
    names = [n for n in source.names() if n.startswith("module/")]
    tensors = {n.removeprefix("module/"): source.whole(n) for n in names}
    tensors |= {alias: tensors[name] for alias, name in plan.manifest.shared.items() if name in tensors}
    custom(tensors, engine.module)


def _load_plugins(engine: Checkpointed, saved: dict[str, Any]) -> None:
    objects = plugin_objects(engine.ctx)
    for name, item in objects.items():
        if name in saved:
            item.load_state_dict(saved[name])
        else:
            log.warning("the checkpoint has no state for %s, which starts as it is", name)
    for name in sorted(set(saved) - set(objects)):
        log.warning("the checkpoint has a state for %s, which this run does not have; it is left out", name)
