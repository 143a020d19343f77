"""Names and addresses of hosts, seen from this one (standard library)."""

from __future__ import annotations

import socket

from ds_command_kit.show import CommandError


def is_here(name: str) -> bool:
    """Whether `name` means this machine."""
    address = name.rpartition("@")[2]
    if address in ("localhost", socket.gethostname(), socket.gethostname().partition(".")[0]):
        return True
    try:
        family, kind, *_, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(place)  # only to an address of ours
    except OSError:
        return False
    return True


def address_towards(hosts: list[str]) -> str:
    """The address of this machine that `hosts` reach it at: of the interface on the way to the
    first that is elsewhere.

    Nothing is sent. Raises CommandError for names without an address.
    """
    own = "127.0.0.1"
    for host in hosts:
        try:
            family, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(place)
                near = probe.getsockname()[0]
                far = place[0]
        except OSError as error:
            raise CommandError(
                f"host {host!r} has no address here ({error.strerror}); tell with --master-addr at "
                "which address of "
                "this machine the hosts reach it"
            ) from error
        own = str(near)
        # as another name of this host would give (Debian)
        if near != far and not near.startswith("127."):
            return own
    return own
