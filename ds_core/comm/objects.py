"""Small things that JSON can hold, exchanged as text (never pickled)."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_core.comm.collectives import all_gather_into_tensor, broadcast, members, rank

__all__ = ["all_gather_json", "broadcast_json"]


def all_gather_json(obj: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Every rank's `obj` (what JSON can hold), in rank order. Collective; for small things, such as settings."""
    text = _text_tensor(obj)
    size = members(group)
    if size == 1:
        return [_from_text(text)]
    device = _device(group)
    lengths = torch.zeros(size, dtype=torch.int64, device=device)
    all_gather_into_tensor(lengths, torch.tensor([text.numel()], device=device), group)
    widths = [int(n) for n in lengths.tolist()]
    padded = torch.zeros(max(widths), dtype=torch.uint8, device=device)
    padded[: text.numel()] = text.to(device)
    gathered = torch.empty(size * max(widths), dtype=torch.uint8, device=device)
    all_gather_into_tensor(gathered, padded, group)
    return [_from_text(row[:width]) for row, width in zip(gathered.cpu().view(size, -1), widths, strict=True)]


def broadcast_json(obj: Any, src: int = 0, group: ProcessGroup | None = None) -> Any:
    """Global rank `src`'s `obj`, on every rank; the others' is not looked at."""
    if members(group) == 1:
        return _from_text(_text_tensor(obj))
    device, sender = _device(group), rank() == src
    text = _text_tensor(obj).to(device) if sender else torch.empty(0, dtype=torch.uint8, device=device)
    length = torch.tensor([text.numel()], device=device)
    broadcast(length, src, group)
    if not sender:
        text = torch.empty(int(length), dtype=torch.uint8, device=device)
    broadcast(text, src, group)
    return _from_text(text.cpu())


def _text_tensor(obj: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(obj).encode()), dtype=torch.uint8)


def _from_text(text: Tensor) -> Any:
    return json.loads(bytes(text.tolist()))


def _device(group: ProcessGroup | None) -> torch.device:
    """Where `group`'s backend wants tensors: the CPU if it serves that, else the accelerator."""
    config = dist.get_backend_config(group)
    if "cpu:" in config:
        return torch.device("cpu")
    from ds_core.accelerator import get_accelerator

    return get_accelerator().current_device()
