"""`save`: prepare (nothing written) -> every rank writes its files aside -> rank 0 commits.

After each step all ranks exchange whether it failed. A failure on one rank is raised on all of them
and leaves the earlier checkpoints, and ``latest``, unchanged.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from ds_run_state import RunState
from torch import Tensor

import ds_core
from ds_checkpoint.collective_errors import on_every_rank, on_first_rank
from ds_checkpoint.contents import class_name, differing, digests, shared_names
from ds_checkpoint.folder import files
from ds_checkpoint.folder.format import LATEST, MANIFEST, README, check_folder, check_tag
from ds_checkpoint.folder.sites import Site, find_site, spread
from ds_checkpoint.folder.tensorfile import check_tensor
from ds_checkpoint.folder.values import encode
from ds_checkpoint.folder.writing import Prepared, SaveJob, publish, seal, write
from ds_core.engine import Folder, SaveOptions
from ds_core.errors import CheckpointError
from ds_core.process import log_once

if TYPE_CHECKING:
    from ds_checkpoint.background import Background
    from ds_checkpoint.config import CheckpointConfig
    from ds_checkpoint.folder.lock import FolderLock

log = logging.getLogger("ds_checkpoint")


def save(
    run: RunState,
    folder: Folder,
    options: SaveOptions,
    config: CheckpointConfig,
    lock: FolderLock,
    later: Background,
) -> Path:
    """Write a checkpoint to ``folder/tag`` and return that path; atomic and durable.

    Collective: every rank calls it.

    The tag is equal on all ranks (config ``checkpoint.tag_validation``). Client state: None, bool,
    int, float, str, tensors, and lists, tuples and dicts (str keys) of them.

    lock: of the folders that this engine saves into.
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
    action = f"cannot save a checkpoint to {folder!s:.200}"
    prepared, tag, offloaded = _prepare_together(run, action, folder, options, config)
    root = Path(folder)
    site = find_site(config.use_node_local_storage)
    # Rank 0 takes the folder's lock and makes the directory that all write into.
    began = on_first_rank(action, lambda: _begin(lock, root, tag))
    job = SaveJob(
        root,
        tag,
        root / began["name"],
        began["id"],
        began["serial"],
        options.save_latest,
        config.keep_last,
    )
    if config.asynchronous and offloaded:
        log_once(
            log,
            logging.WARNING,
            "checkpoint.async: states rest outside of memory, so save writes them before it "
            "returns",
        )
    elif config.asynchronous:
        later.start(action, prepared, job)
        return root / tag
    _write_and_commit(run, action, prepared, job, lock, site)
    on_every_rank(
        f"{root / tag} is saved, but not {LATEST}", lambda: publish(job) if site.first else None
    )
    log.info("saved checkpoint %s", root / tag)
    return root / tag


def _write_and_commit(
    run: RunState, action: str, prepared: Prepared, job: SaveJob, lock: FolderLock, site: Site
) -> None:
    """All files of all ranks, then the name that makes them a checkpoint; else nothing is left.

    Collective.
    """
    final = job.root / job.tag
    try:
        # Hosts with folders of their own need the directory that rank 0 has made on its host.
        if site.local:
            on_every_rank(
                action, lambda: _join(lock, job) if site.first and prepared.rank else None
            )
        _, written = on_every_rank(action, lambda: write(prepared, job), lambda report: report)
        on_first_rank(action, lambda: seal(prepared, job, written))
        if site.local:
            # The manifest is written once, and every host's folder is a checkpoint by itself.
            spread(
                action,
                job.temporary,
                [README, MANIFEST],
                site,
                run.ctx.accelerator.current_device(),
            )
        on_every_rank(
            action, lambda: files.put_in_place(job.temporary, final) if site.first else None
        )
    except CheckpointError:
        if site.first:
            with contextlib.suppress(OSError):  # another rank may see it too
                files.discard(job.temporary)
        raise


def _begin(lock: FolderLock, root: Path, tag: str) -> dict[str, Any]:
    """Rank 0: lock the folder for this job, and make a directory in it to write into."""
    files.make_root(root)
    lock.take(root)
    name = files.make_temporary(root, tag).name
    return {"name": name, "id": secrets.token_hex(16), "serial": files.next_serial(root)}


def _join(lock: FolderLock, job: SaveJob) -> None:
    """The first rank of another host than rank 0's: the same there."""
    if job.temporary.exists():
        raise CheckpointError(
            f"{job.root} is the same folder on several hosts; leave use_node_local_storage out"
        )
    files.make_root(job.root)
    lock.take(job.root)
    files.make_temporary(job.root, job.tag, job.temporary.name)


# -- prepare ---------------------------------------------------------------------------------------


def _prepare_together(
    run: RunState, action: str, folder: Folder, options: SaveOptions, config: CheckpointConfig
) -> tuple[Prepared, str, bool]:
    """(what this rank writes, the tag, whether any rank has offloaded states). Collective."""
    prepared, reports = on_every_rank(
        action,
        lambda: _prepare(run, folder, options),
        lambda p: {
            "tag": p.tag,
            "buffers": digests(run.module),
            "offloaded": any(piece.read for piece in p.pieces),
        },
    )
    tag = _agreed_tag([report["tag"] for report in reports], config.tag_validation.lower())
    # Buffers that differ between ranks, such as running statistics, are stored per rank.
    own = differing(run, prepared.buffers, [report["buffers"] for report in reports])
    prepared.local_tensors.update({f"buffer/{name}": buffer for name, buffer in own.items()})
    return prepared, tag, any(report["offloaded"] for report in reports)


def _prepare(run: RunState, folder: Folder, options: SaveOptions) -> Prepared:
    """Collect and check everything that this rank would write; changes nothing."""
    check_folder(folder, "save_dir")
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
