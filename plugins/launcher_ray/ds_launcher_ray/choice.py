"""Which nodes of a cluster a run takes, and what it asks of each: the bundles of its placement
group.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_command_kit.show import CommandError

DEVICES = ("GPU", "TPU", "NPU", "HPU", "neuron_cores")  # as Ray names them


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a run asks for."""

    hosts: tuple[tuple[str, int], ...] = ()
    """(name, slots) of a hostfile; 0 slots: not given."""
    count: int = 0
    """Of hosts; 0: all there are."""
    nproc: int = 0
    """Processes on each host; 0: one per device."""
    cpus: float = 1.0
    """Of Ray's CPUs, on each host."""
    resources: Mapping[str, float] | None = None
    """Further resources of each node."""


def bundles(nodes: Sequence[Mapping[str, Any]], wanted: Wanted) -> list[dict[str, float]]:
    """What to reserve, host by host; nodes are as `ray.nodes()` has them. Raises CommandError."""
    alive = [node for node in nodes if node["Alive"]]
    device = next(
        (name for name in DEVICES if any(name in node["Resources"] for node in alive)), ""
    )
    basic = {"CPU": wanted.cpus, **(wanted.resources or {})}
    if wanted.hosts:
        return [
            _at(_find(alive, host), slots or wanted.nproc, basic, device)
            for host, slots in wanted.hosts
        ]
    usable = [
        node for node in alive if _has(node, basic) and (not device or device in node["Resources"])
    ]
    count = wanted.count or len(usable)
    if count == 0:
        raise CommandError(f"no node of the cluster has {_text(basic)}; its nodes: {_named(alive)}")
    if not device:
        return [dict(basic) for _ in range(count)]
    there = sorted((float(node["Resources"][device]) for node in usable), reverse=True)
    if not wanted.nproc and count > len(there):
        raise CommandError(
            f"{count} hosts with a {device} are asked for, and the cluster has {len(there)}; give "
            "--nproc"
        )
    return [{**basic, device: wanted.nproc or there[count - 1]} for _ in range(count)]


def devices(bundle: Mapping[str, float]) -> int:
    """How many devices a bundle has."""
    return next((int(bundle[name]) for name in DEVICES if name in bundle), 0)


def _at(
    node: Mapping[str, Any], slots: int, basic: Mapping[str, float], device: str
) -> dict[str, float]:
    bundle = {**basic, f"node:{node['NodeManagerAddress']}": 0.001}
    if device in node["Resources"]:
        bundle[device] = slots or float(node["Resources"][device])
    return bundle


def _find(nodes: Sequence[Mapping[str, Any]], host: str) -> Mapping[str, Any]:
    """The node that `host` means: by its name, or by an address that the name has here."""
    try:
        addresses = {row[4][0] for row in socket.getaddrinfo(host, None)}
    except OSError:
        addresses = set()
    for node in nodes:
        names = {node["NodeManagerHostname"], node["NodeManagerHostname"].partition(".")[0]}
        if host in names or node["NodeManagerAddress"] in addresses | {host}:
            return node
    raise CommandError(
        f"host {host!r} is not a node of the Ray cluster; its nodes: {_named(nodes)}"
    )


def _has(node: Mapping[str, Any], resources: Mapping[str, float]) -> bool:
    return all(node["Resources"].get(name, 0.0) >= amount for name, amount in resources.items())


def _named(nodes: Sequence[Mapping[str, Any]]) -> str:
    return (
        ", ".join(f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})" for node in nodes)
        or "none"
    )


def _text(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items())
