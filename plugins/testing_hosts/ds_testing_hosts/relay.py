"""A cable with latency and loss: two TAP devices, and this process that carries packets from one to
the other.

Run by `ds_testing_hosts.lab` in the namespace of its switch, as ``python -I -S relay.py TAP TAP``.
Each line on stdin is ``{"latency": seconds, "loss": share}``, answered by a line on stdout once it
holds; the end of stdin ends the process.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF = 0x400454CA
TUNSETOFFLOAD = 0x400454D0
# IFF_TAP, IFF_NO_PI, IFF_VNET_HDR
TAP = 0x0002
NO_PACKET_INFO = 0x1000
OFFLOAD_HEADER = 0x4000
# TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6: the kernel hands over up to 64 KiB at once
LARGE_PACKETS = 0x01 | 0x02 | 0x04
LONGEST = 1 << 17
HELD = 64 << 20  # bytes under way in one direction; what comes beyond is lost, as in a switch


class Direction:
    """From one device to the other: packets wait here for their time."""

    def __init__(self, source: int, target: int) -> None:
        self.source = source
        self.target = target
        self.waiting: deque[tuple[float, bytes]] = deque()
        self.held = 0

    def take(self, latency: float, loss: float) -> None:
        """Read all packets that are there."""
        while True:
            try:
                packet = os.read(self.source, LONGEST)
            except BlockingIOError:
                return
            if (loss and random.random() < loss) or self.held > HELD:
                continue
            self.held += len(packet)
            self.waiting.append((time.monotonic() + latency, packet))

    def deliver(self) -> float | None:
        """Write the packets whose time has come; seconds until the next one's, None without any."""
        while self.waiting:
            left = self.waiting[0][0] - time.monotonic()
            if left > 0:
                return left
            packet = self.waiting.popleft()[1]
            self.held -= len(packet)
            try:
                os.write(self.target, packet)
            except OSError:  # the device is down or full: lost
                continue
        return None


def device(name: str) -> int:
    """A new TAP device, which goes with this process."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(
        file,
        TUNSETIFF,
        struct.pack("16sH14x", name.encode(), TAP | NO_PACKET_INFO | OFFLOAD_HEADER),
    )
    return file


def main(names: list[str]) -> None:
    """Carry packets until stdin ends."""
    one, other = map(device, names)
    ways = {one: Direction(one, other), other: Direction(other, one)}
    latency = loss = 0.0
    print("ready", flush=True)
    while True:
        waits = [wait for way in ways.values() if (wait := way.deliver()) is not None]
        ready, _, _ = select.select([0, *ways], [], [], min(waits, default=None))
        for file in ready:
            if file != 0:
                ways[file].take(latency, loss)
                continue
            line = sys.stdin.readline()
            if not line:
                return
            wanted = json.loads(line)
            latency = wanted["latency"]
            loss = wanted["loss"]
            for tap in ways:  # with loss, packets as they are on a wire are what gets lost
                fcntl.ioctl(tap, TUNSETOFFLOAD, 0 if loss else LARGE_PACKETS)
            print("set", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
