"""`save`: prepare (nothing written) -> every rank writes its files aside -> rank 0 commits.

Each step ends with word from all ranks, so a failure anywhere is raised everywhere, and leaves the checkpoints that
were there, and ``latest``, as they were.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_core import comm
from ds_core._version import __version__
from ds_core.checkpoint import files, rng
from ds_core.checkpoint.format import (
    COMMON,
    FORMAT,
    LATEST,
    MANIFEST,
    VERSION,
    Manifest,
    check_tag,
    local_file,
    rank_file,
    render_manifest,
)
from ds_core.checkpoint.layout import items_of, merge, rows_of
from ds_core.checkpoint.state import (
    Checkpointed,
    class_name,
    digests,
    extra_modules,
    frozen_states,
    optimizer_values,
    own_buffers,
    plugin_objects,
    shared_names,
)
from ds_core.checkpoint.tensorfile import Item, check_tensor, write_tensors
from ds_core.checkpoint.together import on_every_rank, on_first_rank
from ds_core.checkpoint.values import encode
from ds_core.errors import CheckpointError
from ds_core.partition import StateTensor

__all__ = ["save"]

log = logging.getLogger("ds_core.checkpoint")


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

    Raises CheckpointError on every rank, with the rank and the cause, when it fails on any; what was in `save_dir`
    before is then as it was. One job at a time may save to a `save_dir`.
    """
    action = f"cannot save a checkpoint to {os.fspath(save_dir)!r}"
    prepared, reports = on_every_rank(
        action,
        lambda: _prepare(engine, save_dir, tag, client_state, exclude_frozen_parameters),
        lambda p: {"tag": p.tag, "buffers": digests(engine.module)},
    )
    tag = _agreed_tag(engine, [report["tag"] for report in reports])
    own = own_buffers(engine.module, reports[0]["buffers"])
    prepared.local_tensors.update({f"buffer/{name}": buffer for name, buffer in own.items()})
    root = Path(save_dir)
    began = on_first_rank(action, lambda: {"name": files.make_temporary(root, tag).name, "id": secrets.token_hex(16)})
    temporary = root / began["name"]
    try:
        _, written = on_every_rank(action, lambda: _write(prepared, temporary, began["id"]), lambda report: report)
        on_first_rank(action, lambda: _commit(engine, prepared, temporary, tag, began["id"], written))
    except CheckpointError:
        if comm.rank() == 0:
            files.discard(temporary)
        raise
    if save_latest:
        on_first_rank(f"{root / tag} is saved, but not {LATEST}", lambda: files.write_latest(root, tag))
    log.info("saved checkpoint %s", root / tag)
    return root / tag


# -- prepare -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What this rank is to write, all checked: pieces of states, and values in JSON with their tensors."""

    tag: str
    step: int
    pieces: list[StateTensor]
    coord: dict[str, int]
    excluded: list[str]
    shared: dict[str, str]
    extra: list[str]
    local: Any
    local_tensors: dict[str, Tensor]
    run: Any
    client: Any
    common_tensors: dict[str, Tensor]


def _prepare(
    engine: Checkpointed,
    save_dir: str | os.PathLike[str],
    tag: str | None,
    client_state: Mapping[str, Any] | None,
    exclude_frozen: bool,
) -> _Prepared:
    """Collect and check everything that this rank would write; changes nothing."""
    if not os.fspath(save_dir):
        raise CheckpointError("save_dir is empty; name a directory")
    ctx = engine.ctx
    excluded = frozen_states(ctx) if exclude_frozen else []
    left_out = set(excluded)
    pieces = [p for p in engine.partitioner.states(engine.optimizer) if p.store and p.name not in left_out]
    for piece in pieces:
        check_tensor(piece.tensor, f"state {piece.name!r}")
        assert piece.tensor.numel() == piece.stop - piece.start, piece.name
    common: dict[str, Tensor] = {}
    local: dict[str, Tensor] = {}
    return _Prepared(
        tag=check_tag(tag if tag is not None else f"global_step{engine.global_steps}"),
        step=engine.global_steps,
        pieces=pieces,
        coord=dict(ctx.mesh.coord),
        excluded=excluded,
        shared=shared_names(engine.module),
        extra=list(extra_modules(engine.module)),
        local=encode(_local_values(engine), "rank", local, own=True),
        local_tensors=local,
        run=encode(engine.run_state(), "run_state", common, own=True),
        client=encode(dict(client_state or {}), "client_state", common),
        common_tensors=common,
    )


def _local_values(engine: Checkpointed) -> dict[str, Any]:
    """What may differ between any two ranks."""
    return {
        "random": rng.capture(engine.ctx.accelerator),
        "plugins": {name: item.state_dict() for name, item in plugin_objects(engine.ctx).items()},
        "module_extra": {name: module.get_extra_state() for name, module in extra_modules(engine.module).items()},
        "optimizer": optimizer_values(engine.optimizer),
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


# -- write ---------------------------------------------------------------------------------------------------------


def _write(prepared: _Prepared, temporary: Path, save_id: str) -> dict[str, Any]:
    """Write this rank's files; what the manifest needs to know of them."""
    rank = comm.rank()
    if not temporary.is_dir():
        raise CheckpointError(f"{temporary}, made by rank 0, is not there; save_dir must be on storage all ranks share")
    sizes: dict[str, int] = {}

    def write(name: str, items: Iterable[Item], **values: str) -> None:
        mark = {"format": f"{FORMAT} {VERSION}", "save_id": save_id, "file": name, "step": str(prepared.step)}
        mark |= {"rank": str(rank), "world_size": str(comm.world_size())}
        sizes[name] = write_tensors(temporary / name, items, mark | values)

    rows, items = rows_of(prepared.pieces, prepared.coord, rank_file(rank)), items_of(prepared.pieces)
    if items:
        write(rank_file(rank), items)
    write(local_file(rank), _plain_items(prepared.local_tensors), values=json.dumps(prepared.local))
    if rank == 0 and prepared.common_tensors:
        write(COMMON, _plain_items(prepared.common_tensors))
    files.sync_directory(temporary)
    return {
        "sizes": sizes,
        "states": rows,
        "excluded": prepared.excluded,
        "shared": prepared.shared,
        "extra": prepared.extra,
    }


def _plain_items(tensors: Mapping[str, Tensor]) -> list[Item]:
    return [(key, tuple(t.shape), t.dtype, lambda t=t: t) for key, t in tensors.items()]  # type: ignore[misc]


# -- commit --------------------------------------------------------------------------------------------------------


def _commit(
    engine: Checkpointed, prepared: _Prepared, temporary: Path, tag: str, save_id: str, written: list[dict[str, Any]]
) -> None:
    """Rank 0, once all ranks' files are on the disk: the manifest, and then the name that makes it a checkpoint."""
    ctx = engine.ctx
    manifest = Manifest(
        save_id=save_id,
        tag=tag,
        step=prepared.step,
        world_size=ctx.world_size,
        mesh=ctx.mesh.describe(),
        versions={"ds_core": __version__, "torch": torch.__version__, "python": platform.python_version()},
        plugins=ctx.plugins.loaded_versions(),
        config=encode(ctx.config.redacted(), "config", {}, own=True),
        optimizer=None if engine.optimizer is None else class_name(engine.optimizer),
        files={name: size for report in written for name, size in report["sizes"].items()},
        states=merge(row for report in written for row in report["states"]),
        shared={alias: name for report in written for alias, name in report["shared"].items()},
        excluded=tuple(sorted({name for report in written for name in report["excluded"]})),
        module_extra={name: rank for rank, r in reversed(list(enumerate(written))) for name in r["extra"]},
        run=prepared.run,
        client=prepared.client,
    )
    files.write_file(temporary / MANIFEST, render_manifest(manifest))
    files.put_in_place(temporary, temporary.with_name(tag))
