"""Files of an analysis, ours and DeepSpeed's, and damaged ones."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from ds_data_sampling.curricula.index import read_array, read_index, read_rows

from ds_core.errors import UsageError


def write_rows(path: Path, rows: list[list[int]], kind: int = 6, dtype: str = "<u2") -> str:
    """As DeepSpeed's builder writes them: lengths and positions of rows, then documents; and the
    elements.
    """
    sizes = np.array([len(row) for row in rows], "<i4")
    places = (np.cumsum(sizes) - sizes).astype("<i8") * np.dtype(dtype).itemsize
    documents = np.array([0, len(rows)], "<i8")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, kind, len(rows), len(documents))
    path.with_suffix(".idx").write_bytes(
        head + sizes.tobytes() + places.tobytes() + documents.tobytes()
    )
    path.with_suffix(".bin").write_bytes(
        np.concatenate([np.array(row, dtype) for row in rows]).tobytes()
    )
    return str(path)


def test_rows_of_deepspeed(tmp_path: Path) -> None:
    samples = write_rows(tmp_path / "samples", [[4, 0], [], [2], [1, 3, 5]])
    metric = write_rows(tmp_path / "metric", [[8], [9], [16], [40]], kind=1, dtype="u1")
    index = read_index(samples, metric, 6)
    assert index.samples.tolist() == [4, 0, 2, 1, 3, 5]
    assert [index.up_to_value(v) for v in (7, 8, 15, 16, 39, 40, 99)] == [0, 2, 2, 3, 3, 6, 6]
    assert [index.up_to_percentile(p) for p in (0, 17, 50, 99, 100)] == [0, 1, 3, 5, 6]


def test_arrays(tmp_path: Path) -> None:
    np.save(tmp_path / "samples.npy", np.array([4, 0, 2, 1, 3, 5], np.uint32))
    np.save(tmp_path / "metric.npy", np.array([8.0, 8.0, 16.5, 40, 40, 40]))
    index = read_index(str(tmp_path / "samples.npy"), str(tmp_path / "metric"), 6)
    assert [index.up_to_value(v) for v in (7, 8, 16, 17, 40)] == [0, 2, 2, 3, 6]
    assert read_index(str(tmp_path / "samples"), None, 6).values is None


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    def said(match: str, samples: str, metric: str | None = None, size: int = 3) -> None:
        with pytest.raises(UsageError, match=match):
            read_index(samples, metric, size)

    said("there is no such file; `dscore curriculum analyze` writes it", str(tmp_path / "none"))
    (tmp_path / "text.npy").write_text("1 2 3")
    said("is no array that numpy can read", str(tmp_path / "text.npy"))
    np.save(tmp_path / "objects.npy", np.array([1, "a"], object), allow_pickle=True)
    said("is no array that numpy can read", str(tmp_path / "objects.npy"))
    np.save(tmp_path / "square.npy", np.zeros((2, 2)))
    said("with 2 dimensions", str(tmp_path / "square.npy"))
    np.save(tmp_path / "three.npy", np.arange(3))
    np.save(tmp_path / "two.npy", np.arange(2))
    said(
        "has 3 samples and .* has 2 values", str(tmp_path / "three.npy"), str(tmp_path / "two.npy")
    )
    said("3 samples; the training data has 4", str(tmp_path / "three.npy"), size=4)

    rows = write_rows(tmp_path / "rows", [[1, 2], [0]])
    said("has 2 rows and .* has 1 values", rows, write_rows(tmp_path / "one", [[1]]))
    table = tmp_path / "rows.idx"
    data = tmp_path / "rows.bin"
    whole = table.read_bytes()
    data.write_bytes(data.read_bytes()[:-1])
    said("has 5 bytes; rows.idx says 6", rows)
    table.write_bytes(whole.replace(struct.pack("<2i", 2, 1), struct.pack("<2i", 4, -1)))
    data.write_bytes(bytes(6))
    said("row 1 has -1 elements", rows)
    table.write_bytes(whole[:50])
    said("ends in the middle of 2 rows", rows)
    table.write_bytes(whole.replace(b"\x01", b"\x02", 1))
    said("has version 2", rows)
    table.write_bytes(b"TNTIDX\x00\x00")
    said("does not begin as an index of rows does", rows)
    data.unlink()
    with pytest.raises(UsageError, match=r"rows\.bin: there is no such file"):
        read_rows(rows)


@pytest.mark.parametrize(
    ("samples", "values", "match"),
    [
        (
            [0, 2, 1_000_000_000],
            [1, 2, 3],
            "samples.npy names sample 1000000000; its 3 samples are 0 to 2",
        ),
        ([0, -7, 2], [1, 2, 3], "samples.npy names sample -7"),
        ([0, 2, 2], [1, 2, 3], "samples.npy lacks sample 1, and names another one twice"),
        ([0.0, 1.5, 2.0], [1, 2, 3], "samples.npy has float64"),
        ([0, 1, 2], [3, 1, 2], "values.npy is not in order: 3 at 0 comes before 1"),
        ([0, 1, 2], [1.0, 2.0, float("nan")], "values.npy has the value nan at 2"),
        ([0, 1, 2], [1.0, 2.0, float("inf")], "values.npy has the value inf at 2"),
    ],
)
def test_numbers_that_cannot_be_an_index(
    tmp_path: Path,
    samples: list[int],
    values: list[int],
    match: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    np.save(tmp_path / "samples.npy", np.array(samples))
    np.save(tmp_path / "values.npy", np.array(values))
    for chunk in (1, 1 << 22):
        monkeypatch.setattr("ds_data_sampling.curricula.index.CHUNK", chunk)
        with pytest.raises(UsageError, match=match):
            read_index(str(tmp_path / "samples.npy"), str(tmp_path / "values.npy"), 3)


def test_files_that_are_no_array(tmp_path: Path) -> None:
    (tmp_path / "empty.npy").touch()
    np.savez(tmp_path / "zip.npz", np.arange(3))
    (tmp_path / "zip.npz").rename(tmp_path / "zip.npy")
    os.mkfifo(tmp_path / "fifo.npy")
    np.save(tmp_path / "cut.npy", np.arange(3))
    os.truncate(tmp_path / "cut.npy", 140)
    said = {
        "empty": "can read",
        "zip": "can read",
        "cut": "can read",
        "fifo": "there is no such file",
    }
    for name, match in said.items():
        with pytest.raises(UsageError, match=rf"{name}\.npy.*{match}"):
            read_array(tmp_path / f"{name}.npy")
