"""How the machines of a run meet, for torch's elastic launcher, which imports this module only when it runs.

torch's own ways open stores on all interfaces, and its dynamic one unpickles what it finds there. Here a run has one
store, which on one machine listens on the loopback only, and what goes through it is JSON.
"""

from __future__ import annotations

import contextlib
import json
import time
from datetime import datetime, timedelta
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousSettings,
    RendezvousTimeout,
    _BackendRendezvousStateHolder,
    _NodeDesc,
    _NodeDescGenerator,
    _RendezvousState,
)
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

from ds_core.comm.meeting import Place, host_store, meet, reach_store
from ds_core.errors import CommError

__all__ = ["ELASTIC", "FIXED", "register"]

FIXED, ELASTIC = "ds_core-fixed", "ds_core-elastic"
LIMIT = timedelta(minutes=10)  # for machines to come, as in torch
READ_LIMIT = timedelta(minutes=1)  # for one answer of the elastic rendezvous' store


def register() -> None:
    """Make both ways known to torch's launcher."""
    rendezvous_handler_registry.register(FIXED, Fixed)
    rendezvous_handler_registry.register(ELASTIC, elastic)


class Fixed(RendezvousHandler):
    """A known number of machines, each with its number; one machine meets nobody.

    config: ``rank``, this machine's. endpoint: of machine 0's store; port 0 on one machine: any free one.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        address, _, port = params.endpoint.rpartition(":")
        self.place = Place(
            int(params.config["rank"]), params.max_nodes, address.strip("[]"), int(port), "machine", "--nnodes"
        )
        self.run_id = params.run_id
        self._store: Any = None

    def get_backend(self) -> str:
        return FIXED

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Open or reach the store and wait for all machines. Called again for each restart."""
        place = self.place
        if place.size == 1:
            # A new one for each attempt: processes that use torch alone would find the addresses of those before.
            self._store = None
        if self._store is None:
            self._store = (host_store if place.number == 0 else reach_store)(place, LIMIT)
        prefix = "ds_core/machine" if place.size == 1 else f"machines/{self._meet()}"
        port = place.port or self._store.port
        return RendezvousInfo(
            PrefixStore(prefix, self._store), place.number, place.size, RendezvousStoreInfo(place.address, port)
        )

    def _meet(self) -> str:
        """Wait for the other machines, in a part of the store that ranks do not use."""
        return meet(PrefixStore("machines", self._store), self.place, LIMIT, kept=True, job=self.run_id)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        return

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return str(self.run_id)

    def shutdown(self) -> bool:
        return True


def elastic(params: RendezvousParameters) -> RendezvousHandler:
    """torch's dynamic rendezvous, whose state travels as JSON, and with one store for machines and ranks.

    endpoint: ``HOST:PORT``; the machine that has this address, or is told so by ``is_host``, opens the store.
    """
    address, _, port = params.endpoint.rpartition(":")
    told = params.get_as_bool("is_host")
    hosts = _matches_machine_hostname(address) if told is None else told
    place = Place(0 if hosts else 1, params.max_nodes, address.strip("[]"), int(port), "machine", "--nnodes")
    try:
        store = (host_store if hosts else reach_store)(place, READ_LIMIT)
    except CommError:
        if not hosts or told is not None:
            raise
        store = reach_store(place, READ_LIMIT)  # several launchers on this machine, and another was first
    settings = RendezvousSettings(
        params.run_id,
        params.min_nodes,
        params.max_nodes,
        RendezvousTimeout(join=LIMIT),
        keep_alive_interval=timedelta(seconds=5),
        keep_alive_max_attempt=3,
    )
    node = _NodeDescGenerator().generate(params.local_addr)
    state = _State(C10dRendezvousBackend(store, params.run_id), settings)
    handler = _Elastic(node, settings, ELASTIC, store, state)
    handler.bootstrap = RendezvousStoreInfo(place.address, place.port)
    return handler


class _Elastic(DynamicRendezvousHandler):
    """The ranks use the store at which the machines meet, instead of one more."""

    bootstrap: RendezvousStoreInfo

    def next_rendezvous(self) -> RendezvousInfo:
        self._bootstrap_store_info, self._shared_tcp_store_server = self.bootstrap, self._store
        return super().next_rendezvous()


class _State(_BackendRendezvousStateHolder):
    """torch's holder of the shared state, which it would pickle; `sync` is the only place that does."""

    _backend: RendezvousBackend

    def sync(self) -> bool | None:
        """Write the state if it was changed, else read it. Returns whether ours was written; None when not tried."""
        answer: tuple[Any, ...] | None
        if self._dirty:
            answer = self._backend.set_state(_as_json(self._state), self._token)
        elif self._cache_duration > 0 and self._last_sync_time >= max(time.monotonic() - self._cache_duration, 0):
            return None
        else:
            answer = self._backend.get_state()
        written = None if not self._dirty else (answer is not None and len(answer) > 2 and bool(answer[2]))
        self._state = _RendezvousState() if answer is None else _from_json(answer[0])
        self._token = None if answer is None else answer[1]
        self._dirty = False
        self._last_sync_time = time.monotonic()
        self._sanitize()
        return written


def _as_json(state: _RendezvousState) -> bytes:
    def row(node: _NodeDesc) -> list[Any]:
        return [node.addr, node.pid, node.local_id]

    return json.dumps(
        {
            "round": state.round,
            "complete": state.complete,
            "deadline": state.deadline and state.deadline.isoformat(),
            "closed": state.closed,
            "participants": [[*row(node), rank] for node, rank in state.participants.items()],
            "wait_list": sorted(map(row, state.wait_list)),
            "redundancy_list": sorted(map(row, state.redundancy_list)),
            "last_heartbeats": [[*row(node), at.isoformat()] for node, at in state.last_heartbeats.items()],
        }
    ).encode()


def _from_json(text: bytes) -> _RendezvousState:
    """Raises RendezvousStateError for what none of us wrote."""

    def node(addr: str, pid: int, local_id: int) -> _NodeDesc:
        if not isinstance(addr, str) or type(pid) is not int or type(local_id) is not int:
            raise ValueError("not a machine")
        return _NodeDesc(addr, pid, local_id)

    state = _RendezvousState()
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        found = json.loads(text)
        state.round, state.complete, state.closed = int(found["round"]), bool(found["complete"]), bool(found["closed"])
        state.deadline = found["deadline"] and datetime.fromisoformat(found["deadline"])
        state.participants = {node(*row[:3]): int(row[3]) for row in found["participants"]}
        state.wait_list = {node(*row) for row in found["wait_list"]}
        state.redundancy_list = {node(*row) for row in found["redundancy_list"]}
        state.last_heartbeats = {node(*row[:3]): datetime.fromisoformat(row[3]) for row in found["last_heartbeats"]}
        return state
    raise RendezvousStateError(
        "what lies at the --rdzv-endpoint is not the state of a dscore run: another program writes to this store"
    )
