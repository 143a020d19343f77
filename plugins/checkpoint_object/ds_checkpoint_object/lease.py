"""One job at a time saves to a place: an object that its owner renews, since a store has no locks.

Two jobs would clear each other's half-written checkpoints away. The owner puts the object anew every
few seconds, on the condition that it is as the owner has left it. Another job watches it: one that
changes has a living owner; one that stays the same for `seconds` may be taken over, on the same
condition. Whoever has lost it finds that out at its next renewal, and before each commit. No clock
of one machine is compared with that of another.

A process that was killed on this machine is known to be dead, so its lease is taken over at once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_checkpoint_object.bucket import Conflict
from ds_core.errors import CheckpointError

if TYPE_CHECKING:
    from ds_checkpoint_object.bucket import Bucket, Version

log = logging.getLogger("ds_checkpoint")

LEASE = ".lease"
# Renewals in the time after which another job may take over.
RENEWALS = 6
# Seconds that the end of a process waits for a store that does not answer.
LEAVING = 5.0


class Lease:
    """Holds a place from `take` to `release`, or until it is no longer referred to.

    key: of the object.
    place: how messages call what it is for.
    seconds: without a renewal after which another job may take it.
    """

    def __init__(self, bucket: Bucket, key: str, place: str) -> None:
        self._bucket = bucket
        self._key = key
        self._place = place
        self._seconds = bucket.config.lease_seconds
        self._lock = threading.Lock()
        # The version that this process has put; None: it does not hold the lease.
        self._version: Version | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # Gives the lease back; also at the end of the process.
        self._end: weakref.finalize[Any, Lease] | None = None

    def take(self) -> None:
        """Hold the place; CheckpointError naming who has it when that is another job."""
        with self._lock:
            if self._version is None:
                self._version = self._taken()
            else:
                self._renew()
        if self._end is None:
            self._end = weakref.finalize(self, _leave, self._bucket, self._key, self._stop)
        if self._thread is None or not self._thread.is_alive():
            arguments = (weakref.ref(self), self._stop, self._seconds / RENEWALS)
            self._thread = threading.Thread(
                target=_keep, args=arguments, name=f"lease of {self._place}", daemon=True
            )
            self._thread.start()

    def check(self) -> None:
        """CheckpointError unless this job holds the place, for some seconds from now on."""
        with self._lock:
            if self._version is None:
                raise CheckpointError(
                    f"another job has taken {self._place} over, since this one gave no sign of life "
                    f"for {self._seconds:g} s. {_ADVICE}"
                )
            self._renew()

    def release(self) -> None:
        """Let other jobs have it."""
        if self._end is not None:
            self._end()
        self._version = self._thread = self._end = None
        self._stop = threading.Event()

    def _taken(self) -> Version:
        """The version of a lease of this process, however long that takes."""
        watched: Version | None = None
        since = time.monotonic()
        while True:
            found = self._bucket.peek(self._key)
            owner = _owner(found)
            if found is not None and not (_is_me(owner) or _is_dead(owner)):
                version = found[1]
                if watched is None:
                    watched = version
                    since = time.monotonic()
                elif version != watched:
                    raise self._others(owner)
                if time.monotonic() - since < self._seconds:
                    time.sleep(self._seconds / RENEWALS / 4)
                    continue
                log.warning(
                    "%s: taking over from %s, which gave no sign of life for %g s",
                    self._place,
                    _named(owner),
                    self._seconds,
                )
            with contextlib.suppress(Conflict):  # somebody else was faster: look again
                return self._put(None if found is None else found[1])

    def _renew(self) -> None:
        """Put the lease anew; CheckpointError when another job has it now."""
        assert self._version is not None
        version: Version | None = self._version
        while True:
            try:
                self._version = self._put(version)
                return
            except Conflict as conflict:
                owner = _owner(conflict.found)
                # Another engine of this process may have renewed or released it.
                if conflict.found is not None and not _is_me(owner):
                    self._version = None
                    raise CheckpointError(
                        f"{self._named_others(owner)}; it has taken the place over, since this job "
                        f"gave no sign of life for {self._seconds:g} s. {_ADVICE}"
                    ) from None
                version = None if conflict.found is None else conflict.found[1]

    def _put(self, version: Version | None) -> Version:
        text = json.dumps(_me() | {"host": socket.gethostname(), "token": secrets.token_hex(16)})
        # Later than this, the answer would be worth nothing: another job may have taken it.
        return self._bucket.put_if(self._key, text.encode(), version, limit=self._seconds / 2)

    def _others(self, owner: dict[str, Any]) -> CheckpointError:
        return CheckpointError(f"{self._named_others(owner)}; {_ADVICE}")

    def _named_others(self, owner: dict[str, Any]) -> str:
        return f"another job is saving to {self._place} ({_named(owner)})"


_ADVICE = "give each job a separate save_dir, or end the other job"


def _keep(lease: weakref.ref[Lease], stop: threading.Event, pause: float) -> None:
    """Renew as long as there is something to renew."""
    while not stop.wait(pause):
        this = lease()
        if this is None or this._version is None:
            return
        try:
            this.check()
        except CheckpointError as error:
            # The next save raises it; until then training goes on.
            log.warning("%s", error)
        except Exception as error:
            log.warning("the lease cannot be renewed: %s", type(error).__name__)
        del this


def _leave(bucket: Bucket, key: str, stop: threading.Event) -> None:
    """Remove the lease if it is this process's."""
    stop.set()
    with contextlib.suppress(CheckpointError):
        found = bucket.peek(key, limit=LEAVING)
        if found is not None and _is_me(_owner(found)):
            bucket.delete([key], limit=LEAVING)


def _owner(found: tuple[bytes, Version] | None) -> dict[str, Any]:
    """What a lease says; nothing where it is not one of ours."""
    if found is not None:
        with contextlib.suppress(ValueError):
            said = json.loads(found[0])
            if isinstance(said, dict):
                return said
    return {}


def _named(owner: dict[str, Any]) -> str:
    host = str(owner.get("host", ""))[:100]
    process = owner.get("process", "")
    if not host:
        return "it has not said which"
    return f"host {host}, process {process if isinstance(process, int) else '?'}"


def _me() -> dict[str, Any]:
    """What tells this process from all others, on whatever machine."""
    return {"machine": _machine(), "process": os.getpid(), "started": _started(os.getpid())}


def _is_me(owner: dict[str, Any]) -> bool:
    me = _me()
    return {key: owner.get(key) for key in me} == me


def _is_dead(owner: dict[str, Any]) -> bool:
    """Whether it was a process of this machine that has ended."""
    process = owner.get("process")
    if owner.get("machine") != _machine() or type(process) is not int:
        return False
    return _started(process) != owner.get("started")


def _machine() -> str:
    """This boot of this machine, and whose process numbers count."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _started(process: int) -> str | None:
    """When a process of this machine was started, in the kernel's ticks; None when there is none."""
    with contextlib.suppress(OSError, IndexError):
        # The name, in parentheses, may have anything in it; the 22nd field is the 20th behind it.
        text = Path(f"/proc/{process}/stat").read_text()
        fields = text.rpartition(")")[2].split()
        return None if fields[0] in ("Z", "X") else fields[19]
    return None
