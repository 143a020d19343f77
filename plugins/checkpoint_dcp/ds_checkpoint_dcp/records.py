"""The records of ``*.distcp`` files: each is a file of `torch.save` of its own, at an offset.

A record is looked at before anything is made of it: its zip file (nothing is compressed, every
checksum holds), what its pickle names (a tensor of a plain storage), and that the tensor is all
that is stored. Its values are then read by ranges.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from ds_checkpoint.folder.tensorfile import as_bytes
from ds_run_state.opening import open_plain
from ds_run_state.torch_files import DAMAGED, check_zip
from torch import Tensor

from ds_checkpoint_dcp.pickles import Global, Made, Outside, read_pickle
from ds_core.errors import CheckpointError

_STORAGES: dict[str, torch.dtype] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
}
_REBUILD = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
_PARAMETER = "torch._utils._rebuild_parameter"
_NAMES = frozenset(
    (
        *_REBUILD,
        _PARAMETER,
        "collections.OrderedDict",
        "torch.storage.UntypedStorage",
        "torch.Size",
        *(f"torch.{name}" for name in _STORAGES),
        *(str(dtype) for dtype in (*_STORAGES.values(), torch.uint16, torch.uint32, torch.uint64)),
        *(str(dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)),
    )
)
_MOST_VALUE = 1 << 26


class DataFile:
    """A file of records, opened once; read by several, one after the other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            descriptor, self.size = open_plain(path)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing; copy all files of the checkpoint") from None
        self._file = open(descriptor, "rb", buffering=0)  # noqa: SIM115

    def read_into(self, place: int, view: memoryview) -> None:
        """Fill `view` from byte `place` on."""
        self._file.seek(place)
        while view:
            count = self._file.readinto(view[: 1 << 28])
            if not count:
                raise CheckpointError(f"{self.path} ends too early; {DAMAGED}")
            view = view[count:]

    def close(self) -> None:
        """Close it."""
        self._file.close()


class _Window(io.RawIOBase):
    """A stretch of a file, as a file."""

    def __init__(self, file: DataFile, offset: int, length: int) -> None:
        self._source = file
        self._offset = offset
        self._length = length
        self._place = 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """See `io.RawIOBase`."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise ValueError("before the beginning")
        self._place = start + offset
        return self._place

    def tell(self) -> int:
        """See `io.RawIOBase`."""
        return self._place

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase`."""
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._place))
        self._source.read_into(self._offset + self._place, view[:count])
        self._place += count
        return count


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor's values are: `place` is the byte of its storage's first element."""

    place: int
    dtype: torch.dtype
    first: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def in_order(self) -> bool:
        """Whether elements follow each other as they are counted."""
        step = 1
        for n, s in zip(reversed(self.size), reversed(self.stride), strict=True):
            if n != 1 and s != step:
                return False
            step *= n
        return True


class Record:
    """One record, of the tensor or value `name`."""

    def __init__(self, file: DataFile, offset: int, length: int, name: str) -> None:
        self.name = name
        self.what = f"{file.path}: the record of {name!r}"
        self._file = file
        self._offset = offset
        self._length = length
        if offset + length > file.size:
            raise CheckpointError(
                f"{self.what} is to end at byte {offset + length}, and the file has {file.size}; "
                f"{DAMAGED}"
            )

    def _open(self) -> tuple[bytes, dict[str, tuple[int, int]]]:
        """(its pickle, the begin and size of each storage)."""
        window = io.BufferedReader(_Window(self._file, self._offset, self._length))
        records = check_zip(self.what, window)
        with zipfile.ZipFile(window) as archive:
            names = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if "data.pkl" not in names:
                raise CheckpointError(f"{self.what} has no data.pkl; {DAMAGED}")
            if "byteorder" in names and archive.read(names["byteorder"]) != b"little":
                raise CheckpointError(f"{self.what} was written on a machine of another byte order")
            pickle = archive.read(names["data.pkl"])
        storages = {r.name.partition("/")[2]: (self._offset + r.offset, r.size) for r in records}
        return pickle, storages

    @cached_property
    def _tensor(self) -> _Stored:
        pickle, storages = self._open()
        made = read_pickle(pickle, self.what, _NAMES.__contains__)
        if isinstance(made, Made) and made.kind.name == _PARAMETER and made.args:
            made = made.args[0]
        try:
            return self._stored(made, storages)
        except (IndexError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{self.what} is not a plain tensor ({type(error).__name__}: {error}); {DAMAGED}"
            ) from error

    def _stored(self, made: Made, storages: dict[str, tuple[int, int]]) -> _Stored:
        """CheckpointError unless the tensor is all that its storage holds, each element once."""
        if made.kind.name not in _REBUILD:
            raise TypeError(made.kind.name)
        outside, first, size, stride = made.args[:4]
        tag, storage, key, _, count = outside.key
        if tag != "storage" or not isinstance(storage, Global):
            raise TypeError("its storage is no storage")
        kind = storage.name.removeprefix("torch.")
        dtype = _dtype(made.args[6]) if kind == "storage.UntypedStorage" else _STORAGES[kind]
        place, stored = storages.get(f"data/{key}", (0, 0))
        size = tuple(size.args[0]) if isinstance(size, Made) else tuple(size)
        for number in (first, count, *size, *stride):
            if type(number) is not int or not 0 <= number < 1 << 62:
                raise ValueError(f"it has the number {number!r}")
        if len(size) != len(stride) or len(size) > 64:
            raise ValueError("its sizes and strides differ in number")
        numel = math.prod(size)
        if kind == "storage.UntypedStorage":
            count, odd = divmod(count, dtype.itemsize)
            stored += bool(odd)
        if stored != count * dtype.itemsize or len(storages) != (stored > 0):
            raise CheckpointError(
                f"{self.what} says it stores {count} elements, and {stored} bytes are stored; "
                f"{DAMAGED}"
            )
        if numel != count or first != 0 or not _each_once(size, stride):
            raise CheckpointError(
                f"{self.what} claims {numel} elements of {count} that are stored (strides "
                f"{tuple(stride)}); save its clone()"
            )
        return _Stored(place, dtype, first, size, tuple(stride))

    def check(self, dtype: torch.dtype, size: Sequence[int]) -> None:
        """CheckpointError unless it is whole, and a tensor of that dtype and size."""
        found = self._tensor
        if found.dtype != dtype or found.size != tuple(size):
            raise CheckpointError(
                f"{self.what} is a tensor of {found.dtype} and shape {found.size}, the metadata says "
                f"{dtype} and {tuple(size)}; {DAMAGED}"
            )

    def reader(self, dtype: torch.dtype, size: Sequence[int]) -> Callable[[int, Tensor], None]:
        """What fills a flat tensor from an element on, once the record was checked."""

        def read(start: int, out: Tensor) -> None:
            self.check(dtype, size)
            found = self._tensor
            if found.in_order:
                place = found.place + start * dtype.itemsize
                self._file.read_into(place, as_bytes(out))
                return
            # Dense, but in another order (channels_last, a transposed weight): all of it is read.
            whole = torch.empty(math.prod(found.size), dtype=dtype)
            self._file.read_into(found.place, as_bytes(whole))
            ordered = whole.as_strided(found.size, found.stride).contiguous().view(-1)
            out.copy_(ordered[start : start + out.numel()])

        return read

    def value(self) -> Any:
        """The plain value that it holds; classes and tensors in it stay what `read_pickle` gives."""
        if self._length > _MOST_VALUE:
            raise CheckpointError(
                f"{self.what} has {self._length} bytes; {_MOST_VALUE} are the most"
            )
        pickle, storages = self._open()
        return _with_tensors(read_pickle(pickle, self.what), self, storages)

    def small(self, made: Made, storages: dict[str, tuple[int, int]]) -> Tensor:
        """A tensor within a value."""
        used = made.args[0].key[2]
        found = self._stored(made, {k: v for k, v in storages.items() if k == f"data/{used}"})
        whole = torch.empty(math.prod(found.size), dtype=found.dtype)
        self._file.read_into(found.place, as_bytes(whole))
        return whole.as_strided(found.size, found.stride).clone()


def _dtype(value: Any) -> torch.dtype:
    """The dtype of that name."""
    found = getattr(torch, value.name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"dtype {value.name}")
    return found


def _each_once(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether strides go through as many elements as there are, each once."""
    step = 1
    for s, n in sorted((s, n) for s, n in zip(stride, size, strict=True) if n != 1):
        if s != step and 0 not in size:
            return False
        step *= n
    return True


class NotPlain(Exception):
    """A value of a class that has no meaning here."""


def _with_tensors(value: Any, record: Record, storages: dict[str, tuple[int, int]]) -> Any:
    return plain(value, lambda made: record.small(made, storages))


_DEEPEST = 50
_MOST_NODES = 1 << 20


def plain(value: Any, tensor: Callable[[Made], Tensor] | None = None) -> Any:
    """`value` without classes: None, numbers, str, lists, tuples, dicts and tensors; what is of any
    other class becomes a `NotPlain`, which says which.

    tensor: makes a tensor of what would rebuild one.
    """
    budget = [_MOST_NODES]

    def of(value: Any, depth: int) -> Any:
        budget[0] -= 1
        if budget[0] < 0 or depth > _DEEPEST:
            raise CheckpointError("a value is nested too deep, or of too many values")
        if isinstance(value, dict):
            return {k: of(v, depth + 1) for k, v in value.items() if isinstance(k, str | int)}
        if isinstance(value, list | tuple):
            return type(value)(of(v, depth + 1) for v in value)
        if isinstance(value, Made):
            return of_class(value, depth)
        if isinstance(value, Global):
            return NotPlain(value.name)
        if isinstance(value, set | frozenset | bytes | Outside):
            return NotPlain(type(value).__name__)
        return value

    def of_class(made: Made, depth: int) -> Any:
        name = made.kind.name
        if name in _REBUILD and tensor is not None:
            try:
                return tensor(made)
            except (IndexError, KeyError, TypeError, ValueError, AttributeError):
                return NotPlain(name)
        if name in ("collections.OrderedDict", "collections.defaultdict"):
            return of(dict(made.items), depth + 1)
        if name == "torch.Size" and made.args:
            return of(tuple(made.args[0]), depth + 1)
        # A command line's arguments, which programs keep in their checkpoints.
        if name in ("argparse.Namespace", "types.SimpleNamespace") and isinstance(made.state, dict):
            return of(made.state, depth + 1)
        return NotPlain(name)

    return of(value, 0)
