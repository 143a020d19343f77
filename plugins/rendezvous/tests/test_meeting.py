"""Ranks that meet at a store: who belongs together, who does not, and what else may be at the
port."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from ds_rendezvous import meeting, stores, waiting
from ds_rendezvous.meeting import (
    Participant,
    host_store,
    is_loopback,
    listen,
    meet,
    meet_at_store,
    reach_store,
    within,
)

from ds_core.errors import CommError

LOOPBACK = "127.0.0.1"
LONG = timedelta(seconds=60)
SHORT = timedelta(seconds=1)


@pytest.fixture(autouse=True)
def no_job_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "TORCHELASTIC_RUN_ID",
        "SLURM_JOB_ID",
        "PMIX_NAMESPACE",
        "OMPI_MCA_ess_base_jobid",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def store() -> Any:
    return host_store(Participant(0, 1, LOOPBACK, 0), LONG)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server((LOOPBACK, 0)) as server:
        yield server


def come(
    store: Any,
    *processes: tuple[int, int],
    limit: timedelta = LONG,
    after: int = 0,
    **options: Any,
) -> list[str]:
    """What becomes of processes (rank, world size), each on a thread of its own with a connection
    of its own.

    after: rank 0 begins once so many notes are posted, and answers all of them.
    """
    said = [""] * len(processes)

    def posted() -> int:
        return int(store.add("ds_core/notes", 0))

    def one(at: int) -> None:
        place = Participant(*processes[at], LOOPBACK, store.port)
        while place.number == 0 and posted() < after:
            time.sleep(0.005)
        try:
            said[at] = meet(reach_store(place, LONG), place, limit, **options)
        except CommError as error:
            said[at] = str(error)

    threads = [threading.Thread(target=one, args=(at,)) for at in range(len(processes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


# -- who belongs together --------------------------------------------------------------------------


def test_all_come_and_agree_on_a_prefix_that_is_new_each_time(store: Any) -> None:
    assert come(store, (2, 3), (0, 3), (1, 3)) == ["ds_core/start1"] * 3
    assert come(store, (0, 2), (1, 2)) == ["ds_core/start2"] * 2


def test_a_restart_is_not_disturbed_by_notes_of_processes_that_are_gone(store: Any) -> None:
    (gone,) = come(store, (1, 3), limit=SHORT, kept=True)
    assert gone.startswith("rank 1 of 3 reached the store")
    assert "rank 0 did not answer within 1 s" in gone
    assert come(store, (0, 2), (1, 2), kept=True) == ["ds_core/start1"] * 2


def test_different_world_sizes(store: Any) -> None:
    for said in come(store, (0, 2), (1, 3), (2, 3), after=2):
        assert "was started with WORLD_SIZE 3, but rank 0 (pid" in said
        assert "with 2; start all with the same" in said


def test_a_rank_too_many(store: Any) -> None:
    for said in come(store, (0, 3), (1, 3), (1, 3), after=2):
        assert said.startswith("two processes are rank 1: pid")


def test_a_rank_that_comes_when_all_are_there(store: Any) -> None:
    come(store, (0, 2), (1, 2))
    (said,) = come(store, (1, 2), limit=SHORT)
    assert f"the job at 127.0.0.1:{store.port} (2 ranks, rank 0 is pid " in said
    assert (
        "has begun with all its ranks; this process, rank 1 of 2, is one too many or belongs to "
        "another job" in said
    )


def test_a_rank_that_comes_when_all_are_there_and_stays_till_they_end() -> None:
    class Ending:
        """A store at which the job has begun, and which closes while the rank waits."""

        def __init__(self) -> None:
            self.asked = 0

        def add(self, *_: Any) -> int:
            return 3

        def set(self, *_: Any) -> None:
            return

        def get(self, _: str) -> bytes:
            return b"2 ranks"

        def check(self, keys: list[str]) -> bool:
            self.asked += 1
            if self.asked > 4:
                raise RuntimeError("Connection reset by peer")
            return keys == ["ds_core/begun"]

    with pytest.raises(
        CommError, match="has begun with all its ranks; this process, rank 1 of 2, is one too many"
    ):
        meet(Ending(), Participant(1, 2, LOOPBACK, 1), LONG)  # type: ignore[arg-type]


def test_a_rank_that_does_not_come_is_named_on_all(
    store: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also before the time is over: once here, since the second time would come after twice as
    long.
    """
    monkeypatch.setattr(waiting, "TOLD_AFTER", 0.6)
    said: list[str] = []
    waits = threading.Thread(target=lambda: said.extend(come(store, (2, 4))))
    waits.start()
    while not store.add("ds_core/notes", 0):
        time.sleep(0.01)
    said.extend(come(store, (0, 4), limit=SHORT))
    waits.join()
    for each in said:
        assert each.startswith(f"rank 1, 3 of 4 did not reach 127.0.0.1:{store.port} within 1 s")
    assert len(said) == 2
    told = [message for message in caplog.messages if message.startswith("rank 0 of 4")]
    assert len(told) == 1 and told[0].startswith(
        f"rank 0 of 4 waits at 127.0.0.1:{store.port} for rank 1, 3, since "
    )


def test_another_job_is_refused_and_this_one_goes_on(store: Any) -> None:
    answers: dict[str, list[str]] = {}
    threads = [
        threading.Thread(
            target=lambda p=p, job=job: answers.update(
                {job + str(p): come(store, p, job=job, after=2)}
            )
        )
        for p, job in (((1, 2), "theirs"), ((0, 2), "ours"), ((1, 2), "ours"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers["ours(0, 2)"] == answers["ours(1, 2)"] == ["ds_core/start1"]
    assert f"another job is at 127.0.0.1:{store.port}" in answers["theirs(1, 2)"][0]


def test_what_strangers_write_is_no_note(store: Any) -> None:
    store.add("ds_core/notes", 1)  # and one who ended before it wrote
    for junk in (
        b"\x80\x04.",
        b"[",
        b'"heard"',
        b'"x told"',
        b"{}",
        b"[1, 2, 3]",
        b'[true, 2, "", "", "x"]',
        b"9" * 10_000,
        b"\xff",
    ):
        store.set(f"ds_core/note/{store.add('ds_core/notes', 1)}", junk)
    assert come(store, (0, 2), (1, 2)) == ["ds_core/start1"] * 2


def test_launchers_meet_in_their_own_words(store: Any) -> None:
    places = [
        Participant(0, 2, LOOPBACK, store.port, "host", "--nnodes"),
        Participant(1, 3, LOOPBACK, store.port, "host"),
    ]
    said: list[str] = []

    def other() -> None:
        with pytest.raises(CommError) as caught:
            meet(reach_store(places[1], LONG), places[1], LONG)
        said.append(str(caught.value))

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(
        CommError, match=r"host 1 \(pid .* was started with --nnodes 3, but host 0 .* with 2"
    ):
        meet(store, places[0], LONG)
    thread.join()
    assert len(said) == 1


def test_who_reaches_the_store_of_an_earlier_group_finds_the_new_one() -> None:
    """Process groups one after the other on one port: torch alone fails there now and then."""
    old = host_store(Participant(0, 2, LOOPBACK, 0), LONG)
    port = old.port
    found: list[Any] = []
    other = threading.Thread(
        target=lambda: found.append(meet_at_store(Participant(1, 2, LOOPBACK, port), LONG))
    )
    other.start()
    while not old.add("ds_core/notes", 0):
        time.sleep(0.01)
    del old
    ours = meet_at_store(Participant(0, 2, LOOPBACK, port), LONG)
    other.join()
    ours.set("key", "value")
    assert found[0].get("key") == b"value"


# -- what may be at the port -----------------------------------------------------------------------

MAGIC = b"\x00" + struct.pack("<I", 0x3C85F7CE)
GARBAGE = [
    b"",
    b"\x00",
    b"GET / HTTP/1.1\r\n\r\n",
    bytes(range(256)) * 64,
    MAGIC + b"\x01" + b"\xff" * 64,
    MAGIC + b"\x01" + struct.pack("<Q", 1 << 40) + b"abc",
    MAGIC + bytes(range(20)),
]


def test_garbage_on_the_port_does_not_stop_the_start(store: Any) -> None:
    held = [socket.create_connection((LOOPBACK, store.port)) for _ in GARBAGE]
    for client, data in zip(held, GARBAGE, strict=True):
        client.sendall(data)
    assert come(store, (0, 2), (1, 2)) == ["ds_core/start1"] * 2
    for client in held:
        client.close()


def test_a_silent_listener(listener: socket.socket) -> None:
    place = Participant(1, 2, LOOPBACK, listener.getsockname()[1])
    with pytest.raises(
        CommError, match="rank 1 of 2 expected the store of rank 0 at .* does not answer as one"
    ):
        reach_store(place, SHORT)


def test_a_listener_that_says_something_else(listener: socket.socket) -> None:
    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            client.close()

    threading.Thread(target=serve, daemon=True).start()
    with pytest.raises(CommError, match="does not answer as one, so another program has the port"):
        reach_store(Participant(1, 2, LOOPBACK, listener.getsockname()[1]), SHORT)


def test_nobody_listens(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "TOLD_AFTER", 0.3)
    port = listener.getsockname()[1]
    listener.close()
    with pytest.raises(CommError, match=r"but nothing can be reached there \(Connection refused\)"):
        reach_store(Participant(1, 2, LOOPBACK, port), SHORT)
    assert (
        f"rank 1 of 2 waits for rank 0, which does not listen at 127.0.0.1:{port} yet, since "
        in caplog.text
    )
    with pytest.raises(
        CommError, match="expected the store of rank 0 at no.such.host.invalid:1, but nothing"
    ):
        reach_store(Participant(1, 2, "no.such.host.invalid", 1), SHORT)


def test_a_port_that_is_taken(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with pytest.raises(
        CommError, match=rf"rank 0 of 2 cannot open the job's store: port {port} of 127.0.0.1 is al"
    ):
        host_store(Participant(0, 2, LOOPBACK, port), SHORT)


def test_a_store_that_stops_answering() -> None:
    class Stuck:
        def add(self, *_: Any) -> int:
            threading.Event().wait()
            return 0

    meeting_place = Participant(0, 2, LOOPBACK, 1)
    old = meeting.TELL_SECONDS
    meeting.TELL_SECONDS = 0.0
    try:
        with pytest.raises(CommError, match="the store at 127.0.0.1:1 stopped answering"):
            meet(Stuck(), meeting_place, timedelta(seconds=0.1))  # type: ignore[arg-type]
    finally:
        meeting.TELL_SECONDS = old


def test_a_store_that_closes_meanwhile() -> None:
    class Closed:
        def add(self, *_: Any) -> int:
            raise RuntimeError("Connection reset by peer\nand a stack")

        set = add

    with pytest.raises(
        CommError,
        match=r"lost the store of rank 0 .* has probably failed,.*\(Connection reset by peer\)",
    ):
        meet(Closed(), Participant(1, 2, LOOPBACK, 1), SHORT)  # type: ignore[arg-type]


def test_a_store_to_which_others_write() -> None:
    class Foreign:
        set = check = lambda self, *_: True

        def add(self, *_: Any) -> int:
            return 1

        def get(self, _: str) -> bytes:
            return b"\x80\x04K\x01."

    with pytest.raises(CommError, match="another program writes to the store at 127.0.0.1:1"):
        meet(Foreign(), Participant(1, 2, LOOPBACK, 1), LONG)  # type: ignore[arg-type]


def test_within_passes_on_what_comes() -> None:
    assert within(1, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        within(1, lambda: 1 // 0)


# -- who can reach it ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "at"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        ("127.0.0.2", "127.0.0.2"),
        ("::1", "::1"),
    ],
)
def test_a_loopback_address_listens_on_the_loopback_alone(address: str, at: str) -> None:
    if address == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with listen(address, 0) as server:
        assert server.getsockname()[0] == at
    assert is_loopback(address)


@pytest.mark.parametrize("address", ["some-host", "203.0.113.7"])
def test_names_and_foreign_addresses_listen_everywhere(address: str) -> None:
    with listen(address, 0) as server:
        assert server.getsockname()[0] in ("::", "0.0.0.0")
    assert not is_loopback(address)


@pytest.mark.parametrize(
    ("means", "at"),
    [
        # a loopback address: to others the name means something else
        (["127.0.0.5"], ("::", "0.0.0.0")),
        (["203.0.113.7"], ("::", "0.0.0.0")),  # not ours
        (["10.9.8.7"], ("10.9.8.7",)),
        (["10.9.8.7", "203.0.113.7"], ("10.9.8.7",)),
        (["10.9.8.7", "10.9.8.8"], ("::", "0.0.0.0")),  # others may come by either
    ],
)
def test_a_name_listens_at_the_one_address_that_it_means(
    monkeypatch: pytest.MonkeyPatch, means: list[str], at: tuple[str, ...]
) -> None:
    create = socket.create_server
    where = []
    monkeypatch.setattr(stores, "_addresses", lambda _: means)
    monkeypatch.setattr(stores, "_is_own", lambda address: address.startswith(("10.", "127.")))
    monkeypatch.setattr(
        socket,
        "create_server",
        lambda place, **_: (where.append(place[0]), create((LOOPBACK, 0)))[1],
    )
    listen("some-host", 0).close()
    assert (where[0] or "::") in at


def test_the_store_is_where_it_should_be() -> None:
    """A second address of this machine is refused."""
    store = host_store(Participant(0, 2, LOOPBACK, 0), LONG)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.3", store.port), 5)
    assert reach_store(Participant(1, 2, LOOPBACK, store.port), LONG).port == store.port
