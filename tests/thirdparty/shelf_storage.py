"""A storage of somebody else's: checkpoints in the memory of this process, as ``shelf://NAME``.

A checkpoint is a dict of files, and putting it in place is one assignment. The declaration is
shelf.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_checkpoint.folder.format import Manifest, Mark
    from ds_checkpoint.folder.tensorfile import Item

from ds_checkpoint.folder.format import (
    DAMAGED,
    MANIFEST,
    README,
    check_manifest,
    check_tag,
    no_manifest,
    parse_head,
)
from ds_checkpoint.folder.reader import Reader
from ds_checkpoint.storages.contract import Draft, Storage, Stored

from ds_core.errors import CheckpointError

Files = dict[str, bytes]


class Shelf:
    """One place. tags: the checkpoints; drafts: those that are being written."""

    def __init__(self) -> None:
        self.tags: dict[str, Files] = {}
        self.drafts: dict[str, Files] = {}
        self.latest: str | None = None


SHELVES: dict[str, Shelf] = {}


def open_shelf(url: str, ctx: Any) -> ShelfStorage:
    name, _, tag = url.removeprefix("shelf://").partition("/")
    return ShelfStorage(f"shelf://{name}", SHELVES.setdefault(name, Shelf()), tag)


class ShelfFile(Reader):
    def __init__(self, path: str, files: Files, name: str) -> None:
        self.path = path
        self._files = files
        self._name = name

    @property
    def _data(self) -> bytes:
        if self._name not in self._files:
            raise FileNotFoundError(self.path)
        return self._files[self._name]

    def size(self) -> int:
        return len(self._data)

    def read_into(self, place: int, view: memoryview) -> int:
        part = self._data[place : place + len(view)]
        view[: len(part)] = part
        return len(part)

    def blocks(self) -> Iterator[memoryview]:
        yield memoryview(self._data)

    def close(self) -> None: ...


class ShelfCheckpoint(Stored):
    def __init__(self, path: str, files: Files) -> None:
        self.path: str = path
        self._files = files

    def path_of(self, name: str) -> str:
        return f"{self.path}/{name}"

    def manifest(self) -> Manifest:
        if MANIFEST not in self._files:
            raise no_manifest(self.path_of(MANIFEST))
        return check_manifest(self._files[MANIFEST], self.path_of(MANIFEST))

    def check_file(self, name: str, size: int) -> None:
        if name not in self._files:
            raise CheckpointError(f"{self.path_of(name)} is missing; {DAMAGED}")
        if (found := len(self._files[name])) != size:
            raise CheckpointError(f"{self.path_of(name)} has {found} bytes, not {size}; {DAMAGED}")

    def open(self, name: str) -> Reader:
        return ShelfFile(self.path_of(name), self._files, name)


class ShelfDraft(Draft):
    def __init__(self, shelf: Shelf, tag: str, save_id: str) -> None:
        self._shelf = shelf
        self._tag = tag
        self._id = save_id

    @property
    def _files(self) -> Files:
        return self._shelf.drafts[self._id]

    def check(self) -> None:
        if self.gone:
            raise CheckpointError("the shelf is of one process; use a folder for several ranks")

    def write_tensors(self, name: str, items: Iterable[Item], metadata: Mapping[str, str]) -> Mark:
        from ds_checkpoint.folder.tensorfile import pour_tensors

        data = bytearray()
        mark = pour_tensors(name, items, metadata, data.extend)
        self._files[name] = bytes(data)
        return mark

    def seal(self, readme: bytes, manifest: bytes) -> None:
        self._files.update({README: readme, MANIFEST: manifest})

    def put_in_place(self) -> None:
        self._shelf.tags[self._tag] = self._shelf.drafts.pop(self._id)

    def discard(self) -> None:
        self._shelf.drafts.pop(self._id, None)

    def leave_report(self, rank: int, report: bytes) -> None:
        self._files[f"{rank}.report"] = report

    def take_reports(self, ranks: Iterable[int]) -> Mapping[int, bytes]:
        here = [rank for rank in ranks if f"{rank}.report" in self._files]
        return {rank: self._files.pop(f"{rank}.report") for rank in here}

    @property
    def gone(self) -> bool:
        return self._id not in self._shelf.drafts


class ShelfStorage(Storage):
    def __init__(self, url: str, shelf: Shelf, tag: str = "") -> None:
        self._url = url
        self._shelf = shelf
        self._tag = tag

    def path(self, name: str = "") -> str:
        return f"{self._url}/{name}" if name else self._url

    def _heads(self) -> dict[str, tuple[int, int]]:
        heads = {tag: parse_head(files[MANIFEST]) for tag, files in self._shelf.tags.items()}
        return {tag: head for tag, head in heads.items() if head is not None}

    def tags(self) -> list[str]:
        heads = self._heads()
        return sorted(heads, key=lambda tag: (heads[tag], tag), reverse=True)

    def latest(self) -> str | None:
        return self._shelf.latest

    def find(self, tag: str) -> str:
        if check_tag(tag) not in self._shelf.tags:
            have = ", ".join(self.tags()) or "none"
            raise CheckpointError(f"checkpoint {self.path(tag)} does not exist; there are {have}")
        return tag

    def open(self, name: str) -> Stored:
        return ShelfCheckpoint(self.path(name), self._shelf.tags.get(name, {}))

    def itself(self) -> Stored | None:
        return self.open(self._tag) if self._tag in self._shelf.tags else None

    def hold(self) -> None:
        """Memory is of one process, so no other job can save here."""

    def begin(self, tag: str, save_id: str) -> dict[str, Any]:
        self._shelf.drafts.clear()
        self._shelf.drafts[save_id] = {}
        return {}

    def draft(self, tag: str, save_id: str, begun: Mapping[str, Any]) -> Draft:
        return ShelfDraft(self._shelf, tag, save_id)

    def next_serial(self) -> int:
        return 1 + max((serial for serial, _ in self._heads().values()), default=0)

    def write_latest(self, tag: str) -> None:
        self._shelf.latest = tag

    def remove(self, tag: str) -> None:
        del self._shelf.tags[tag]
