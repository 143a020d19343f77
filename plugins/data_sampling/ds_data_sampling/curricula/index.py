"""The files of an analysis: samples in order of a metric.

They are memory-mapped, and nothing in them is executed.

Ours are two arrays in numpy's format, of one entry per sample: the samples, easiest first, and
their values. Those of DeepSpeed's analyzer are read as well: ``.bin`` and ``.idx``, with one row of
samples per value.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ds_core.errors import UsageError

Array = np.ndarray[Any, np.dtype[Any]]

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<QBQQ")  # version, element type, rows, documents
CHUNK = 1 << 22  # numbers that are checked at once
TYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "u2", 7: "u4", 8: "u8"}


@dataclass(frozen=True)
class MetricIndex:
    """Samples in order of a metric.

    samples: their indices, easiest first.
    values: increasing values of the metric.
    ends: how many samples have a value of at most the one at this place of `values`; None where
        `values` has an entry for each sample.
    """

    samples: Array
    values: Array | None = None
    ends: Array | None = None

    def up_to_value(self, value: float) -> int:
        """How many samples have a metric of at most `value`."""
        assert self.values is not None
        place = int(np.searchsorted(self.values, value, side="right"))
        return place if self.ends is None or not place else int(self.ends[place - 1])

    def up_to_percentile(self, percent: float) -> int:
        """How many samples are the easiest `percent` of all, rounded down."""
        return int(len(self.samples) * percent // 100)


def read_index(samples: str, metric: str | None, size: int | None = None) -> MetricIndex:
    """The index in the files `samples` and `metric` for a dataset of `size` samples (None: of
    any).

    metric: None where only percentiles are asked for. Both files are read once, to check them.

    Raises UsageError for files that are missing, damaged, or of another dataset.
    """
    if not _is_rows(samples):
        found = MetricIndex(read_array(samples), read_array(metric) if metric else None)
        if found.values is not None and len(found.values) != len(found.samples):
            raise UsageError(
                f"{samples} has {len(found.samples)} samples and {metric} has {len(found.values)} "
                "values"
            )
    else:
        indices, sizes = read_rows(samples)
        values = None
        ends = None
        if metric is not None:
            values = read_rows(metric)[0]
            ends = np.cumsum(sizes)
            if len(values) != len(ends):
                raise UsageError(
                    f"{samples} has {len(ends)} rows and {metric} has {len(values)} values"
                )
        found = MetricIndex(indices, values, ends)
    if size is not None and len(found.samples) != size:
        raise UsageError(
            f"{samples} is of a dataset of {len(found.samples)} samples; the training data has "
            f"{size}"
        )
    _check_samples(samples, found.samples)
    if found.values is not None:
        _check_values(str(metric), found.values)
    return found


def _check_samples(path: str, samples: Array) -> None:
    """UsageError unless each number of a sample occurs once: another one is drawn twice, or is
    none.
    """
    count = len(samples)
    if samples.dtype.kind not in "iu":
        raise UsageError(f"{path} has {samples.dtype}, and the numbers of samples are whole")
    seen = np.zeros(count, bool)
    for begin in range(0, count, CHUNK):
        part = samples[begin : begin + CHUNK]
        bad = (part < 0) | (part >= count)
        if bad.any():
            found = part[bad][0]
            raise UsageError(
                f"{path} names sample {found}; its {count} samples are 0 to {count - 1}"
            )
        seen[part] = True
    if not seen.all():  # as many numbers as samples: one is missing where another is there twice
        missing = int(np.flatnonzero(~seen)[0])
        raise UsageError(f"{path} lacks sample {missing}, and names another one twice")


def _check_values(path: str, values: Array) -> None:
    """UsageError unless values are finite and never fall, as they are searched by halves."""
    for begin in range(0, len(values), CHUNK):
        part = values[begin : begin + CHUNK + 1]  # and the next part's first one
        if part.dtype.kind == "f" and not np.isfinite(part).all():
            at = begin + int(np.flatnonzero(~np.isfinite(part))[0])
            raise UsageError(f"{path} has the value {values[at]} at {at}, which is no measure")
        falls = part[1:] < part[:-1]
        if falls.any():
            at = begin + int(np.flatnonzero(falls)[0])
            raise UsageError(
                f"{path} is not in order: {values[at]} at {at} comes before {values[at + 1]}; "
                "`dscore curriculum analyze` writes it in order"
            )


def read_array(path: str | Path) -> Array:
    """A memory-mapped array with one dimension; ``.npy`` may be left out of the path."""
    found = Path(path)
    if not found.is_file():
        found = found.with_name(f"{found.name}.npy")
    try:
        # an array, and no zip file of them
        array: Array = np.lib.format.open_memmap(found, mode="r")
    except FileNotFoundError:
        raise UsageError(
            f"{path}: there is no such file; `dscore curriculum analyze` writes it"
        ) from None
    except (OSError, ValueError, EOFError, OverflowError) as error:
        raise UsageError(f"{path} is no array that numpy can read: {error}") from None
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise UsageError(
            f"{path} has an array of {array.dtype} with {array.ndim} dimensions; numbers in one "
            "are needed"
        )
    return array


def read_rows(path: str) -> tuple[Array, Array]:
    """All elements of a file of rows that DeepSpeed or Megatron wrote, row after row, and the
    length of each row.

    path: without ``.idx`` and ``.bin``.

    Raises UsageError for files that are missing or damaged.
    """
    table = Path(f"{path}.idx")
    data = Path(f"{path}.bin")
    for file in (table, data):
        if not file.is_file():
            raise UsageError(f"{file}: there is no such file")
    start = len(MAGIC) + HEADER.size
    with table.open("rb") as stream:
        head = stream.read(start)
    if not head.startswith(MAGIC) or len(head) < start:
        raise UsageError(f"{table} does not begin as an index of rows does")
    version, kind, rows, _ = HEADER.unpack(head[len(MAGIC) :])
    if version != 1 or kind not in TYPES:
        raise UsageError(
            f"{table} has version {version} and elements of type {kind}; 1 and 1 to 8 can be read"
        )
    if table.stat().st_size < start + rows * 12:  # a length and a position for each row
        raise UsageError(f"{table} ends in the middle of {rows} rows")
    dtype = np.dtype(TYPES[kind])
    sizes: Array = (
        np.memmap(table, "<i4", "r", offset=start, shape=(rows,)) if rows else np.empty(0, "<i4")
    )
    if rows and int(sizes.min()) < 0:
        row = int(np.argmax(sizes < 0))
        raise UsageError(f"{table}: row {row} has {int(sizes[row])} elements; the file is damaged")
    total = int(sizes.sum(dtype=np.int64))
    if data.stat().st_size != total * dtype.itemsize:
        raise UsageError(
            f"{data} has {data.stat().st_size} bytes; {table.name} says {total * dtype.itemsize}"
        )
    elements: Array = np.memmap(data, dtype.newbyteorder("<"), "r") if total else np.empty(0, dtype)
    return elements, sizes


def _is_rows(path: str) -> bool:
    return Path(f"{path}.idx").is_file() and not Path(path).is_file()
