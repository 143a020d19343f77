"""Checkpoints below a prefix of a bucket.

    PREFIX/latest                                   the tag of the newest checkpoint
    PREFIX/.lease                                   renewed by the job that saves here
    PREFIX/TAG/manifest.json                        makes a checkpoint of what it names
    PREFIX/TAG/SAVE_ID/rank00000.safetensors        and the other files, of one save

There are no renames. A save writes below its own SAVE_ID, and its manifest comes last, on the
condition that nobody else has changed the tag since. So a checkpoint is there wholly or not at all,
one that is replaced can be read until then, and what no manifest names is left of a save that has
crashed.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ds_checkpoint.folder.format import (
    DAMAGED,
    HEAD_BYTES,
    LATEST,
    MANIFEST,
    MAX_LATEST,
    MAX_MANIFEST,
    Manifest,
    check_manifest,
    check_tag,
    no_manifest,
    parse_head,
    parse_latest,
)
from ds_checkpoint.storages.contract import Storage, Stored

from ds_checkpoint_object.draft import ObjectDraft
from ds_checkpoint_object.lease import LEASE, Lease
from ds_checkpoint_object.reader import Fetcher, ObjectFile
from ds_checkpoint_object.uploads import abort_uploads
from ds_core.errors import CheckpointError

if TYPE_CHECKING:
    from ds_checkpoint.folder.reader import Reader

    from ds_checkpoint_object.bucket import Bucket, Meta, Version

_SAVE_ID = re.compile(r"[0-9a-f]{1,64}", re.ASCII)
_SAVE_ID_OF = re.compile(rb'"save_id": "([0-9a-f]{1,64})"')
# What a save writes, and nothing else: only such keys are ever removed.
_OURS = re.compile(
    r"(?P<tag>[A-Za-z0-9._-]{1,128})/(?P<id>[0-9a-f]{1,64})/"
    r"(?:(?:rank\d{5,9}(?:-local)?|common)\.safetensors|rank\d{5,9}\.report|README\.md)",
    re.ASCII,
)


class ObjectCheckpoint(Stored):
    """A checkpoint.

    folder: the key of its tag.
    """

    def __init__(self, bucket: Bucket, folder: str, fetcher: Fetcher) -> None:
        self.path: str = bucket.url(folder)
        self._bucket = bucket
        self._folder = folder
        self._fetcher = fetcher
        self._files: dict[str, Meta] | None = None
        self._id = ""

    def path_of(self, name: str) -> str:
        """See `Stored`."""
        if name == MANIFEST or not self._id:
            return f"{self.path}/{name}"
        return f"{self.path}/{self._id}/{name}"

    def manifest(self) -> Manifest:
        """See `Stored`."""
        key = _join(self._folder, MANIFEST)
        try:
            text, _ = self._bucket.get(key, MAX_MANIFEST)
        except FileNotFoundError:
            raise no_manifest(self.path_of(MANIFEST)) from None
        found = check_manifest(text, self.path_of(MANIFEST))
        # It becomes part of a key, which must stay below the tag.
        if not _SAVE_ID.fullmatch(found.save_id):
            raise CheckpointError(
                f"{self.path_of(MANIFEST)} has the save_id {found.save_id!r:.80}, which no save "
                f"has; {DAMAGED}"
            )
        self._id = found.save_id
        self._files = None
        return found

    def _listed(self) -> dict[str, Meta]:
        """Its files by name, all asked for at once."""
        if self._files is None:
            if not self._id:
                self.manifest()
            prefix = _join(self._folder, self._id) + "/"
            rows = self._bucket.objects(prefix)
            self._files = {row.key.removeprefix(prefix): row for row in rows}
        return self._files

    def check_file(self, name: str, size: int) -> None:
        """See `Stored`."""
        found = self._listed().get(name)
        if found is None:
            raise CheckpointError(f"{self.path_of(name)} is missing; {DAMAGED}")
        if found.size != size:
            raise CheckpointError(
                f"{self.path_of(name)} has {found.size} bytes, it was written with {size}; "
                f"{DAMAGED}"
            )

    def open(self, name: str) -> Reader:
        """See `Stored`."""
        meta = self._listed().get(name)
        return ObjectFile(self._bucket, self.path_of(name), meta, self._fetcher)


class ObjectStorage(Storage):
    """A place in a bucket.

    prefix: of all its keys, without a slash at either end; "" for the bucket itself.
    """

    def __init__(self, bucket: Bucket, prefix: str) -> None:
        config = bucket.config
        self._bucket = bucket
        self._prefix = prefix
        self._fetcher = Fetcher(config.requests, config.part_size)
        self._lease = Lease(bucket, self._key(LEASE), str(self.path()))
        # What `begin` has seen, for the `next_serial` that follows it.
        self._seen: dict[str, tuple[bytes, Version]] | None = None
        # Whether uploads of jobs before this one were looked for.
        self._looked = False

    def path(self, name: str = "") -> str:
        """See `Storage`."""
        return self._bucket.url(self._key(name)).rstrip("/")

    def _key(self, *names: str) -> str:
        return _join(self._prefix, *names)

    # -- reading -----------------------------------------------------------------------------------

    def tags(self) -> list[str]:
        """See `Storage`."""
        heads = self._heads()
        order = {tag: parse_head(start) for tag, (start, _) in heads.items()}
        rows = [(head, tag) for tag, head in order.items() if head is not None]
        return [tag for _, tag in sorted(rows, reverse=True)]

    def _heads(self) -> dict[str, tuple[bytes, Version]]:
        """The beginning of every manifest, by tag."""
        return self._heads_of(self._bucket.folders(f"{self._prefix}/" if self._prefix else ""))

    def _heads_of(self, folders: Iterable[str]) -> dict[str, tuple[bytes, Version]]:
        """Of those folders that are tags and have one, asked for at once."""
        names = []
        for name in folders:
            with contextlib.suppress(CheckpointError):
                names.append(check_tag(name))
        with ThreadPoolExecutor(self._bucket.config.requests, "manifests") as pool:
            found = pool.map(self._head, names)
        return {tag: head for tag, head in zip(names, found, strict=True) if head is not None}

    def _head(self, tag: str) -> tuple[bytes, Version] | None:
        return self._bucket.start(self._key(tag, MANIFEST), HEAD_BYTES)

    def latest(self) -> str | None:
        """See `Storage`."""
        found = self._bucket.start(self._key(LATEST), MAX_LATEST)
        return None if found is None else parse_latest(found[0], self.path(LATEST))

    def find(self, tag: str) -> str:
        """See `Storage`."""
        if self._head(check_tag(tag)) is None:
            have = self.tags()
            hint = f"there are {', '.join(have[:10])}" if have else "there is no checkpoint"
            raise CheckpointError(
                f"checkpoint {self.path(tag)} does not exist; in {self.path()} {hint}"
            )
        return tag

    def open(self, name: str) -> ObjectCheckpoint:
        """See `Storage`."""
        return ObjectCheckpoint(self._bucket, self._key(name), self._fetcher)

    def itself(self) -> ObjectCheckpoint | None:
        """See `Storage`."""
        there = self._bucket.start(self._key(MANIFEST), HEAD_BYTES) is not None
        return ObjectCheckpoint(self._bucket, self._prefix, self._fetcher) if there else None

    # -- saving ------------------------------------------------------------------------------------

    def hold(self) -> None:
        """See `Storage`. It may wait until a job that has died is known to be dead."""
        self._lease.take()

    def begin(self, tag: str, save_id: str) -> dict[str, Any]:
        """See `Storage`."""
        self._seen = self._clean()
        found = self._seen.get(tag)
        if found is None:
            return {"version": None, "replaces": None}
        start, version = found
        if parse_head(start) is None:
            raise CheckpointError(
                f"{self.path(tag)}/{MANIFEST} exists and is not of a checkpoint of ds_core, so it is "
                "not replaced; move it away or use another tag"
            )
        return {"version": version, "replaces": _id_in(start)}

    def _clean(self) -> dict[str, tuple[bytes, Version]]:
        """Remove what crashed saves have left: files of which no manifest has the save_id.

        The beginning of every manifest, by tag.
        """
        prefix = f"{self._prefix}/" if self._prefix else ""
        saves: dict[tuple[str, str], list[str]] = defaultdict(list)
        folders = set()
        for row in self._bucket.objects(prefix):
            name = row.key.removeprefix(prefix)
            if (ours := _OURS.fullmatch(name)) is not None:
                saves[ours["tag"], ours["id"]].append(row.key)
            if name.endswith(f"/{MANIFEST}") and name.count("/") == 1:
                folders.add(name.partition("/")[0])
        # Also of tags whose manifest was not listed: it may have come since.
        heads = self._heads_of(folders | {tag for tag, _ in saves})
        for (tag, save_id), keys in saves.items():
            named = _id_in(heads[tag][0]) if tag in heads else ""
            # A manifest of which the save_id cannot be told may name any of them.
            if named is not None and named != save_id:
                self._bucket.delete(keys)
        # Uploads of this job end with their save; those of a job before it are looked for once.
        if self._looked:
            return heads
        self._looked = True
        abort_uploads(self._bucket, prefix, lambda key: _OURS.fullmatch(key) is not None)
        return heads

    def draft(self, tag: str, save_id: str, begun: Mapping[str, Any]) -> ObjectDraft:
        """See `Storage`."""
        return ObjectDraft(self._bucket, self._lease, self._prefix, tag, save_id, begun)

    def next_serial(self) -> int:
        """See `Storage`."""
        seen, self._seen = self._seen, None
        known = self._heads() if seen is None else seen
        heads = (parse_head(start) for start, _ in known.values())
        return 1 + max((head[0] for head in heads if head is not None), default=0)

    def write_latest(self, tag: str) -> None:
        """See `Storage`."""
        self._bucket.put(self._key(LATEST), tag.encode())

    def remove(self, tag: str) -> None:
        """See `Storage`. The manifest first: from then on there is no checkpoint, and the rest is
        debris.
        """
        prefix = self._key(tag) + "/"
        self._bucket.delete([prefix + MANIFEST])
        keys = [row.key for row in self._bucket.objects(prefix)]
        self._bucket.delete(
            key for key in keys if _OURS.fullmatch(f"{tag}/{key.removeprefix(prefix)}")
        )

    def close(self) -> None:
        """See `Storage`."""
        self._lease.release()


def _join(*names: str) -> str:
    return "/".join(name for name in names if name)


def _id_in(start: bytes) -> str | None:
    """The save_id in the beginning of a manifest."""
    found = _SAVE_ID_OF.search(start)
    return None if found is None else found[1].decode()
