"""The store at which the hosts of an elastic run meet, in the launcher's process: so any host may
die.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ds_cli.show import CommandError
from ds_cli.surroundings import import_torch

if TYPE_CHECKING:
    from ds_cli.launch import LaunchRequest


@contextlib.contextmanager
def store_here(request: LaunchRequest) -> Iterator[LaunchRequest]:
    """While entered the store is open; gives the request with its place.

    It listens at ``master_addr``, or at the address from which this machine reaches the hosts, and
    nowhere else; at ``master_port``, or any free port. Raises CommError when it cannot.
    """
    if request.rdzv_endpoint or request.show:
        yield request
        return
    import_torch()
    from ds_rendezvous.meeting import Participant, host_store

    from ds_cli.rendezvous import LIMIT

    address = request.master_addr or address_towards([host.address for host in request.hosts])
    place = Participant(
        0, request.max_nodes, address, request.master_port or 0, "machine", "--hostfile"
    )
    store = host_store(place, LIMIT)
    try:
        yield dataclasses.replace(
            request,
            rdzv_endpoint=f"{address}:{store.port}",
            rdzv_id=f"{request.rdzv_id}-{uuid.uuid4().hex[:8]}",
        )
    finally:
        del store


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
