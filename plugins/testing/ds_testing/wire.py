"""How values travel between a test and its worker processes: JSON plus raw tensor bytes, never
pickle.

A message is ``<u64 length of the header><header JSON><blob><blob>...``; the header holds the value,
with tensors and bytes replaced by the index of their blob, and the blobs' lengths. What has no
plain JSON form is written as ``{"!": kind, ...}``; dicts are always wrapped, so that a user's key
``"!"`` cannot be mistaken for a tag.
"""

from __future__ import annotations

import ctypes
import json
import math
import socket
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_LENGTH = struct.Struct("!Q")


class Closed(Exception):
    """The other end is gone."""


def encode(value: Any, where: str = "value") -> tuple[Any, list[bytes]]:
    """Turn `value` into plain JSON and the blobs it refers to.

    Takes None, bool, int, float, str, bytes, Path, list, tuple, dict with str keys, dense tensors
    and torch.dtype; subclasses come out as the plain kind, a tensor as a detached CPU tensor.
    Raises TypeError with the place inside `value` for anything else.
    """
    blobs: list[bytes] = []
    return _encode(value, where, blobs), blobs


def decode(plain: Any, blobs: list[bytes]) -> Any:
    """The inverse of `encode`."""
    if isinstance(plain, list):
        return [decode(item, blobs) for item in plain]
    if not isinstance(plain, dict):
        return plain
    kind = plain["!"]
    if kind == "dict":
        return {key: decode(item, blobs) for key, item in plain["v"].items()}
    if kind == "tuple":
        return tuple(decode(item, blobs) for item in plain["v"])
    if kind == "float":
        return float(plain["v"])
    if kind == "path":
        return Path(plain["v"])
    if kind == "bytes":
        return blobs[plain["n"]]
    if kind == "dtype":
        return _dtype(plain["v"])
    assert kind == "tensor", kind
    return _tensor(plain["dtype"], plain["shape"], blobs[plain["n"]])


def send(sock: socket.socket, value: Any) -> None:
    """Write one message.

    Raises Closed when the reader is gone, TypeError for a value that cannot travel.
    """
    plain, blobs = encode(value)
    header = json.dumps({"v": plain, "blobs": [len(b) for b in blobs]}).encode()
    try:
        sock.sendall(_LENGTH.pack(len(header)) + header)
        for blob in blobs:
            sock.sendall(blob)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Closed from error


def receive(sock: socket.socket, deadline: float | None = None) -> Any:
    """Read one message.

    Raises Closed at the end of the stream, TimeoutError past `deadline` (`time.monotonic`).
    """
    (length,) = _LENGTH.unpack(_read(sock, _LENGTH.size, deadline))
    header = json.loads(_read(sock, length, deadline))
    blobs = [_read(sock, n, deadline) for n in header["blobs"]]
    return decode(header["v"], blobs)


def _read(sock: socket.socket, count: int, deadline: float | None) -> bytes:
    buffer = bytearray(count)
    view = memoryview(buffer)
    done = 0
    while done < count:
        if deadline is not None:
            sock.settimeout(max(deadline - time.monotonic(), 1e-3))
        try:
            got = sock.recv_into(view[done:])
        except ConnectionResetError:
            got = 0
        if got == 0:
            raise Closed
        done += got
    return bytes(buffer)


def _encode(value: Any, where: str, blobs: list[bytes]) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        number = float(value)
        return number if math.isfinite(number) else {"!": "float", "v": repr(number)}
    if isinstance(value, list):
        return [_encode(item, f"{where}[{i}]", blobs) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {
            "!": "tuple",
            "v": [_encode(item, f"{where}[{i}]", blobs) for i, item in enumerate(value)],
        }
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}; only str keys can be sent")
        return {
            "!": "dict",
            "v": {str(k): _encode(v, f"{where}[{k!r}]", blobs) for k, v in value.items()},
        }
    if isinstance(value, Path):
        return {"!": "path", "v": str(value)}
    if isinstance(value, bytes | bytearray):
        blobs.append(bytes(value))
        return {"!": "bytes", "n": len(blobs) - 1}
    return _encode_torch(value, where, blobs)


def _encode_torch(value: Any, where: str, blobs: list[bytes]) -> Any:
    import torch

    if isinstance(value, torch.dtype):
        return {"!": "dtype", "v": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta:
        flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        count = flat.numel() * flat.element_size()
        blobs.append(ctypes.string_at(flat.data_ptr(), count) if count else b"")
        name = str(flat.dtype).removeprefix("torch.")
        return {"!": "tensor", "dtype": name, "shape": list(flat.shape), "n": len(blobs) - 1}
    raise TypeError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be sent "
        "to or from a worker; "
        "send None, bool, int, float, str, bytes, Path, list, tuple, dict with str keys, dense "
        "tensors or torch.dtype"
    )


def _dtype(name: str) -> torch.dtype:
    import torch

    found = getattr(torch, name)
    assert isinstance(found, torch.dtype), name
    return found


def _tensor(dtype: str, shape: list[int], blob: bytes) -> torch.Tensor:
    import torch

    if not blob:
        return torch.empty(shape, dtype=_dtype(dtype))
    return torch.frombuffer(bytearray(blob), dtype=torch.uint8).view(_dtype(dtype)).reshape(shape)
