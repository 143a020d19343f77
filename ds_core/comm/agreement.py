"""Small things that JSON can hold, exchanged as text (never pickled); and whether all ranks run the
same thing.

[Note: one fails, all fail] Where ranks do the same work on different parts of a model, one may find
a fault that others cannot see. They would wait for it in the next collective. `together` ends such
work with word of every rank. A rank that failed says so instead of its next `all_gather_json`,
so that ranks which agree on something inside of the work hear it there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_core.comm.collectives import all_gather_into_tensor, members, rank
from ds_core.errors import CommError, LostRankError, RankMismatchError

SHOWN = 5  # differences spelled out; the others are only counted
_WIDTH = 200  # characters of one value in the message
_RANKS = 8  # ranks named for one value
_FAILED = "ds_core: failed on rank"  # the key of what a rank sends that has failed


def all_gather_json(obj: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Every rank's `obj` (what JSON can hold), in rank order.

    Collective; for small things, such as settings.

    LostRankError where another rank failed in the work that they do together; see [Note: one fails,
    all fail].
    """
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
    found = [
        _from_text(row[:width])
        for row, width in zip(gathered.cpu().view(size, -1), widths, strict=True)
    ]
    for row in found:
        if isinstance(row, dict) and _FAILED in row:
            raise LostRankError(f"rank {row[_FAILED]} stopped, and so do all: {row['error']}")
    return found


@contextlib.contextmanager
def together() -> Iterator[None]:
    """A block that has succeeded on every rank when it ends. Collective.

    What it raises on one rank is raised there, and on all others a LostRankError with that rank and
    its error.
    """
    try:
        yield
    except CommError:
        raise  # ranks know already, or can no longer talk
    except Exception as error:
        # the error itself says more than that telling it failed
        with contextlib.suppress(Exception):
            all_gather_json({_FAILED: rank(), "error": f"{type(error).__name__}: {error}"})
        raise
    all_gather_json(None)


def check_ranks_agree(items: Mapping[str, str]) -> None:
    """Compare `items` over all ranks of the world; collective.

    items: name -> value, with secrets already hashed.

    One hash is compared, and the items are exchanged only when it differs. Raises RankMismatchError
    on every rank, naming each key that differs, its values and who holds which.
    """
    if members(None) == 1:
        return
    text = json.dumps(dict(items), sort_keys=True)
    if len(set(all_gather_json(hashlib.sha256(text.encode()).hexdigest()))) > 1:
        raise RankMismatchError(describe_mismatch(all_gather_json(dict(items))))


def describe_mismatch(held: Sequence[Mapping[str, str]]) -> str:
    """The message for `held`, one mapping per rank."""
    keys = sorted({key for items in held for key in items})
    differing = [key for key in keys if len({items.get(key) for items in held}) > 1]
    lines = [f"the {len(held)} ranks were started differently in {len(differing)} item(s):"]
    for key in differing[:SHOWN]:
        lines.append(f"  {key}:")
        owners: dict[str | None, list[int]] = {}
        for holder, items in enumerate(held):
            owners.setdefault(items.get(key), []).append(holder)
        for value, ranks in owners.items():
            lines.append(
                f"    {_name_ranks(ranks)}: {'(missing)' if value is None else _short(value)}"
            )
    if len(differing) > SHOWN:
        lines.append(f"  and {len(differing) - SHOWN} more: {_short(', '.join(differing[SHOWN:]))}")
    lines.append("give every rank the same config file, packages and environment")
    return "\n".join(lines)


def _short(value: str) -> str:
    return value if len(value) <= _WIDTH else f"{value[:_WIDTH]}... ({len(value)} characters)"


def _name_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_RANKS])) + (
        f" and {len(ranks) - _RANKS} more" if len(ranks) > _RANKS else ""
    )
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _text_tensor(obj: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(obj).encode()), dtype=torch.uint8)


def _from_text(text: Tensor) -> Any:
    return json.loads(bytes(text.tolist()))


def _device(group: ProcessGroup | None) -> torch.device:
    """Where `group`'s backend wants tensors: the CPU if it serves that, else the accelerator."""
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    from ds_core.accelerator import get_accelerator

    return get_accelerator().current_device()
