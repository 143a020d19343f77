"""`load`: find -> check everything on all ranks -> only then change the run."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_run_state import RunState, SavedRun, persistent_buffers, some
from ds_run_state.slices import SLICES
from torch import Tensor
from torch.optim import Optimizer

from ds_checkpoint.collective_errors import on_every_rank, on_first_rank
from ds_checkpoint.folder.contents import class_name, shared_names
from ds_checkpoint.folder.format import (
    COMMON,
    DAMAGED,
    LATEST,
    MANIFEST,
    Manifest,
    local_file,
)
from ds_checkpoint.folder.sites import Site, complete, find_site, introduce
from ds_checkpoint.folder.values import decode
from ds_checkpoint.formats.resuming import find_foreign, open_foreign, saved_run
from ds_checkpoint.source import SavedStates
from ds_checkpoint.storages.contract import Storage, Stored
from ds_checkpoint.storages.disk import DiskCheckpoint, DiskStorage
from ds_checkpoint.storages.finding import Storages, shown
from ds_core.engine import Folder, LoadOptions
from ds_core.errors import CheckpointError

log = logging.getLogger("ds_checkpoint")


def load(
    run: RunState,
    folder: Folder,
    options: LoadOptions,
    storages: Storages,
    *,
    verify: bool,
    node_local: bool = False,
) -> tuple[str | None, dict[str, Any] | None]:
    """Load ``folder/tag`` into `run`, at any world size; returns (path, client_state). Collective.

    Without a tag, and without a checkpoint in `folder`, nothing is loaded: the answer is (None,
    None), with a warning, or (None, {}) with `missing_ok`. With `module_only` the client state is
    {}.

    storages: of the engine.
    verify: compare all files with their checksums first.
    node_local: each host has a folder of its own.

    Raises CheckpointError on every rank, naming the file and the fix, before anything in `run` was
    changed, when the checkpoint is missing, damaged, of another format, or of another model; and
    where checkpoints are there, but neither a tag nor ``latest``.
    """
    action = f"cannot load a checkpoint from {shown(folder)}"
    # Find: rank 0 decides for all which checkpoints may be loaded, the requested one first.
    storage, _ = on_every_rank(
        action, lambda: storages.open(folder, "load_dir", node_local=node_local)
    )
    site = find_site(node_local)
    device = run.ctx.accelerator.current_device()
    if site.local and isinstance(storage, DiskStorage):
        introduce(action, storage.root, options.tag, site, device)
    foreign = on_first_rank(action, lambda: find_foreign(run, storage, options))
    if foreign is not None:
        return _load_foreign(run, action, foreign[0], Path(foreign[1]), options, verify)
    found = on_first_rank(action, lambda: _candidates(storage, options))
    if not found:
        return None, {} if options.missing_ok else None

    # Check: the first candidate that fits on all ranks, with nothing changed yet.
    def bring(stored: Stored) -> None:
        if site.local and isinstance(stored, DiskCheckpoint):
            complete(action, stored.path, site, device)

    check = functools.partial(_check, run, options, verify, site)
    path, plan, reports = _first_that_fits(action, map(storage.open, found), bring, check)
    return _restore(run, action, path, plan, reports, options)


def _restore(
    run: RunState,
    action: str,
    path: Path | str,
    plan: _Plan,
    reports: list[list[str]],
    options: LoadOptions,
) -> tuple[str, dict[str, Any]]:
    try:
        # Change: an error from here on leaves a run that is half loaded, so all that can be checked
        # has been.
        _refuse_unexpected(action, options, reports)
        on_every_rank(f"loading {path} stopped half-way", lambda: run.restore(plan.saved, options))
    finally:
        plan.source.close()
    log.info(
        "loaded checkpoint %s (step %d, %d bytes read)",
        path,
        plan.manifest.step,
        plan.source.bytes_read,
    )
    return str(path), {} if options.module_only else plan.client


def _load_foreign(
    run: RunState, action: str, name: str, path: Path, options: LoadOptions, verify: bool
) -> tuple[str, dict[str, Any]]:
    """Load a checkpoint of another program, which the format `name` reads; what it has no place for
    is said once.
    """
    plan, reports = on_every_rank(
        action,
        lambda: _check_foreign(run, options, verify, name, path),
        lambda plan: plan.unexpected,
    )
    if run.rank == 0 and not options.module_only:
        for text in dict.fromkeys(plan.missing):
            log.warning("%s (%s): %s", path, name, text)
    return _restore(run, action, path, plan, reports, options)


def _candidates(storage: Storage, options: LoadOptions) -> list[str]:
    """The names of the checkpoints in `storage` that may be loaded, the wanted one first, or none;
    rank 0 decides for all.
    """
    others = storage.tags()
    try:
        wanted = storage.latest() if options.tag is None else options.tag
        if wanted is None:
            if options.fallback and others:
                log.warning("%s does not exist; taking %s", storage.path(LATEST), others[0])
                return others
            # A run that starts afresh beside them would look as if it had resumed.
            if others:
                raise CheckpointError(
                    f"{storage.path(LATEST)} does not exist, and no tag was given; there are "
                    f"{', '.join(others[:10])}: give one as tag=, or load with fallback=True, "
                    "which takes the newest"
                )
            level = logging.INFO if options.missing_ok else logging.WARNING
            log.log(level, "nothing was loaded: there is no checkpoint in %s", storage.path())
            return []
        first = storage.find(wanted)
    except CheckpointError as error:
        if not (options.fallback and others):
            raise
        log.warning("%s; taking %s", error, others[0])
        return others
    return [first, *(name for name in others if name != first)] if options.fallback else [first]


def _first_that_fits(
    action: str,
    candidates: Iterable[Stored],
    bring: Callable[[Stored], None],
    check: Callable[[Stored], _Plan],
) -> tuple[Path | str, _Plan, list[list[str]]]:
    """Check one after the other, on all ranks, once it is there; the first one's CheckpointError
    when none will do.
    """
    first: CheckpointError | None = None
    waiting = list(candidates)
    several = len(waiting) > 1
    for stored in waiting:
        try:
            bring(stored)
            plan, reports = on_every_rank(
                action, functools.partial(check, stored), lambda plan: plan.unexpected
            )
        except CheckpointError as error:
            first = first or error
            if several:
                log.warning("%s", error)
        else:
            return stored.path, plan, reports
    assert first is not None
    raise first


# -- check -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plan:
    """A checkpoint that fits, with its values decoded."""

    manifest: Manifest
    source: SavedStates
    # Weights of the checkpoint that this rank has no place for.
    unexpected: list[str]
    # The program's own values.
    client: dict[str, Any]
    # All that the run takes over.
    saved: SavedRun
    # What it cannot take over of another program's checkpoint.
    missing: Sequence[str] = ()


def _check(run: RunState, options: LoadOptions, verify: bool, site: Site, stored: Stored) -> _Plan:
    """Everything that can be known to be wrong before a state changes."""
    # The files are there, whole, and of this save.
    manifest = stored.manifest()
    source = SavedStates(stored, manifest, run.ctx.mesh, run.ctx.stash.get(SLICES))
    try:
        source.add_masters()
        if site.first:
            source.check_files()
        if verify:
            source.verify(site.rank, site.size)
        try:
            unexpected = run.check(source, options, excluded=manifest.excluded)
        except CheckpointError as error:
            raise CheckpointError(f"{stored.path}: {error}") from None
        # A rank beyond those that saved reads the values of rank 0; `own` says that they are not
        # its own.
        own = run.rank < manifest.world_size
        local = _local(source, run.rank if own else 0)

        def common(key: str) -> Tensor:
            return _tensor(source, COMMON, key)

        where = stored.path_of(MANIFEST)
        values = decode(manifest.run, common, f"{where}: run")
        # The optimizer's hyperparameters decide which states a parameter has.
        _check_optimizer(run.optimizer, manifest, values["optimizer_groups"], options)
        client = decode(manifest.client, common, f"{where}: client")
        local["buffers"] = _own_buffers(run, source) if own else {}
        local["module_extra"] = _extra(run, source, local["module_extra"] if own else {})
        saved = SavedRun(
            states=source,
            common=values,
            local=local,
            own=own,
            world_size=manifest.world_size,
            partial=bool(manifest.excluded),
            shared=manifest.shared,
        )
        return _Plan(manifest, source, _not_tied(run, unexpected), client, saved)
    # Another candidate may be tried next, with files of its own.
    except BaseException:
        source.close()
        raise


def _not_tied(run: RunState, unexpected: list[str]) -> list[str]:
    """Without further names of tied weights, under which other programs store them as well."""
    tied = shared_names(run.module)
    return [name for name in unexpected if name.removeprefix("module/") not in tied]


def _check_foreign(
    run: RunState, options: LoadOptions, verify: bool, name: str, path: Path
) -> _Plan:
    """The same for a checkpoint of another program."""
    source = open_foreign(run, name, path, verify=verify)
    try:
        unexpected = _not_tied(run, run.check(source, options))
        saved, missing = saved_run(run, source, options)
        if source.manifest.optimizer is not None:
            groups = saved.common["optimizer_groups"]
            _check_optimizer(run.optimizer, source.manifest, groups, options)
        client = dict(source.found.client)
        return _Plan(source.manifest, source, unexpected, client, saved, missing)
    except CheckpointError as error:
        source.close()
        raise CheckpointError(f"{path}: {error}") from None
    except BaseException:
        source.close()
        raise


def _refuse_unexpected(action: str, options: LoadOptions, reports: list[list[str]]) -> None:
    """A weight that no rank can place is an error when strict."""
    # A weight that one stage of a pipeline lacks is another's: only what no rank has is unexpected.
    unexpected = sorted(set.intersection(*(set(names) for names in reports)))
    if unexpected and options.strict:
        raise CheckpointError(
            f"{action}: the model has no {some(unexpected)}; load into the model that was saved, "
            "or with load_module_strict=False"
        )
    if unexpected:
        log.info("not in the model, so left alone: %s", some(unexpected))


def _check_optimizer(
    optimizer: Optimizer | None,
    manifest: Manifest,
    groups: list[dict[str, Any]],
    options: LoadOptions,
) -> None:
    if options.module_only or not options.optimizer or optimizer is None:
        return
    saved = len(groups)
    here = len(optimizer.param_groups)
    if manifest.optimizer is None:
        log.warning("the checkpoint was saved without an optimizer; this run's starts as it is")
    elif saved != here:
        raise CheckpointError(
            f"the checkpoint has {saved} optimizer groups, this run {here}; use the same "
            "groups, or load_optimizer_states=False"
        )
    elif differs := _state_switch(groups, optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint's optimizer had {differs}: their states are not the same. Set it as "
            "it was, or start the optimizer afresh with load_optimizer_states=False"
        )
    elif ":" in manifest.optimizer:
        program, _, name = manifest.optimizer.partition(":")
        log.info("the optimizer's states are those of %s's %s", program, name)
    elif manifest.optimizer != class_name(optimizer):
        log.warning(
            "the checkpoint's optimizer states are of %s, this run has %s; "
            "load_optimizer_states=False starts afresh",
            manifest.optimizer,
            class_name(optimizer),
        )


def _state_switch(saved: list[dict[str, Any]], here: list[dict[str, Any]]) -> str:
    """How groups differ in a hyperparameter that adds a state to each parameter; empty where they
    do not.

    An optimizer whose class has no such hyperparameter keeps no such state.
    """
    words = {True: "on", False: "off"}
    for name in ("amsgrad", "centered"):  # of Adam's kind; of RMSprop
        for old, new in zip(saved, here, strict=True):
            was = bool(old.get(name))
            is_now = bool(new.get(name))
            if was != is_now:
                return f"{name} {words[was]}, and this run has it {words[is_now]}"
    return ""


def _local(source: SavedStates, rank: int) -> dict[str, Any]:
    name = local_file(rank)
    file = source.file(name)
    try:
        data = json.loads(file.metadata["values"])
    except (KeyError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file.path}: its values cannot be read ({error}); {DAMAGED}"
        ) from error
    values: dict[str, Any] = decode(data, lambda key: _tensor(source, name, key), str(file.path))
    return values


def _own_buffers(run: RunState, source: SavedStates) -> dict[str, Tensor]:
    """The buffers in which this rank differed from the others."""
    name = local_file(run.ctx.rank)
    here = persistent_buffers(run.module)
    found = {
        key.removeprefix("buffer/"): key
        for key in source.file(name).tensors
        if key.startswith("buffer/")
    }
    return {buffer: _tensor(source, name, key) for buffer, key in found.items() if buffer in here}


def _tensor(source: SavedStates, name: str, key: str) -> Tensor:
    file = source.file(name)
    if key not in file.tensors:
        raise CheckpointError(f"{file.path} has no tensor {key!r}; {DAMAGED}")
    return file.read(key).view(file.tensors[key][1])


def _extra(run: RunState, source: SavedStates, own: Mapping[str, Any]) -> dict[str, Any]:
    """The extra state of each of this rank's modules that was saved with one: its own, else any
    rank's.
    """
    found: dict[str, Any] = {}
    others: dict[int, Mapping[str, Any]] = {}
    for name in run.extra_modules():
        # A module that is new on this rank gets what the rank with the lowest number has saved for
        # it.
        if name in own:
            found[name] = own[name]
        elif (rank := source.manifest.module_extra.get(name)) is not None:
            if rank not in others:
                others[rank] = _local(source, rank)["module_extra"]
            if name in others[rank]:
                found[name] = others[rank][name]
    return found
