"""Files from strangers: of other kinds, too large, too many, or nested too deep."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from checkpoint_folders import MANIFEST, checkpoint, items
from ds_checkpoint import source as source_module
from ds_checkpoint.export import clone_tensors_for_torch_save
from ds_checkpoint.folder import files
from ds_checkpoint.folder.format import (
    Chunk,
    Mark,
    SavedState,
    parse_manifest,
    render_manifest,
)
from ds_checkpoint.folder.tensorfile import TensorFile, write_tensors
from ds_checkpoint.folder.values import decode
from ds_checkpoint.storages.disk import DiskCheckpoint

from ds_core.errors import CheckpointError

# -- files from strangers --------------------------------------------------------------------------


def huge(path: Path, begin: bytes = b"") -> None:
    """A file of 1 GB, which takes no room."""
    path.write_bytes(begin)
    os.truncate(path, 1 << 30)


@pytest.mark.parametrize("name", ["manifest.json", "latest", "a.safetensors"])
@pytest.mark.parametrize("kind", ["fifo", "link", "huge", "directory"])
def test_what_is_no_file_or_too_large_is_refused_unread(
    tmp_path: Path, name: str, kind: str
) -> None:
    path = tmp_path / name
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        (tmp_path / "elsewhere").write_bytes(render_manifest(MANIFEST))
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "directory":
        path.mkdir()
    else:
        huge(path, (1 << 29).to_bytes(8, "little"))
    readers: dict[str, Any] = {
        "manifest.json": lambda: parse_manifest(path),
        "latest": lambda: files.read_latest(tmp_path),
        "a.safetensors": lambda: TensorFile(path),
    }
    words = {
        "fifo": "not a regular file",
        "link": "it is a link",
        "huge": str(1 << 30),
        "directory": "not a regular",
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=words[kind]) as caught:
        readers[name]()
    assert str(path) in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


@pytest.mark.fast_cases("ours")
@pytest.mark.parametrize(
    "begin", [b"", b'{"format": "ds_core.checkpoint", "version": 1, "a": '], ids=["foreign", "ours"]
)
def test_a_manifest_of_very_many_values_is_not_parsed(
    tmp_path: Path, begin: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(begin + b"[" + b"[]," * (1 << 24) + b"[]]")
    monkeypatch.setattr(json, "loads", lambda _: pytest.fail("parsed"))
    with pytest.raises(
        CheckpointError, match=r"where 16777216 are the most" if begin else "does not say it is"
    ):
        parse_manifest(path)


def header_file(path: Path, header: bytes, data: int) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(data))


@pytest.mark.parametrize(
    "places, word",
    [
        ([(0, 8), (0, 8), (16, 24)], "another tensor overlaps with"),
        ([(0, 8), (16, 24)], "a gap before"),
        ([(8, 16)], "a gap before"),
        ([(0, 8), (4, 12), (8, 16)], "another tensor overlaps with"),
    ],
)
def test_tensors_that_overlap_or_leave_gaps(
    tmp_path: Path, places: list[tuple[int, int]], word: str
) -> None:
    rows = {
        f"t{i}": {"dtype": "U8", "shape": [b - a], "data_offsets": [a, b]}
        for i, (a, b) in enumerate(places)
    }
    header_file(tmp_path / "a.safetensors", json.dumps(rows).encode(), places[-1][1])
    with pytest.raises(CheckpointError, match=word):
        TensorFile(tmp_path / "a.safetensors")


def test_a_header_of_a_million_keys_is_not_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = '"k%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    header_file(
        tmp_path / "a.safetensors",
        ("{" + ",".join(row % i for i in range(10**6)) + "}").encode(),
        0,
    )
    monkeypatch.setattr(json, "loads", lambda _: pytest.fail("parsed"))
    with pytest.raises(CheckpointError, match="its header tells of 1000000 tensors"):
        TensorFile(tmp_path / "a.safetensors")


def test_more_files_than_a_process_may_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "MOST_OPEN", 3)
    names = [f"rank{rank:05d}.safetensors" for rank in range(8)]
    for i, name in enumerate(names):
        write_tensors(
            tmp_path / name, items({"x": torch.tensor([i])}), {"save_id": "ab", "file": name}
        )
    marks = {name: Mark(0, None) for name in names}
    states = tuple(
        SavedState(f"module/{name}", {}, (1,), "I64", (Chunk(name, "x", 0, 1),)) for name in names
    )
    with closing(
        source_module.SavedStates(
            DiskCheckpoint(tmp_path),
            dataclasses.replace(MANIFEST, files=marks, states=states),
            None,
        )
    ) as source:
        for _ in range(2):
            assert [source.read(f"module/{name}").item() for name in names] == list(range(8))
            assert len([f for f in source._files.values() if f._file._handle is not None]) == 3
        os.replace(tmp_path / names[1], tmp_path / names[0])
        with pytest.raises(CheckpointError, match="changed while it was being read"):
            source.read(f"module/{names[0]}")


def test_values_that_are_nested_too_deep() -> None:
    deep: Any = {}
    for _ in range(500):
        deep = [deep]
    with pytest.raises(CheckpointError, match=r"manifest\.json: .* nested more than"):
        decode(deep, lambda _: pytest.fail("no tensor"), "manifest.json")


def test_a_missing_tag_tells_which_there_are(tmp_path: Path) -> None:
    checkpoint(tmp_path, "good", "x")
    with pytest.raises(CheckpointError, match=r"bad does not exist; .* there are good"):
        files.find(tmp_path, "bad")


def test_clones_have_storage_of_their_own_size() -> None:
    flat = torch.zeros(1000)
    copy = clone_tensors_for_torch_save({"a": [flat[:3], (flat[3:5], "x")], "b": 1})
    assert copy["a"][0].untyped_storage().nbytes() == 12
    assert isinstance(copy["a"][1], tuple) and copy["a"][1][1] == "x" and copy["b"] == 1
    copy["a"][0] += 1
    assert flat.sum() == 0


@pytest.mark.parametrize("name", [".old-latest", ".old-..", ".old-a b", ".old-t"])
def test_only_what_a_save_moved_aside_is_put_back(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "manifest.json").write_text(
        "{}" if name == ".old-t" else '{\n "format": "ds_core.checkpoint",'
    )
    files.clean(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
