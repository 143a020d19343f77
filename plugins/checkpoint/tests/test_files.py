"""The pieces below save and load: tags, the manifest, safetensors files, directories that appear
whole."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import safetensors.torch
import torch
from checkpoint_folders import MANIFEST, items
from ds_checkpoint.folder.format import (
    Chunk,
    Mark,
    SavedState,
    check_coverage,
    check_tag,
    checksum,
    local_file,
    parse_manifest,
    render_manifest,
)
from ds_checkpoint.folder.tensorfile import DTYPES, TensorFile, write_tensors
from hypothesis import given
from hypothesis import strategies as st

from ds_core.errors import CheckpointError

STATE: dict[str, Any] = {"name": "a", "at": {}, "shape": [2], "dtype": "F32", "chunks": []}
CHUNK: dict[str, Any] = {"file": local_file(0), "key": "a", "start": 0, "stop": 2}


@pytest.mark.parametrize("tag", ["a", "global_step10", "..a", "-x", ".hidden", "A" * 128, "1"])
def test_good_tags(tag: str) -> None:
    assert check_tag(tag) == tag


@pytest.mark.parametrize(
    "tag",
    [
        "",
        ".",
        "..",
        "a/b",
        "../a",
        "/etc",
        "a\\b",
        "a b",
        "a\n",
        "é",
        "A" * 129,
        "latest",
        ".tmp-a",
        ".old-a",
        3,
        "٣",
    ],
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
        {"world_size": 0, "files": {}},
        {"world_size": 10**9},
        {"world_size": 10**30},
        {"files": {local_file(r): {"size": 1, "checksum": ""} for r in range(100_000)}},
        {
            "files": {
                local_file(0): {"size": 1, "checksum": ""},
                "rank00001.safetensors": {"size": 1, "checksum": ""},
            }
        },
        {"states": [STATE | {"shape": [10**4000]}]},
        {"states": [STATE | {"shape": [2**40, 2**40]}]},
        {"states": [STATE | {"shape": [1] * 1000}]},
        {"states": [STATE | {"chunks": [CHUNK | {"box": {"first": [0], "size": [10**4000]}}]}]},
        {"states": [STATE | {"chunks": [CHUNK]}, STATE | {"name": "b", "chunks": [CHUNK]}]},
        {"states": [STATE | {"chunks": [{"file": "x", "key": "a", "start": 0, "stop": 2}]}]},
    ],
    ids=lambda change: str(change)[:60],
)
def test_wrong_manifests_are_refused_by_name(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(sealed(json.loads(render_manifest(MANIFEST)) | change))
    with pytest.raises(CheckpointError, match=r"manifest\.json") as caught:
        parse_manifest(path)
    assert "checksum is wrong" not in str(caught.value) and len(str(caught.value)) < 1000


def sealed(data: dict[str, Any]) -> bytes:
    """A manifest of these fields, with a right checksum."""
    body = json.dumps({k: v for k, v in data.items() if k != "checksum"})[:-1].encode()
    return body + b',\n "checksum": "' + checksum(body).encode() + b'"\n}\n'


def test_every_changed_byte_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    text = render_manifest(MANIFEST)
    for place in range(len(text)):
        path.write_bytes(text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :])
        with contextlib.suppress(CheckpointError):
            assert parse_manifest(path) == MANIFEST, (
                f"byte {place}, {text[place - 20 : place + 20]!r}"
            )


def test_version_1_is_read(tmp_path: Path) -> None:
    data = json.loads(render_manifest(MANIFEST))
    del data["checksum"], data["frozen"]
    del data["serial"]
    data |= {
        "version": 1,
        "files": {name: {"size": entry["size"]} for name, entry in data["files"].items()},
    }
    (tmp_path / "manifest.json").write_text(json.dumps(data))
    old = parse_manifest(tmp_path / "manifest.json")
    assert old == dataclasses.replace(
        MANIFEST,
        serial=0,
        frozen=(),
        files={n: Mark(m.size, None) for n, m in MANIFEST.files.items()},
    )


def test_version_2_is_read(tmp_path: Path) -> None:
    data = json.loads(render_manifest(MANIFEST)) | {"version": 2}
    (tmp_path / "manifest.json").write_bytes(sealed(data))
    assert parse_manifest(tmp_path / "manifest.json") == MANIFEST


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b"null"], ids=lambda t: repr(t[:4])
)
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
    check_coverage([SavedState("s", {}, (numel,), "F32", tuple(chunks))])
    victim = data.draw(st.integers(0, len(chunks) - 1))
    size = chunks[victim].stop - chunks[victim].start
    for bad in (chunks[:victim] + chunks[victim + 1 :], [*chunks[: victim + 1], *chunks[victim:]]):
        if size:
            with pytest.raises(CheckpointError, match="'s'"):
                check_coverage([SavedState("s", {}, (numel,), "F32", tuple(bad))])


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
    path = tmp_path / "a.safetensors"
    tensors = odd_tensors()
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
            assert torch.equal(
                file.read(name).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
            )


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
