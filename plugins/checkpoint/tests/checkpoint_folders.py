"""Folders of checkpoints without a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from ds_checkpoint.folder import files
from ds_checkpoint.folder.format import (
    Chunk,
    Manifest,
    Mark,
    SavedState,
    local_file,
    render_manifest,
)

MANIFEST = Manifest(
    save_id="ab",
    tag="t",
    step=3,
    serial=5,
    world_size=1,
    mesh={"dp": 1},
    versions={"torch": "2"},
    plugins={},
    config={"a": 1},
    optimizer=None,
    shared={"b": "a"},
    files={local_file(0): Mark(10, "a"), "rank00000.safetensors": Mark(7, "b")},
    excluded=("module/z",),
    frozen=("f",),
    module_extra={"m": 0},
    run={},
    client={},
    states=(
        SavedState(
            "module/w",
            {"tp": 1},
            (2, 3),
            "F32",
            (Chunk("rank00000.safetensors", "module/w", 0, 6),),
        ),
    ),
)


def items(tensors: dict[str, torch.Tensor]) -> list[Any]:
    return [(k, tuple(t.shape), t.dtype, lambda t=t: t) for k, t in tensors.items()]


def checkpoint(root: Path, tag: str, text: str) -> Path:
    temporary = files.make_temporary(root, tag)
    manifest = dataclasses.replace(MANIFEST, save_id=text)
    (temporary / "manifest.json").write_bytes(render_manifest(manifest))
    files.put_in_place(temporary, root / tag)
    return root / tag
