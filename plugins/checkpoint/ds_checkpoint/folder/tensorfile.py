"""safetensors files: written one tensor at a time, read by ranges.

The safetensors library wants all tensors of a file in host memory before it writes, and reads
through mmap, where a file that shrinks kills the process. This writer keeps one tensor at a time;
this reader uses plain reads, and checks every number in the header first. The files are ordinary
safetensors: 8 bytes length, JSON header, data.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
import os
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import torch
import xxhash
from ds_run_state.opening import parse_json
from torch import Tensor

from ds_checkpoint.folder.boxes import Move
from ds_checkpoint.folder.format import DAMAGED, Mark
from ds_checkpoint.folder.reader import PlainFile, Reader
from ds_core.errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {
    "C64": torch.complex64,
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000  # what the safetensors library accepts
_MAX_VALUES = 1 << 22
_MAX_TENSORS = 1 << 19  # of one file; to read a header of more would take seconds

# Bytes that are written or read at once: they fit into the processor's cache.
_BLOCK = 1 << 20
# Bytes after which the system is asked to begin bringing them to the disk.
_STRIDE = 1 << 25
# Rows shorter than a page are read together with the gaps between them.
_PAGE = 1 << 12

Item = tuple[str, tuple[int, ...], torch.dtype, Callable[[], Tensor]]
"""A tensor to be written: its key, shape, dtype, and a function that gives it when its turn comes.
"""


def dtype_name(dtype: torch.dtype, what: str) -> str:
    """How safetensors spells `dtype`; CheckpointError, naming `what`, for one that it does not
    have.
    """
    if dtype not in _NAMES:
        fix = (
            "store torch.view_as_real of it"
            if dtype.is_complex
            else f"use one of {', '.join(DTYPES)}"
        )
        raise CheckpointError(
            f"{what} has dtype {dtype}, which safetensors files cannot hold; {fix}"
        )
    return _NAMES[dtype]


def check_tensor(tensor: Tensor, what: str) -> None:
    """CheckpointError unless `tensor` is plain strided data of a dtype that safetensors has."""
    dtype_name(tensor.dtype, what)
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(
            f"{what} is a {tensor.layout} tensor; store a dense one (.to_dense(), .dequantize())"
        )
    if tensor.device.type == "meta":
        raise CheckpointError(f"{what} is on the meta device and has no values to store")


def write_tensors(path: Path, items: Iterable[Item], metadata: Mapping[str, str]) -> Mark:
    """Write a new safetensors file and bring it to the disk; returns its size and checksum.

    Tensors may be anywhere and of any stride; one at a time is held on the host. FileExistsError if
    `path` exists.
    """
    # Exclusively: no file of a checkpoint is ever written over.
    with open(path, "xb", buffering=0) as file:
        mark = pour_tensors(path.name, items, metadata, functools.partial(_write, file))
        # Before the manifest may name this file, it must survive a crash of the machine.
        os.fsync(file.fileno())
        return mark


def pour_tensors(
    name: str,
    items: Iterable[Item],
    metadata: Mapping[str, str],
    write: Callable[[memoryview], object],
) -> Mark:
    """Hand the bytes of a safetensors file `name` to `write`, block by block; the file's size and
    checksum.

    A block stays valid only while `write` runs.
    """
    # Falling item size keeps every tensor aligned to its own, as safetensors readers like it.
    ordered = sorted(items, key=lambda item: -item[2].itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    place = 0
    for key, shape, dtype, _ in ordered:
        end = place + math.prod(shape) * dtype.itemsize
        header[key] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [place, end]}
        place = end
    assert len(header) == len(ordered) + 1, "two tensors of one file have the same key"
    text = json.dumps(header, separators=(",", ":")).encode()
    # The data begins at a multiple of 8 bytes, as readers that map the file need.
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER or len(ordered) > _MAX_TENSORS:
        raise CheckpointError(
            f"{name} would need a header of {len(text)} bytes for {len(ordered)} tensors; the "
            "most are "
            f"{_MAX_HEADER} bytes (of safetensors) and {_MAX_TENSORS} tensors"
        )
    # The checksum is taken while the bytes are written: the file is not read again.
    digest = xxhash.xxh3_128()
    size = 0

    def pour(data: bytes | memoryview) -> None:
        # In blocks that are still in the processor's cache when they are read a second time.
        nonlocal size
        view = memoryview(data)
        for place in range(0, len(view), _BLOCK):
            block = view[place : place + _BLOCK]
            write(block)
            digest.update(block)
        size += len(view)

    pour(struct.pack("<Q", len(text)) + text)
    for key, shape, dtype, give in ordered:
        value = give().detach()
        assert value.dtype == dtype and value.numel() == math.prod(shape), key
        pour(as_bytes(value.to("cpu").contiguous()))
    return Mark(size, digest.hexdigest())


def as_bytes(flat: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor.

    Not by way of numpy, after which a storage cannot be resized any more.
    """
    flat = flat.resolve_conj().resolve_neg()
    # Who reads into less memory than it seems to be writes over that of others.
    assert flat.is_contiguous(), f"{tuple(flat.shape)} with strides {flat.stride()}"
    memory = (ctypes.c_uint8 * (flat.numel() * flat.itemsize)).from_address(flat.data_ptr())
    memory.owner = flat  # type: ignore[attr-defined]  # as long as there is a view of it
    return memoryview(memory).cast("B")


def _write(file: FileIO, view: memoryview) -> None:
    """All of a block, which a write may take in parts."""
    place = file.tell()
    while view:
        count = file.write(view)
        view = view[count:]
        if place // _STRIDE != (place + count) // _STRIDE:
            _begin_writing(file.fileno(), (place + count) // _STRIDE * _STRIDE)
        place += count


def _begin_writing(handle: int, stop: int) -> None:
    """Let the system bring the stride before `stop` to the disk meanwhile, or else all waits for
    fsync. Linux only.
    """
    begin = getattr(_libc(), "sync_file_range", None)
    if begin is not None:  # only a hint: fsync reports whether it worked
        whence = ctypes.c_int64(stop - _STRIDE)
        count = ctypes.c_int64(_STRIDE)
        begin(ctypes.c_int(handle), whence, count, ctypes.c_uint(2))  # SYNC_FILE_RANGE_WRITE


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def carry(move: Move, values: Tensor, out: Tensor) -> None:
    """Do `move` from `values` to `out`, both 1-d; `out` contiguous."""
    shape = (move.rows, move.length)
    values = values.contiguous()
    source = values.as_strided(shape, (move.source_step, 1), values.storage_offset() + move.source)
    out.as_strided(shape, (move.target_step, 1), out.storage_offset() + move.target).copy_(source)


def read_moved(read: Callable[[int, Tensor], None], move: Move, out: Tensor) -> None:
    """Do `move` into `out`, a contiguous 1-d CPU tensor, from what ``read(start, into)`` gives: it
    fills `into` from element `start` on.
    """
    if move.rows == 1:
        read(move.source, out[move.target : move.target + move.length])
    elif move.length * out.itemsize >= _PAGE:
        for row in range(move.rows):
            place = move.target + row * move.target_step
            read(move.source + row * move.source_step, out[place : place + move.length])
    else:  # the gaps between short rows are on the same pages
        at_once = max(1, _BLOCK // (move.source_step * out.itemsize))
        for row in range(0, move.rows, at_once):
            rows = min(at_once, move.rows - row)
            first = move.source + row * move.source_step
            block = torch.empty((rows - 1) * move.source_step + move.length, dtype=out.dtype)
            read(first, block)
            carry(
                move._replace(source=0, target=move.target + row * move.target_step, rows=rows),
                block,
                out,
            )


class TensorFile:
    """An open safetensors file whose header has been checked against its size.

    file: a path of a disk, or the file of another storage.
    links: whether a path may be a link.
    bytes_read: tensor data read so far.

    Raises CheckpointError naming the file for anything wrong with it.
    """

    def __init__(self, file: Path | Reader, *, links: bool = False) -> None:
        self._file = file if isinstance(file, Reader) else PlainFile(file, links=links)
        self.path = self._file.path
        self.bytes_read = 0
        try:
            self.metadata, self.tensors = self._header()
        except FileNotFoundError:
            raise CheckpointError(f"{self.path} is missing; {DAMAGED}") from None
        except BaseException:
            self.close()
            raise

    def _header(
        self,
    ) -> tuple[dict[str, str], dict[str, tuple[torch.dtype, tuple[int, ...], int, int]]]:
        # The header comes from a file that may be damaged or hostile: every number in it is checked
        # before it is used for an allocation or an offset.
        size = self._file.size()
        length = struct.unpack("<Q", self._exactly(0, 8))[0] if size >= 8 else size
        if length > min(size - 8, _MAX_HEADER):
            raise self._damaged(f"it is not a safetensors file, or cut off ({size} bytes)")
        text = self._exactly(8, length)
        if (count := text.count(b'"data_offsets"')) > _MAX_TENSORS:
            raise self._damaged(
                f"its header tells of {count} tensors; {_MAX_TENSORS} are the most of one file"
            )
        try:
            header = parse_json(text, _MAX_VALUES)
            metadata = {str(k): str(v) for k, v in header.pop("__metadata__", {}).items()}
            tensors = {}
            for key, entry in header.items():
                dtype = DTYPES[entry["dtype"]]
                shape = tuple(entry["shape"])
                begin, stop = entry["data_offsets"]
                if (
                    not all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, begin, stop))
                    or len(shape) > 64
                ):
                    raise ValueError(f"numbers of {key!r}")
                if stop - begin != math.prod(shape) * dtype.itemsize:
                    raise ValueError(f"offsets of {key!r}")
                tensors[key] = (dtype, shape, 8 + length + begin, 8 + length + stop)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged(f"its header is wrong: {error}") from error
        # Tensors must fill the file without gap or overlap, so that no byte is unaccounted for.
        place = 8 + length
        for begin, stop, key in sorted(
            (begin, stop, key) for key, (_, _, begin, stop) in tensors.items()
        ):
            if begin != place:
                what = "there is a gap before" if begin > place else "another tensor overlaps with"
                raise self._damaged(f"its header is wrong: {what} {key!r}")
            place = stop
        if place != size:
            raise self._damaged(f"it has {size} bytes where its header tells of {place}")
        return metadata, tensors

    def read(self, key: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements [start, stop) of the flattened tensor `key`, as a new 1-d CPU tensor."""
        dtype, shape, _, _ = self.tensors[key]
        out = torch.empty((math.prod(shape) if stop is None else stop) - start, dtype=dtype)
        self.read_into(key, start, out)
        return out

    def read_into(self, key: str, start: int, out: Tensor) -> None:
        """Fill `out`, a contiguous 1-d CPU tensor of the same dtype, from element `start` of the
        flattened tensor.
        """
        dtype, _, begin, end = self.tensors[key]
        assert out.dtype == dtype and begin + (start + out.numel()) * dtype.itemsize <= end, key
        view = as_bytes(out)
        count = self._file.read_into(begin + start * dtype.itemsize, view)
        self.bytes_read += count
        if count < len(view):
            raise self._damaged("it ends too early")

    def read_move(self, key: str, move: Move, out: Tensor) -> None:
        """Read what `move` says of the flattened tensor `key` to its places in `out`, a contiguous
        1-d CPU tensor.
        """
        read_moved(lambda start, into: self.read_into(key, start, into), move, out)

    def checksum(self) -> str:
        """Of the whole file, as it is stored."""
        digest = xxhash.xxh3_128()
        for block in self._file.blocks():
            digest.update(block)
        return digest.hexdigest()

    def _exactly(self, place: int, count: int) -> bytes:
        data = bytearray(count)
        found = self._file.read_into(place, memoryview(data))
        return bytes(data[:found])

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}; {DAMAGED}")

    def close(self) -> None:
        """Close the file; reading opens it again."""
        self._file.close()
