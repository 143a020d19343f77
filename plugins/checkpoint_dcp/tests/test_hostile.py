"""Files from strangers: nothing in them runs, and what is wrong is named."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_runs import make
from ds_checkpoint.formats.convert import convert
from ds_checkpoint_dcp import pickles
from ds_checkpoint_dcp.metadata import read_metadata
from ds_checkpoint_dcp.pickles import read_pickle
from torch.distributed.checkpoint import filesystem

from ds_core.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two weights and a value."""
    state = {"model": {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(400)}, "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "ck")
    return tmp_path / "ck"


def edited(folder: Path, change: Callable[[dcp.metadata.Metadata], Any]) -> None:
    """The metadata, changed by torch's own classes."""
    found = dcp.FileSystemReader(folder).read_metadata()
    change(found)
    (folder / ".metadata").write_bytes(pickle.dumps(found))


def refused(folder: Path, *words: str) -> str:
    """The error of a conversion, which leaves nothing."""
    output = folder.parent / "out"
    with pytest.raises(CheckpointError) as caught:
        convert(folder, output)
    message = str(caught.value)
    assert all(word in message for word in (str(folder), *words)), message
    assert not output.exists() or not any(p.name != ".lock" for p in output.iterdir())
    return message


class Runs:
    """What would run code when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch hacked",)


def test_metadata_that_would_run_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for thing in (Runs(), {"state_dict_metadata": Runs()}):
        (folder / ".metadata").write_bytes(pickle.dumps(thing))
        refused(folder, "system", "nothing of it was run")
    assert not (folder / "hacked").exists()


def test_names_that_no_metadata_has(folder: Path) -> None:
    for name in ("builtins eval", "posix system", "torch load", "torch.storage _load_from_bytes"):
        module, _, attribute = name.partition(" ")
        text = b"\x80\x04c" + f"{module}\n{attribute}\n".encode() + b")R."
        (folder / ".metadata").write_bytes(text)
        refused(folder, f"{module}.{attribute}")


@pytest.mark.parametrize("cut", [0, 1, 100, 700])
def test_metadata_that_is_cut_off(folder: Path, cut: int) -> None:
    data = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(data[:cut])
    refused(folder, ".metadata")


def test_what_is_no_metadata(folder: Path) -> None:
    for thing in (None, {}, [1, 2], "text", 10**5000, {(1, 2): 3}):
        (folder / ".metadata").write_bytes(pickle.dumps(thing))
        refused(folder, ".metadata")


def storage(found: Any, name: str) -> Any:
    return next(i for index, i in found.storage_data.items() if index.fqn == name)


@pytest.mark.parametrize(
    "key, value, word",
    [
        ("relative_path", "../ck/__0_0.distcp", "no file beside .metadata"),
        ("relative_path", "/etc/passwd", "no file beside .metadata"),
        ("relative_path", "gone.distcp", "is missing"),
        ("offset", 1 << 40, "the file has"),
        ("offset", -1, "is at the bytes"),
        ("length", 1 << 50, "the file has"),
        ("length", 100, "zip"),
        ("transform_descriptors", ["zstd"], "was transformed"),
    ],
)
def test_places_that_cannot_be(folder: Path, key: str, value: Any, word: str) -> None:
    edited(folder, lambda found: setattr(storage(found, "model.b"), key, value))
    refused(folder, word)


def test_records_that_overlap(folder: Path) -> None:
    def same(found: Any) -> None:
        one, two = storage(found, "model.a"), storage(found, "model.b")
        two.offset, two.length = one.offset, one.length

    edited(folder, same)
    refused(folder, "overlaps with another")


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
    return dcp.metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


@pytest.mark.parametrize(
    "chunks, word",
    [
        ([((0, 0), (2, 3)), ((1, 0), (1, 3))], "is not what its boxes put together"),
        ([((0, 0), (1, 3))], "is not what its boxes put together"),
        ([((0, 0), (3, 3))], "beyond the shape"),
        ([], "has no chunks"),
    ],
    ids=["overlap", "gap", "beyond", "none"],
)
def test_chunks_that_do_not_cover_a_tensor_once(folder: Path, chunks: list[Any], word: str) -> None:
    def change(found: Any) -> None:
        entry = found.state_dict_metadata["model.a"]
        entry.chunks = [chunk(*c) for c in chunks]
        info = storage(found, "model.a")
        for number, c in enumerate(chunks[1:], 1):
            index = dcp.metadata.MetadataIndex("model.a", c[0])
            other = filesystem._StorageInfo(f"more{number}.distcp", 0, info.length)
            found.storage_data[index] = other
            (folder / other.relative_path).write_bytes(bytes(info.length))

    edited(folder, change)
    refused(folder, "/a" if "boxes" in word else "model.a", word)


def test_sizes_that_only_the_metadata_has(folder: Path) -> None:
    def change(found: Any) -> None:
        entry = found.state_dict_metadata["model.b"]
        entry.size = torch.Size([1 << 40])
        entry.chunks = [chunk((0,), (1 << 40,))]

    edited(folder, change)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    engine = make()
    with pytest.raises(CheckpointError, match="'b'|shape"):
        engine.load_checkpoint(str(folder), load_module_strict=False)
    engine.destroy()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10  # KiB


def replaced(folder: Path, name: str, data: bytes) -> None:
    """Another record in a file of its own."""
    (folder / "other.distcp").write_bytes(data)

    def change(found: Any) -> None:
        info = storage(found, name)
        info.relative_path, info.offset, info.length = "other.distcp", 0, len(data)

    edited(folder, change)


def saved(value: Any, path: Path) -> bytes:
    torch.save(value, path)
    return path.read_bytes()


def test_a_flipped_byte_of_a_record(folder: Path) -> None:
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    place = data.rindex(torch.ones(4).numpy().tobytes())
    data[place] ^= 1
    (folder / "__0_0.distcp").write_bytes(bytes(data))
    refused(folder, "'model.b'", "is not as it was written")


def test_a_compressed_record(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(saved(torch.ones(400), tmp_path / "x"))
    with (
        zipfile.ZipFile(tmp_path / "plain") as old,
        zipfile.ZipFile(tmp_path / "packed", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    replaced(folder, "model.b", (tmp_path / "packed").read_bytes())
    refused(folder, "is compressed")


@pytest.mark.parametrize(
    "value, word",
    [
        (torch.zeros(1).expand(400), "save its clone"),
        (torch.ones(500)[:400], "save its clone"),
        (torch.ones(399), "shape"),
        (torch.ones(400, dtype=torch.float64), "float64"),
        (Runs(), "system"),
        ({"a": 1}, "not a plain tensor"),
    ],
    ids=["stride 0", "view", "short", "dtype", "code", "dict"],
)
def test_records_that_are_another_tensor(
    folder: Path, tmp_path: Path, value: Any, word: str
) -> None:
    replaced(folder, "model.b", saved(value, tmp_path / "x"))
    refused(folder, "'model.b'", word)


def test_a_weight_in_another_order_is_read(folder: Path, tmp_path: Path) -> None:
    turned = torch.arange(6.0).view(3, 2).t()
    replaced(folder, "model.a", saved(turned, tmp_path / "x"))
    convert(folder, tmp_path / "out", "safetensors")
    from safetensors.torch import load_file

    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["a"], turned)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_links_and_what_is_no_file(folder: Path, name: str) -> None:
    shutil.move(folder / name, folder.parent / "elsewhere")
    (folder / name).symlink_to(folder.parent / "elsewhere")
    refused(folder, name, "it is a link")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    if name != ".metadata":  # no file of that name: no such checkpoint
        refused(folder, name, "not a regular file")


def test_a_file_that_is_cut_off(folder: Path) -> None:
    os.truncate(folder / "__0_0.distcp", 2000)
    refused(folder, "__0_0.distcp", "the file has 2000")


def test_names_that_are_paths(tmp_path: Path) -> None:
    dcp.save({"model": {"../../evil": torch.ones(2)}}, checkpoint_id=tmp_path / "ck")
    with pytest.raises(CheckpointError, match="is the path of a file"):
        convert(tmp_path / "ck", tmp_path / "out", "deepspeed")


def test_a_run_is_not_changed_by_what_is_refused(folder: Path) -> None:
    engine = make()
    before = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    data[data.rindex(torch.ones(4).numpy().tobytes())] ^= 1
    (folder / "__0_0.distcp").write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="not as it was written"):
        engine.load_checkpoint(str(folder), load_module_strict=False)
    for name, param in engine.module.named_parameters():
        assert torch.equal(before[name], param)
    engine.destroy()


# -- the reader of pickles -------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(6))
def test_plain_values_are_read_as_python_reads_them(protocol: int) -> None:
    shared = [1]
    value = {
        "a": [1, -2, 2**40, 2.5, None, True, "text", b"bytes"],
        "b": (1, (2, 3), ()),
        "c": {"d": {1, 2}, 3: shared, 4: shared},
        "e": 10**30,
    }
    if protocol < 4:  # bytes and sets are calls there
        value = {"a": [1, -2, 2**40, 2.5, None, True, "text"], "b": ((1, 2, 3, 4), [])}
    assert read_pickle(pickle.dumps(value, protocol), "it") == value


def test_a_small_pickle_of_very_many_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "_MOST_MADE", 1000)
    with pytest.raises(CheckpointError, match="makes more than 1000 values"):
        read_pickle(b"\x80\x02(" + b"]" * 1000 + b"t.", "it")


@pytest.mark.parametrize(
    "data",
    [b"", b".", b"\x80\x04", b"(", b"e.", b"0.", b"a.", b"s.", b"b.", b"h\x05.", b"N}sK\x01.", b"R.",
     b"Q.", b"\x93.", b"K\x01K\x02.", b"c__main__\nX\n.", b"\x82\x01.", b"o.", b"Pid\n."],
)  # fmt: skip
def test_pickles_that_make_no_sense(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="^it "):
        read_pickle(data, "it", lambda name: False)


def test_what_metadata_of_a_whole_checkpoint_says(folder: Path) -> None:
    found = read_metadata(folder)
    assert {n: t.shape for n, t in found.tensors.items()} == {"model.a": (2, 3), "model.b": (400,)}
    assert found.values == ("step",) and found.paths["model.a"] == ("model", "a")
