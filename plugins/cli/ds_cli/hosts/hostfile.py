"""Which hosts and slots a run uses: hostfiles, filters and counts, as the documents have them (standard library)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["DEFAULT", "Host", "filter_hosts", "read_hostfile"]

DEFAULT = "/job/hostfile"


@dataclass(frozen=True, slots=True)
class Host:
    """A machine of a run. slots: the accelerators to use there, one process each; None: as many as there are."""

    name: str
    slots: tuple[int, ...] | None = None

    @property
    def address(self) -> str:
        """Without the user's name that ssh may need."""
        return self.name.rpartition("@")[2]


def read_hostfile(path: str) -> dict[str, int] | None:
    """Host -> slots, in the file's order; None when there is no such file.

    A line is ``name slots=K``; empty lines and comments (``#``) do not count. Raises ValueError, naming file and line.
    """
    if not os.path.isfile(path):
        return None
    hosts: dict[str, int] = {}
    with open(path, encoding="utf-8", errors="replace") as stream:
        for number, line in enumerate(stream, 1):
            line = line.partition("#")[0].strip()
            if not line:
                continue
            where = f"{path}, line {number}"
            found = re.fullmatch(r"([^\s-]\S*)\s+slots=([0-9]+)", line)  # ssh would take "-x" for an option
            if found is None:
                raise ValueError(f"{where}: {line!r} is not `name slots=K`")
            if found[1] in hosts:
                raise ValueError(f"{where}: host {found[1]!r} is there twice; one line each, with all of its slots")
            if not 0 < int(found[2]) < 10_000:
                raise ValueError(f"{where}: host {found[1]!r} has {found[2]} slots; leave out its line, or give some")
            hosts[found[1]] = int(found[2])
    if not hosts:
        raise ValueError(f"{path} names no host; write one line `name slots=K` for each, or give another file")
    return hosts


def filter_hosts(hosts: Mapping[str, list[int]], include: str = "", exclude: str = "") -> dict[str, list[int]]:
    """Host -> slots to use: only those of `include`, or all but those of `exclude`.

    A filter is ``host[:slot,slot]@host...``; a host without slots stands for all of them. Raises ValueError for both
    filters at once, and for a host or a slot that does not exist.
    """
    if include and exclude:
        raise ValueError("--include and --exclude are two ways to choose; give one of them")
    named = _named(hosts, include or exclude)
    if include:
        return {host: named[host] for host in hosts if host in named}
    if not exclude:
        return {host: list(slots) for host, slots in hosts.items()}
    left = {host: [s for s in slots if s not in named.get(host, ())] for host, slots in hosts.items()}
    return {host: slots for host, slots in left.items() if slots}


def _named(hosts: Mapping[str, list[int]], text: str) -> dict[str, list[int]]:
    """What a filter names."""
    named: dict[str, list[int]] = {}
    for part in filter(None, text.split("@")):
        host, colon, slots = part.partition(":")
        if host not in hosts:
            raise ValueError(f"host {host!r} in {text!r} is not known; hosts: {', '.join(hosts)}")
        wanted = hosts[host]
        if colon:
            if not re.fullmatch(r"[0-9]+(,[0-9]+)*", slots):
                raise ValueError(f"{part!r} is not `host:slot,slot`")
            wanted = [int(slot) for slot in slots.split(",")]
            if unknown := [s for s in wanted if s not in hosts[host]]:
                raise ValueError(f"host {host!r} has slots {hosts[host]}, not {unknown}")
        named[host] = sorted({*named.get(host, ()), *wanted})
    return named
