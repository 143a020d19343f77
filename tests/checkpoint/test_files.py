"""The pieces below save and load: tags, the manifest, safetensors files, directories that appear whole."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_core.checkpoint import files
from ds_core.checkpoint.export import clone_tensors_for_torch_save
from ds_core.checkpoint.format import (
    Chunk,
    Manifest,
    Mark,
    State,
    check_coverage,
    check_tag,
    checksum,
    local_file,
    parse_manifest,
    render_manifest,
)
from ds_core.checkpoint.tensorfile import DTYPES, TensorFile, write_tensors
from ds_core.errors import CheckpointError

MANIFEST = Manifest(
    save_id="ab", tag="t", step=3, world_size=1, mesh={"dp": 1}, versions={"torch": "2"}, plugins={}, config={"a": 1},
    optimizer=None, files={local_file(0): Mark(10, "a"), "rank00000.safetensors": Mark(7, "b")}, shared={"b": "a"},
    excluded=("module/z",), frozen=("f",),
    module_extra={"m": 0}, run={}, client={},
    states=(State("module/w", {"tp": 1}, (2, 3), "F32", (Chunk("rank00000.safetensors", "module/w", 0, 6),)),),
)  # fmt: skip

STATE: dict[str, Any] = {"name": "a", "at": {}, "shape": [2], "dtype": "F32", "chunks": []}


@pytest.mark.parametrize("tag", ["a", "global_step10", "..a", "-x", ".hidden", "A" * 128, "1"])
def test_good_tags(tag: str) -> None:
    assert check_tag(tag) == tag


@pytest.mark.parametrize(
    "tag",
    ["", ".", "..", "a/b", "../a", "/etc", "a\\b", "a b", "a\n", "é", "A" * 129, "latest", ".tmp-a", ".old-a", 3, "٣"],
)
def test_bad_tags(tag: Any) -> None:
    with pytest.raises(CheckpointError, match="tag"):
        check_tag(tag)


def test_manifest_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(render_manifest(MANIFEST))
    assert parse_manifest(path) == MANIFEST


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"version": 4},
        {"version": None},
        {"files": {"../../etc/passwd": {"size": 1}}},
        {"files": {"rank00000.safetensors": {"size": 7}}},
        {"files": {local_file(0): {"size": -1}}},
        {"files": []},
        {"step": True},
        {"step": -1},
        {"world_size": "1"},
        {"module_extra": {"m": 7}},
        {"states": [1]},
        {"states": [STATE | {"shape": [-1]}]},
        {"states": [STATE | {"shape": ["1"]}]},
        {"states": [STATE]},
        {"states": [STATE | {"chunks": [{"file": "x", "key": "a", "start": 0, "stop": 2}]}]},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_manifests_are_refused_by_name(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(sealed(json.loads(render_manifest(MANIFEST)) | change))
    with pytest.raises(CheckpointError, match=r"manifest\.json") as caught:
        parse_manifest(path)
    assert "checksum is wrong" not in str(caught.value)


def sealed(data: dict[str, Any]) -> bytes:
    """A manifest of these fields, with a right checksum."""
    body = json.dumps({k: v for k, v in data.items() if k != "checksum"})[:-1].encode()
    return body + b',\n "checksum": "' + checksum(body).encode() + b'"\n}\n'


def test_every_changed_byte_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    path, text = tmp_path / "manifest.json", render_manifest(MANIFEST)
    for place in range(len(text)):
        path.write_bytes(text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :])
        with contextlib.suppress(CheckpointError):
            assert parse_manifest(path) == MANIFEST, f"byte {place}, {text[place - 20 : place + 20]!r}"


def test_version_1_is_read(tmp_path: Path) -> None:
    data = json.loads(render_manifest(MANIFEST))
    del data["checksum"], data["frozen"]
    data |= {"version": 1, "files": {name: {"size": entry["size"]} for name, entry in data["files"].items()}}
    (tmp_path / "manifest.json").write_text(json.dumps(data))
    old = parse_manifest(tmp_path / "manifest.json")
    assert old == dataclasses.replace(
        MANIFEST, frozen=(), files={n: Mark(m.size, None) for n, m in MANIFEST.files.items()}
    )


def test_version_2_is_read(tmp_path: Path) -> None:
    data = json.loads(render_manifest(MANIFEST)) | {"version": 2}
    (tmp_path / "manifest.json").write_bytes(sealed(data))
    assert parse_manifest(tmp_path / "manifest.json") == MANIFEST


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b"null"], ids=lambda t: repr(t[:4]))
def test_text_that_is_no_manifest(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        parse_manifest(path)


@given(st.data())
def test_coverage(data: st.DataObject) -> None:
    numel = data.draw(st.integers(0, 20))
    cuts = sorted(data.draw(st.lists(st.integers(0, numel), max_size=4)))
    ends = [0, *cuts, numel]
    chunks = [Chunk("f", "k", a, b) for a, b in itertools.pairwise(ends)]
    check_coverage([State("s", {}, (numel,), "F32", tuple(chunks))])
    victim = data.draw(st.integers(0, len(chunks) - 1))
    size = chunks[victim].stop - chunks[victim].start
    for bad in (chunks[:victim] + chunks[victim + 1 :], [*chunks[: victim + 1], *chunks[victim:]]):
        if size:
            with pytest.raises(CheckpointError, match="'s'"):
                check_coverage([State("s", {}, (numel,), "F32", tuple(bad))])


def items(tensors: dict[str, torch.Tensor]) -> list[Any]:
    return [(k, tuple(t.shape), t.dtype, lambda t=t: t) for k, t in tensors.items()]


def odd_tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(24, dtype=torch.float64).view(4, 6)
    odd = {
        "strided": base.T[1::2],
        "expanded": torch.ones(1).expand(3),
        "scalar": torch.tensor(2.5),
        "none": base[:0],
        "view": base[1],
    }
    for name, dtype in DTYPES.items():
        odd[name] = torch.arange(3).to(dtype)
    return odd


def test_the_safetensors_library_reads_what_we_write(tmp_path: Path) -> None:
    path, tensors = tmp_path / "a.safetensors", odd_tensors()
    mark = write_tensors(path, items(tensors), {"who": "me"})
    assert mark == Mark(path.stat().st_size, checksum(path.read_bytes()))
    theirs = safetensors.torch.load_file(path)
    with closing(TensorFile(path)) as ours:
        assert ours.metadata == {"who": "me"}
        assert ours.checksum() == mark.checksum
        for name, tensor in tensors.items():
            want = tensor.contiguous().reshape(-1).view(torch.uint8)
            assert theirs[name].dtype == tensor.dtype and theirs[name].shape == tensor.shape
            assert torch.equal(theirs[name].reshape(-1).view(torch.uint8), want)
            assert torch.equal(ours.read(name).view(torch.uint8), want)


def test_we_read_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    tensors = {name: tensor.clone().contiguous() for name, tensor in odd_tensors().items()}
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors")
    with closing(TensorFile(tmp_path / "a.safetensors")) as file:
        for name, tensor in tensors.items():
            assert torch.equal(file.read(name).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_only_the_range_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, items({"x": torch.arange(1000)}), {})
    with closing(TensorFile(path)) as file:
        assert file.read("x", 990, 995).tolist() == [990, 991, 992, 993, 994]
        assert file.bytes_read == 5 * 8


def test_every_cut_and_every_wrong_header_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, items({"x": torch.arange(4), "y": torch.zeros(2, 2)}), {})
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=r"a\.safetensors"):
            TensorFile(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(CheckpointError, match=r"a\.safetensors"):
        TensorFile(path)
    length = int.from_bytes(whole[:8], "little")
    y = {"dtype": "F32", "shape": [4], "data_offsets": [32, 48]}
    wrong: list[Any] = [
        [],
        {"x": 1, "y": y},
        {"x": {"dtype": "F99", "shape": [4], "data_offsets": [0, 32]}, "y": y},
        {"x": {"dtype": "I64", "shape": [4], "data_offsets": [-8, 24]}, "y": y},
        {"x": {"dtype": "I64", "shape": [1 << 62], "data_offsets": [0, 32]}, "y": y},
        {"x": {"dtype": "I64", "shape": ["4"], "data_offsets": [0, 32]}, "y": y},
        {"x": {"dtype": "I64", "shape": [4], "data_offsets": [32, 64]}, "y": y},
    ]
    for header in wrong:
        text = json.dumps(header).encode().ljust(length)
        path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
        with pytest.raises(CheckpointError, match=r"a\.safetensors"):
            TensorFile(path)


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


def checkpoint(root: Path, tag: str, text: str) -> Path:
    temporary = files.make_temporary(root, tag)
    manifest = dataclasses.replace(MANIFEST, save_id=text)
    (temporary / "manifest.json").write_bytes(render_manifest(manifest))
    files.put_in_place(temporary, root / tag)
    return root / tag


def text_of(folder: Path) -> str:
    return parse_manifest(folder / "manifest.json").save_id


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failing_rename_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: Any, failing: int) -> None:
    checkpoint(tmp_path, "t", "old")
    calls, real = [], os.replace

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
    root, victim = tmp_path / "root", tmp_path / "victim"
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


def test_pruning_keeps_the_newest_the_latest_and_what_is_not_ours(tmp_path: Path) -> None:
    for age, tag in enumerate("abcde"):
        os.utime(checkpoint(tmp_path, tag, tag) / "manifest.json", (age, age))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "manifest.json").write_text("{}")
    files.write_latest(tmp_path, "a")
    assert files.existing_tags(tmp_path) == list("edcba")
    assert files.prune(tmp_path, 2, "b") == ["c"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "d", "e", "latest", "mine"]


def test_latest_written_by_hand_or_changed(tmp_path: Path) -> None:
    files.write_latest(tmp_path, "step10")
    written = (tmp_path / "latest").read_bytes()
    assert files.read_latest(tmp_path) == "step10"
    (tmp_path / "latest").write_text("step11\n")
    assert files.read_latest(tmp_path) == "step11"
    (tmp_path / "latest").write_bytes(written.replace(b"step10", b"step11"))
    with pytest.raises(CheckpointError, match="not the one that was written"):
        files.read_latest(tmp_path)


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
