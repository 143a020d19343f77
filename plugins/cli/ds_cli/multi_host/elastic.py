"""Machines that may come and go: torch's dynamic rendezvous, whose state travels as JSON instead of
a pickle.

This reaches into torch, whose parts for it are not public; it is imported for ``--rdzv-endpoint``
only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

from ds_command_kit.hosts.addresses import address_towards
from ds_rendezvous.meeting import Participant, host_store, reach_store
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

from ds_cli.multi_host.host_monitor import HostMonitor
from ds_cli.multi_host.rendezvous import LIMIT, READ_LIMIT, RanksStore
from ds_core.errors import CommError

ELASTIC = "ds_core-elastic"
# for more hosts, when there are enough; who comes later makes a new round
LAST_CALL = timedelta(seconds=5)
# after a round, which ends when all of its hosts that live wait already
LAST_CALL_AGAIN = timedelta(seconds=2.5)


def register() -> None:
    """Make it known to torch's launcher."""
    rendezvous_handler_registry.register(ELASTIC, elastic)


def elastic(params: RendezvousParameters) -> RendezvousHandler:
    """torch's dynamic rendezvous, whose state travels as JSON, and with one store for hosts and
    ranks.

    endpoint: ``HOST:PORT``; the host that has this address, or is given ``is_host``, opens the
    store.
    """
    address, _, port = params.endpoint.rpartition(":")
    told = params.get_as_bool("is_host")
    hosts = _matches_machine_hostname(address) if told is None else told
    place = Participant(
        0 if hosts else 1, params.max_nodes, address.strip("[]"), int(port), "host", "--nnodes"
    )
    try:
        store = (host_store if hosts else reach_store)(place, READ_LIMIT)
    except CommError:
        if not hosts or told is not None:
            raise
        # several launchers on this machine, and another was first
        store = reach_store(place, READ_LIMIT)
    settings = RendezvousSettings(
        params.run_id,
        params.min_nodes,
        params.max_nodes,
        RendezvousTimeout(join=LIMIT, last_call=LAST_CALL),
        keep_alive_interval=timedelta(seconds=2),
        keep_alive_max_attempt=5,
    )
    node = _NodeDescGenerator().generate(params.local_addr)
    state = _State(C10dRendezvousBackend(store, params.run_id), settings)
    handler = _Elastic(node, settings, ELASTIC, store, state)
    handler.ranks = RanksStore()
    handler.monitor = params.config["monitor"]
    handler.guest = dataclasses.replace(place, number=1)
    handler.hosts = hosts
    return handler


class _Elastic(DynamicRendezvousHandler):
    """With a store for the ranks of each round, and one who watches over the hosts."""

    ranks: RanksStore
    monitor: HostMonitor
    guest: Participant
    hosts: bool  # the store

    def next_rendezvous(self) -> RendezvousInfo:
        self.monitor.end()
        # What torch would open itself is on all interfaces.
        self._bootstrap_store_info = RendezvousStoreInfo("", 0)
        self._shared_tcp_store_server = self._store
        met = super().next_rendezvous()
        self._settings.timeout._last_call = LAST_CALL_AGAIN
        round_ = self._state_holder.state.round
        mine = reach_store(self.guest, READ_LIMIT)
        key = f"{self._settings.run_id}/{round_}"
        self.monitor.begin(
            mine, key, met.rank, met.world_size, self.guest.where, self.hosts, attempt=round_
        )
        address = address_towards([self.guest.address]) if met.rank == 0 else ""
        where = self.ranks.open(met.store, met.rank, met.world_size, address)
        return RendezvousInfo(met.store, met.rank, met.world_size, where)

    def num_nodes_waiting(self) -> int:
        waiting = super().num_nodes_waiting()
        if waiting:
            self.monitor.regroup()
        return waiting


class _State(_BackendRendezvousStateHolder):
    """torch's holder of the shared state, which it would pickle; `sync` is the only place that
    does.

    [Note: clocks] torch compares the stamps of all hosts with its own clock. Here clocks may
    differ by any amount: a stamp is as old as the time since this machine first saw it. What others
    wrote is written back as it was.
    """

    _backend: RendezvousBackend

    def __init__(self, backend: RendezvousBackend, settings: RendezvousSettings) -> None:
        super().__init__(backend, settings)
        self._seen: dict[_NodeDesc | None, tuple[datetime, float, datetime]] = {}

    def _here(
        self, whose: _NodeDesc | None, told: datetime, later: timedelta = timedelta(0)
    ) -> datetime:
        """The time on this machine's clock of what `whose` clock tells, or `later` than when it was
        first seen.
        """
        before, since, _ = self._seen.get(whose, (None, 0.0, told))
        since = since if before == told else time.monotonic()
        here = datetime.now(timezone.utc) + later - timedelta(seconds=time.monotonic() - since)
        self._seen[whose] = told, since, here
        return here

    def _there(self, whose: _NodeDesc | None, here: datetime) -> datetime:
        """What `_here` was told, unless the time has been changed since."""
        told, _, same = self._seen.get(whose, (here, 0.0, here))
        return told if same == here else here

    def _stamps(self, change: Callable[..., datetime], *last_call: timedelta) -> None:
        state = self._state
        state.deadline = state.deadline and change(None, state.deadline, *last_call)
        state.last_heartbeats = {
            node: change(node, at) for node, at in state.last_heartbeats.items()
        }

    def sync(self) -> bool | None:
        """Write the state if it was changed, else read it.

        Returns whether ours was written; None when not tried.
        """
        answer: tuple[Any, ...] | None
        if self._dirty:
            self._stamps(self._there)
            answer = self._backend.set_state(_as_json(self._state), self._token)
        elif self._cache_duration > 0 and self._last_sync_time >= max(
            time.monotonic() - self._cache_duration, 0
        ):
            return None
        else:
            answer = self._backend.get_state()
        written = (
            None
            if not self._dirty
            else (answer is not None and len(answer) > 2 and bool(answer[2]))
        )
        self._state = _RendezvousState() if answer is None else _from_json(answer[0])
        self._stamps(self._here, self._settings.timeout.last_call)
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
            "last_heartbeats": [
                [*row(node), at.isoformat()] for node, at in state.last_heartbeats.items()
            ],
        }
    ).encode()


def _from_json(text: bytes) -> _RendezvousState:
    """Raises RendezvousStateError for what none of us wrote."""

    def node(addr: str, pid: int, local_id: int) -> _NodeDesc:
        if not isinstance(addr, str) or type(pid) is not int or type(local_id) is not int:
            raise ValueError("not a host")
        return _NodeDesc(addr, pid, local_id)

    state = _RendezvousState()
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        found = json.loads(text)
        state.round = int(found["round"])
        state.complete = bool(found["complete"])
        state.closed = bool(found["closed"])
        state.deadline = found["deadline"] and datetime.fromisoformat(found["deadline"])
        state.participants = {node(*row[:3]): int(row[3]) for row in found["participants"]}
        state.wait_list = {node(*row) for row in found["wait_list"]}
        state.redundancy_list = {node(*row) for row in found["redundancy_list"]}
        state.last_heartbeats = {
            node(*row[:3]): datetime.fromisoformat(row[3]) for row in found["last_heartbeats"]
        }
        return state
    raise RendezvousStateError(
        "what lies at the --rdzv-endpoint is not the state of a dscore run: another program writes "
        "to this store"
    )
