"""The store of number 0: who may listen for it, reaching it, and what is there instead (torch loads
when used).
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from ds_core.errors import CommError
from ds_rendezvous.waiting import Waiting

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Participant:
    """Who meets where."""

    number: int
    size: int
    """How many participants there are."""
    address: str
    """Of the store of number 0."""
    port: int
    """Of that store."""
    what: str = "rank"
    """``"rank"``, or ``"host"`` for launchers."""
    setting: str = "WORLD_SIZE"
    """The name under which users give `size`."""

    def __str__(self) -> str:
        return f"{self.what} {self.number} of {self.size}"

    @property
    def where(self) -> str:
        """``address:port``."""
        return f"{self.address}:{self.port}"


def is_loopback(address: str) -> bool:
    """Whether only processes of this machine can reach `address`."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens at `port` (0: any free one) of `address` and nowhere else.

    A name that means one address of this machine listens there. One that means the loopback here
    (as Debian has it) or several addresses may mean another one to other hosts, and an address
    that this machine does not have is translated on the way: these listen on every interface.
    Raises OSError, for example for a port in use.
    """
    found = [own for own in _addresses(address) if _is_own(own)]
    if len(found) != 1 or (is_loopback(found[0]) and not is_loopback(address)):
        both = socket.has_dualstack_ipv6()
        return socket.create_server(
            ("", port),
            family=socket.AF_INET6 if both else socket.AF_INET,
            backlog=4096,
            dualstack_ipv6=both,
        )
    return socket.create_server((found[0], port), family=_family(found[0]), backlog=4096)


def _addresses(address: str) -> list[str]:
    """What `address`, a name or an address, means on this machine."""
    if address == "localhost":
        return ["127.0.0.1"]
    try:
        return sorted(
            {
                str(place[4][0])
                for place in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
            }
        )
    except OSError:
        return []


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET


def _is_own(address: str) -> bool:
    """Whether this machine has `address`."""
    try:
        with socket.socket(_family(address)) as probe:
            probe.bind((address, 0))
            return True
    except (ValueError, OSError):
        return False


def host_store(place: Participant, timeout: timedelta) -> TCPStore:
    """Number 0's store, listening no wider than `listen` does.

    Raises CommError when the port is taken.
    """
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    taken: OSError | None = None
    port = place.port
    descriptor = dict[str, Any]()
    try:
        listener = listen(place.address, place.port)
        port = listener.getsockname()[1]  # place.port is 0: any
        # before torch 2.8, libuv takes no socket
        descriptor = {
            "master_listen_fd": listener.detach(),
            "use_libuv": torch.__version__ >= "2.8",
        }
    # perhaps by our own store of an earlier process group, which torch then shares
    except OSError as error:
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
            f"{place} cannot open the job's store: port {place.port} of {place.address} is already "
            "in use or not "
            f"allowed ({os.strerror(taken.errno or 0)}); choose another one with MASTER_PORT or "
            "--master-port, "
            "the same for all"
        ) from error


def reach_store(place: Participant, timeout: timedelta) -> TCPStore:
    """A connection to number 0's store.

    Raises CommError within `timeout`, saying what is there instead of it.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    start = time.monotonic()
    seconds = timeout.total_seconds()
    expected = f"{place} expected the store of {place.what} 0 at {place.where}"
    advice = f"see that {place.what} 0 is started and that all were given the same address and port"
    if refused := wait_for_listener(place, seconds):
        raise CommError(f"{expected}, but nothing can be reached there ({refused}); {advice}")
    left = max(1.0, seconds - (time.monotonic() - start))

    def connect() -> TCPStore:
        # Half, since torch tries for as long again after the first try has failed.
        half = timedelta(seconds=left / 2)
        return TCPStore(
            place.address, place.port, is_master=False, timeout=half, wait_for_workers=False
        )

    try:
        store = within(left, connect)
    except (OSError, RuntimeError) as error:
        raise CommError(
            f"{expected}, but what listens there does not answer as one, so another program has "
            f"the port; {advice}"
        ) from error
    store.set_timeout(timeout)
    return store


def wait_for_listener(place: Participant, seconds: float) -> str:
    """Return "" as soon as somebody listens at the place, or after `seconds` why it could not be
    reached.
    """
    end = time.monotonic() + seconds
    pause = 0.01
    waiting = Waiting(place.number)
    while True:
        waiting.tell(
            lambda: f"{place} waits for {place.what} 0, which does not listen at {place.where} yet"
        )
        try:
            socket.create_connection(
                (place.address, place.port), max(0.1, min(10.0, end - time.monotonic()))
            ).close()
            return ""
        except OSError as error:
            if time.monotonic() + pause > end:
                return error.strerror or str(error)
        time.sleep(pause)
        pause = min(0.5, pause * 1.5)


def within(seconds: float, function: Callable[[], T], stop: threading.Event | None = None) -> T:
    """What `function` returns or raises, or TimeoutError: torch's store waits without limit for
    some answers.

    stop: set when the wait is broken off (by a signal), for `function` to end too: a thread that
    still calls the store when the interpreter ends would abort the process.
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
