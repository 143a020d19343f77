"""The pieces below save and load: tags, the manifest, safetensors files, directories that appear
whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import resource
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from ds_checkpoint import source as source_module
from ds_checkpoint.export import clone_tensors_for_torch_save
from ds_checkpoint.folder import files
from ds_checkpoint.folder.format import (
    Chunk,
    Manifest,
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
from ds_checkpoint.folder.values import decode
from hypothesis import given
from hypothesis import strategies as st

from ds_core.errors import CheckpointError

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
    assert files.prune(tmp_path, 2, "b") == ["c"]
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
            tmp_path, dataclasses.replace(MANIFEST, files=marks, states=states), None
        )
    ) as source:
        for _ in range(2):
            assert [source.read(f"module/{name}").item() for name in names] == list(range(8))
            assert len([f for f in source._files.values() if f._handle is not None]) == 3
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
