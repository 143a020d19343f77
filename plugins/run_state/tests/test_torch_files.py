"""Damaged and hostile files of torch.save: a clear error each, and never wrong values."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_run_state.torch_files import read_torch_file

from ds_core.errors import CheckpointError

WEIGHTS = {"a.weight": torch.arange(1000.0), "b.weight": torch.ones(3, 2)}


def saved(folder: Path, what: Any = WEIGHTS) -> Path:
    torch.save(what, folder / "x.pt")
    return folder / "x.pt"


def rezipped(
    path: Path, change: Callable[[str, bytes], bytes] = lambda _, data: data, **options: Any
) -> None:
    """The same records, in a zip file whose checksums are right."""
    with zipfile.ZipFile(path) as archive:
        records = {
            info.filename: change(info.filename, archive.read(info)) for info in archive.infolist()
        }
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, data in records.items():
            archive.writestr(name, data)


def test_whole_files_are_read(tmp_path: Path) -> None:
    tied = torch.randn(8, 4)
    view = torch.arange(20.0)[5:9]
    what = {
        **WEIGHTS,
        "tied": tied,
        "alias": tied,
        "view": view,
        "empty": torch.empty(0),
        "more": [1, {"k": (2.5, None)}],
    }
    found = read_torch_file(saved(tmp_path, what))
    assert found["more"] == what["more"] and found.keys() == what.keys()
    assert all(torch.equal(found[k], w) for k, w in what.items() if isinstance(w, torch.Tensor))


def test_every_flipped_byte_of_values_is_found(tmp_path: Path) -> None:
    whole = saved(tmp_path).read_bytes()
    first = whole.index(WEIGHTS["a.weight"].numpy().tobytes())
    for place in (first, first + 1777, first + 3999):
        (tmp_path / "x.pt").write_bytes(
            whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        )
        with pytest.raises(
            CheckpointError, match=r"x\.pt: record '.*/data/0' is not as it was written"
        ):
            read_torch_file(tmp_path / "x.pt")


def test_no_damage_gives_other_values(tmp_path: Path) -> None:
    """Flips and cuts all over the file: an error of ours, or (in padding) the right values."""
    whole = saved(tmp_path).read_bytes()
    damaged = [whole[:n] for n in range(0, len(whole), 211)]
    damaged += [
        whole[:n] + bytes([whole[n] ^ 0x55]) + whole[n + 1 :] for n in range(0, len(whole), 37)
    ]
    refused = 0
    for data in damaged:
        (tmp_path / "x.pt").write_bytes(data)
        try:
            found = read_torch_file(tmp_path / "x.pt")
        except CheckpointError as error:
            refused += "x.pt" in str(error)
        else:
            assert found.keys() == WEIGHTS.keys() and all(
                torch.equal(found[n], w) for n, w in WEIGHTS.items()
            )
    assert refused > len(damaged) // 2


def test_compressed_records(tmp_path: Path) -> None:
    path = saved(tmp_path)
    rezipped(path, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match=r"record '.*' is compressed"):
        read_torch_file(path)


def test_a_record_of_another_size(tmp_path: Path) -> None:
    """torch would take the bytes of what comes behind the record."""
    path = saved(tmp_path)
    rezipped(path, lambda name, data: data[:-400] if name.endswith("data/0") else data)
    with pytest.raises(CheckpointError, match=r"x\.pt.*(data/0|bytes)"):
        read_torch_file(path)


def test_a_record_twice(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("x/data/0", b"\0" * 4000)
    with pytest.raises(CheckpointError, match="twice"):
        read_torch_file(path)


def test_tensors_that_claim_more_than_is_stored(tmp_path: Path) -> None:
    for size in (2**28, 2**40):
        path = saved(tmp_path, {"in": {"w": torch.zeros(1).expand(size)}})
        with pytest.raises(
            CheckpointError, match=r"x\.pt: tensor in/w claims \d+ elements, and 4 bytes are stored"
        ):
            read_torch_file(path)
    one = torch.zeros(1 << 18)
    path = saved(tmp_path, {str(n): one for n in range(1000)})
    with pytest.raises(CheckpointError, match=r"x\.pt: its tensors claim \d+ bytes"):
        read_torch_file(path)


def test_containers_that_unfold_without_end(tmp_path: Path) -> None:
    nested: list[Any] = []
    for _ in range(64):
        nested = [nested, nested]
    with pytest.raises(CheckpointError, match=r"x\.pt describes \d+ values"):
        read_torch_file(saved(tmp_path, nested))
    own: list[Any] = []
    own.append(own)
    with pytest.raises(CheckpointError, match=r"x\.pt: /0 contains itself"):
        read_torch_file(saved(tmp_path, own))


def test_a_pickle_that_inflates(tmp_path: Path) -> None:
    """64 KiB in the file, 64 MiB once unpacked: refused by its kind, before it is unpacked."""
    with zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"\x80\x02" + b"0" * (1 << 26))
    with pytest.raises(CheckpointError, match=r"x\.pt: record 'x/data\.pkl' is compressed"):
        read_torch_file(tmp_path / "x.pt")
    for pickled, word in (
        (b"]" * (1 << 23), "makes about 8388608 objects"),
        (b"0" * (1 << 26), "are the most"),
    ):
        with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
            archive.writestr("x/DATA.pkl", b"\x80\x02" + pickled)
        with pytest.raises(CheckpointError, match=rf"x\.pt: record 'x/DATA\.pkl' .*{word}"):
            read_torch_file(tmp_path / "x.pt")


class Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(Path(__file__).parent / "made"),)


def test_code_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_torch_file(saved(tmp_path, Hostile()))
    assert "posix.mkdir" in str(caught.value) and "weights_only" not in str(caught.value)
    assert not (Path(__file__).parent / "made").exists()


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(saved(tmp_path))
    (tmp_path / "text").write_text("text")
    for name, word in (
        ("fifo", "not a regular file"),
        ("link", "link"),
        ("text", "torch.save"),
        (".", "regular file"),
    ):
        with pytest.raises(CheckpointError, match=word):
            read_torch_file(tmp_path / name)
    assert torch.equal(
        read_torch_file(tmp_path / "link", links=True)["a.weight"], WEIGHTS["a.weight"]
    )
