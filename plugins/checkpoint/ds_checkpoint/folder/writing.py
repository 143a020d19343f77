"""The part of saving that needs no engine and no collective: one rank's files, and rank 0's commit.

So it runs in the caller's thread or in another one, while training goes on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ds_run_state.states import StateTensor
from torch import Tensor

from ds_checkpoint.folder.format import (
    COMMON,
    FORMAT,
    VERSION,
    Manifest,
    Mark,
    local_file,
    rank_file,
    render_manifest,
)
from ds_checkpoint.folder.layout import items_of, merge, rows_of
from ds_checkpoint.folder.tensorfile import Item
from ds_checkpoint.storages.contract import Draft, Storage

log = logging.getLogger("ds_checkpoint")


@dataclass(frozen=True, slots=True)
class Prepared:
    """What one rank is to write, all checked."""

    tag: str
    rank: int
    # -- states
    # This rank's pieces, and its place on the mesh.
    pieces: list[StateTensor]
    coord: dict[str, int]
    # Names of states that are left out, and of parameters that are not trained.
    excluded: list[str]
    frozen: list[str]
    # Further name -> first name, of tensors that modules share.
    shared: dict[str, str]
    # Names of modules that have an extra state on this rank.
    extra: list[str]
    # -- values
    # This rank's own, as JSON, and the tensors in them.
    local: Any
    local_tensors: dict[str, Tensor]
    # This rank's persistent buffers; those that differ from other ranks' join `local_tensors`.
    buffers: dict[str, Tensor]
    # The tensors in what is equal on all ranks, which is in `head`.
    common_tensors: dict[str, Tensor]
    # The fields of the manifest that one rank knows.
    head: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Where a checkpoint goes, and what happens around it."""

    storage: Storage
    tag: str
    # What is written into, and becomes the checkpoint.
    draft: Draft
    # Random: files of another save are known by it.
    save_id: str
    # One more than that of the newest checkpoint there: their order, whatever clocks say.
    serial: int
    save_latest: bool
    # How many checkpoints stay there; None: all.
    keep_last: int | None


def write(prepared: Prepared, job: SaveJob) -> dict[str, Any]:
    """Write this rank's files; what the manifest needs to know of them, as JSON."""
    rank = prepared.rank
    head = prepared.head
    job.draft.check()
    # Each file says in its metadata which save it belongs to, so that a file of another save is
    # known when it is read.
    marks: dict[str, Mark] = {}

    def write_one(name: str, items: Iterable[Item], **values: str) -> None:
        mark = {
            "format": f"{FORMAT} {VERSION}",
            "save_id": job.save_id,
            "file": name,
            "step": str(head["step"]),
        }
        mark |= {"rank": str(rank), "world_size": str(head["world_size"])}
        marks[name] = job.draft.write_tensors(name, items, mark | values)

    # Pieces of states; a rank may have none, then it has no such file.
    rows = rows_of(prepared.pieces, prepared.coord, rank_file(rank))
    items = items_of(prepared.pieces)
    if items:
        write_one(rank_file(rank), items)
    write_one(
        local_file(rank), _plain_items(prepared.local_tensors), values=json.dumps(prepared.local)
    )
    # What is equal on all ranks is stored once.
    if rank == 0 and prepared.common_tensors:
        write_one(COMMON, _plain_items(prepared.common_tensors))
    # The names of the files must be durable too, before rank 0 commits.
    job.draft.finish()
    return {
        "files": {name: [mark.size, mark.checksum] for name, mark in marks.items()},
        "states": rows,
        "excluded": prepared.excluded,
        "frozen": prepared.frozen,
        "shared": prepared.shared,
        "extra": prepared.extra,
    }


def _plain_items(tensors: Mapping[str, Tensor]) -> list[Item]:
    return [(key, tuple(t.shape), t.dtype, lambda t=t: t) for key, t in tensors.items()]  # type: ignore[misc]


def seal(prepared: Prepared, job: SaveJob, written: list[dict[str, Any]]) -> None:
    """Rank 0, once all ranks' files are on the disk: the manifest.

    Only its name is missing to a checkpoint then.
    """
    manifest = Manifest(
        save_id=job.save_id,
        tag=job.tag,
        serial=job.serial,
        files={name: Mark(*mark) for report in written for name, mark in report["files"].items()},
        states=merge(row for report in written for row in report["states"]),
        shared={alias: name for report in written for alias, name in report["shared"].items()},
        excluded=tuple(sorted({name for report in written for name in report["excluded"]})),
        frozen=tuple(sorted({name for report in written for name in report["frozen"]})),
        # The lowest rank that has a module's extra state is the one that is read.
        module_extra={
            name: rank for rank, r in reversed(list(enumerate(written))) for name in r["extra"]
        },
        **prepared.head,
    )
    job.draft.seal(readme_of(job.tag), render_manifest(manifest))


def commit(prepared: Prepared, job: SaveJob, written: list[dict[str, Any]]) -> None:
    """`seal`, and the name that makes it a checkpoint."""
    seal(prepared, job, written)
    job.draft.put_in_place()


def publish(job: SaveJob) -> None:
    """The first rank that sees a folder, last: ``latest``, and the removal of checkpoints beyond
    ``keep_last``.
    """
    if job.save_latest:
        job.storage.write_latest(job.tag)
    # After ``latest`` is written, so that it never names a checkpoint that was removed.
    if job.keep_last is not None:
        job.storage.prune(job.keep_last, job.tag)


def readme_of(tag: str) -> bytes:
    """What a checkpoint says to people who look into it."""
    return f"""# A checkpoint of ds_core

Tensors are in safetensors files, all else in manifest.json; nothing here is pickled or executable. These commands need
dscore-checkpoint and dscore-cli
(`pip install -c dist/constraints.txt dscore-checkpoint dscore-cli` in a clone of ds_core, after `make wheels`);
run them in the folder above this one:

    dscore checkpoint inspect {tag}
    dscore checkpoint verify {tag}
    dscore checkpoint export {tag} weights/      # one fp32 state dict, whatever ran it on however many devices

`engine.load_checkpoint(<the folder above>, tag="{tag}")` resumes it at any world size.
""".encode()
