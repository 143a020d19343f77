"""The hosts of a run: which are alive, which have failed, and that all end together.

The agent of each host talks to the store at which the hosts meet, by a connection of its own:

- it sends a heartbeat every 2 seconds, and checks that of the host before it (in a ring);
- when one of its processes fails, or that host is lost, it raises an alarm. Each host that sees an
  alarm ends its processes and reports. One host decides for all (`decision.decide`); the one with
  the failure shows it, and all end with its exit code;
- a host that the store no longer answers ends its processes and says whose store it was;
- a host that is asked to stop while another is silent reports that one, too: the tool that reaches
  the hosts may have noticed its loss first.

A process that was stopped (SIGSTOP) for 10 seconds while others run counts as failed.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ds_cli.local.failure import WorkerFailure, gather
from ds_cli.multi_host.decision import Decision, Report, decide, unequal
from ds_core.errors import CommError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from ds_cli.local.process_monitor import ProcessMonitor

TICK_SECONDS = 0.1
ASK_SECONDS = 0.5
"""Between two looks for an alarm."""
BEAT_SECONDS = 2.0
LOST_SECONDS = 16.0
"""Without a heartbeat, or an answer of the store: the host is lost."""
LOST_ELASTIC_SECONDS = 8.0
"""The same where a loss costs a restart and not the run, or where the run ends anyway."""
SILENT_SECONDS = 6.0
"""Without a heartbeat after an alarm: no report will come."""
BROKEN_SECONDS = 3.0
"""After the store has closed: time for a run that has ended well to end."""
STOPPED_SECONDS = 10.0
"""A process that stands still for so long has failed."""
DEAF_SECONDS = 5.0
"""How long the main thread may take to ask for a decision that is there."""


class Ended(Exception):
    """The run has ended, with this exit code, and all is said."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the run has ended with exit code {code}")
        self.code = code


@dataclass(slots=True)
class _Round:
    """One meeting of the hosts, until one of them fails, comes or goes."""

    # -- who takes part
    store: Store
    number: int
    """This host's."""
    names: dict[int, str]
    """What to call each host, by number."""
    main: bool
    """The store is in this process, which must stay until the others have read from it."""
    attempt: int = -1
    world_size: int = 0

    # -- heartbeats
    beat: int = 0
    next_beat: float = 0.0
    next_ask: float = 0.0
    heard: dict[int, tuple[bytes, float]] = field(default_factory=dict)
    """By host: its last heartbeat, and when that was new."""
    lost: tuple[int, ...] = ()
    silent: str = ""
    """The host before this one, while its heartbeat is late, but not late enough to be lost."""

    # -- how it ends
    expected: bool = False
    """Hosts come or go on purpose: processes that end have not failed."""
    known: Sequence[tuple[int, int, int, int]] = ()
    """Failures that torch knows of, as for `gather`."""
    decision: Decision | None = None
    asked: threading.Event = field(default_factory=threading.Event)
    """The main thread waits for the decision."""
    looked: threading.Event = field(default_factory=threading.Event)
    """After a signal to stop: it is known whether another host is silent."""
    decided: threading.Event = field(default_factory=threading.Event)


class HostMonitor:
    """While entered, and a round runs: checks this host and the others.

    The main thread calls its methods.
    """

    def __init__(
        self,
        processes: ProcessMonitor,
        *,
        elastic: bool,
        restarts: int,
        problem: str,
        say: Callable[[str], None],
    ) -> None:
        self.processes = processes
        # Hosts may come and go.
        self.elastic = elastic
        # How often processes are started again after a failure, and how often they were.
        self.restarts = restarts
        self.used = 0
        # What keeps this host from taking part; the others show it as well.
        self.problem = problem
        # Shows a message.
        self.say = say
        self.attempt: int | None = None
        # Where the store is, for messages.
        self.where = ""
        self._round: _Round | None = None
        self._heard = time.monotonic()
        self._broken = float("inf")
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=run, name=f"dscore-{name}", daemon=True)
            for run, name in ((self._talk, "talk"), (self._time, "time"))
        ]

    def __enter__(self) -> HostMonitor:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join(2.0)

    # -- rounds, as the rendezvous and torch's launcher see them -----------------------------------

    def begin(
        self,
        store: Store,
        key: str,
        number: int,
        size: int,
        where: str,
        main: bool,
        attempt: int | None = None,
    ) -> None:
        """The hosts have met. Raises for hosts that do not fit together.

        store: a connection for this alone.
        main: the store is this machine's.
        attempt: a number that all have for the start of the processes, where each host counts
            for itself.
        """
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self.where = where
        self.attempt = attempt
        base = PrefixStore(f"supervision/{key}", store)
        facts = {"host": socket.gethostname(), "problem": self.problem, "versions": _versions()}
        base.set(f"beat/{number}", "0")
        base.set(f"host/{number}", json.dumps(facts))
        # One host compares, so that all raise the same error.
        if number == 0:
            rows = [json.loads(base.get(f"host/{n}")) for n in range(size)]
            base.set("fit", json.dumps([*unequal(rows), [row["host"] for row in rows]]))
        culprit, wrong, hosts = json.loads(base.get("fit"))
        names = {n: f"host {host}" for n, host in enumerate(hosts)}
        self._heard = time.monotonic()
        self._broken = float("inf")
        round_ = _Round(base, number, names, main)
        if wrong:
            self._let_read(round_, range(size))
            raise CommError(wrong) if culprit == number else Ended(1)
        self._round = round_

    def ranks(self, attempt: int, ranks: Sequence[int], world_size: int) -> None:
        """The processes of this round are about to start."""
        if (now := self._round) is not None:
            own = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
            now.store.set(f"ranks/{now.number}", f"{own} of {world_size}")
            now.attempt = attempt
            now.world_size = world_size

    def regroup(self) -> None:
        """Machines have come or gone on purpose: processes end now without having failed, here and
        elsewhere.
        """
        if (now := self._round) is not None and not now.expected:
            now.expected = True
            now.store.set("regroup", "")

    def end(self, known: Sequence[tuple[int, int, int, int]] = ()) -> None:
        """The processes of the round have ended, badly unless regrouped.

        Raises Ended unless they are to start again.

        known: failures that torch tells of, as for `gather`.
        """
        now = self._round
        if now is None:
            return
        if not now.expected or now.decision is not None:
            now.known = known
            now.asked.set()
            # In steps of a second, since hosts may come meanwhile: then no decision is made.
            while not now.decided.wait(1.0) and not now.expected:
                pass
            if now.decision is not None and not now.decision.again:
                raise Ended(now.decision.code)
        self._round = None

    def stopped(self) -> int | None:
        """This host was told to stop: the run's exit code if it ends as a host is lost, and
        that is said.
        """
        now = self._round
        if now is None or (now.looked.wait(1.0) and not now.lost):
            return None
        now.asked.set()
        # The tool that asked us to stop kills us soon, so a late decision is not waited for.
        now.decided.wait(2.0)
        return None if now.decision is None or now.decision.again else now.decision.code

    # -- the thread that talks ---------------------------------------------------------------------

    def _talk(self) -> None:
        while not self._closed.wait(TICK_SECONDS):
            now = self._round
            if now is None or now.decided.is_set():
                self._heard = time.monotonic()
                continue
            try:
                self._turn(now)
                self._heard = time.monotonic()
                self._broken = float("inf")
            # A broken connection to the store does not recover; `_time` ends the run.
            except (OSError, RuntimeError, ValueError, TypeError, KeyError):
                self._broken = time.monotonic()
                return

    def _turn(self, now: _Round) -> None:
        self._beat(now)
        if self._stopping() and not now.looked.is_set():
            if (
                not self.elastic
                and now.store.check(["silent"])
                and (silent := now.store.get("silent"))
            ):
                now.lost = (int(silent),)
            now.looked.set()
        failed = self._fails(now) or now.asked.is_set() or bool(now.lost)
        told = False
        # Each look is a message to the one store, which many hosts ask.
        if time.monotonic() >= now.next_ask:
            now.next_ask = time.monotonic() + ASK_SECONDS
            told = now.store.add("alarms", 0) > 0
        if not failed and not told:
            return
        if now.expected or (self.elastic and now.store.check(["regroup"])):
            now.expected = True
            return
        self._resolve(now, failed)

    def _stopping(self) -> bool:
        return self.processes.told < float("inf")

    def _fails(self, now: _Round) -> bool:
        return any(
            one.attempt == now.attempt and e.code != 0
            for one, e in list(self.processes.endings.items())
        )

    def _beat(self, now: _Round) -> None:
        """Say that we are alive, and look after the host before us."""
        at = time.monotonic()
        if at < now.next_beat:
            return
        now.next_beat = at + BEAT_SECONDS
        now.beat += 1
        now.store.set(f"beat/{now.number}", str(now.beat))
        other = (now.number - 1) % len(now.names)
        if other == now.number:
            return
        beat = now.store.get(f"beat/{other}")
        last, since = now.heard.get(other, (b"", at))
        now.heard[other] = (beat, at if beat != last else since)
        silence = at - now.heard[other][1]
        if silence > (LOST_ELASTIC_SECONDS if self.elastic else LOST_SECONDS):
            now.lost = (other,)
        if (silent := str(other) if silence > LOST_ELASTIC_SECONDS else "") != now.silent:
            now.silent = silent
            now.store.set("silent", silent)

    def _resolve(self, now: _Round, failed: bool) -> None:
        """End the processes of the round, report, and come to the one decision."""
        # The counter orders the alarms of all hosts: clocks of hosts cannot be compared.
        order = now.store.add("alarms", 1) if failed else 0
        grace = self.processes.grace
        failures, ended, finished = self._own(now, failed)
        report = Report(
            now.number,
            socket.gethostname(),
            order,
            tuple(failures),
            ended,
            finished,
            now.lost,
            self.used,
        )
        now.store.set(f"report/{now.number}", report.text())
        end = time.monotonic() + grace + 5.0
        reports = {now.number: report}
        beats = dict[int, tuple[bytes, float]]()
        # Every host gathers reports; the first that has all, or waits no longer, decides.
        while not now.store.check(["decision"]):
            for other in now.names.keys() - reports.keys():
                if now.store.check([f"report/{other}"]):
                    reports[other] = Report.read(now.store.get(f"report/{other}"))
            missing = now.names.keys() - reports.keys() - set(now.lost)
            missing = {other for other in missing if _beats(now.store, other, beats)}
            if not missing or time.monotonic() > end:
                # Two hosts may decide at once: the first one's decision stays.
                now.store.compare_set(
                    "decision", "", self._decide(now, list(reports.values())).json()
                )
            self._beat(now)
            self._closed.wait(TICK_SECONDS)
        decision = Decision.read(now.store.get("decision"))
        self.used = decision.used
        if decision.number == now.number:
            self.say(decision.text)
        self._let_read(now, [n for n in now.names if now.store.check([f"report/{n}"])])
        now.decision = decision
        now.decided.set()
        # The main thread may wait inside torch for hosts that will not come.
        if not now.asked.wait(DEAF_SECONDS):
            self.processes.leave(decision.code)

    def _own(self, now: _Round, failed: bool) -> tuple[list[WorkerFailure], int, bool]:
        """End this machine's processes of the round; its failures, how many were ended, whether all
        had finished.
        """
        mine = [one for one in self.processes.started() if one.attempt == now.attempt]
        finished = bool(mine) and all(one in self.processes.endings for one in mine) and not failed
        alive = self.processes.ask(now.attempt)
        # Asked to stop while a host is lost: the tool kills us soon, so no grace is given.
        if now.lost and self._stopping():
            self.processes.end(now.attempt)
        end = time.monotonic() + self.processes.grace + 3.0
        while self.processes.alive(now.attempt) and time.monotonic() < end:
            self._beat(now)
            self._closed.wait(TICK_SECONDS)
        # torch's launcher passes on what it knows of the failures by `end`.
        now.asked.wait(1.0)
        if not failed or (now.lost and not self._fails(now)):
            return [], alive, finished
        failures, ended = gather(
            self.processes.folder,
            now.attempt,
            self.processes.endings,
            now.known,
            self.processes.grace,
        )
        return [row.at(socket.gethostname()) for row in failures], ended, False

    def _decide(self, now: _Round, reports: list[Report]) -> Decision:
        names = {}
        for number, name in now.names.items():
            ranks = (
                now.store.get(f"ranks/{number}").decode()
                if now.store.check([f"ranks/{number}"])
                else ""
            )
            names[number] = f"{name} ({ranks})" if ranks else name
        used = max(report.used for report in reports)
        return decide(
            reports,
            names,
            now.world_size,
            me=now.number,
            elastic=self.elastic,
            used=used,
            most=self.restarts,
        )

    def _let_read(self, now: _Round, others: Sequence[int]) -> None:
        """Who has the store keeps it until the others have read what is in it."""
        now.store.set(f"read/{now.number}", "")
        end = time.monotonic() + 3.0
        while (
            now.main
            and time.monotonic() < end
            and not now.store.check([f"read/{n}" for n in others])
        ):
            time.sleep(0.02)

    # -- the thread that never waits for anybody ---------------------------------------------------

    def _time(self) -> None:
        stopped: dict[int, float] = {}
        while not self._closed.wait(1.0):
            self._look_for_stopped(stopped)
            now = self._round
            at = time.monotonic()
            if now is not None and not now.decided.is_set():
                silent = (
                    self.processes.told - self._heard > LOST_ELASTIC_SECONDS and self._stopping()
                )
                if silent or at - self._heard > LOST_SECONDS or at - self._broken > BROKEN_SECONDS:
                    self._without_store(now)

    def _without_store(self, now: _Round) -> None:
        owner = f"{now.names[0]}, which has the store of the run"
        if self.elastic:
            owner = f"the store of the run at {self.where}"
        self.processes.end()
        self.say(f"dscore: lost {owner}; all processes were ended")
        self.processes.leave(1)

    def _look_for_stopped(self, since: dict[int, float]) -> None:
        """A process that is stopped for long while another one of the run is not has failed."""
        begun = [one for one in self.processes.started() if one not in self.processes.endings]
        stopped = {one.pid for one in begun if _state(one.pid) == "T"}
        # On one host, Ctrl-Z stops all of them: that is a pause and no failure.
        alone = self._round is None
        for one in begun:
            if one.pid not in stopped:
                since.pop(one.pid, None)
            elif time.monotonic() - since.setdefault(one.pid, time.monotonic()) > STOPPED_SECONDS:
                if not alone or len(stopped) < len(begun):
                    self.processes.condemn(
                        one, f"it stood still for {STOPPED_SECONDS:g} s, stopped by a signal"
                    )


def _beats(store: Store, number: int, seen: dict[int, tuple[bytes, float]]) -> bool:
    """Whether a host that should report still sends heartbeats; `seen` keeps the last."""
    beat = store.get(f"beat/{number}")
    at = time.monotonic()
    last, since = seen.setdefault(number, (beat, at))
    if beat != last:
        seen[number] = beat, at
        return True
    return at - since < SILENT_SECONDS


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _versions() -> dict[str, str]:
    """What must be equal on all hosts: Python, torch, and every installed part of ds_core."""
    from importlib.metadata import PackageNotFoundError, entry_points, version

    found = {"python": ".".join(map(str, sys.version_info[:2]))}
    names = {"torch", "dscore-train", "dscore-cli"}
    for group in ("ds_core.plugins", "ds_core.backends"):
        names |= {point.dist.name for point in entry_points(group=group) if point.dist is not None}
    for name in sorted(names):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
