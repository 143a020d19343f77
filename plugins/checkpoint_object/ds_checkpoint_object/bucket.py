"""One bucket of an object store: requests that are repeated, and errors that name bucket, key and
cause.

[Note: a conditional put that was repeated] A request whose answer was lost is repeated, and the
second one finds what the first has written: the condition fails although nobody else was there. So
where it fails, the object is compared with what was to be written. It has random digits in it, so
the same bytes are one's own.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
from obstore import exceptions as failed

from ds_core.errors import CheckpointError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

    from ds_checkpoint_object.config import ObjectConfig

T = TypeVar("T")

Version = dict[str, Any]
"""Of an object: ``e_tag`` and ``version``; a store has one or both."""

# Seconds between two tries: at first, and at most.
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
# Answers that the same request can get once and not again; all other 4xx stay what they are.
_PASSING = (408, 409, 425, 429)
_STATUS = re.compile(r"status code: (\d{3})")
_MESSAGE = re.compile(r"<Code>([^<]*)</Code>(?:\s*<Message>([^<]*)</Message>)?", re.DOTALL)
_QUERY = re.compile(r"\?[^\s\"'<>]+")
_SECRET = re.compile(r"KEY|SECRET|TOKEN|SAS|PASSWORD|CREDENTIAL|SERVICE_ACCOUNT")
_STORES = ("AWS_", "AZURE_", "GOOGLE_")
# Where machines of a cloud ask for credentials: it is asked when the environment has none.
_METADATA = re.compile(r"169\.254\.|metadata\.google")


class Conflict(Exception):  # no error of a user
    """A conditional put found another object than it was to replace.

    found: its content and version; None where there is none.
    """

    def __init__(self, text: str, found: tuple[bytes, Version] | None) -> None:
        super().__init__(text)
        self.found = found


@dataclass(frozen=True, slots=True)
class Meta:
    """What a listing says of an object."""

    key: str
    size: int
    version: Version


class Bucket:
    """Requests to one bucket.

    store: for requests that are repeated here.
    patient: the same, for uploads in parts, which the library repeats part by part.
    place: the URL of the bucket, as in messages.
    """

    def __init__(
        self, store: ObjectStore, patient: ObjectStore, place: str, config: ObjectConfig
    ) -> None:
        self._store = store
        self._patient = patient
        self.place = place
        self.config = config

    def url(self, key: str) -> str:
        """How messages call an object."""
        return f"{self.place}/{key}"

    # -- reading -----------------------------------------------------------------------------------

    def get(self, key: str, most: int, limit: float | None = None) -> tuple[bytes, Version]:
        """An object's content and version. FileNotFoundError without it; CheckpointError when it
        has more than `most` bytes.

        limit: seconds after which to give up; None: as for all requests.
        """

        def call() -> tuple[bytes, Version]:
            found = obstore.get(self._store, key)
            size = found.meta["size"]
            if size > most:
                raise CheckpointError(
                    f"{self.url(key)} has {size} bytes, where {most} are the most that such a file "
                    "can have"
                )
            return bytes(found.bytes()), _version(found.meta)

        return self._repeat("read", key, call, limit)

    def peek(
        self, key: str, most: int = 1 << 16, limit: float | None = None
    ) -> tuple[bytes, Version] | None:
        """As `get`; None without the object."""
        try:
            return self.get(key, most, limit)
        except FileNotFoundError:
            return None

    def start(self, key: str, count: int) -> tuple[bytes, Version] | None:
        """The first `count` bytes of an object, fewer where it has fewer; None without it."""

        def call() -> tuple[bytes, Version] | None:
            try:
                found = obstore.get(self._store, key, options={"range": (0, count)})
                return bytes(found.bytes()), _version(found.meta)
            except FileNotFoundError as error:
                self._no_bucket("read", key, error)
                return None
            except failed.BaseError as error:
                if _status(error) == 416:  # it is empty
                    return b"", {}
                raise

        return self._repeat("read", key, call)

    def get_range(self, key: str, start: int, stop: int, version: Version) -> Any:
        """The bytes [start, stop) of an object that has this version, as a buffer.

        CheckpointError where it was changed.
        """

        def call() -> Any:
            options: Any = {"range": (start, stop)}
            if version.get("e_tag"):
                options["if_match"] = version["e_tag"]
            data = obstore.get(self._store, key, options=options).bytes()
            if len(data) != stop - start:
                raise failed.GenericError(f"{len(data)} of {stop - start} bytes came")
            return data

        try:
            return self._repeat("read", key, call)
        except FileNotFoundError:
            raise CheckpointError(f"{self.url(key)} was removed while it was read") from None

    def head(self, key: str) -> Meta | None:
        """Size and version of an object; None without it."""

        def call() -> Meta:
            found = obstore.head(self._store, key)
            return Meta(key, found["size"], _version(found))

        try:
            return self._repeat("read", key, call)
        except FileNotFoundError:
            return None

    def objects(self, prefix: str) -> list[Meta]:
        """Every object below `prefix`."""

        def call() -> list[Meta]:
            return [
                Meta(row["path"], row["size"], _version(row))
                for rows in obstore.list(self._store, prefix or None)
                for row in rows
            ]

        return self._repeat("list", prefix, call)

    def folders(self, prefix: str) -> list[str]:
        """The names right below `prefix` that have objects below them."""

        def call() -> list[str]:
            found = obstore.list_with_delimiter(self._store, prefix or None)
            return [name.rstrip("/").rpartition("/")[2] for name in found["common_prefixes"]]

        return self._repeat("list", prefix, call)

    # -- writing -----------------------------------------------------------------------------------

    def put(self, key: str, data: bytes) -> None:
        """Write an object, whatever is there."""
        self._repeat(
            "written", key, lambda: obstore.put(self._store, key, data, use_multipart=False)
        )

    def put_if(
        self, key: str, data: bytes, version: Version | None, limit: float | None = None
    ) -> Version:
        """Write an object if it has `version` (None: if it does not exist); its new version.

        data: no two calls give the same, see [Note: a conditional put that was repeated].
        limit: seconds after which to give up; None: as for all requests.

        Raises `Conflict` where it has another.
        """
        mode: Any = "create" if version is None else dict(version)

        def call() -> Version:
            try:
                done = obstore.put(self._store, key, data, mode=mode, use_multipart=False)
            except FileNotFoundError as error:
                self._no_bucket("written", key, error)
            except (failed.AlreadyExistsError, failed.PreconditionError):
                pass
            else:
                return _version(done)
            found = self.peek(key, max(len(data), 1 << 16))
            if found is not None and found[0] == data:
                return found[1]
            raise Conflict(f"{self.url(key)} was written by another job meanwhile", found)

        return self._repeat("written", key, call, limit)

    def upload(self, key: str, parts: Iterator[bytearray], part_size: int) -> None:
        """Write an object out of parts, several at once; if `parts` raises, there is none."""
        sent = 0
        ended = False

        def counted() -> Iterator[bytearray]:
            nonlocal sent, ended
            for part in parts:
                sent += len(part)
                yield part
            ended = True

        try:
            obstore.put(
                self._patient,
                key,
                counted(),
                use_multipart=True,
                chunk_size=part_size,
                max_concurrency=self.config.requests,
            )
        except (failed.BaseError, OSError) as error:
            # The answer to the last request may have been lost: an object is there only whole.
            found = self.head(key) if ended else None
            if found is None or found.size != sent:
                raise self._error("written", key, error) from None

    def delete(self, keys: Iterable[str], limit: float | None = None) -> None:
        """Remove objects; those that are gone already are fine."""
        several = list(keys)
        if not several:
            return

        def call() -> None:
            try:
                obstore.delete(self._store, several)
            except FileNotFoundError as error:
                self._no_bucket("removed", several[0], error)

        self._repeat("removed", several[0], call, limit)

    # -- failures ----------------------------------------------------------------------------------

    def _repeat(self, what: str, key: str, call: Callable[[], T], limit: float | None = None) -> T:
        """`call`, again and again while it fails in a way that may pass.

        FileNotFoundError where there is no such object; else CheckpointError.
        """
        end = time.monotonic() + (self.config.give_up_after if limit is None else limit)
        pause = FIRST_PAUSE
        while True:
            try:
                return call()
            except FileNotFoundError as error:
                self._no_bucket(what, key, error)
                raise FileNotFoundError(self.url(key)) from None
            except failed.BaseError as error:
                if not _may_pass(error) or time.monotonic() + pause > end:
                    raise self._error(what, key, error) from None
            # Ranks that failed together must not come back together.
            time.sleep(pause * random.uniform(0.5, 1))
            pause = min(2 * pause, LONGEST_PAUSE)

    def _no_bucket(self, what: str, key: str, error: Exception) -> None:
        """Raise where not the object is missing but the bucket, or what was to be written to."""
        text = str(error)
        if what in ("written", "list") or "NoSuchBucket" in text or "ContainerNotFound" in text:
            raise self._error(what, key, error) from None

    def _error(self, what: str, key: str, error: Exception) -> CheckpointError:
        doing = "listed" if what == "list" else what
        cause = cause_of(error)
        if _METADATA.search(str(error)):
            cause = f"the environment has no credentials for it ({cause})"
        elif isinstance(error, failed.PreconditionError) and what == "read":
            cause = "it was changed while it was being read"
        return CheckpointError(f"{self.url(key)} cannot be {doing}: {cause}")


def cause_of(error: Exception) -> str:
    """What the store has said, in one line and without anything that could be a secret."""
    text = str(error).partition("\n\nDebug source")[0]
    if (said := _MESSAGE.search(text)) is not None:
        status = _STATUS.search(text)
        text = f"{said[1]}: {said[2] or ''}".strip(": ")
        text = f"{text} (status {status[1]})" if status else text
    # A signed query or a token would stand in logs.
    text = _QUERY.sub("?***", " ".join(text.split()))
    for name, value in os.environ.items():
        if name.startswith(_STORES) and _SECRET.search(name) and len(value) >= 4:
            text = text.replace(value, "***")
    return text if len(text) <= 300 else f"{text[:300]}..."


def _status(error: Exception) -> int | None:
    found = _STATUS.search(str(error))
    return None if found is None else int(found[1])


def _may_pass(error: Exception) -> bool:
    """Whether the same request may get another answer."""
    if type(error) is not failed.GenericError or _METADATA.search(str(error)):
        return isinstance(error, failed.JoinError)
    status = _status(error)
    return status is None or status >= 500 or status in _PASSING


def _version(meta: Any) -> Version:
    return {key: meta[key] for key in ("e_tag", "version") if meta[key] is not None}
