"""A checkpoint that is being written to an object store."""

from __future__ import annotations

import contextlib
import math
import queue
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ds_checkpoint.folder.format import MANIFEST, README, Mark
from ds_checkpoint.storages.contract import Draft

from ds_checkpoint_object.bucket import Conflict
from ds_checkpoint_object.lease import LEASE
from ds_core.errors import CheckpointError

if TYPE_CHECKING:
    from ds_checkpoint.folder.tensorfile import Item

    from ds_checkpoint_object.bucket import Bucket
    from ds_checkpoint_object.lease import Lease

# S3 has at most 10,000 parts of one object.
MOST_PARTS = 9_000
_REPORT = re.compile(r"rank(\d{5,9})\.report", re.ASCII)


class ObjectDraft(Draft):
    """Objects below ``PREFIX/TAG/SAVE_ID``, which no manifest names yet.

    begun: ``version``, of the manifest that it replaces, and ``replaces``, that one's save_id.
    """

    poll_seconds = 0.25

    def __init__(
        self,
        bucket: Bucket,
        lease: Lease,
        prefix: str,
        tag: str,
        save_id: str,
        begun: Mapping[str, Any],
    ) -> None:
        self._bucket = bucket
        self._lease = lease
        self._root = f"{prefix}/" if prefix else ""
        self._tag = f"{self._root}{tag}/"
        self._folder = f"{self._tag}{save_id}/"
        self._begun = begun
        self._manifest = b""
        # A rank that has lost the store says nothing any more; all others must not wait forever.
        self.patience = max(3600.0, 12 * bucket.config.give_up_after)

    def check(self) -> None:
        """See `Draft`. The lease that rank 0 holds tells whether this rank sees the same store."""
        if self._bucket.head(self._root + LEASE) is None:
            raise CheckpointError(
                f"{self._bucket.url(self._root + LEASE)}, put by rank 0, is missing; all ranks "
                "must see the same store (a memory:// store is of one process)"
            )

    def write_tensors(self, name: str, items: Iterable[Item], metadata: Mapping[str, str]) -> Mark:
        """See `Draft`."""
        from ds_checkpoint.folder.tensorfile import pour_tensors

        several = list(items)
        size = sum(math.prod(shape) * dtype.itemsize for _, shape, dtype, _ in several)
        with _Upload(self._bucket, self._folder + name, size) as upload:
            mark = pour_tensors(name, several, metadata, upload.write)
            upload.finish()
        return mark

    def seal(self, readme: bytes, manifest: bytes) -> None:
        """See `Draft`. The manifest itself is put by `put_in_place`."""
        self._bucket.put(self._folder + README, readme)
        self._manifest = manifest

    def put_in_place(self) -> None:
        """See `Draft`."""
        key = self._tag + MANIFEST
        end = time.monotonic() + self._bucket.config.give_up_after
        while True:
            # A put that is repeated for longer than the lease holds could come after another job's
            # first save, and name files that it has cleared away.
            self._lease.check()
            limit = self._bucket.config.lease_seconds / 2
            try:
                self._bucket.put_if(key, self._manifest, self._begun["version"], limit)
                break
            except Conflict as conflict:
                raise CheckpointError(f"{conflict}; the checkpoint is not in place") from None
            except CheckpointError:
                if time.monotonic() > end:
                    raise
        # What it has replaced is debris now; where this fails, the next save clears it.
        if (old := self._begun["replaces"]) is not None:
            with contextlib.suppress(CheckpointError):
                self._remove(f"{self._tag}{old}/")

    def discard(self) -> None:
        """See `Draft`."""
        self._remove(self._folder)

    def _remove(self, folder: str) -> None:
        self._bucket.delete([row.key for row in self._bucket.objects(folder)])

    # -- reports -----------------------------------------------------------------------------------

    def leave_report(self, rank: int, report: bytes) -> None:
        """See `Draft`."""
        self._bucket.put(f"{self._folder}rank{rank:05d}.report", report)

    def take_reports(self, ranks: Iterable[int]) -> Mapping[int, bytes]:
        """See `Draft`."""
        wanted = set(ranks)
        found = {}
        for row in self._bucket.objects(self._folder):
            name = _REPORT.fullmatch(row.key.removeprefix(self._folder))
            if name is not None and (rank := int(name[1])) in wanted:
                found[rank], _ = self._bucket.get(row.key, 1 << 30)
                self._bucket.delete([row.key])
        return found

    @property
    def gone(self) -> bool:
        """See `Draft`: a rank that gives up says so in its report."""
        return False


class _Upload:
    """Streams one object: blocks come in, and a thread sends them on in parts.

    So tensors are brought to the host and hashed while earlier parts are on their way, and few parts
    are held at once.

    size: of what is to come, about.
    """

    def __init__(self, bucket: Bucket, key: str, size: int) -> None:
        self._bucket = bucket
        self._key = key
        self._part_size = max(bucket.config.part_size, math.ceil(size / MOST_PARTS))
        self._part = bytearray()
        self._queue: queue.Queue[bytearray | _Stop | None] = queue.Queue(1)
        self._thread: ThreadPoolExecutor | None = None
        self._done: Future[None] | None = None

    def __enter__(self) -> _Upload:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._thread is None:
            return
        # Something else failed: the store is to forget the parts that it has.
        if kind is not None:
            with contextlib.suppress(Exception):
                self._hand(_Stop())
        self._thread.shutdown()

    def write(self, block: memoryview) -> None:
        """Take a block; it waits while enough parts are under way."""
        while block:
            count = min(len(block), self._part_size - len(self._part))
            self._part += block[:count]
            block = block[count:]
            if len(self._part) == self._part_size:
                # It is handed over as it is: the next one is another.
                self._hand(self._part)
                self._part = bytearray()

    def finish(self) -> None:
        """All has come; the object is there when this returns."""
        if self._thread is None:
            # One request, which is repeated as any other.
            self._bucket.put(self._key, bytes(self._part))
            return
        if self._part:
            self._hand(self._part)
        self._hand(None)
        assert self._done is not None
        self._done.result()

    def _hand(self, part: bytearray | _Stop | None) -> None:
        """Give a part to the thread; raises what has gone wrong there."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "writing a checkpoint")
            self._done = self._thread.submit(self._send)
        assert self._done is not None
        while True:
            if self._done.done():
                self._done.result()
                raise AssertionError("an upload ended before all was given to it")
            with contextlib.suppress(queue.Full):
                self._queue.put(part, timeout=0.1)
                return

    def _send(self) -> None:
        self._bucket.upload(self._key, self._parts(), self._part_size)

    def _parts(self) -> Iterator[bytearray]:
        while True:
            part = self._queue.get()
            if isinstance(part, _Stop):
                raise part
            if part is None:
                return
            yield part


class _Stop(Exception):  # no error: ends an upload
    """The writer has given up."""
