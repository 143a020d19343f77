"""Our own format as one among others: a checkpoint of any program, written as one rank would.

A checkpoint of ours is copied, so that what belongs to each rank stays with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from ds_run_state.states import StateTensor
from torch import Tensor

import ds_core
from ds_checkpoint.folder.format import COMMON, check_tag, render_manifest
from ds_checkpoint.folder.tensorfile import DTYPES
from ds_checkpoint.folder.values import decode, encode
from ds_checkpoint.folder.writing import Prepared, SaveJob, commit, publish, readme_of, write
from ds_checkpoint.formats.foreign import Written, no_rank_values, refuse_split
from ds_checkpoint.offline import Saved
from ds_checkpoint.storages.contract import Storage
from ds_checkpoint.storages.finding import open_storage
from ds_core.errors import CheckpointError


def run_values(saved: Saved) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the run's values, the client state)."""
    if saved.values is not None:
        return saved.values

    def tensor(key: str) -> Tensor:
        file = saved.source.file(COMMON)
        return file.read(key).view(file.tensors[key][1])

    run, client = (
        decode(v, tensor, str(saved.path)) for v in (saved.manifest.run, saved.manifest.client)
    )
    return run, client


def write_ours(saved: Saved, output: str | Path) -> Written:
    """Write it below `output` under its tag, as `engine.load_checkpoint` resumes it; one state is in
    memory.

    output: a folder, or a URL.

    CheckpointError where a checkpoint of that tag is there.
    """
    tag = check_tag(saved.manifest.tag)
    # A copy keeps the mark that its files bear.
    save_id = secrets.token_hex(16) if saved.values is not None else saved.manifest.save_id
    with contextlib.closing(open_storage(output, "output")) as storage:
        if tag in (storage.tags() if storage.exists() else ()):
            raise CheckpointError(
                f"{storage.path(tag)} is there already; remove it, or name another folder"
            )
        with writing_to(storage, tag, save_id) as job:
            missing = _copy(saved, job) if saved.values is None else _write(saved, job)
        return Written(storage.path(tag), missing)


@contextlib.contextmanager
def writing_to(storage: Storage, tag: str, save_id: str) -> Iterator[SaveJob]:
    """Begin a checkpoint that this process alone writes. The caller puts it in place inside, and
    ``latest`` names it then; after an error nothing of it is left.
    """
    storage.hold()
    draft = storage.draft(tag, save_id, storage.begin(tag, save_id))
    job = SaveJob(storage, tag, draft, save_id, storage.next_serial(), True, None)
    try:
        yield job
    except BaseException:
        draft.discard()
        raise
    publish(job)


def head_of(
    run: Mapping[str, Any],
    client: Mapping[str, Any],
    common: dict[str, Tensor],
    *,
    mesh: Mapping[str, int],
    optimizer: str | None,
) -> dict[str, Any]:
    """`Prepared.head` of a checkpoint that no run of ours has saved.

    common: the tensors in `run` and `client` are added to it.
    mesh: sizes of the axes over which ranks differ; a rank each.
    """
    return {
        "step": run["global_steps"],
        "world_size": math.prod(mesh.values()),
        "mesh": dict(mesh),
        "versions": {"ds_core": ds_core.__version__, "torch": torch.__version__},
        "plugins": {},
        "config": None,
        "optimizer": optimizer,
        "run": encode(run, "run_state", common, own=True),
        "client": encode(client, "client_state", common),
    }


def _write(saved: Saved, job: SaveJob) -> tuple[str, ...]:
    refuse_split(saved, "a checkpoint of one rank")
    run, client = run_values(saved)
    client, left = encodable(client)
    common: dict[str, Tensor] = {}
    head = head_of(run, client, common, mesh={}, optimizer=saved.manifest.optimizer)
    prepared = Prepared(
        tag=job.tag,
        rank=0,
        pieces=[_streamed(saved, name) for name in saved.source.names()],
        coord={},
        excluded=[],
        frozen=list(saved.manifest.frozen),
        shared=saved.manifest.shared,
        extra=[],
        local=encode(no_rank_values(), "rank", {}, own=True),
        local_tensors={},
        buffers={},
        common_tensors=common,
        head=head,
    )
    commit(prepared, job, [write(prepared, job)])
    return tuple(left)


def _streamed(saved: Saved, name: str) -> StateTensor:
    """A whole state that is read when it is written."""
    shape = saved.source.shape(name)
    stand_in = torch.empty(shape, dtype=DTYPES[saved.source.dtype(name)], device="meta")
    return StateTensor(
        name,
        stand_in,
        shape,
        0,
        stand_in.numel(),
        (),
        True,
        read=lambda _: saved.source.whole(name),
    )


def encodable(client: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What of a client state a checkpoint can hold; and what not, to be reported."""
    kept = {}
    left = []
    for key, value in client.items():
        try:
            encode({key: value}, "client_state", {})
        except CheckpointError as error:
            left.append(f"left out: {error}")
        else:
            kept[key] = value
    return kept, left


def _copy(saved: Saved, job: SaveJob) -> tuple[str, ...]:
    """A copy of a checkpoint of ours, once every file was compared with its checksum."""
    saved.source.verify(0, 1)
    marks = {}
    for name in saved.manifest.files:
        file = saved.source.file(name)
        items = [
            (key, shape, dtype, functools.partial(file.read, key))
            for key, (dtype, shape, _, _) in file.tensors.items()
        ]
        marks[name] = job.draft.write_tensors(name, items, file.metadata)
    job.draft.finish()
    manifest = dataclasses.replace(saved.manifest, serial=job.serial, files=marks)
    job.draft.seal(readme_of(job.tag), render_manifest(manifest))
    job.draft.put_in_place()
    return ()
