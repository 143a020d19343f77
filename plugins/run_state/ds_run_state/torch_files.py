"""Reading files of `torch.save` from untrusted sources: damage is found, no code runs.

[Note: what torch does not check] Such a file is a zip file: ``data.pkl`` describes tensors, and
``data/0``, ``data/1`` and so on are their bytes. `torch.load` compares no checksum. Where it maps a
file it takes compressed bytes for values, and as many bytes as ``data.pkl`` says from where a
record begins, be they the next record's. So the zip file is looked at first, and afterwards what
was loaded. Bytes are streamed for that, so memory does not grow with the file.
"""

from __future__ import annotations

import itertools
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ds_core.errors import CheckpointError
from ds_run_state.opening import open_plain

DAMAGED = "the file is damaged; copy or save it again"
_BLOCK = 1 << 20
_MAX_PICKLE = 1 << 26  # it holds names and numbers: a hundred bytes for each tensor
_MAX_OBJECTS = 1 << 22
# lists, dicts, tuples, sets, calls
_MAKES = tuple(bytes([code]) for code in b"]})(R\x85\x86\x87\x8f")
_MAX_VALUES = 1 << 24
_MAX_REPEATS = 64  # tied weights: so many times the file's size may its tensors have together
_LOCAL_HEADER = 30
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    EOFError,
    OSError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    struct.error,
)

StandIn = tuple[Callable[..., Any], str]
"""What is made in place of a class, and the class' name."""


@dataclass(frozen=True, slots=True, order=True)
class StorageRecord:
    """A stretch of the file that holds a storage."""

    offset: int
    size: int
    name: str


def read_torch_file(path: Path, *, stand_ins: Sequence[StandIn] = (), links: bool = False) -> Any:
    """What `torch.save` wrote to `path`, on the host; tensors are mapped, not read.

    stand_ins: (callable, name of a class) for classes that the file may name; the callable is
        called instead.
    links: whether `path` may be a link.

    Files of before torch 1.6 have no checksums: their tensors are read, and only their sizes are
    checked.

    Raises CheckpointError, which names the file and the record or tensor, for a file that is
    damaged, is no regular one, names another class, or whose tensors claim more elements than it
    stores; FileNotFoundError without a file.
    """
    with open(open_plain(path, links=links)[0], "rb") as file:
        begin = file.read(2)
        if not begin.startswith((b"PK", b"\x80")):
            raise CheckpointError(f"{path} is not a file that torch.save wrote")
        zipped = begin == b"PK"
        records = check_zip(path, file) if zipped else []
        stored = sum(record.size for record in records) if zipped else file.seek(0, 2)
    storages: list[tuple[int, int]] = []

    def place(storage: Any, _: str) -> Any:
        storages.append((storage.data_ptr(), storage.nbytes()))
        return storage

    try:
        with torch.serialization.safe_globals(list(stand_ins)):
            found = torch.load(path, map_location=place, mmap=zipped, weights_only=True)
    except Exception as error:  # the loader raises what it comes upon
        raise CheckpointError(f"{path} {_reason(error)}") from error
    if zipped:
        _check_storages(path, storages, records)
    _check_claims(path, found, _MAX_REPEATS * stored + _BLOCK)
    return found


def _reason(error: Exception) -> str:
    """What the loader says, without its advice to run the code."""
    if str(error).startswith("Weights only load failed") and error.__context__ is not None:
        why = str(error.__context__).split(". Please")[0]
        return f"cannot be read without running code in it: {why}"
    first = str(error).strip().split("\n", 1)[0]
    return f"cannot be read: {type(error).__name__} {first}; {DAMAGED}"


# -- the zip file ---------------------------------------------------------------------------------


def check_zip(path: Path | str, file: BinaryIO) -> list[StorageRecord]:
    """The records that hold storages, once every record was compared with its checksum.

    path: names the file in errors.

    Raises CheckpointError for a record that is compressed, damaged or there twice.
    """
    try:
        archive = zipfile.ZipFile(file)
    except _ZIP_ERRORS as error:
        raise CheckpointError(
            f"{path} cannot be read as a zip file ({error}); {DAMAGED}"
        ) from error
    found = []
    names = set()
    with archive:
        for info in archive.infolist():
            what = f"{path}: record {info.filename!r}"
            name = info.filename.lower()  # torch finds a record whatever the case of its name
            if name in names:
                raise CheckpointError(f"{what} is there twice; {DAMAGED}")
            names.add(name)
            begin = _check_record(archive, file, info, what)
            kind = name.partition("/")[2]
            if kind == "data.pkl":
                _check_pickle(archive, info, what)
            if kind.startswith("data/") and info.file_size:
                found.append(StorageRecord(begin, info.file_size, info.filename))
    return sorted(found)


def _check_record(
    archive: zipfile.ZipFile, file: BinaryIO, info: zipfile.ZipInfo, what: str
) -> int:
    """Where a record begins, once it was compared with its checksum.

    A compressed one is refused before any of it is unpacked: torch compresses none.
    """
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        raise CheckpointError(
            f"{what} is compressed, as torch.save never does; save the file again with torch.save"
        )
    try:
        archive.open(info).close()  # compares the record's own header with the file's list
        begin = _begin(file, info)
        if _checksum(file, begin, info.file_size) != info.CRC:
            raise zipfile.BadZipFile("its checksum is wrong")
    except _ZIP_ERRORS as error:
        raise CheckpointError(f"{what} is not as it was written ({error}); {DAMAGED}") from error
    return begin


def _checksum(file: BinaryIO, begin: int, size: int) -> int:
    """Of a stretch of the file, read into one buffer: half the time that zipfile takes."""
    block = memoryview(bytearray(min(_BLOCK, size)))
    file.seek(begin)
    found = 0
    while size:
        count = file.readinto(block[:size])  # type: ignore[attr-defined]
        if not count:
            raise EOFError("the file ends in it")
        found = zlib.crc32(block[:count], found)
        size -= count
    return found


def _check_pickle(archive: zipfile.ZipFile, info: zipfile.ZipInfo, what: str) -> None:
    """A list of one byte takes sixty once it is made, so what makes one is counted before."""
    if info.file_size > _MAX_PICKLE:
        raise CheckpointError(f"{what} has {info.file_size} bytes; {_MAX_PICKLE} are the most")
    text = archive.read(info)
    count = sum(text.count(makes) for makes in _MAKES)
    if count > _MAX_OBJECTS:
        raise CheckpointError(f"{what} makes about {count} objects; {_MAX_OBJECTS} are the most")


def _begin(file: BinaryIO, info: zipfile.ZipInfo) -> int:
    """Where a record's bytes begin: behind its own header, whose name has any length."""
    file.seek(info.header_offset)
    name, extra = struct.unpack("<26xHH", file.read(_LOCAL_HEADER))
    return int(info.header_offset + _LOCAL_HEADER + name + extra)


def _check_storages(
    path: Path, storages: Iterable[tuple[int, int]], records: list[StorageRecord]
) -> None:
    """Each storage must be one record, whole: both are in the same order, at the same distances."""
    mapped = sorted((address, size) for address, size in storages if size)
    for storage, record in itertools.zip_longest(mapped, records):
        if storage is None:
            raise CheckpointError(f"{path}: record {record.name!r} belongs to no tensor; {DAMAGED}")
        if record is None:
            raise CheckpointError(
                f"{path} has {len(mapped)} storages in {len(records)} records; {DAMAGED}"
            )
        address, size = storage
        if size != record.size or address - mapped[0][0] != record.offset - records[0].offset:
            raise CheckpointError(
                f"{path}: a tensor takes {size} bytes where record {record.name!r} has "
                f"{record.size}; {DAMAGED}"
            )


# -- what was loaded ------------------------------------------------------------------------------


def _check_claims(path: Path, found: Any, most: int) -> None:
    """A few bytes can describe tensors of any size, and lists that never end when walked."""
    try:
        values, claimed = _weigh(path, "", found, {})
    except RecursionError:
        raise CheckpointError(f"{path} is nested too deep") from None
    if values > _MAX_VALUES:
        raise CheckpointError(f"{path} describes {values} values, where {_MAX_VALUES} are the most")
    if claimed > most:
        raise CheckpointError(
            f"{path}: its tensors claim {claimed} bytes, more than it can stand for; {DAMAGED}"
        )


def _weigh(
    path: Path, name: str, value: Any, known: dict[int, tuple[int, int] | None]
) -> tuple[int, int]:
    """(values, bytes of tensors) when all is copied.

    known: of containers.
    """
    if isinstance(value, Tensor):
        return 1, _claimed(path, name, value)
    if value is None or isinstance(value, str | bytes | int | float):
        return 1, 0
    if id(value) not in known:
        known[id(value)] = None
        weights = [
            _weigh(path, f"{name}/{key!s:.100}", child, known) for key, child in _children(value)
        ]
        known[id(value)] = (1 + sum(w[0] for w in weights), sum(w[1] for w in weights))
    weight = known[id(value)]
    if weight is None:
        raise CheckpointError(f"{path}: {name or 'what is in it'} contains itself; {DAMAGED}")
    return weight


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from enumerate(value)
    if isinstance(own := getattr(value, "__dict__", None), dict):  # of a class' stand-in
        yield from own.items()


def _claimed(path: Path, name: str, tensor: Tensor) -> int:
    """A tensor's bytes; CheckpointError where its storage has fewer, as with strides of 0."""
    what = f"{path}: tensor {name.removeprefix('/') or 'in it'}"
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        raise CheckpointError(
            f"{what} is a {tensor.layout} tensor on {tensor.device}; save it dense, on the host"
        )
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise CheckpointError(
            f"{what} claims {tensor.numel()} elements, and {tensor.untyped_storage().nbytes()} "
            "bytes are stored; save its clone()"
        )
    return int(tensor.nbytes)
