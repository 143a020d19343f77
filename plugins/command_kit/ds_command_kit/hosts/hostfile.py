"""Which hosts and slots a run uses: hostfiles, filters and counts, as the documents have them
(standard library).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT = "/job/hostfile"


_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
"""Of a host or a user. Underscores are in no DNS name, but in those of containers."""


def _is_address(text: str) -> bool:
    """Whether it is an IPv6 address, perhaps with a zone (``fe80::1%eth0``); one of IPv4 is a
    word."""
    import ipaddress  # few hosts need it

    address, percent, zone = text.partition("%")
    if percent and not _WORD.fullmatch(zone):
        return False
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Host:
    """A machine of a run.

    slots: the accelerators to use there, one process each; None: as many as there are.
    """

    name: str
    slots: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a name that ssh, pdsh, an MPI or a shell would read as anything but
        one host.
        """
        user, at, host = self.name.rpartition("@")
        if not (_WORD.fullmatch(host) or _is_address(host)):
            raise ValueError(
                f"{host!r} in {self.name!r} is no host: letters, digits, dots and hyphens, or an "
                "address"
            )
        if at and not _WORD.fullmatch(user):
            raise ValueError(
                f"{user!r} in {self.name!r} is no user's name: letters, digits, dots and hyphens"
            )

    @property
    def address(self) -> str:
        """Without the user's name that ssh may need."""
        return self.name.rpartition("@")[2]


def read_hostfile(path: str) -> dict[str, int] | None:
    """Host -> slots, in the file's order; None when there is no such file.

    A line is ``name slots=K``; empty lines and comments (``#``) do not count. Raises ValueError,
    naming file and line.
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
            found = re.fullmatch(r"(\S+)\s+slots=([0-9]+)", line)
            if found is None:
                raise ValueError(f"{where}: {line!r} is not `name slots=K`")
            try:
                Host(found[1])
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            if found[1] in hosts:
                raise ValueError(
                    f"{where}: host {found[1]!r} is there twice; one line each, with all of its "
                    "slots"
                )
            if not 0 < int(found[2]) < 10_000:
                raise ValueError(
                    f"{where}: host {found[1]!r} has {found[2]} slots; leave out its line, or give "
                    "some"
                )
            hosts[found[1]] = int(found[2])
    if not hosts:
        raise ValueError(
            f"{path} names no host; write one line `name slots=K` for each, or give another file"
        )
    return hosts


def filter_hosts(
    hosts: Mapping[str, list[int]], include: str = "", exclude: str = ""
) -> dict[str, list[int]]:
    """Host -> slots to use: only those of `include`, or all but those of `exclude`.

    A filter is ``host[:slot,slot]@host...``; a host without slots stands for all of them. Raises
    ValueError for both filters at once, and for a host or a slot that does not exist.
    """
    if include and exclude:
        raise ValueError("--include and --exclude are two ways to choose; give one of them")
    named = _named(hosts, include or exclude)
    if include:
        return {host: named[host] for host in hosts if host in named}
    if not exclude:
        return {host: list(slots) for host, slots in hosts.items()}
    left = {
        host: [s for s in slots if s not in named.get(host, ())] for host, slots in hosts.items()
    }
    return {host: slots for host, slots in left.items() if slots}


def _named(hosts: Mapping[str, list[int]], text: str) -> dict[str, list[int]]:
    """What a filter names."""
    named: dict[str, list[int]] = {}
    for part in filter(None, text.split("@")):
        # An address has colons of its own, so a name that is a known host is not split at its last
        # colon.
        host, colon, slots = (part, "", "") if part in hosts else part.rpartition(":")
        if not colon:
            host = part
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
