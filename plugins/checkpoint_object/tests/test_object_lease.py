"""One job at a time: who is alive, who is dead, and what happens to one that was taken for dead."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import obstore
import pytest
from ds_checkpoint_object import bucket as bucket_module
from ds_checkpoint_object.bucket import Bucket, Conflict
from ds_checkpoint_object.config import ObjectConfig
from ds_checkpoint_object.lease import Lease
from ds_checkpoint_object.opening import open_storage
from ds_testing.processes import clean_environment
from object_server import BUCKET, KEYS, environment, s3_server
from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from ds_core.errors import CheckpointError

HOLDER = """
import sys
from ds_checkpoint_object.opening import open_storage
storage = open_storage(sys.argv[1], None)
storage.hold()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address, environment(address):
        yield address


def holder(address: str, url: str) -> subprocess.Popen[str]:
    variables = KEYS | {"AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": address}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, url],
        env=clean_environment(**variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_living_job_and_a_dead_one(server: str, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}"
    mine = open_storage(url, None)
    with holder(server, url) as other:
        with pytest.raises(CheckpointError) as caught:
            mine.hold()
        assert f"another job is saving to {url} (host " in str(caught.value)
        assert f"process {other.pid})" in str(caught.value)
        assert "a separate save_dir" in str(caught.value)
        other.kill()
        other.wait()
        # Killed on this machine: nobody waits until its time is over.
        began = time.monotonic()
        mine.hold()
        assert time.monotonic() - began < 25
    mine.close()
    # One that ends by itself leaves nothing.
    with holder(server, url) as other:
        assert other.stdin is not None
        other.stdin.close()
        other.wait()
    mine.hold()
    mine.close()


# -- jobs on other machines, played by hand --------------------------------------------------------


def memory(**config: Any) -> Bucket:
    store = MemoryStore()
    return Bucket(store, store, "memory://x", ObjectConfig(**({"lease_seconds": 1} | config)))


def theirs(number: int) -> bytes:
    return json.dumps(
        {"machine": "elsewhere", "process": 7, "started": "1", "host": "far", "n": number}
    ).encode()


def test_another_machine_that_is_silent_is_taken_over() -> None:
    bucket = memory()
    bucket.put(".lease", theirs(0))
    lease = Lease(bucket, ".lease", "memory://x/run")
    lease.take()
    lease.check()
    assert b"elsewhere" not in bucket.get(".lease", 1 << 16)[0]
    lease.release()
    assert bucket.peek(".lease") is None


def test_another_machine_that_renews_is_left_alone() -> None:
    bucket = memory()
    bucket.put(".lease", theirs(0))
    stop = threading.Event()

    def renew() -> None:
        number = 0
        while not stop.wait(0.1):
            number += 1
            bucket.put(".lease", theirs(number))

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        lease = Lease(bucket, ".lease", "memory://x/run")
        with pytest.raises(CheckpointError, match=r"another job is saving to .* \(host far, proc"):
            lease.take()
    finally:
        stop.set()
        thread.join()


def test_whoever_has_lost_it_cannot_commit(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/run"
    mine = open_storage(url, None)
    mine.hold()
    draft = mine.draft("a", "5a", mine.begin("a", "5a"))
    draft.seal(b"", b"the manifest")
    # It was silent for long, and another machine has taken over.
    mine._bucket.put(mine._key(".lease"), theirs(0))
    with pytest.raises(
        CheckpointError, match="it has taken the place over, since this job gave no"
    ):
        draft.put_in_place()
    assert mine._bucket.peek(mine._key("a", "manifest.json")) is None
    # And again, from what is remembered.
    with pytest.raises(CheckpointError, match="another job has taken"):
        draft.put_in_place()


def test_engines_of_one_process_share_it() -> None:
    bucket = memory()
    one = Lease(bucket, ".lease", "x")
    two = Lease(bucket, ".lease", "x")
    for _ in range(3):
        one.take()
        two.take()
    one.release()
    two.check()
    assert bucket.peek(".lease") is not None
    two.release()
    assert bucket.peek(".lease") is None


def test_it_is_renewed_while_nobody_saves() -> None:
    bucket = memory()
    lease = Lease(bucket, ".lease", "x")
    lease.take()
    before = bucket.get(".lease", 1 << 16)
    for _ in range(200):
        if bucket.get(".lease", 1 << 16) != before:
            break
        time.sleep(0.05)
    assert bucket.get(".lease", 1 << 16) != before
    lease.release()


def test_a_lease_that_is_not_one_of_ours_is_waited_for_as_any_other() -> None:
    for text in (b"", b"[]", b"\xff", b"{" * 1000):
        bucket = memory()
        bucket.put(".lease", text)
        lease = Lease(bucket, ".lease", "x")
        lease.take()
        lease.release()


# -- answers that are lost -------------------------------------------------------------------------


@pytest.mark.parametrize("version", [None, "old"])
def test_a_conditional_put_whose_answer_was_lost(
    monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    bucket = memory()
    first = None if version is None else bucket.put_if("k", b"0", None)
    real = obstore.put
    lost = []

    def put(*args: Any, **kwargs: Any) -> Any:
        answer = real(*args, **kwargs)
        if not lost:
            lost.append(answer)
            raise GenericError("the connection was closed")
        return answer

    monkeypatch.setattr(bucket_module.obstore, "put", put)
    found = bucket.put_if("k", b"mine", first)
    assert lost and found == bucket.get("k", 9)[1]
    with pytest.raises(Conflict, match="was written by another job"):
        bucket.put_if("k", b"theirs", first)
    assert bucket.get("k", 9)[0] == b"mine"
