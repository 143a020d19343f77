"""A store that is away, refuses, breaks off or is changed; and what is fetched of an object."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from ds_checkpoint.folder.tensorfile import TensorFile
from ds_checkpoint_object import opening
from ds_checkpoint_object.bucket import Bucket, Meta
from ds_checkpoint_object.config import ObjectConfig
from ds_checkpoint_object.reader import Fetcher, ObjectFile
from object_runs import advance, make, wrong
from object_server import BUCKET, KEYS, environment, faulty_proxy, keys, s3, s3_server
from obstore.store import MemoryStore

from ds_core import comm
from ds_core.errors import CheckpointError

SECRET = KEYS["AWS_SECRET_ACCESS_KEY"]
SOON = {"checkpoint_object": {"give_up_after": 1, "timeout": 5}}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address, environment(address):
        yield address


# -- stores that are away --------------------------------------------------------------------------


def away(address: str, url: str, before: str) -> list[str]:
    """The messages of a save and a load that fail; what was saved before is loaded then."""
    with environment(before):
        engine = make(**SOON)
        advance(engine)
        engine.save_checkpoint(f"s3://{BUCKET}/{url}", "whole")
        engine.destroy()
    found = []
    with environment(address):
        engine = make(**SOON)
        for call in (engine.save_checkpoint, engine.load_checkpoint):
            with pytest.raises(CheckpointError) as caught:
                call(f"s3://{BUCKET}/{url}")
            found.append(str(caught.value))
        engine.destroy()
    assert comm.all_gather_json(comm.rank()) == [0, 1]  # the ranks are still in step
    with environment(before):
        engine = make(**SOON)
        engine.load_checkpoint(f"s3://{BUCKET}/{url}")
        assert wrong(engine) == [] and engine.global_steps == 1
        engine.destroy()
    return found


def test_a_store_that_does_not_answer(ranks: Any, server: str, tmp_path: Path) -> None:
    nobody = "http://127.0.0.1:9"
    for messages in ranks(2, away, nobody, tmp_path.name, server):
        for message in messages:
            assert f"s3://{BUCKET}/{tmp_path.name}/" in message and "cannot be" in message
            assert "error sending request" in message
            assert SECRET not in message and "hunter2" not in message


def test_a_bucket_that_does_not_exist(server: str) -> None:
    engine = make(**SOON)
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(CheckpointError, match=r"s3://nobody-s/run.*NoSuchBucket"):
            call("s3://nobody-s/run")
    engine.destroy()


def test_no_credentials(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEYS:
        monkeypatch.delenv(name)
    storage = opening.open_storage(f"s3://{BUCKET}/run", None)
    config = ObjectConfig(give_up_after=300)
    storage._bucket.config = config
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="the environment has no credentials for it"):
        storage.tags()
    # It has not tried again until it gave up.
    assert time.monotonic() - began < 250


@pytest.mark.slow
def test_half_of_all_requests_fail(ranks: Any, server: str, tmp_path: Path) -> None:
    with faulty_proxy(server, share=0.4, latency=0.0, seed=3) as address:
        ranks(2, _there_and_back, address, f"s3://{BUCKET}/{tmp_path.name}")
    # nothing but whole checkpoints is left of it
    ids = {key.split("/")[2] for key in keys(server, tmp_path.name) if key.count("/") == 3}
    assert len(ids) == 2


def _there_and_back(address: str, url: str) -> None:
    with environment(address):
        engine = make(checkpoint={"keep_last": 2})
        for _ in range(3):
            advance(engine)
            engine.save_checkpoint(url)
        advance(engine)
        engine.load_checkpoint(url)
        assert wrong(engine) == [] and engine.global_steps == 3
        engine.destroy()


# -- secrets ---------------------------------------------------------------------------------------


def test_no_secret_is_written_or_said(
    server: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}"
    with caplog.at_level(logging.DEBUG):
        engine = make(autosave={"folder": url})
        advance(engine)
        engine.save_checkpoint(url)
        storage = opening.open_storage(url, None)
        shown = repr(storage) + repr(storage._bucket) + repr(storage._bucket._store) + repr(engine)
        with environment("http://127.0.0.1:9"), pytest.raises(CheckpointError) as caught:
            make(**SOON).load_checkpoint(url)
        engine.destroy()
    texts = [shown, caplog.text, str(caught.value), repr(caught.value)]
    texts += [s3(server, "GET", key).decode("latin-1") for key in keys(server, tmp_path.name)]
    assert len(texts) > 6
    assert not [text for text in texts if SECRET in text or KEYS["AWS_ACCESS_KEY_ID"] in text]


# -- what is fetched -------------------------------------------------------------------------------


class Counted(Bucket):
    """Notes the ranges that are asked for, and how many at once."""

    def __init__(self, config: ObjectConfig) -> None:
        store = MemoryStore()
        super().__init__(store, store, "memory://x", config)
        self.asked: list[tuple[int, int]] = []
        self.most = self._now = 0
        self._counting = threading.Lock()

    def get_range(self, key: str, start: int, stop: int, version: Any) -> Any:
        with self._counting:
            self.asked.append((start, stop))
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(0.02)
        try:
            return super().get_range(key, start, stop, version)
        finally:
            with self._counting:
                self._now -= 1

    @property
    def bytes(self) -> int:
        return sum(stop - start for start, stop in self.asked)


def opened(size: int, **config: Any) -> tuple[Counted, ObjectFile, bytes]:
    given = ObjectConfig(**({"part_size": 5 << 20, "requests": 4} | config))
    bucket = Counted(given)
    data = torch.arange(size // 4, dtype=torch.int32).numpy().tobytes()
    bucket.put("k", data)
    found = bucket.head("k")
    assert found is not None
    return bucket, ObjectFile(bucket, "memory://x/k", found, Fetcher(4, given.part_size)), data


def read(file: ObjectFile, start: int, stop: int) -> bytes:
    room = bytearray(stop - start)
    assert file.read_into(start, memoryview(room)) == len(room)
    return bytes(room)


def test_a_long_read_is_several_requests_at_once() -> None:
    bucket, file, data = opened(64 << 20)
    assert read(file, 0, len(data)) == data
    assert bucket.bytes == len(data) and bucket.most == 4
    assert all(stop - start <= 4 << 20 for start, stop in bucket.asked)


def test_reads_in_order_are_fetched_ahead_in_few_requests() -> None:
    bucket, file, data = opened(48 << 20)
    step = 100_000
    for start in range(0, len(data) - step, step):
        assert read(file, start, start + step) == data[start : start + step]
    assert len(bucket.asked) < 40 and bucket.most > 1
    assert bucket.bytes <= len(data)


def test_streams_that_take_turns() -> None:
    """As weights, masters and moments are read, parameter by parameter."""
    bucket, file, data = opened(96 << 20)
    third = 32 << 20
    for start in range(0, third, 1 << 20):
        for stream in range(3):
            place = stream * third + start
            assert read(file, place, place + (1 << 20)) == data[place : place + (1 << 20)]
    # Beyond the end of a stream at most what is fetched ahead: 4 requests of 4 MiB.
    assert bucket.bytes <= len(data) + 2 * (16 << 20) and len(bucket.asked) < 70


def test_what_is_not_wanted_is_not_fetched() -> None:
    """A tenth of each stretch, as a rank of ten reads it."""
    bucket, file, data = opened(60 << 20)
    for start in range(0, len(data), 20 << 20):
        assert read(file, start, start + (2 << 20)) == data[start : start + (2 << 20)]
    assert bucket.bytes <= 3 * (2 << 20) + 3 * (1 << 18)
    assert read(file, len(data) - 10, len(data)) == data[-10:]
    assert file.read_into(len(data) - 3, memoryview(bytearray(10))) == 3


@pytest.mark.parametrize("spool", [True, False])
def test_what_was_verified_is_what_is_read(spool: bool) -> None:
    bucket, file, data = opened(32 << 20, spool=spool)
    assert b"".join(map(bytes, file.blocks())) == data
    assert bucket.bytes == len(data) and bucket.most == 4
    assert read(file, 7, 1 << 20) == data[7 : 1 << 20]
    again = bucket.bytes - len(data)
    assert (again == 0) is spool
    if spool:  # the store may be changed now
        bucket.put("k", b"other")
        assert b"".join(map(bytes, file.blocks())) == data
    file.close()


def test_a_change_while_it_is_read_is_an_error() -> None:
    bucket, file, data = opened(32 << 20)
    read(file, 0, 10)
    bucket.put("k", bytes(len(data)))
    with pytest.raises(CheckpointError, match="memory://x/k cannot be read: it was changed while"):
        read(file, 20 << 20, 21 << 20)
    bucket.delete(["k"])
    with pytest.raises(CheckpointError, match="memory://x/k was removed while it was read"):
        read(file, 30 << 20, 31 << 20)


def test_memory_of_what_was_fetched_is_bounded() -> None:
    _bucket, file, data = opened(200 << 20)
    for start in range(len(data) - (1 << 20), 0, -(3 << 20)):
        read(file, start, start + 100)
    assert file._fetcher._bytes <= file._fetcher.held


def test_a_header_of_a_stranger_is_checked_against_the_object() -> None:
    bucket = Counted(ObjectConfig())
    for data in (b"", b"1234567", (1 << 40).to_bytes(8, "little") + b"{}"):
        bucket.put("k", data)
        meta = Meta("k", len(data), {})
        with pytest.raises(CheckpointError, match="memory://x/k: it is not a safetensors file"):
            TensorFile(ObjectFile(bucket, "memory://x/k", meta, Fetcher(2, 5 << 20)))
