"""Which ranks of a group share a host."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_comm_gloo.transports import Members


@dataclass(frozen=True, slots=True)
class Host:
    """name: the machine's, for messages. ranks: those of the group that are on it, in order;
    numbers in the group.
    """

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a group, in the order of their first ranks."""

    hosts: tuple[Host, ...]

    @property
    def rails(self) -> int:
        """How many ranks of each host exchange with those of other hosts: as many as the smallest
        host has.
        """
        return min(len(host.ranks) for host in self.hosts)

    @property
    def even(self) -> bool:
        """Whether all hosts have equally many ranks."""
        return len({len(host.ranks) for host in self.hosts}) == 1

    @property
    def two_level(self) -> bool:
        """Whether there are several hosts, and several ranks on one of them."""
        return 1 < len(self.hosts) < sum(len(host.ranks) for host in self.hosts)


def host_key(unknown: str = "") -> str:
    """What is equal exactly on processes that see each other in /proc: the kernel's boot and the
    pid namespace.

    unknown: for where there is no /proc; by default something that is equal on no two.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError as error:
        return unknown or f"unknown {secrets.token_hex(8)} ({error.strerror})"


def meet(members: Members, key: str) -> Hosts:
    """The hosts of a group, whose ranks give one key per host. Collective."""
    records = members.exchange({"host": key, "name": socket.gethostname()[:255]})
    ranks: dict[str, list[int]] = {}
    for rank, record in enumerate(records):
        ranks.setdefault(record["host"], []).append(rank)
    return Hosts(tuple(Host(records[here[0]]["name"], tuple(here)) for here in ranks.values()))
