"""`save`: prepare (nothing written) -> every rank writes its files aside -> rank 0 commits.

After each step all ranks exchange whether it failed. A failure on one rank is raised on all of them
and leaves the earlier checkpoints, and ``latest``, unchanged.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import secrets
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from ds_run_state import RunState
from torch import Tensor

import ds_core
from ds_checkpoint.collective_errors import on_every_rank, on_first_rank
from ds_checkpoint.folder.contents import class_name, differing, digests, shared_names
from ds_checkpoint.folder.format import LATEST, MANIFEST, README, check_tag
from ds_checkpoint.folder.sites import Site, find_site, spread
from ds_checkpoint.folder.tensorfile import check_tensor
from ds_checkpoint.folder.values import encode
from ds_checkpoint.folder.writing import Prepared, SaveJob, publish, seal, write
from ds_checkpoint.storages.disk import DiskDraft, DiskStorage
from ds_checkpoint.storages.finding import Storages, shown
from ds_core.engine import Folder, SaveOptions
from ds_core.errors import CheckpointError
from ds_core.process import log_once

if TYPE_CHECKING:
    from pathlib import Path

    from ds_checkpoint.background import Background
    from ds_checkpoint.config import CheckpointConfig
    from ds_checkpoint.storages.contract import Storage

log = logging.getLogger("ds_checkpoint")


def save(
    run: RunState,
    folder: Folder,
    options: SaveOptions,
    config: CheckpointConfig,
    storages: Storages,
    later: Background,
) -> Path | str:
    """Write a checkpoint to ``folder/tag`` and return that path; atomic and durable.

    Collective: every rank calls it.

    The tag is equal on all ranks (config ``checkpoint.tag_validation``). Client state: None, bool,
    int, float, str, tensors, and lists, tuples and dicts (str keys) of them.

    storages: of this engine.
    later: with ``checkpoint.async`` it goes on writing after this function has returned, unless
        states rest in a store that gives memory back: there may be no memory for a copy of them, so
        they are streamed.

    Raises CheckpointError on every rank, with the rank and the cause, when it fails on any; what
    was in `folder` before is then as it was. One job at a time may save to a folder: it is locked
    until the engine is destroyed.
    """
    # A save that is under way ends first; its error is raised here.
    later.wait()
    # Prepare: everything that can be wrong is found before a file is written.
    action = f"cannot save a checkpoint to {shown(folder)}"
    node_local = config.use_node_local_storage
    prepared, storage, tag, offloaded = prepare_together(
        run,
        action,
        lambda: storages.open(folder, "save_dir", node_local=node_local),
        options,
        config,
    )
    path = storage.path(tag)
    site = find_site(node_local)
    # Rank 0 takes the place for this job, and makes what all write into.
    began = on_first_rank(action, lambda: _begin(storage, tag))
    job = _job(storage, tag, began, options, config)
    if config.asynchronous and offloaded:
        log_once(
            log,
            logging.WARNING,
            "checkpoint.async: states are stored outside of memory, so save writes them before it "
            "returns",
        )
    elif config.asynchronous:
        later.start(action, prepared, job)
        return path
    _write_and_commit(run, action, prepared, job, site, began["begun"])
    on_every_rank(
        f"{path} is saved, but not {LATEST}", lambda: publish(job) if site.first else None
    )
    log.info("saved checkpoint %s", path)
    return path


def _write_and_commit(
    run: RunState,
    action: str,
    prepared: Prepared,
    job: SaveJob,
    site: Site,
    begun: Mapping[str, Any],
) -> None:
    """All files of all ranks, then the name that makes them a checkpoint; else nothing is left.

    Collective.
    """
    storage = job.storage
    try:
        # Hosts with folders of their own need the directory that rank 0 has made on its host.
        if site.local and isinstance(storage, DiskStorage):
            joins = site.first and prepared.rank
            on_every_rank(action, lambda: storage.join(job.tag, begun) if joins else None)
        _, written = on_every_rank(action, lambda: write(prepared, job), lambda report: report)
        on_first_rank(action, lambda: seal(prepared, job, written))
        if site.local and isinstance(job.draft, DiskDraft):
            # The manifest is written once, and every host's folder is a checkpoint by itself.
            spread(
                action,
                job.draft.folder,
                [README, MANIFEST],
                site,
                run.ctx.accelerator.current_device(),
            )
        on_every_rank(action, lambda: job.draft.put_in_place() if site.first else None)
    except CheckpointError:
        if site.first:
            # another rank may see it too; and the next save clears what is left
            with contextlib.suppress(OSError, CheckpointError):
                job.draft.discard()
        raise


def _job(
    storage: Storage, tag: str, began: Any, options: SaveOptions, config: CheckpointConfig
) -> SaveJob:
    """What rank 0 has begun, as this rank takes part in it."""
    return SaveJob(
        storage,
        tag,
        storage.draft(tag, began["id"], began["begun"]),
        began["id"],
        began["serial"],
        options.save_latest,
        config.keep_last,
    )


def _begin(storage: Storage, tag: str) -> dict[str, Any]:
    """Rank 0: take the place for this job, and begin a checkpoint there."""
    storage.hold()
    save_id = secrets.token_hex(16)
    begun = storage.begin(tag, save_id)
    return {"begun": begun, "id": save_id, "serial": storage.next_serial()}


# -- prepare ---------------------------------------------------------------------------------------


def prepare_together(
    run: RunState,
    action: str,
    find: Callable[[], Storage],
    options: SaveOptions,
    config: CheckpointConfig,
) -> tuple[Prepared, Storage, str, bool]:
    """(what this rank writes, where, the tag, whether any rank has offloaded states).

    Collective.
    """
    (storage, prepared), reports = on_every_rank(
        action,
        lambda: (find(), _prepare(run, options)),
        lambda found: {
            "tag": found[1].tag,
            "buffers": digests(run.module),
            "offloaded": any(piece.read for piece in found[1].pieces),
        },
    )
    tag = _agreed_tag([report["tag"] for report in reports], config.tag_validation.lower())
    # Buffers that differ between ranks, such as running statistics, are stored per rank.
    own = differing(run, prepared.buffers, [report["buffers"] for report in reports])
    prepared.local_tensors.update({f"buffer/{name}": buffer for name, buffer in own.items()})
    return prepared, storage, tag, any(report["offloaded"] for report in reports)


def _prepare(run: RunState, options: SaveOptions) -> Prepared:
    """Collect and check everything that this rank would write; changes nothing."""
    client = options.client_state
    if not isinstance(client, Mapping | None):
        raise CheckpointError(
            f"client_state is a {type(client).__name__}; give a dict with str keys, such as "
            "{'epoch': 3}"
        )
    # This rank's pieces of states: of tensor data that ranks share, each element once over all.
    ctx = run.ctx
    excluded = run.frozen_states() if options.exclude_frozen_parameters else []
    pieces = list(run.pieces(exclude=excluded))
    for piece in pieces:
        check_tensor(piece.tensor, f"state {piece.name!r}")
        assert piece.tensor.numel() == piece.stop - piece.start, piece.name
    # Values become JSON, and the tensors in them entries of files beside it.
    common: dict[str, Tensor] = {}
    local: dict[str, Tensor] = {}
    values = run.local()
    buffers = values.pop("buffers")
    return Prepared(
        tag=check_tag(options.tag),
        rank=ctx.rank,
        pieces=pieces,
        coord=dict(ctx.mesh.coord),
        excluded=excluded,
        frozen=[info.name for param, info in ctx.params.items() if not param.requires_grad],
        shared=shared_names(run.module),
        extra=list(run.extra_modules()),
        local=encode(values, "rank", local, own=True),
        local_tensors=local,
        buffers=buffers,
        common_tensors=common,
        head={
            "step": run.step,
            "world_size": ctx.world_size,
            "mesh": ctx.mesh.describe(),
            "versions": {
                "ds_core": ds_core.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "plugins": ctx.plugins.loaded_versions(),
            "config": encode(ctx.config.redacted(), "config", {}, own=True),
            "optimizer": None if run.optimizer is None else class_name(run.optimizer),
            "run": encode(run.common(), "run_state", common, own=True),
            "client": encode(dict(client or {}), "client_state", common),
        },
    )


def _agreed_tag(tags: list[str], mode: str) -> str:
    """Rank 0's tag, after what ``checkpoint.tag_validation`` wants said about the others'."""
    different = {rank: tag for rank, tag in enumerate(tags) if tag != tags[0]}
    if different and mode != "ignore":
        rank, other = next(iter(different.items()))
        differs = (
            f"the tag is {tags[0]!r} on rank 0 but {other!r} on rank {rank} "
            f"({len(different)} "
            "ranks differ)"
        )
        if mode == "fail":
            raise CheckpointError(
                f"{differs}; pass one tag on all ranks (checkpoint.tag_validation is Fail)"
            )
        log.warning("%s; rank 0's is used", differs)
    return tags[0]
