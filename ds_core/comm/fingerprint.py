"""Do all ranks run the same thing? One hash is compared; only when it differs are the items exchanged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from ds_core.errors import RankMismatchError

__all__ = ["SHOWN", "check_ranks_agree"]

SHOWN = 5  # differences spelled out; the rest are counted
_WIDTH = 200  # characters of one value in the message


def check_ranks_agree(items: Mapping[str, str]) -> None:
    """Compare `items` (name -> value, secrets already hashed) over all ranks of the world; collective.

    Raises RankMismatchError on every rank, naming each key that differs, its values and who holds which.
    """
    from ds_core.comm.collectives import world_size

    if world_size() == 1:
        return
    from ds_core.comm.objects import all_gather_json

    text = json.dumps(dict(items), sort_keys=True)
    digests = all_gather_json(hashlib.sha256(text.encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    held = all_gather_json(dict(items))
    raise RankMismatchError(describe_mismatch(held))


def describe_mismatch(held: Sequence[Mapping[str, str]]) -> str:
    """The message for `held`, one mapping per rank."""
    keys = sorted({key for items in held for key in items})
    differing = [key for key in keys if len({items.get(key) for items in held}) > 1]
    lines = [f"the {len(held)} ranks were started differently in {len(differing)} item(s):"]
    for key in differing[:SHOWN]:
        lines.append(f"  {key}:")
        owners: dict[str | None, list[int]] = {}
        for rank, items in enumerate(held):
            owners.setdefault(items.get(key), []).append(rank)
        for value, ranks in owners.items():
            lines.append(f"    {_name_ranks(ranks)}: {'(missing)' if value is None else _short(value)}")
    if len(differing) > SHOWN:
        lines.append(f"  and {len(differing) - SHOWN} more: {_short(', '.join(differing[SHOWN:]))}")
    lines.append("give every rank the same config file, packages and environment")
    return "\n".join(lines)


def _short(value: str) -> str:
    return value if len(value) <= _WIDTH else f"{value[:_WIDTH]}... ({len(value)} characters)"


def _name_ranks(ranks: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``"ranks 0-2, 5"``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
