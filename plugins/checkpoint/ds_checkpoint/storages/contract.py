"""The contract of a storage: what saving and loading ask of the place that checkpoints are kept in.

Three views of one place. `Storage` is the place itself, with its tags and ``latest``. `Stored` is
one checkpoint that is there. `Draft` is one that is being written, which nobody sees before
`Draft.put_in_place`. A rank that saves or loads has its own objects; only rank 0 calls what says
so. Addresses that a method gives are for messages.

[Note: whole or not there] A checkpoint exists from the moment its manifest is in place, and the
manifest is put in place after everything that it names is durable. So a process may die anywhere:
what it leaves is a whole checkpoint, or files that no manifest names.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_core.errors import CheckpointError

if TYPE_CHECKING:
    from ds_checkpoint.folder.format import Manifest, Mark
    from ds_checkpoint.folder.reader import Reader
    from ds_checkpoint.folder.tensorfile import Item


class Stored(ABC):
    """A checkpoint that is there.

    path: how messages call it, and a path or URL that `open_saved` takes.
    """

    path: Path | str

    @abstractmethod
    def path_of(self, name: str) -> Path | str:
        """How messages call its file `name`."""

    @abstractmethod
    def manifest(self) -> Manifest:
        """Its manifest, read and checked. CheckpointError when anything about it is wrong."""

    @abstractmethod
    def check_file(self, name: str, size: int) -> None:
        """CheckpointError unless its file `name` is there and has `size` bytes."""

    @abstractmethod
    def open(self, name: str) -> Reader:
        """Its file `name`. One that is not there may be known by the first read only."""


class Draft(ABC):
    """A checkpoint that is being written, as one rank has it.

    poll_seconds: how often `reports` may be asked for.
    patience: seconds after which a report does not come any more; None: it may take any time.
    """

    poll_seconds = 0.02
    patience: float | None = None

    @abstractmethod
    def check(self) -> None:
        """CheckpointError unless this rank can write into what rank 0 has begun."""

    @abstractmethod
    def write_tensors(self, name: str, items: Iterable[Item], metadata: Mapping[str, str]) -> Mark:
        """Write the safetensors file `name`, durably, holding one tensor at a time; its size and
        checksum.
        """

    def finish(self) -> None:  # noqa: B027
        """This rank has written all its files: their names must be durable when this returns."""

    @abstractmethod
    def seal(self, readme: bytes, manifest: bytes) -> None:
        """Rank 0, when all ranks have written: what is still missing but `put_in_place`."""

    @abstractmethod
    def put_in_place(self) -> None:
        """Rank 0, after `seal`: make it the checkpoint of its tag, in one step, durably.

        A checkpoint that has the tag can be read until then. CheckpointError, with nothing changed,
        where another job has got in between.
        """

    @abstractmethod
    def discard(self) -> None:
        """Give up: remove what was written. OSError or CheckpointError where that fails; the next
        save then clears it.
        """

    # -- saves that go on in the background: ranks tell rank 0 that they are done ------------------

    @abstractmethod
    def leave_report(self, rank: int, report: bytes) -> None:
        """Leave word for rank 0, as a whole."""

    @abstractmethod
    def take_reports(self, ranks: Iterable[int]) -> Mapping[int, bytes]:
        """Rank 0: what those of `ranks` that have left word have left; each is given once."""

    @property
    @abstractmethod
    def gone(self) -> bool:
        """Whether another rank has discarded it, as far as this one can see."""


class Storage(ABC):
    """A place that checkpoints are kept in.

    One job at a time saves into it: see `hold`.
    """

    @abstractmethod
    def path(self, name: str = "") -> Path | str:
        """How messages call what has `name` there (a tag, ``latest``), or the place itself."""

    # -- reading -----------------------------------------------------------------------------------

    def exists(self) -> bool:
        """Whether the place is there; where places need not be made, it is."""
        return True

    @abstractmethod
    def tags(self) -> list[str]:
        """The tags of the checkpoints, newest first: by the manifest's serial, then its step."""

    @abstractmethod
    def latest(self) -> str | None:
        """The tag that ``latest`` names; None when there is no such file. CheckpointError when it
        holds no tag.
        """

    @abstractmethod
    def find(self, tag: str) -> str:
        """The name under which `open` finds checkpoint `tag`; CheckpointError with the tags that
        are there when it is not.
        """

    @abstractmethod
    def open(self, name: str) -> Stored:
        """The checkpoint `name`, as `find` or `tags` gave it. Nothing is read yet."""

    @abstractmethod
    def itself(self) -> Stored | None:
        """The checkpoint that the place itself is, where it is one."""

    # -- saving: rank 0, and any rank for `draft` --------------------------------------------------

    @abstractmethod
    def hold(self) -> None:
        """Take the place for this job, until `close` or the end of the process, however that ends.

        It is called before each save. CheckpointError naming who has it when that is another job.
        """

    @abstractmethod
    def begin(self, tag: str, save_id: str) -> dict[str, Any]:
        """Clear what crashed saves have left, and begin one: JSON that `draft` takes on any rank.

        CheckpointError where `tag` is taken by something that is no checkpoint.
        """

    @abstractmethod
    def draft(self, tag: str, save_id: str, begun: Mapping[str, Any]) -> Draft:
        """What `begin` has begun, on any rank."""

    @abstractmethod
    def next_serial(self) -> int:
        """One more than the largest serial of a checkpoint that is there."""

    @abstractmethod
    def write_latest(self, tag: str) -> None:
        """Point ``latest`` at `tag`, in one step, durably."""

    @abstractmethod
    def remove(self, tag: str) -> None:
        """Remove a checkpoint that is there: half of it is never taken for one."""

    def prune(self, keep: int, tag: str) -> list[str]:
        """Remove all but the newest `keep` checkpoints; never `tag`, nor what ``latest`` names.
        Their tags.
        """
        # The checkpoint that was just saved, and the one that a resumed run would read.
        safe = {tag}
        with contextlib.suppress(CheckpointError):
            safe |= {self.latest() or tag}
        removed = [old for old in self.tags()[keep:] if old not in safe]
        for old in removed:
            self.remove(old)
        return removed

    def close(self) -> None:  # noqa: B027
        """Let other jobs have the place."""
