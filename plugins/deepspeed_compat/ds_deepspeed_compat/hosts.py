"""Hostfiles and filters of hosts, as DeepSpeed's launcher takes them (standard library only)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

__all__ = ["fetch_hostfile", "parse_resource_filter"]


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Host -> slots, in the file's order; None when there is no such file.

    A line is ``name slots=K``; empty lines and those that begin with ``#`` do not count. Raises ValueError, naming
    file and line.
    """
    if not os.path.isfile(hostfile_path):
        return None
    hosts: dict[str, int] = {}
    with open(hostfile_path, encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            line = line.partition("#")[0].strip()
            if not line:
                continue
            where = f"{hostfile_path}, line {number}"
            found = re.fullmatch(r"(\S+)\s+slots=(\d+)", line)
            if found is None:
                raise ValueError(f"{where}: {line!r} is not `name slots=K`")
            if found[1] in hosts:
                raise ValueError(f"{where}: host {found[1]!r} is there twice; one line each, with all of its slots")
            hosts[found[1]] = int(found[2])
    if not hosts:
        raise ValueError(f"{hostfile_path} names no host; write one line `name slots=K` for each, or give another file")
    return hosts


def parse_resource_filter(
    host_info: Mapping[str, list[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """Host -> slots to use: only those of `include_str`, or all but those of `exclude_str`.

    A filter is ``host[:slot,slot]@host...``; a host without slots stands for all of them. Raises ValueError for both
    filters at once, and for a host or a slot that there is not.
    """
    if include_str and exclude_str:
        raise ValueError("--include and --exclude are two ways to choose; give one of them")
    named = _named(host_info, include_str or exclude_str)
    if include_str:
        return {host: named[host] for host in host_info if host in named}
    if not exclude_str:
        return {host: list(slots) for host, slots in host_info.items()}
    left = {host: [s for s in slots if s not in named.get(host, ())] for host, slots in host_info.items()}
    return {host: slots for host, slots in left.items() if slots}


def _named(host_info: Mapping[str, list[int]], text: str) -> dict[str, list[int]]:
    """What a filter names."""
    named: dict[str, list[int]] = {}
    for part in filter(None, text.split("@")):
        host, colon, slots = part.partition(":")
        if host not in host_info:
            raise ValueError(f"host {host!r} in {text!r} is not known; hosts: {', '.join(host_info)}")
        wanted = host_info[host]
        if colon:
            if not re.fullmatch(r"\d+(,\d+)*", slots):
                raise ValueError(f"{part!r} is not `host:slot,slot`")
            wanted = [int(slot) for slot in slots.split(",")]
            if unknown := [s for s in wanted if s not in host_info[host]]:
                raise ValueError(f"host {host!r} has slots {host_info[host]}, not {unknown}")
        named[host] = sorted({*named.get(host, ()), *wanted})
    return named
