"""`save`: prepare (nothing written) -> every rank writes its files aside -> rank 0 commits.

Each step ends with word from all ranks, so a failure anywhere is raised everywhere, and leaves the checkpoints that
were there, and ``latest``, as they were.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_core._version import __version__
from ds_core.checkpoint import background, files, rng
from ds_core.checkpoint.format import LATEST, check_folder, check_tag
from ds_core.checkpoint.layout import shares
from ds_core.checkpoint.lock import FolderLock
from ds_core.checkpoint.state import (
    Checkpointed,
    HasRankState,
    class_name,
    digests,
    extra_modules,
    frozen_states,
    optimizer_values,
    own_buffers,
    plugin_objects,
    shared_names,
)
from ds_core.checkpoint.tensorfile import check_tensor
from ds_core.checkpoint.together import on_every_rank, on_first_rank
from ds_core.checkpoint.values import encode
from ds_core.checkpoint.writing import Job, Prepared, commit, publish, write
from ds_core.errors import CheckpointError
from ds_core.slices import SLICES, as_wholes
from ds_core.stash import StashKey

__all__ = ["close", "save"]

log = logging.getLogger("ds_core.checkpoint")

_LOCK: StashKey[FolderLock] = StashKey("folders that checkpoints are saved into")


def save(
    engine: Checkpointed,
    save_dir: str | os.PathLike[str],
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> Path:
    """Write a checkpoint to ``save_dir/tag`` and return that path; atomic and durable. Collective: every rank calls it.

    tag: default ``global_step{N}``; equal on all ranks (config ``checkpoint.tag_validation``). client_state: rank 0's
    is kept; None, bool, int, float, str, tensors, and lists, tuples and dicts (str keys) of them. save_latest: point
    ``latest`` at it. exclude_frozen_parameters: leave out weights that do not require gradients.

    With ``checkpoint.async`` it returns once the states are copied; see `ds_core.checkpoint.background`.

    Raises CheckpointError on every rank, with the rank and the cause, when it fails on any; what was in `save_dir`
    before is then as it was. One job at a time may save to a `save_dir`: it is locked until the engine is destroyed.
    """
    background.wait(engine)
    action = f"cannot save a checkpoint to {save_dir!s:.200}"
    prepared, reports = on_every_rank(
        action,
        lambda: _prepare(engine, save_dir, tag, client_state, exclude_frozen_parameters),
        lambda p: {"tag": p.tag, "buffers": digests(engine.module)},
    )
    tag = _agreed_tag(engine, [report["tag"] for report in reports])
    own = own_buffers(engine.ctx, engine.module, [report["buffers"] for report in reports])
    prepared.local_tensors.update({f"buffer/{name}": buffer for name, buffer in own.items()})
    root, config = Path(save_dir), engine.ctx.config.core.checkpoint
    began = on_first_rank(action, lambda: _begin(engine, root, tag))
    job = Job(root, tag, root / began["name"], began["id"], began["serial"], save_latest, config.keep_last)
    if config.asynchronous:
        background.start(engine, action, prepared, job)
        return root / tag
    try:
        _, written = on_every_rank(action, lambda: write(prepared, job), lambda report: report)
        on_first_rank(action, lambda: commit(prepared, job, written))
    except CheckpointError:
        if prepared.rank == 0:
            files.discard(job.temporary)
        raise
    on_first_rank(f"{root / tag} is saved, but not {LATEST}", lambda: publish(job))
    log.info("saved checkpoint %s", root / tag)
    return root / tag


def close(engine: Checkpointed) -> None:
    """The engine will not save again: wait for a save under way, and let other jobs have its folders. Collective."""
    try:
        background.wait(engine)
    finally:
        if (lock := engine.ctx.stash.pop(_LOCK)) is not None:
            lock.close()


def _begin(engine: Checkpointed, root: Path, tag: str) -> dict[str, Any]:
    """Rank 0: have the folder for this job, and in it a directory to write into."""
    files.make_root(root)
    lock = engine.ctx.stash.get(_LOCK)
    if lock is None:
        lock = engine.ctx.stash[_LOCK] = FolderLock()
    lock.take(root)
    name = files.make_temporary(root, tag).name
    return {"name": name, "id": secrets.token_hex(16), "serial": files.next_serial(root)}


# -- prepare -------------------------------------------------------------------------------------------------------


def _prepare(
    engine: Checkpointed,
    save_dir: str | os.PathLike[str],
    tag: str | None,
    client_state: Mapping[str, Any] | None,
    exclude_frozen: bool,
) -> Prepared:
    """Collect and check everything that this rank would write; changes nothing."""
    check_folder(save_dir, "save_dir")
    if not isinstance(client_state, Mapping | None):
        raise CheckpointError(
            f"client_state is a {type(client_state).__name__}; give a dict with str keys, such as {{'epoch': 3}}"
        )
    ctx = engine.ctx
    excluded = frozen_states(ctx) if exclude_frozen else []
    left_out = set(excluded)
    states = as_wholes(engine.partitioner.states(engine.optimizer), ctx.stash.get(SLICES), ctx.mesh)
    kept = (p for p in states if p.name not in left_out)
    pieces = list(shares(kept, ctx.mesh))
    for piece in pieces:
        check_tensor(piece.tensor, f"state {piece.name!r}")
        assert piece.tensor.numel() == piece.stop - piece.start, piece.name
    common: dict[str, Tensor] = {}
    local: dict[str, Tensor] = {}
    return Prepared(
        tag=check_tag(tag if tag is not None else f"global_step{engine.global_steps}"),
        rank=ctx.rank,
        pieces=pieces,
        coord=dict(ctx.mesh.coord),
        excluded=excluded,
        frozen=[info.name for param, info in ctx.params.items() if not param.requires_grad],
        shared=shared_names(engine.module),
        extra=list(extra_modules(engine.module)),
        local=encode(_local_values(engine), "rank", local, own=True),
        local_tensors=local,
        common_tensors=common,
        head={
            "step": engine.global_steps,
            "world_size": ctx.world_size,
            "mesh": ctx.mesh.describe(),
            "versions": {"ds_core": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "plugins": ctx.plugins.loaded_versions(),
            "config": encode(ctx.config.redacted(), "config", {}, own=True),
            "optimizer": None if engine.optimizer is None else class_name(engine.optimizer),
            "run": encode(engine.run_state(), "run_state", common, own=True),
            "client": encode(dict(client_state or {}), "client_state", common),
        },
    )


def _local_values(engine: Checkpointed) -> dict[str, Any]:
    """What may differ between any two ranks."""
    return {
        "random": rng.capture(engine.ctx.accelerator),
        "plugins": {name: item.state_dict() for name, item in plugin_objects(engine.ctx).items()},
        "module_extra": {name: module.get_extra_state() for name, module in extra_modules(engine.module).items()},
        "optimizer": optimizer_values(engine.optimizer),
        "optimizer_rank": engine.optimizer.rank_state_dict() if isinstance(engine.optimizer, HasRankState) else None,
    }


def _agreed_tag(engine: Checkpointed, tags: list[str]) -> str:
    """Rank 0's tag, after what ``checkpoint.tag_validation`` wants said about the others'."""
    different = {rank: tag for rank, tag in enumerate(tags) if tag != tags[0]}
    mode = engine.ctx.config.core.checkpoint.tag_validation.lower()
    if different and mode != "ignore":
        rank, other = next(iter(different.items()))
        told = f"the tag is {tags[0]!r} on rank 0 but {other!r} on rank {rank} ({len(different)} ranks differ)"
        if mode == "fail":
            raise CheckpointError(f"{told}; pass one tag on all ranks (checkpoint.tag_validation is Fail)")
        log.warning("%s; rank 0's is used", told)
    return tags[0]
