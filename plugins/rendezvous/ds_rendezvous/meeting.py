"""Where ranks meet, at rank 0's store: making sure that those who come belong together.

torch's store accepts every connection, and what does not fit (a job on the same port, a rank too
many) shows up later as a connection that is reset. So the ranks compare notes first, as JSON, and
rank 0 says go or what is wrong. `dscore run` lets the hosts of a run meet in the same way.
Nothing that comes from a store is unpickled.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from ds_core.errors import CommError
from ds_rendezvous.stores import (
    Participant as Participant,
)
from ds_rendezvous.stores import (
    host_store as host_store,
)
from ds_rendezvous.stores import (
    is_loopback as is_loopback,
)
from ds_rendezvous.stores import (
    listen as listen,
)
from ds_rendezvous.stores import (
    reach_store as reach_store,
)
from ds_rendezvous.stores import (
    wait_for_listener,
)
from ds_rendezvous.stores import (
    within as within,
)
from ds_rendezvous.waiting import Waiting

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

LATE_SECONDS = 60.0  # how long a rank that comes after the start waits for a start of its own
# how long rank 0 keeps its store for ranks that have yet to read why it gives up
TELL_SECONDS = 5.0
AGAIN_SECONDS = 10.0  # how long who has lost number 0's store looks for another one there
LONGEST_NOTE = 4096  # characters
MOST_AT_ONCE = 4096  # notes; strangers may count too


class StoreLostError(CommError):
    """Number 0's store has closed while others were waiting at it."""


def meet_at_store(place: Participant, timeout: timedelta, *, kept: bool = False) -> Store:
    """Open or reach the store of number 0 (kept: reach it, a launcher has it), `meet` there, and
    give our part of it.

    A process group that starts right after another one may reach the old one's store, which closes
    then; so who loses a store looks once more. Raises CommError within `timeout`.
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
            if (
                hosts
                or kept
                or time.monotonic() > end
                or wait_for_listener(place, again.total_seconds())
            ):
                raise
            try:
                store = reach_store(place, again)
            except CommError:
                raise lost from None
            store.set_timeout(timeout)


# -- the meeting -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Note:
    """What one process says of itself.

    job: which run it belongs to, as far as the environment tells.
    """

    number: int
    size: int
    job: str
    who: str
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def text(self) -> str:
        return json.dumps([self.number, self.size, self.job, self.who, self.token])


# between the prefix and the token of who has the answer; the end of it
_HEARD = "/heard/"
_TOLD = "/told/"


def _read(text: bytes) -> _Note | str | None:
    """A note, or who has heard; None for what no rank wrote: strangers may write there too."""
    try:
        posted = json.loads(text[:LONGEST_NOTE])
        if isinstance(posted, str):
            return posted
        number, size, job, who, token = posted
    except (ValueError, TypeError):
        return None
    if (
        type(number) is int
        and type(size) is int
        and all(isinstance(x, str) for x in (job, who, token))
    ):
        return _Note(number, size, job, who, token)
    return None


def meet(
    store: Store,
    place: Participant,
    timeout: timedelta,
    *,
    kept: bool = False,
    job: str | None = None,
) -> str:
    """Wait until all have come, and return a prefix for keys that is the same on all and that was
    never used before.

    kept: the store outlives the processes that meet at it, since a launcher keeps it over restarts.
    job: names the run; None takes what the environment tells.

    [Note: traffic] A process makes about ten calls, however many there are, and a few per second of
    waiting: it posts its note, waits for the answer, posts that it has heard, and waits for the go.
    Number 0 reads what was posted, and answers, in one call for all.

    [Note: who is alive] In such a store a rank would also find notes of processes that are gone.
    Attempts cannot be told apart by their number: hosts that joined later count from 0. So
    number 0 draws a number, answers every note, and only who has heard the answer counts.

    Raises CommError within `timeout`: on every process when some do not belong together, on the
    stranger alone when it is known to be of another job.
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
            return within(
                seconds + TELL_SECONDS, lambda: _Host(store, place, note, seconds, stop).run(), stop
            )
        return within(seconds, guest.run, stop)
    except CommError:
        raise
    except TimeoutError as error:
        raise CommError(
            f"{place}: the store at {place.where} stopped answering; {_START_AGAIN}"
        ) from error
    except (OSError, RuntimeError) as error:
        raise StoreLostError(guest.lost(error)) from error
    except (ValueError, TypeError) as error:
        raise CommError(
            f"{place}: another program writes to the store at {place.where}; {_START_AGAIN}"
        ) from error


_START_AGAIN = "is the port free for this job alone? Start all again, with another port if not"


def _job(env: Mapping[str, str]) -> str:
    """Which run this process belongs to, as its launcher names it; "" when unknown."""
    run = env.get("TORCHELASTIC_RUN_ID", "")
    if run not in ("", "none"):
        return run
    if env.get("SLURM_JOB_ID"):
        return f"Slurm {env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', '')}"
    return env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or ""


class _Pauses:
    """Between two looks at the store: a quarter of the wait so far, at most `longest` seconds.

    Not the store's own `wait`: it prints a warning each time that it is broken off, and a signal
    must break it off.
    """

    def __init__(self, stop: threading.Event, longest: float) -> None:
        self._stop = stop
        self._longest = longest
        self._start = time.monotonic()

    def __call__(self) -> None:
        waited = time.monotonic() - self._start
        if self._stop.wait(min(self._longest, 0.002 + waited / 4)):
            raise InterruptedError("the wait was broken off")


def _post(store: Store, text: str) -> None:
    """Add `text` to what number 0 reads."""
    store.set(f"ds_core/note/{store.add('ds_core/notes', 1)}", text)


class _Host:
    """Number 0's side of a meeting."""

    def __init__(
        self, store: Store, place: Participant, note: _Note, seconds: float, stop: threading.Event
    ) -> None:
        self.store = store
        self.place = place
        self.note = note
        self.seconds = seconds
        self.stop = stop
        self.prefix = f"ds_core/start{store.add('ds_core/starts', 1)}"
        self.counted = 0  # what was posted up to this number has been read, but for `holes`
        self.holes: list[int] = []  # numbers that nothing was posted under yet
        self.answered: dict[str, tuple[_Note, str]] = {}  # by token; with what is wrong with it
        self.here: dict[int, _Note] = {}

    def run(self) -> str:
        """The prefix, when all have heard it."""
        end = time.monotonic() + self.seconds
        waiting = Waiting(0)
        pause = _Pauses(self.stop, 0.05)
        while len(self.here) < self.place.size - 1:
            waiting.tell(lambda: f"{self.place} waits at {self.place.where} for {self._missing()}")
            if wrong := self._look():
                self._give_up(wrong)
            if time.monotonic() > end:
                self._give_up(
                    f"{self._missing()} of {self.place.size} did not reach {self.place.where} "
                    f"within {self.seconds:g} "
                    "s; see that all are started, with the same address and port, or wait longer "
                    "(DEEPSPEED_TIMEOUT, "
                    f"in minutes)"
                )
            pause()
        what = self.place.what
        self.store.set("ds_core/begun", f"{self.place.size} {what}s, {what} 0 is {self.note.who}")
        self.store.set(f"{self.prefix}/go", "")
        return self.prefix

    def _missing(self) -> str:
        """Who has not come: "rank 1, 5"."""
        missing = [n for n in range(1, self.place.size) if n not in self.here]
        return (
            f"{self.place.what} "
            f"{', '.join(map(str, missing[:8]))}{' ...' if len(missing) > 8 else ''}"
        )

    def _look(self) -> str:
        """Answer what was posted and see who has heard; what is wrong, or ""."""
        notes, tokens = self._posted(_HEARD)
        self._answer({note: self._wrong(note) for note in notes})
        for token in tokens:
            note, wrong = self.answered.pop(token, (self.note, ""))
            if wrong and note.job == self.note.job:
                return wrong
            if (
                not wrong
                and note is not self.note
                and (other := self.here.setdefault(note.number, note)) is not note
            ):
                return (
                    f"two processes are {self.place.what} {note.number}: {other.who} and "
                    f"{note.who}; there is one "
                    f"too many, or two jobs use {self.place.where}"
                )
        return ""

    def _posted(self, what: str) -> tuple[list[_Note], list[str]]:
        """Notes posted since the last call, and tokens of who has `what`; read at once, however
        many there are.
        """
        before = self.counted
        self.counted = min(self.store.add("ds_core/notes", 0), before + MOST_AT_ONCE)
        numbers = [*self.holes, *range(before + 1, self.counted + 1)]
        if numbers and not self.store.check([f"ds_core/note/{n}" for n in numbers]):
            self.holes = [n for n in numbers if not self.store.check([f"ds_core/note/{n}"])]
        else:
            self.holes = []
        if not (keys := [f"ds_core/note/{n}" for n in numbers if n not in self.holes]):
            return [], []
        posted = [_read(text) for text in self.store.multi_get(keys)]
        head = self.prefix + what
        tokens = [
            text[len(head) :] for text in posted if isinstance(text, str) and text.startswith(head)
        ]
        return [note for note in posted if isinstance(note, _Note)], tokens

    def _answer(self, answers: Mapping[_Note, str]) -> None:
        self.answered |= {note.token: (note, wrong) for note, wrong in answers.items()}
        texts = [json.dumps([self.prefix, wrong]) for wrong in answers.values()]
        if texts:
            self.store.multi_set([f"ds_core/answer/{note.token}" for note in answers], texts)  # type: ignore[attr-defined]

    def _wrong(self, note: _Note) -> str:
        what = self.place.what
        mine = f"{self.place.what} 0 ({self.note.who})"
        if note.job != self.note.job and note.job and self.note.job:
            return (
                f"another job is at {self.place.where}: that of {mine}; choose another port "
                "for "
                "this one"
            )
        if note.size != self.place.size:
            return (
                f"{what} {note.number} ({note.who}) was started with {self.place.setting} "
                f"{note.size}, but {mine} "
                f"with {self.place.size}; start all with the same, and each job on a "
                "separate port"
            )
        if not 0 < note.number < self.place.size:
            return (
                f"{note.who} says that it is {what} {note.number}, besides {mine}; one of "
                f"{self.place.size} is meant"
            )
        return ""

    def _give_up(self, wrong: str) -> NoReturn:
        """Raise what is wrong here and on all that have come, who must read it before this store
        closes.
        """
        self.store.set(f"{self.prefix}/go", wrong)
        end = time.monotonic() + TELL_SECONDS
        waiting = {note.token for note in self.here.values()} | self.answered.keys()
        pause = _Pauses(self.stop, 0.05)
        while waiting and time.monotonic() < end:
            notes, tokens = self._posted(_TOLD)
            self._answer(dict.fromkeys(notes, wrong))
            waiting |= {note.token for note in notes}
            waiting -= set(tokens)
            pause()
        raise CommError(wrong)


class _Guest:
    """Everybody else's side."""

    def __init__(
        self,
        store: Store,
        place: Participant,
        note: _Note,
        seconds: float,
        kept: bool,
        stop: threading.Event,
    ) -> None:
        self.store = store
        self.place = place
        self.note = note
        self.seconds = seconds
        self.kept = kept
        self.stop = stop
        self.begun = ""  # what number 0 said when it began without us, if it has
        self.start = time.monotonic()

    def run(self) -> str:
        """The prefix, when all have come."""
        store = self.store
        note = self.note
        place = self.place
        _post(store, note.text())
        answer = f"ds_core/answer/{note.token}"
        if not self._comes(answer, None if self.kept else "ds_core/begun"):
            raise CommError(self._too_late() if self.begun else self._not_answered())
        prefix, wrong = json.loads(store.get(answer))
        _post(store, json.dumps(prefix + _HEARD + note.token))
        if not wrong:
            if not self._comes(f"{prefix}/go"):
                raise CommError(
                    f"{place}: others did not reach {place.where} within {self.seconds:g} s; see "
                    "that all "
                    f"{place.size} are started"
                )
            wrong = store.get(f"{prefix}/go").decode()
        if wrong:
            _post(store, json.dumps(prefix + _TOLD + note.token))
            raise CommError(wrong)
        return str(prefix)

    def _comes(self, key: str, instead: str | None = None) -> bool:
        """Wait for `key`; False when it is too late, which is sooner where there is `instead`."""
        waiting = Waiting(self.place.number)
        limit = self.seconds
        pause = _Pauses(self.stop, 0.25)
        while not self.store.check([key]):
            if "/answer/" in key:  # later number 0 tells for all
                waiting.tell(
                    lambda: f"{self.place} waits at {self.place.where} for {self.place.what} 0"
                )
            if not self.begun and instead and self.store.check([instead]):
                self.begun = self.store.get(instead).decode(errors="replace")
                limit = min(LATE_SECONDS, self.seconds / 2)
            if time.monotonic() - self.start > limit:
                return False
            pause()
        return True

    def _too_late(self) -> str:
        what = self.place.what
        return (
            f"the job at {self.place.where} ({self.begun}) has begun with all its {what}s; this "
            f"process, {self.place}, "
            "is one too many or belongs to another job, which needs another port"
        )

    def _not_answered(self) -> str:
        place = self.place
        return (
            f"{place} reached the store at {place.where}, but {place.what} 0 did not answer within "
            f"{self.seconds:g} s; "
            f"is {place.what} 0 started, and does it call init_distributed (or initialize) too?"
        )

    def lost(self, error: Exception) -> str:
        """What to say when the store has closed."""
        if self.begun:
            return self._too_late()
        place = self.place
        return (
            f"{place} lost the store of {place.what} 0 at {place.where} before all had come; "
            f"{place.what} 0 has "
            f"probably failed, and its own message says why ({str(error).splitlines()[0]})"
        )
