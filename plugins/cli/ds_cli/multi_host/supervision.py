"""Each machine's eye on the others: who is alive, who has failed, and one end for all.

Every machine's launcher (its agent) talks to the store at which the machines meet, by a connection
of its own:

- it beats every 2 seconds, and looks whether the machine before it (in a ring) still does;
- when one of its processes fails, or that machine has gone, it raises an alarm; whoever hears of
  one ends its processes and reports; one verdict (`verdict.decide`) goes back to all; who has the
  failure shows it, all end with its code;
- one that hears nothing from the store any more ends its processes and says whose store it was;
- one that is told to stop while another is silent (by a tool that has noticed before us) says so
  too.

A process that the system has stopped (SIGSTOP) for 10 seconds while others run is taken for a
failed one.
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
from ds_cli.multi_host.verdict import Report, Verdict, decide, unequal
from ds_core.errors import CommError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from ds_cli.local.guard import Guard

TICK_SECONDS = 0.1
ASK_SECONDS = 0.5  # between looks for an alarm
BEAT_SECONDS = 2.0
LOST_SECONDS = 16.0  # without a beat, or an answer of the store
# without a beat, where that costs a restart and not the run, or the run ends anyway
LOST_ELASTIC_SECONDS = 8.0
SILENT_SECONDS = 6.0  # without a beat, when there has been an alarm
BROKEN_SECONDS = 3.0  # after the store has closed: time for a run that has ended well to end
STOPPED_SECONDS = 10.0
DEAF_SECONDS = 5.0  # how long the main thread may take to ask for a verdict that is there


class Ended(Exception):
    """The run has ended, with this exit code, and all is said."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the run has ended with exit code {code}")
        self.code = code


@dataclass(slots=True)
class _Round:
    """One meeting of the machines, until one of them fails or comes or goes. names: what to call
    each.
    """

    store: Store
    number: int
    names: dict[int, str]
    main: bool  # of the store, which must stay until others have read
    attempt: int = -1
    world_size: int = 0
    beat: int = 0
    next_beat: float = 0.0
    next_ask: float = 0.0
    # last beat of a machine, and when it was new
    heard: dict[int, tuple[bytes, float]] = field(default_factory=dict)
    lost: tuple[int, ...] = ()
    silent: str = ""  # the machine before us, while it does not beat, but is not lost yet
    expected: bool = False  # machines come: that processes end is no failure
    known: Sequence[tuple[int, int, int, int]] = ()
    verdict: Verdict | None = None
    asked: threading.Event = field(default_factory=threading.Event)
    # for who is silent, when we were told to stop
    looked: threading.Event = field(default_factory=threading.Event)
    decided: threading.Event = field(default_factory=threading.Event)


class Watch:
    """While entered, and a round runs, watches over this machine and the others. The main thread
    calls its methods.

    elastic: machines may come and go. restarts: how often processes are started again after a
    failure. problem: what keeps this machine from taking part, which the others should hear too.
    say: shows a message.
    """

    def __init__(
        self,
        guard: Guard,
        *,
        elastic: bool,
        restarts: int,
        problem: str,
        say: Callable[[str], None],
    ) -> None:
        self.guard = guard
        self.elastic = elastic
        self.restarts = restarts
        self.problem = problem
        self.say = say
        self.used = 0  # restarts
        self.attempt: int | None = None
        self.where = ""  # the store is, for messages
        self._round: _Round | None = None
        self._heard = time.monotonic()
        self._broken = float("inf")
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=run, name=f"dscore-{name}", daemon=True)
            for run, name in ((self._talk, "talk"), (self._time, "time"))
        ]

    def __enter__(self) -> Watch:
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
        """The machines have met. Raises for machines that do not fit together.

        store: a connection for this alone; main: it is this machine's. attempt: a number that all
        have for the start of the processes, where each machine counts for itself.
        """
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self.where = where
        self.attempt = attempt
        base = PrefixStore(f"supervision/{key}", store)
        facts = {"host": socket.gethostname(), "problem": self.problem, "versions": _versions()}
        base.set(f"beat/{number}", "0")
        base.set(f"host/{number}", json.dumps(facts))
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
        """The processes of the round have ended, badly unless regrouped. Raises Ended unless they
        are to start again.

        known: failures that torch tells of, as for `gather`.
        """
        now = self._round
        if now is None:
            return
        if not now.expected or now.verdict is not None:
            now.known = known
            now.asked.set()
            while not now.decided.wait(1.0) and not now.expected:
                pass
            if now.verdict is not None and not now.verdict.again:
                raise Ended(now.verdict.code)
        self._round = None

    def stopped(self) -> int | None:
        """This machine was told to stop: the run's exit code if it ends as a machine is lost, and
        that is said.
        """
        now = self._round
        if now is None or (now.looked.wait(1.0) and not now.lost):
            return None
        now.asked.set()
        now.decided.wait(2.0)  # soon the tool kills us
        return None if now.verdict is None or now.verdict.again else now.verdict.code

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
            # such a connection does not come back
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
        if time.monotonic() >= now.next_ask:
            now.next_ask = time.monotonic() + ASK_SECONDS
            told = now.store.add("alarms", 0) > 0
        if not failed and not told:
            return
        if now.expected or (self.elastic and now.store.check(["regroup"])):
            now.expected = True
            return
        self._settle(now, failed)

    def _stopping(self) -> bool:
        return self.guard.told < float("inf")

    def _fails(self, now: _Round) -> bool:
        return any(
            one.attempt == now.attempt and e.code != 0
            for one, e in list(self.guard.endings.items())
        )

    def _beat(self, now: _Round) -> None:
        """Say that we are alive, and look after the machine before us."""
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

    def _settle(self, now: _Round, failed: bool) -> None:
        """End the processes of the round, report, and come to the one verdict."""
        order = now.store.add("alarms", 1) if failed else 0
        grace = self.guard.grace
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
        while not now.store.check(["verdict"]):
            for other in now.names.keys() - reports.keys():
                if now.store.check([f"report/{other}"]):
                    reports[other] = Report.read(now.store.get(f"report/{other}"))
            missing = now.names.keys() - reports.keys() - set(now.lost)
            missing = {other for other in missing if _beats(now.store, other, beats)}
            if not missing or time.monotonic() > end:
                now.store.compare_set(
                    "verdict", "", self._decide(now, list(reports.values())).json()
                )
            self._beat(now)
            self._closed.wait(TICK_SECONDS)
        verdict = Verdict.read(now.store.get("verdict"))
        self.used = verdict.used
        if verdict.number == now.number:
            self.say(verdict.text)
        self._let_read(now, [n for n in now.names if now.store.check([f"report/{n}"])])
        now.verdict = verdict
        now.decided.set()
        if not now.asked.wait(DEAF_SECONDS):  # it waits in torch for machines that will not come
            self.guard.leave(verdict.code)

    def _own(self, now: _Round, failed: bool) -> tuple[list[WorkerFailure], int, bool]:
        """End this machine's processes of the round; its failures, how many were ended, whether all
        had finished.
        """
        mine = [one for one in self.guard.started() if one.attempt == now.attempt]
        finished = bool(mine) and all(one in self.guard.endings for one in mine) and not failed
        alive = self.guard.ask(now.attempt)
        if now.lost and self._stopping():  # no time is left
            self.guard.end(now.attempt)
        end = time.monotonic() + self.guard.grace + 3.0
        while self.guard.alive(now.attempt) and time.monotonic() < end:
            self._beat(now)
            self._closed.wait(TICK_SECONDS)
        now.asked.wait(1.0)  # for what torch knows
        if not failed or (now.lost and not self._fails(now)):
            return [], alive, finished
        failures, ended = gather(
            self.guard.folder, now.attempt, self.guard.endings, now.known, self.guard.grace
        )
        return [row.at(socket.gethostname()) for row in failures], ended, False

    def _decide(self, now: _Round, reports: list[Report]) -> Verdict:
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
                silent = self.guard.told - self._heard > LOST_ELASTIC_SECONDS and self._stopping()
                if silent or at - self._heard > LOST_SECONDS or at - self._broken > BROKEN_SECONDS:
                    self._without_store(now)

    def _without_store(self, now: _Round) -> None:
        owner = f"{now.names[0]}, which has the store of the run"
        if self.elastic:
            owner = f"the store of the run at {self.where}"
        self.guard.end()
        self.say(f"dscore: lost {owner}; all processes were ended")
        self.guard.leave(1)

    def _look_for_stopped(self, since: dict[int, float]) -> None:
        """Take a process for failed that is stopped for long, while another one of the run is
        not."""
        begun = [one for one in self.guard.started() if one not in self.guard.endings]
        stopped = {one.pid for one in begun if _state(one.pid) == "T"}
        alone = self._round is None  # on one machine, all of them stopped is a pause
        for one in begun:
            if one.pid not in stopped:
                since.pop(one.pid, None)
            elif time.monotonic() - since.setdefault(one.pid, time.monotonic()) > STOPPED_SECONDS:
                if not alone or len(stopped) < len(begun):
                    self.guard.condemn(
                        one, f"it stood still for {STOPPED_SECONDS:g} s, stopped by a signal"
                    )


def _beats(store: Store, number: int, seen: dict[int, tuple[bytes, float]]) -> bool:
    """Whether a machine that should report still gives a sign of life; `seen` remembers the
    last."""
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
    """What must be equal on all machines: Python, torch, and every installed part of ds_core."""
    from importlib.metadata import PackageNotFoundError, entry_points, version

    found = {"python": ".".join(map(str, sys.version_info[:2]))}
    names = {"torch", "ds-core", "ds-cli"}
    for group in ("ds_core.plugins", "ds_core.backends"):
        names |= {point.dist.name for point in entry_points(group=group) if point.dist is not None}
    for name in sorted(names):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
