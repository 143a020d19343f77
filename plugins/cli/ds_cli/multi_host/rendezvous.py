"""How the hosts of a run meet, for torch's elastic launcher, which imports this module only when
it runs.

torch's own ways open stores on all interfaces, and its dynamic one unpickles what it finds there.
Here a run has one store, which on one host listens on the loopback only, and what goes through
it is JSON. `elastic` has the other way.
"""

from __future__ import annotations

import dataclasses
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ds_rendezvous.meeting import Participant, host_store, meet, reach_store
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

if TYPE_CHECKING:
    from ds_cli.multi_host.host_monitor import HostMonitor

FIXED = "ds_core-fixed"
LIMIT = timedelta(minutes=10)  # for hosts to come, as in torch
READ_LIMIT = timedelta(minutes=1)  # for one answer of the store


def register() -> None:
    """Make it known to torch's launcher."""
    rendezvous_handler_registry.register(FIXED, Fixed)


class RanksStore:
    """The store for the ranks of one round, on host 0: a script that uses torch alone would find
    in one store for all rounds the addresses of ranks that have ended."""

    def __init__(self) -> None:
        self._server: Any = None

    def open(self, store: Any, number: int, size: int, address: str) -> RendezvousStoreInfo:
        """Where it is, on all hosts.

        store: a part of the hosts' for this round alone.
        address: host 0's.
        """
        self._server = None
        if number == 0:
            self._server = host_store(Participant(0, size, address, 0, "host"), LIMIT)
            store.set("ranks", json.dumps([address, self._server.port]))
        return RendezvousStoreInfo(*json.loads(store.get("ranks")))


class Fixed(RendezvousHandler):
    """A known number of hosts, each with its number; one host needs no rendezvous.

    params.config: ``rank``, this host's number; ``monitor``, the `HostMonitor` of several hosts.
    params.endpoint: of host 0's store. On one host port 0 means any free one.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        address, _, port = params.endpoint.rpartition(":")
        self.place = Participant(
            int(params.config["rank"]),
            params.max_nodes,
            address.strip("[]"),
            int(port),
            "host",
            "--nnodes",
        )
        self.run_id = params.run_id
        self.monitor: HostMonitor = params.config["monitor"]
        self._store: Any = None
        self._ranks: RanksStore | None = None  # of the first round: the hosts' own does

    def get_backend(self) -> str:
        """The name that torch logs."""
        return FIXED

    @property
    def use_agent_store(self) -> bool:
        """Workers meet in the store of this agent."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Open or reach the store and wait for all hosts. Called again for each restart."""
        place = self.place
        self.monitor.end()
        if place.size == 1:
            # A new one for each attempt: processes that use torch alone would find the addresses of
            # those before.
            self._store = None
        if self._store is None:
            self._store = (host_store if place.number == 0 else reach_store)(place, LIMIT)
        port = place.port or self._store.port
        prefix = "ds_core/host"
        if place.size > 1:
            prefix = f"hosts/{self._meet()}"
            guest = dataclasses.replace(place, port=port, number=max(1, place.number))
            mine = reach_store(guest, READ_LIMIT)
            self.monitor.begin(
                mine, prefix, place.number, place.size, place.where, place.number == 0
            )
        store = PrefixStore(prefix, self._store)
        where = RendezvousStoreInfo(place.address, port)
        if place.size > 1:
            if self._ranks is not None:
                where = self._ranks.open(store, place.number, place.size, place.address)
            self._ranks = self._ranks or RanksStore()
        return RendezvousInfo(store, place.number, place.size, where)

    def _meet(self) -> str:
        """Wait for the other hosts, in a part of the store that ranks do not use."""
        return meet(
            PrefixStore("hosts", self._store), self.place, LIMIT, kept=True, job=self.run_id
        )

    def is_closed(self) -> bool:
        """Never: the hosts are fixed."""
        return False

    def set_closed(self) -> None:
        """Without effect: the hosts are fixed."""
        return

    def num_nodes_waiting(self) -> int:
        """None: no host joins later."""
        return 0

    def get_run_id(self) -> str:
        """What tells this run from others."""
        return str(self.run_id)

    def shutdown(self) -> bool:
        """Nothing is left to be closed."""
        return True
