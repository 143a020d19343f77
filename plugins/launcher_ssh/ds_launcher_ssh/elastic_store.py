"""The store at which the hosts of an elastic run meet, in the launcher's process: so any host may
die.
"""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from ds_command_kit.environment import import_torch
from ds_command_kit.hosts.addresses import address_towards

if TYPE_CHECKING:
    from ds_command_kit.launch import LaunchRequest

LIMIT = timedelta(minutes=10)  # for hosts to come, as in torch


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

    address = request.master_addr or address_towards([host.address for host in request.hosts])
    place = Participant(
        0, request.max_nodes, address, request.master_port or 0, "host", "--hostfile"
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
