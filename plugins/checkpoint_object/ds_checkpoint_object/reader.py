"""Reading ranges of one object: several requests under way, near ranges in one request.

Reads that go on where an earlier one has ended are taken for a stream, and what comes next is
fetched ahead, as much as the stream has had so far. So a rank that reads one tensor after the other does
not wait for each answer; one that reads here and there fetches little that it does not need.

[Note: what was verified is what is read] `ObjectFile.blocks` fetches a whole object for its
checksum. Its bytes are kept in a temporary file, and later reads come from there: a checkpoint goes
through the network once, and cannot change between its check and its use.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_checkpoint.folder.reader import Reader

from ds_core.process import log_once

if TYPE_CHECKING:
    from ds_checkpoint_object.bucket import Bucket, Meta

log = logging.getLogger("ds_checkpoint")

# Requests begin and end at multiples of this, so that near ranges are one request.
GRAIN = 1 << 18
# Bytes of one request of a stream: small, so that little is fetched beyond its end.
PIECE = 1 << 22
# Bytes between two reads of one stream that are fetched along.
GAP = 1 << 20
# Streams that one file is read in: weights, masters and moments come in turns.
STREAMS = 8
# Bytes that a disk must have left beside what is kept there for a while.
SPARE = 1 << 30


@dataclass(slots=True)
class _Extent:
    """A range that is being fetched, or was."""

    start: int
    stop: int
    data: Future[Any]


class Fetcher:
    """The requests that a storage has under way, and the bytes that wait to be read.

    held: bytes of both, at most.
    """

    def __init__(self, requests: int, part_size: int) -> None:
        self.part_size = part_size
        self.window = requests * PIECE
        self.held = STREAMS * self.window
        self.requests = requests
        self.pool = ThreadPoolExecutor(requests, "reading a checkpoint")
        self.lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, int], tuple[list[_Extent], _Extent]] = OrderedDict()
        self._bytes = 0

    def keep(self, extents: list[_Extent], extent: _Extent) -> None:
        """Note an extent of the file that has `extents`; the oldest ones go when there are too many
        bytes.
        """
        extents.append(extent)
        self._kept[id(extents), extent.start] = extents, extent
        self._bytes += extent.stop - extent.start
        while self._bytes > self.held and len(self._kept) > 1:
            owners, oldest = next(iter(self._kept.values()))
            self.drop(owners, oldest)

    def drop(self, extents: list[_Extent], extent: _Extent) -> None:
        """Forget an extent."""
        if self._kept.pop((id(extents), extent.start), None) is not None:
            extents.remove(extent)
            self._bytes -= extent.stop - extent.start
            extent.data.cancel()


class ObjectFile(Reader):
    """An object.

    meta: as a listing has it; None where there is no such object.
    """

    def __init__(self, bucket: Bucket, path: str, meta: Meta | None, fetcher: Fetcher) -> None:
        self.path: str = path
        self._bucket = bucket
        self._meta = meta
        self._fetcher = fetcher
        self._extents: list[_Extent] = []
        # Where each stream goes on, and how many bytes it has had; the newest last.
        self._streams: list[tuple[int, int]] = []
        self._spool: int | None = None

    def size(self) -> int:
        """See `Reader`."""
        return self._found().size

    def _found(self) -> Meta:
        if self._meta is None:
            raise FileNotFoundError(self.path)
        return self._meta

    # -- ranges ------------------------------------------------------------------------------------

    def read_into(self, place: int, view: memoryview) -> int:
        """See `Reader`."""
        stop = min(place + len(view), self.size())
        if self._spool is not None:
            return _read(self._spool, place, view[: max(stop - place, 0)])
        ahead = self._ahead(place, stop)
        at = place
        while at < stop:
            # Of a long read, as much is under way at once as of a stream.
            extent = self._extent(at, min(stop, at + self._fetcher.window), ahead)
            data = memoryview(extent.data.result())
            end = min(extent.stop, stop)
            view[at - place : end - place] = data[at - extent.start : end - extent.start]
            at = end
            if at == extent.stop:
                with self._fetcher.lock:
                    self._fetcher.drop(self._extents, extent)
        return max(stop - place, 0)

    def _ahead(self, place: int, stop: int) -> int:
        """Note a read; the place up to which is to be fetched ahead."""
        with self._fetcher.lock:
            had = 0
            for stream in self._streams:
                if 0 <= place - stream[0] <= GAP:
                    self._streams.remove(stream)
                    had = stream[1] + stop - place
                    break
            self._streams = [*self._streams[-STREAMS + 1 :], (stop, had or stop - place)]
            # As far ahead as it has come so far; and not before half of that is used up, or there
            # would be many small requests.
            window = min(had, self._fetcher.window)
            under_way = stop
            while (extent := self._at(under_way)) is not None:
                under_way = extent.stop
            return stop if under_way - stop > window // 2 else min(stop + window, self.size())

    def _at(self, place: int) -> _Extent | None:
        return next((e for e in self._extents if e.start <= place < e.stop), None)

    def _extent(self, place: int, stop: int, ahead: int) -> _Extent:
        """The extent that has `place` in it; all up to `stop` and `ahead` is then under way."""
        with self._fetcher.lock:
            end = max(stop, min(ahead, place + self._fetcher.window))
            at = place
            while at < end:
                extent = self._at(at)
                if extent is None:
                    later = [e.start for e in self._extents if e.start > at]
                    wanted = min(_up(end), self.size(), at + PIECE, *later)
                    extent = self._request(at, wanted)
                at = extent.stop
            found = self._at(place)
        assert found is not None, f"{place} of {self.path} was asked for"
        return found

    def _request(self, start: int, stop: int) -> _Extent:
        meta = self._found()
        data = self._fetcher.pool.submit(
            self._bucket.get_range, meta.key, start, stop, meta.version
        )
        extent = _Extent(start, stop, data)
        self._fetcher.keep(self._extents, extent)
        return extent

    # -- the whole ---------------------------------------------------------------------------------

    def blocks(self) -> Iterator[memoryview]:
        """See `Reader` and [Note: what was verified is what is read]."""
        if self._spool is not None:
            yield from _blocks(self._spool)
            return
        with contextlib.ExitStack() as stack:
            spool = self._new_spool()
            if spool is not None:
                stack.callback(os.close, spool)
            for data in self._in_order():
                if spool is not None:
                    _append(spool, data)
                yield data
            # Only what has come whole is read from there.
            if spool is not None:
                stack.pop_all()
                self._spool = spool

    def _in_order(self) -> Iterator[memoryview]:
        meta = self._found()
        part = self._fetcher.part_size
        starts = iter(range(0, meta.size, part))
        waiting: list[Future[Any]] = []
        while True:
            while len(waiting) < self._fetcher.requests:
                start = next(starts, None)
                if start is None:
                    break
                stop = min(start + part, meta.size)
                waiting.append(
                    self._fetcher.pool.submit(
                        self._bucket.get_range, meta.key, start, stop, meta.version
                    )
                )
            if not waiting:
                return
            yield memoryview(waiting.pop(0).result())

    def _new_spool(self) -> int | None:
        """A file without a name, for all of the object; None where it is not wanted, or too
        large.
        """
        if not self._bucket.config.spool:
            return None
        folder = tempfile.gettempdir()
        if shutil.disk_usage(folder).free < self.size() + SPARE:
            log_once(
                log,
                logging.INFO,
                f"{folder} has no room for what is verified, so it is fetched twice; set TMPDIR, or "
                "checkpoint_object.spool to false",
            )
            return None
        handle, name = tempfile.mkstemp(prefix="ds_checkpoint-")
        os.unlink(name)
        return handle

    def close(self) -> None:
        """See `Reader`. What was kept goes."""
        with self._fetcher.lock:
            for extent in list(self._extents):
                self._fetcher.drop(self._extents, extent)
            self._streams.clear()
        if self._spool is not None:
            os.close(self._spool)
            self._spool = None


def _up(place: int) -> int:
    """The end of the grain that ends at `place` or later."""
    return -(-place // GRAIN) * GRAIN


def _append(handle: int, data: memoryview) -> None:
    """Write all of it."""
    while data:
        data = data[os.write(handle, data) :]


def _read(handle: int, place: int, view: memoryview) -> int:
    done = 0
    while done < len(view):
        count = os.preadv(handle, [view[done : done + (1 << 28)]], place + done)
        if not count:
            break
        done += count
    return done


def _blocks(handle: int) -> Iterator[memoryview]:
    block = memoryview(bytearray(1 << 20))
    place = 0
    while count := _read(handle, place, block):
        yield block[:count]
        place += count
