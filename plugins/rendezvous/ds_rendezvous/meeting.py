"""Where ranks meet: rank 0's store, who may listen for it, and making sure that those who come belong together.

torch's store accepts every connection, and what does not fit (a job on the same port, a rank too many) shows up later
as a connection that is reset. So the ranks compare notes first, as JSON, and rank 0 says go or what is wrong.
`dscore run` lets the machines of a run meet in the same way. Nothing that comes from a store is unpickled.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ds_core.errors import CommError
from ds_rendezvous.waiting import Waiting

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

__all__ = [
    "Participant",
    "StoreLostError",
    "host_store",
    "is_loopback",
    "listen",
    "meet",
    "meet_at_store",
    "reach_store",
    "within",
]

T = TypeVar("T")
LATE_SECONDS = 60.0  # how long a rank that comes after the start waits for a start of its own
TELL_SECONDS = 5.0  # how long rank 0 keeps its store for ranks that have yet to read why it gives up
AGAIN_SECONDS = 10.0  # how long who has lost number 0's store looks for another one there
LONGEST_NOTE = 4096  # characters


class StoreLostError(CommError):
    """Number 0's store has closed while others were waiting at it."""


@dataclass(frozen=True, slots=True)
class Participant:
    """Who meets where. what: ``"rank"``, or ``"machine"`` for launchers; size: how many of them there are.

    address, port: of the store of number 0. setting: the name under which users give `size`.
    """

    number: int
    size: int
    address: str
    port: int
    what: str = "rank"
    setting: str = "WORLD_SIZE"

    def __str__(self) -> str:
        return f"{self.what} {self.number} of {self.size}"

    @property
    def where(self) -> str:
        """``address:port``."""
        return f"{self.address}:{self.port}"


# -- the store ---------------------------------------------------------------------------------------------------------


def is_loopback(address: str) -> bool:
    """Whether only processes of this machine can reach `address`."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens at `port` (0: any free one) of `address` and nowhere else.

    A name, which may mean another interface to other machines, and an address that this machine does not have (it is
    translated on the way) listen on every interface. Raises OSError, for example for a port in use.
    """
    host = "127.0.0.1" if address == "localhost" else address
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        with socket.socket(family) as probe:
            probe.bind((host, 0))
    except (ValueError, OSError):
        both = socket.has_dualstack_ipv6()
        return socket.create_server(
            ("", port), family=socket.AF_INET6 if both else socket.AF_INET, backlog=4096, dualstack_ipv6=both
        )
    return socket.create_server((host, port), family=family, backlog=4096)


def host_store(place: Participant, timeout: timedelta) -> TCPStore:
    """Number 0's store, listening no wider than `listen` does. Raises CommError when the port is taken."""
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    taken: OSError | None = None
    port, descriptor = place.port, dict[str, Any]()
    try:
        listener = listen(place.address, place.port)
        port = listener.getsockname()[1]  # place.port is 0: any
        # before torch 2.8, libuv takes no socket
        descriptor = {"master_listen_fd": listener.detach(), "use_libuv": torch.__version__ >= "2.8"}
    except OSError as error:  # perhaps by our own store of an earlier process group, which torch then shares
        taken = error
    try:
        return TCPStore(
            place.address,
            port,
            is_master=True,
            timeout=timeout,
            multi_tenant=True,
            wait_for_workers=False,
            **descriptor,
        )
    except (OSError, RuntimeError) as error:
        if taken is None:
            raise
        raise CommError(
            f"{place} cannot open the job's store: port {place.port} of {place.address} is already in use or not "
            f"allowed ({os.strerror(taken.errno or 0)}); choose another one with MASTER_PORT or --master-port, "
            "the same for all"
        ) from error


def reach_store(place: Participant, timeout: timedelta) -> TCPStore:
    """A connection to number 0's store. Raises CommError within `timeout`, saying what is there instead of it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    start, seconds = time.monotonic(), timeout.total_seconds()
    expected = f"{place} expected the store of {place.what} 0 at {place.where}"
    advice = f"see that {place.what} 0 is started and that all were given the same address and port"
    if refused := _wait_for_listener(place, seconds):
        raise CommError(f"{expected}, but nothing can be reached there ({refused}); {advice}")
    left = max(1.0, seconds - (time.monotonic() - start))

    def connect() -> TCPStore:
        # Half, since torch tries for as long again after the first try has failed.
        half = timedelta(seconds=left / 2)
        return TCPStore(place.address, place.port, is_master=False, timeout=half, wait_for_workers=False)

    try:
        store = within(left, connect)
    except (OSError, RuntimeError) as error:
        raise CommError(
            f"{expected}, but what listens there does not answer as one, so another program has the port; {advice}"
        ) from error
    store.set_timeout(timeout)
    return store


def _wait_for_listener(place: Participant, seconds: float) -> str:
    """Return "" as soon as somebody listens at the place, or after `seconds` why it could not be reached."""
    end, pause = time.monotonic() + seconds, 0.01
    waiting = Waiting(place.number)
    while True:
        waiting.tell(lambda: f"{place} waits for {place.what} 0, which does not listen at {place.where} yet")
        try:
            socket.create_connection((place.address, place.port), max(0.1, min(10.0, end - time.monotonic()))).close()
            return ""
        except OSError as error:
            if time.monotonic() + pause > end:
                return error.strerror or str(error)
        time.sleep(pause)
        pause = min(0.5, pause * 1.5)


def within(seconds: float, function: Callable[[], T], stop: threading.Event | None = None) -> T:
    """What `function` returns or raises, or TimeoutError: torch's store waits without limit for some answers.

    stop: set when the wait is broken off (by a signal), for `function` to end too: a thread that still calls the store
    when the interpreter ends would abort the process.
    """
    done: list[tuple[T | None, BaseException | None]] = []

    def run() -> None:
        try:
            done.append((function(), None))
        except BaseException as error:
            done.append((None, error))

    thread = threading.Thread(target=run, name="ds_core.comm meeting", daemon=True)
    thread.start()
    try:
        thread.join(seconds + 1.0)  # torch's own message, if there is one, is the better
    except BaseException:
        if stop is not None:
            stop.set()
            thread.join(1.0)
        raise
    if not done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    value, fault = done[0]
    if fault is not None:
        raise fault
    return value  # type: ignore[return-value]


def meet_at_store(place: Participant, timeout: timedelta, *, kept: bool = False) -> Store:
    """Open or reach the store of number 0 (kept: reach it, a launcher has it), `meet` there, and give our part of it.

    A process group that starts right after another one may reach the old one's store, which closes then; so who loses
    a store looks once more. Raises CommError within `timeout`.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    end = time.monotonic() + timeout.total_seconds()
    hosts = place.number == 0 and not kept
    store = host_store(place, timeout) if hosts else reach_store(place, timeout)
    while True:
        left = timedelta(seconds=max(0.1, end - time.monotonic()))
        try:
            return PrefixStore(meet(store, place, left, kept=kept), store)
        except StoreLostError as lost:
            again = min(left, timedelta(seconds=AGAIN_SECONDS))
            if hosts or kept or time.monotonic() > end or _wait_for_listener(place, again.total_seconds()):
                raise
            try:
                store = reach_store(place, again)
            except CommError:
                raise lost from None
            store.set_timeout(timeout)


# -- the meeting -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Note:
    """What one process says of itself. job: which run it belongs to, as far as the environment tells."""

    number: int
    size: int
    job: str
    who: str
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def text(self) -> str:
        return json.dumps([self.number, self.size, self.job, self.who, self.token])

    @classmethod
    def read(cls, text: bytes) -> _Note | None:
        """None for what no rank wrote: strangers may write to the store too."""
        try:
            number, size, job, who, token = json.loads(text[:LONGEST_NOTE])
        except (ValueError, TypeError):
            return None
        note = cls(number, size, job, who, token)
        if type(number) is int and type(size) is int and all(isinstance(x, str) for x in (job, who, token)):
            return note
        return None


def meet(store: Store, place: Participant, timeout: timedelta, *, kept: bool = False, job: str | None = None) -> str:
    """Wait until all have come, and return a prefix for keys that is the same on all and that was never used before.

    kept: the store outlives the processes that meet at it, since a launcher keeps it over restarts. job: names the run;
    None takes what the environment tells.

    [Note: who is alive] In such a store a rank would also find notes of processes that are gone. Attempts cannot be
    told apart by their number: machines that joined later count from 0. So number 0 draws a number, answers every
    note, and only who has heard the answer counts.

    Raises CommError within `timeout`: on every process when some do not belong together, on the stranger alone when
    it is known to be of another job.
    """
    note = _Note(
        place.number,
        place.size,
        _job(os.environ) if job is None else job,
        f"pid {os.getpid()} on {socket.gethostname()}",
    )
    seconds = timeout.total_seconds()
    stop = threading.Event()
    guest = _Guest(store, place, note, seconds, kept, stop)
    try:
        if place.number == 0:
            return within(seconds + TELL_SECONDS, lambda: _Host(store, place, note, seconds, stop).run(), stop)
        return within(seconds, guest.run, stop)
    except CommError:
        raise
    except TimeoutError as error:
        raise CommError(f"{place}: the store at {place.where} stopped answering; {_START_AGAIN}") from error
    except (OSError, RuntimeError) as error:
        raise StoreLostError(guest.lost(error)) from error
    except (ValueError, TypeError) as error:
        raise CommError(f"{place}: another program writes to the store at {place.where}; {_START_AGAIN}") from error


_START_AGAIN = "is the port free for this job alone? Start all again, with another port if not"


def _job(env: Mapping[str, str]) -> str:
    """Which run this process belongs to, as its launcher names it; "" when unknown."""
    run = env.get("TORCHELASTIC_RUN_ID", "")
    if run not in ("", "none"):
        return run
    if env.get("SLURM_JOB_ID"):
        return f"Slurm {env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', '')}"
    return env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or ""


def _pause(stop: threading.Event, seconds: float) -> None:
    if stop.wait(seconds):
        raise InterruptedError("the wait was broken off")


class _Host:
    """Number 0's side of a meeting."""

    def __init__(self, store: Store, place: Participant, note: _Note, seconds: float, stop: threading.Event) -> None:
        self.store, self.place, self.note, self.seconds, self.stop = store, place, note, seconds, stop
        self.prefix = f"ds_core/start{store.add('ds_core/starts', 1)}"
        self.unread = 0  # notes up to this number have been answered
        self.answered: dict[str, tuple[_Note, str]] = {}  # by token; with what is wrong with it
        self.here: dict[int, _Note] = {}

    def run(self) -> str:
        """The prefix, when all have heard it."""
        end, pause = time.monotonic() + self.seconds, 0.002
        waiting = Waiting(0)
        while len(self.here) < self.place.size - 1:
            waiting.tell(lambda: f"{self.place} waits at {self.place.where} for {self._missing()}")
            if wrong := self._look():
                self._give_up(wrong)
            if time.monotonic() > end:
                self._give_up(
                    f"{self._missing()} of {self.place.size} did not reach {self.place.where} within {self.seconds:g} "
                    f"s; see that all are started, with the same address and port, or wait longer (DEEPSPEED_TIMEOUT, "
                    f"in minutes)"
                )
            _pause(self.stop, pause)
            pause = min(0.05, pause * 1.2)
        what = self.place.what
        self.store.set("ds_core/begun", f"{self.place.size} {what}s, {what} 0 is {self.note.who}")
        self.store.set(f"{self.prefix}/go", "")
        return self.prefix

    def _missing(self) -> str:
        """Who has not come: "rank 1, 5"."""
        missing = [n for n in range(1, self.place.size) if n not in self.here]
        return f"{self.place.what} {', '.join(map(str, missing[:8]))}{' ...' if len(missing) > 8 else ''}"

    def _look(self) -> str:
        """Answer new notes and see who has heard; what is wrong, or ""."""
        for note in self._new_notes():
            self._answer(note, self._wrong(note))
        for token, (note, wrong) in list(self.answered.items()):
            if not self.store.check([f"{self.prefix}/heard/{token}"]):
                continue
            del self.answered[token]
            if wrong and note.job == self.note.job:
                return wrong
            if not wrong and (other := self.here.setdefault(note.number, note)) is not note:
                return (
                    f"two processes are {self.place.what} {note.number}: {other.who} and {note.who}; there is one "
                    f"too many, or two jobs use {self.place.where}"
                )
        return ""

    def _new_notes(self) -> Iterator[_Note]:
        arrived = self.store.add("ds_core/notes", 0)
        while self.unread < arrived and self.store.check([f"ds_core/note/{self.unread + 1}"]):
            self.unread += 1
            note = _Note.read(self.store.get(f"ds_core/note/{self.unread}"))
            if note is not None:
                yield note

    def _answer(self, note: _Note, wrong: str) -> None:
        self.answered[note.token] = (note, wrong)
        self.store.set(f"ds_core/answer/{note.token}", json.dumps([self.prefix, wrong]))

    def _wrong(self, note: _Note) -> str:
        what, mine = self.place.what, f"{self.place.what} 0 ({self.note.who})"
        if note.job != self.note.job and note.job and self.note.job:
            return f"another job is at {self.place.where}: that of {mine}; choose another port for this one"
        if note.size != self.place.size:
            return (
                f"{what} {note.number} ({note.who}) was started with {self.place.setting} {note.size}, but {mine} "
                f"with {self.place.size}; start all with the same, and each job on a port of its own"
            )
        if not 0 < note.number < self.place.size:
            return f"{note.who} says that it is {what} {note.number}, besides {mine}; one of {self.place.size} is meant"
        return ""

    def _give_up(self, wrong: str) -> NoReturn:
        """Raise what is wrong here and on all that have come, who must read it before this store closes."""
        self.store.set(f"{self.prefix}/go", wrong)
        end = time.monotonic() + TELL_SECONDS
        while time.monotonic() < end:
            for note in self._new_notes():
                self._answer(note, wrong)
            tokens = {note.token for note in self.here.values()} | self.answered.keys()
            if not tokens or self.store.check([f"ds_core/told/{token}" for token in tokens]):
                break
            _pause(self.stop, 0.01)
        raise CommError(wrong)


class _Guest:
    """Everybody else's side."""

    def __init__(
        self, store: Store, place: Participant, note: _Note, seconds: float, kept: bool, stop: threading.Event
    ) -> None:
        self.store, self.place, self.note, self.seconds, self.kept = store, place, note, seconds, kept
        self.stop = stop
        self.begun = ""  # what number 0 said when it began without us, if it has
        self.start = time.monotonic()

    def run(self) -> str:
        """The prefix, when all have come."""
        store, note, place = self.store, self.note, self.place
        store.set(f"ds_core/note/{store.add('ds_core/notes', 1)}", note.text())
        answer = f"ds_core/answer/{note.token}"
        if not self._comes(answer, None if self.kept else "ds_core/begun"):
            raise CommError(self._too_late() if self.begun else self._not_answered())
        prefix, wrong = json.loads(store.get(answer))
        store.set(f"{prefix}/heard/{note.token}", "")
        if not wrong:
            if not self._comes(f"{prefix}/go"):
                raise CommError(
                    f"{place}: others did not reach {place.where} within {self.seconds:g} s; see that all "
                    f"{place.size} are started"
                )
            wrong = store.get(f"{prefix}/go").decode()
        if wrong:
            store.set(f"ds_core/told/{note.token}", "")
            raise CommError(wrong)
        return str(prefix)

    def _comes(self, key: str, instead: str | None = None) -> bool:
        """Wait for `key`; False when it is too late, which is sooner where there is `instead`."""
        pause, waiting = 0.002, Waiting(self.place.number)
        while not self.store.check([key]):
            if "/answer/" in key:  # later number 0 tells for all
                waiting.tell(lambda: f"{self.place} waits at {self.place.where} for {self.place.what} 0")
            waited = time.monotonic() - self.start
            if not self.begun and instead and self.store.check([instead]):
                self.begun = self.store.get(instead).decode(errors="replace")
            if waited > (min(LATE_SECONDS, self.seconds / 2) if self.begun else self.seconds):
                return False
            _pause(self.stop, pause)
            pause = min(0.25, pause * 1.2)
        return True

    def _too_late(self) -> str:
        what = self.place.what
        return (
            f"the job at {self.place.where} ({self.begun}) has begun with all its {what}s; this process, {self.place}, "
            "is one too many or belongs to another job, which needs another port"
        )

    def _not_answered(self) -> str:
        place = self.place
        return (
            f"{place} reached the store at {place.where}, but {place.what} 0 did not answer within {self.seconds:g} s; "
            f"is {place.what} 0 started, and does it call init_distributed (or initialize) too?"
        )

    def lost(self, error: Exception) -> str:
        """What to say when the store has closed."""
        if self.begun:
            return self._too_late()
        place = self.place
        return (
            f"{place} lost the store of {place.what} 0 at {place.where} before all had come; {place.what} 0 has "
            f"probably failed, and its own message says why ({str(error).splitlines()[0]})"
        )
