"""What stands beside checkpoints: debris, names moved aside, latest, pruning."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from checkpoint_folders import MANIFEST, checkpoint
from ds_checkpoint.folder import files
from ds_checkpoint.folder.format import (
    checksum,
    parse_manifest,
    render_manifest,
)
from ds_checkpoint.storages.disk import DiskStorage

from ds_core.errors import CheckpointError


def test_debris_is_cleared_and_nothing_else(tmp_path: Path) -> None:
    ours = [".tmp-global_step3-0123456789abcdef", ".tmp-latest-0123456789abcdef"]
    (tmp_path / ours[0]).mkdir()
    (tmp_path / ours[0] / "rank00000.safetensors").write_text("half")
    (tmp_path / ours[1]).write_text("half")
    for name in (".tmp-mine", ".tmp-global_step3-0123", "notes.txt"):
        (tmp_path / name).write_text("the user's")
    temporary = files.make_temporary(tmp_path, "t")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [".tmp-mine", ".tmp-global_step3-0123", "notes.txt", temporary.name]
    )


def text_of(folder: Path) -> str:
    return parse_manifest(folder / "manifest.json").save_id


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failing_rename_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: Any, failing: int
) -> None:
    checkpoint(tmp_path, "t", "old")
    calls = []
    real = os.replace

    def replace(a: Any, b: Any) -> None:
        calls.append(a)
        if len(calls) == failing + 1:
            raise OSError("no")
        real(a, b)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="no"):
        checkpoint(tmp_path, "t", "new")
    assert text_of(files.find(tmp_path, "t")) == "old"
    monkeypatch.setattr(os, "replace", real)
    assert text_of(checkpoint(tmp_path, "t", "newer")) == "newer"
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


def test_a_checkpoint_that_stepped_aside_is_found_and_put_back(tmp_path: Path) -> None:
    checkpoint(tmp_path, "t", "old")
    os.replace(tmp_path / "t", tmp_path / ".old-t")
    assert files.find(tmp_path, "t").name == ".old-t"
    files.clean(tmp_path)
    assert files.find(tmp_path, "t").name == "t"


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_what_is_no_checkpoint_is_never_replaced(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "root"
    victim = tmp_path / "victim"
    for folder in (root, victim):
        folder.mkdir()
        (folder / "precious").write_text("x")
    if kind == "directory":
        (root / "t").mkdir()
    elif kind == "file":
        (root / "t").write_text("x")
    else:
        (victim / "manifest.json").write_text("{}")
        (root / "t").symlink_to(victim)
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        files.make_temporary(root, "t")
    assert (victim / "precious").exists()


def test_links_out_of_the_directory_and_bad_latest(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    checkpoint(tmp_path / "elsewhere", "t", "x")
    (tmp_path / "root" / "t").symlink_to(tmp_path / "elsewhere" / "t")
    with pytest.raises(CheckpointError, match="link out of"):
        files.find(tmp_path / "root", "t")
    for text in ("../elsewhere/t", "", "/etc", "a b", "\x00"):
        (tmp_path / "root" / "latest").write_text(text)
        with pytest.raises(CheckpointError, match="latest"):
            files.read_latest(tmp_path / "root")


def numbered(root: Path, tag: str, serial: int, step: int) -> Path:
    """A checkpoint whose manifest has these, and whose file is the older the later it was made."""
    temporary = files.make_temporary(root, tag)
    manifest = dataclasses.replace(MANIFEST, tag=tag, serial=serial, step=step)
    (temporary / "manifest.json").write_bytes(render_manifest(manifest))
    files.put_in_place(temporary, root / tag)
    os.utime(root / tag / "manifest.json", (10**6 - 10 * serial - step,) * 2)
    return root / tag


def test_pruning_keeps_the_newest_the_latest_and_what_is_not_ours(tmp_path: Path) -> None:
    for serial, tag in enumerate("abcde", 1):
        assert files.next_serial(tmp_path) == serial
        numbered(tmp_path, tag, serial, step=7)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "manifest.json").write_text("{}")
    files.write_latest(tmp_path, "a")
    assert files.existing_tags(tmp_path) == list("edcba")
    assert DiskStorage(tmp_path).prune(2, "b") == ["c"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "d", "e", "latest", "mine"]


def test_the_order_is_what_is_written_inside(tmp_path: Path) -> None:
    for step, tag in enumerate("abc"):  # before there were serial numbers: by step
        path = numbered(tmp_path, tag, 0, step) / "manifest.json"
        data = json.loads(path.read_bytes())
        del data["serial"]
        path.write_bytes(json.dumps(data, indent=1).encode())
        os.utime(path, (100 - step,) * 2)
    numbered(tmp_path, "went_back", 1, step=0)  # resumed from an early step: newer all the same
    assert files.existing_tags(tmp_path) == ["went_back", "c", "b", "a"]


def test_latest_holds_the_tag_alone_and_old_ones_are_read(tmp_path: Path) -> None:
    files.write_latest(tmp_path, "step10")
    assert (tmp_path / "latest").read_text() == "step10"
    assert files.read_latest(tmp_path) == "step10"
    (tmp_path / "latest").write_text("step11\n")
    assert files.read_latest(tmp_path) == "step11"
    (tmp_path / "latest").write_text(f"step10\nxxh3 {checksum(b'step10')}\n")
    assert files.read_latest(tmp_path) == "step10"
    (tmp_path / "latest").write_text(f"step11\nxxh3 {checksum(b'step10')}\n")
    with pytest.raises(CheckpointError, match="not the one that was written"):
        files.read_latest(tmp_path)
