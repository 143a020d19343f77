"""Making a checkpoint of ds_core out of other files: DeepSpeed's checkpoints, safetensors, and
torch state dicts.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Any

from ds_checkpoint.folder.format import check_tag
from ds_checkpoint.folder.tensorfile import TensorFile, check_tensor
from ds_checkpoint.folder.values import encode
from ds_checkpoint.folder.writing import Prepared, commit, write
from ds_checkpoint.formats.foreign import new_run, no_rank_values
from ds_checkpoint.formats.ours import encodable, head_of, writing_to
from ds_checkpoint.formats.weights import INDEX, Safetensors, files_of
from ds_checkpoint.storages.finding import open_storage
from ds_run_state.opening import open_plain, read_start
from ds_run_state.states import StateTensor
from ds_run_state.torch_files import read_torch_file
from torch import Tensor

from ds_checkpoint_deepspeed.reading.deepspeed import read_deepspeed
from ds_checkpoint_deepspeed.reading.folder import find_deepspeed
from ds_checkpoint_deepspeed.reading.foreign import Foreign
from ds_checkpoint_deepspeed.reading.renaming import in_our_names
from ds_core.errors import CheckpointError

_ONE = "model.safetensors"


def import_checkpoint(
    source: str | Path, output_dir: str | Path, tag: str | None = None
) -> tuple[Path | str, list[str]]:
    """Write ``output_dir/tag`` out of `source`; (its path, what could not be taken over, and why).

    source: a folder of DeepSpeed's (the tag's, or the one above it) with all its ranks' files; a
        ``.safetensors`` file; a folder with ``model.safetensors`` or its index, as Hugging Face has
        them; or a state dict that torch saved.
    tag: default as in `source`, or ``imported``. `engine.load_checkpoint` then resumes at any stage
        and world size.

    CheckpointError when it is none of these, or would need code in it to be run.
    """
    path = Path(source)
    folder = find_deepspeed(path, None)
    found = (
        in_our_names(_weights(path)) if folder is None else read_deepspeed(folder, our_names=True)
    )
    tag = check_tag(tag if tag is not None else found.tag)
    for piece in (*found.pieces, *(p for pieces in found.cut for p in pieces)):
        if piece.read is None:
            check_tensor(piece.tensor, f"{path}: {piece.name!r}")
    client, left = encodable(found.client)
    common: dict[str, Tensor] = {}
    ranks = max(len(found.cut), 1)
    mesh = {"tp": ranks} if found.cut else {}
    head = head_of(found.run, client, common, mesh=mesh, optimizer=found.optimizer)
    prepared = [
        _prepared(found, rank, tag, common if rank == 0 else {}, head) for rank in range(ranks)
    ]
    with contextlib.closing(open_storage(output_dir, "output_dir")) as storage:
        with writing_to(storage, tag, secrets.token_hex(16)) as job:
            commit(prepared[0], job, [write(p, job) for p in prepared])
    return storage.path(tag), [*found.missing, *left]


def _prepared(
    found: Foreign, rank: int, tag: str, common: dict[str, Tensor], head: dict[str, Any]
) -> Prepared:
    """What one rank writes: the first one all that is the same for all, each its part of what is
    cut.
    """
    return Prepared(
        tag=tag,
        rank=rank,
        pieces=[*(found.pieces if rank == 0 else ()), *(found.cut[rank] if found.cut else ())],
        coord={"tp": rank} if found.cut else {},
        excluded=[],
        frozen=found.frozen,
        shared=found.shared,
        extra=[],
        local=encode(no_rank_values(), "rank", {}, own=True),
        local_tensors={},
        buffers={},
        common_tensors=common,
        head=head,
    )


def _weights(path: Path) -> Foreign:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    paths = _of_folder(path) if path.is_dir() else files_of(path)
    tensors: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    for one in paths:
        found, aliases = (
            _safetensors(one) if one.suffix == ".safetensors" else (_state_dict(one), {})
        )
        tensors |= found
        shared |= aliases
    pieces = [
        StateTensor(f"module/{n}", t, tuple(t.shape), 0, t.numel(), (), True)
        for n, t in tensors.items()
    ]
    return Foreign("imported", pieces, shared, [], new_run(), {}, None, [])


def _of_folder(folder: Path) -> list[Path]:
    if Safetensors().find(folder, None) is None:
        raise CheckpointError(
            f"{folder} holds no checkpoint of DeepSpeed, no {_ONE} and no index; give the "
            "folder or file itself, or use dscore checkpoint convert, which knows more formats"
        )
    return files_of(folder)


def _safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with contextlib.closing(TensorFile(path)) as file:
        tensors = {name: file.read(name).view(file.tensors[name][1]) for name in file.tensors}
        metadata = file.metadata
    return tensors, {a: n for a, n in metadata.items() if n in tensors and a not in tensors}


def _check_is_file(path: Path) -> None:
    try:
        os.close(open_plain(path)[0])  # what is no file would be waited for
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None


def _state_dict(path: Path) -> dict[str, Tensor]:
    _check_is_file(path)
    begin = read_start(path, 2)
    if not begin.startswith((b"PK", b"\x80")):  # a zip file, or a pickle of before torch 1.6
        raise CheckpointError(
            f"{path} is neither a safetensors file nor one that torch.save wrote; give such a "
            "file, a folder with "
            f"{_ONE} or {INDEX}, or a folder of DeepSpeed's"
        )
    found = read_torch_file(path)
    if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
        raise CheckpointError(
            f"{path} is not a state dict of tensors; save model.state_dict() alone"
        )
    return dict(found)
