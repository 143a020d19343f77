"""`PeerCheckpointer`: the checkpoints of `FolderCheckpointer`, with sets in memory before them."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_checkpoint.background import HostCopies, snapshot
from ds_checkpoint.checkpointer import FolderCheckpointer
from ds_checkpoint.collective_errors import describe, on_every_rank
from ds_checkpoint.config import CheckpointConfig
from ds_checkpoint.folder import files
from ds_checkpoint.folder.format import MANIFEST, read_head
from ds_checkpoint.folder.sites import find_hosts
from ds_checkpoint.folder.writing import Prepared, SaveJob
from ds_checkpoint.loading import load
from ds_checkpoint.saving import prepare_together
from ds_checkpoint.storages.disk import DiskDraft, DiskStorage
from ds_checkpoint.storages.finding import Storages, is_url
from ds_run_state import RunState

from ds_checkpoint_peer import room as rooms
from ds_checkpoint_peer.config import MEMORY, PeerConfig
from ds_checkpoint_peer.exchange import form
from ds_checkpoint_peer.sets import Limits, keep
from ds_core import comm
from ds_core.engine import Checkpointer, Folder, Loaded, LoadOptions, RunningEngine, SaveOptions
from ds_core.errors import CheckpointError

if TYPE_CHECKING:
    from ds_core.context import Context

log = logging.getLogger("ds_checkpoint_peer")


class PeerCheckpointer(Checkpointer):
    """Chosen by the section ``checkpoint_peer``. What is saved by name goes to disk as ever."""

    def __init__(self, ctx: Context) -> None:
        section = ctx.config.section(PeerConfig)
        assert section is not None
        self._config = section
        self._disk = FolderCheckpointer(ctx)
        self._storages = Storages(ctx)
        self._accelerator = ctx.accelerator
        self._copies: HostCopies = {}
        self._thread: threading.Thread | None = None
        self._warned = False
        self._client: Mapping[str, Any] | None = None
        # The hosts, and this one's folder in memory; None where it cannot be used.
        self._circle = form(ctx.rank, find_hosts())
        self._room = self._enter()

    def _enter(self) -> Path | None:
        """This host's folder, which the rank that speaks for the host names. Collective."""
        config = self._config
        mine = rooms.room_of(Path(config.memory), config.folder)
        paths = comm.all_gather_json(str(mine))
        room = Path(paths[self._circle.leaders[self._circle.host]])
        try:
            on_every_rank(
                "checkpoint_peer",
                lambda: rooms.enter(room) if self._circle.leads else None,
            )
        except CheckpointError as error:
            log.warning("%s; training continues with checkpoints on disk alone", error)
            return None
        return room

    @property
    def saving(self) -> bool:
        """See `Checkpointer`."""
        return self._disk.saving or self._thread is not None

    # -- saving ------------------------------------------------------------------------------------

    def save(self, engine: RunningEngine, folder: Folder, options: SaveOptions) -> None:
        """See `Checkpointer`. What the plugin itself asks for goes to memory."""
        if folder != MEMORY:
            self._client = options.client_state
            self._disk.save(engine, folder, options)
            return
        # A set that cannot be made costs nothing but itself: the disk has the run.
        if self._room is None:
            return
        try:
            self._begin_set(RunState(engine), options, self._room)
        except CheckpointError as error:
            self._warn(error)

    def _begin_set(self, run: RunState, options: SaveOptions, room: Path) -> None:
        storage = DiskStorage(room)
        busy = self._thread is not None and self._thread.is_alive()
        rows = comm.all_gather_json([busy, storage.next_serial(), secrets.token_hex(16)])
        if any(row[0] for row in rows):
            log.debug("step %d: the set of before is still being copied", run.step)
            return
        self._join()
        options = dataclasses.replace(options, client_state=self._client)
        prepared, _, tag, evicted = prepare_together(
            run, "no set in memory", lambda: storage, options, CheckpointConfig()
        )
        if evicted:
            raise CheckpointError(
                "states are stored outside of memory, which has no room for a copy"
            )
        save_id = rows[0][2]
        draft = DiskDraft(room / f".tmp-{tag}-{save_id[:16]}", room / tag)
        job = SaveJob(storage, tag, draft, save_id, max(row[1] for row in rows), True, None)
        copied: Prepared | Exception
        try:
            copied, self._copies = snapshot(self._accelerator, prepared, self._copies)
        # No memory, say: the other ranks hear of it in the thread.
        except Exception as error:
            copied = error
        limits = Limits(
            self._config.neighbours, self._config.max_bytes, self._config.max_bytes_per_second
        )

        def work() -> None:
            try:
                keep(self._circle, copied, job, room, limits)
            # A lost rank ends training as well, which says so.
            except Exception as error:
                self._warn(error)

        self._thread = threading.Thread(target=work, name=f"keeping {tag}")
        self._thread.start()

    def _warn(self, error: Exception) -> None:
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        log.log(
            level,
            "checkpoint_peer: no set in memory was made (%s); training continues, and the disk has its "
            "checkpoints",
            describe(error),
        )

    def _join(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    # -- loading -----------------------------------------------------------------------------------

    def load(self, engine: RunningEngine, folder: Folder, options: LoadOptions) -> Loaded:
        """See `Checkpointer`.

        Without a tag, the newest set in memory that is newer than ``latest``; one that cannot be
        used is passed over with a warning.
        """
        self.wait()
        room = self._room
        if room is None or not self._stands_for(folder):
            return self._disk.load(engine, folder, options)
        if options.tag is None:
            for tag in self._newer_than(folder, room):
                asked = dataclasses.replace(options, tag=tag, fallback=False)
                try:
                    loaded = load(
                        RunState(engine), room, asked, self._storages, verify=True, node_local=True
                    )
                except CheckpointError as error:
                    log.warning("the set in memory is passed over: %s", error)
                else:
                    return self._loaded(loaded, options)
        loaded = self._disk.load(engine, folder, options)
        # Sets of steps that this run has not come to yet, or will come to on another way.
        on_every_rank("checkpoint_peer", lambda: _forget(room) if self._circle.leads else None)
        return self._loaded(loaded, options)

    def _loaded(self, loaded: Loaded, options: LoadOptions) -> Loaded:
        """Sets that follow have the program's values of the checkpoint."""
        if not options.module_only and loaded[1]:
            self._client = loaded[1]
        return loaded

    def _stands_for(self, folder: Folder) -> bool:
        """Whether sets in memory are of the checkpoints in `folder`."""
        own = self._config.folder
        if is_url(own) or is_url(folder):
            return str(folder) == own
        return Path(folder).absolute() == Path(own).absolute()

    def _newer_than(self, folder: Folder, room: Path) -> list[str]:
        """The tags of sets that are newer than the newest checkpoint on disk, the newest first.

        Collective.
        """

        def look() -> list[tuple[int, int, str]]:
            if not self._circle.leads:
                return []
            rooms.check(room)
            tags = files.existing_tags(room)
            heads = ((read_head(room / tag / MANIFEST), tag) for tag in tags)
            return [(head[1], head[0], tag) for head, tag in heads if head is not None]

        try:
            _, rows = on_every_rank("checkpoint_peer", look, lambda found: found)
        except CheckpointError as error:
            log.warning("the sets in memory are passed over: %s", error)
            return []
        # Hosts may have disks of their own.
        steps = comm.all_gather_json(self._step_on_disk(folder) if self._circle.leads else -1)
        found = sorted({tuple(row) for rank in rows for row in rank}, reverse=True)
        return list(dict.fromkeys(tag for step, _, tag in found if step > max(steps)))

    def _step_on_disk(self, folder: Folder) -> int:
        """Of the checkpoint that ``latest`` names; -1 where there is none that can be read."""
        try:
            storage = self._storages.open(folder, "load_dir")
            tag = storage.latest()
            return -1 if tag is None else storage.open(storage.find(tag)).manifest().step
        except CheckpointError:
            return -1

    # -- the rest ----------------------------------------------------------------------------------

    def export(
        self, engine: RunningEngine, folder: Folder, filename: str, exclude_frozen_parameters: bool
    ) -> bool:
        """See `Checkpointer`."""
        return self._disk.export(engine, folder, filename, exclude_frozen_parameters)

    def wait(self) -> None:
        """See `Checkpointer`. What went wrong with a set in memory was said, and is not raised."""
        self._join()
        self._disk.wait()

    def close(self) -> None:
        """Remove the sets, unless an error passes: the run may be started again.

        Collective.
        """
        failed = sys.exc_info()[1] is not None
        try:
            if not failed:
                self.wait()
        finally:
            self._disk.close()
            self._storages.close()
        if self._room is not None and not failed and self._circle.leads:
            rooms.leave(self._room)


def _forget(room: Path) -> None:
    for tag in files.existing_tags(room):
        files.discard(room / tag)
    files.clean(room)
    (room / "latest").unlink(missing_ok=True)
