"""Which ranks see one folder: all of them, or with ``checkpoint.use_node_local_storage`` those of a
host.

Each host's folder then has the files that its own ranks have written, and the manifest of all.
Before a load every host gets the files that it lacks from a host that has them; so any ranks may be
on any hosts, and what was copied stays there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from ds_checkpoint.collective_errors import on_every_rank, on_first_rank
from ds_checkpoint.folder import files
from ds_checkpoint.folder.format import MANIFEST, check_tag, parse_manifest, read_head
from ds_core import comm
from ds_core.errors import CheckpointError

BLOCK = 16 << 20  # bytes of a message


@dataclass(frozen=True, slots=True)
class Site:
    """The ranks that see the same folder as this one."""

    # This rank's number among them, and how many they are.
    rank: int
    size: int
    # Whether ranks of other hosts see other folders.
    local: bool = False

    @property
    def first(self) -> bool:
        """Whether this rank acts for all of the site."""
        return self.rank == 0


def find_site(local: bool) -> Site:
    """This rank's. Collective when `local`: a site is then a host."""
    if not local:
        return Site(comm.rank(), comm.world_size())
    hosts = find_hosts()
    mine = [rank for rank, host in enumerate(hosts) if host == hosts[comm.rank()]]
    return Site(mine.index(comm.rank()), len(mine), True)


def find_hosts() -> list[int]:
    """By rank, the lowest rank of the same host. Collective."""
    # Hosts may have the same name: the boot id distinguishes them.
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    hosts = comm.all_gather_json([socket.gethostname(), boot])
    return [hosts.index(host) for host in hosts]


def introduce(action: str, root: Path, tag: str | None, site: Site, device: torch.device) -> None:
    """Tell every host of the newest checkpoint that a host's ``latest`` names, or of `tag`.

    Collective.

    Rank 0's host may be new, or have been away.
    """

    def look() -> tuple[int, int, str] | None:
        # what is wrong will be said, or another checkpoint taken
        with contextlib.suppress(CheckpointError):
            named = files.read_latest(root) if tag is None else tag
            head = None if named is None else read_head(root / check_tag(named) / MANIFEST)
            return None if named is None or head is None else (*head, named)
        return None

    def follow(newest: str) -> None:
        files.make_root(root)
        if tag is None:
            files.write_latest(root, newest)

    _, rows = on_every_rank(action, look, lambda row: row)
    if found := [tuple(row) for row in rows if row is not None]:
        *_, newest = max(found)
        on_every_rank(action, lambda: follow(newest) if site.first else None)
        spread(action, root / newest, [MANIFEST], site, device)


def complete(action: str, path: Path, site: Site, device: torch.device) -> None:
    """Copy to every host what its part of the checkpoint at `path` lacks. Collective.

    Raises CheckpointError on every rank for a file that no host has, and for parts of different
    saves.
    """
    save_id = on_first_rank(action, lambda: parse_manifest(path / MANIFEST).save_id)

    def look() -> None:
        if (
            site.first
            and (path / MANIFEST).exists()
            and parse_manifest(path / MANIFEST).save_id != save_id
        ):
            raise CheckpointError(
                f"{path} on {socket.gethostname()} is of another save than on rank 0's host; a "
                "save was broken off "
                "there. Load an earlier checkpoint (its tag, or fallback=True)"
            )

    on_every_rank(action, look)
    spread(action, path, [MANIFEST], site, device)
    manifest, _ = on_every_rank(action, lambda: parse_manifest(path / MANIFEST))
    spread(action, path, sorted(manifest.files), site, device)


def spread(
    action: str, folder: Path, names: Sequence[str], site: Site, device: torch.device
) -> None:
    """Copy files to every host whose `folder` lacks them, from the first rank that sees them.

    Collective.

    names: equal on all ranks.
    """
    # One exchange for all names: a bit per file says who has it.
    here = [os.path.lexists(folder / name) for name in names]
    _, everyone = on_every_rank(
        action, lambda: None, lambda _: "".join("01"[found] for found in here)
    )
    for number, name in enumerate(names):
        holders = [rank for rank, found in enumerate(everyone) if found[number] == "1"]
        if not holders:
            raise CheckpointError(
                f"{action}: {folder / name} is on no host of this run; have all hosts that saved "
                "it taken part?"
            )
        if len(holders) < len(everyone):
            _copy(action, folder / name, holders[0], site.first and not here[number], device)


def _copy(action: str, path: Path, source: int, wanted: bool, device: torch.device) -> None:
    """One file from rank `source` to where it is wanted, whole or not at all."""
    temporary = path.with_name(f".tmp-{path.name}-{secrets.token_hex(8)}")
    try:
        on_every_rank(action, lambda: _transfer(path, temporary, source, wanted, device))
        on_every_rank(action, lambda: os.replace(temporary, path) if wanted else None)
    finally:
        if wanted:
            temporary.unlink(missing_ok=True)


def _transfer(path: Path, temporary: Path, source: int, wanted: bool, device: torch.device) -> None:
    """Every rank takes part to the end, whatever happens here; then it raises."""
    stream: BinaryIO | None = None
    fault: OSError | None = None
    with contextlib.ExitStack() as stack:

        def guarded(work: Callable[[BinaryIO], object]) -> None:
            nonlocal fault
            try:
                if stream is not None and fault is None:
                    work(stream)
            except OSError as error:
                fault = error

        try:
            if wanted:
                path.parent.mkdir(parents=True, exist_ok=True)
                stream = stack.enter_context(open(temporary, "xb"))
            elif comm.rank() == source:
                stream = stack.enter_context(open(path, "rb"))
        except OSError as error:
            fault = error
        # From here on every rank takes part in the same broadcasts, also after an error: the size
        # first, then blocks that fit into memory.
        size = os.fstat(stream.fileno()).st_size if stream is not None else 0
        left = torch.tensor([size], device=device)
        comm.broadcast(left, source)
        for start in range(0, int(left), BLOCK):
            data = bytearray(min(BLOCK, int(left) - start))
            if comm.rank() == source:
                guarded(lambda file, d=data: _fill(file, d))  # type: ignore[misc]
            block = torch.frombuffer(data, dtype=torch.uint8)
            sent = block.to(device)
            comm.broadcast(sent, source)
            if wanted:
                block.copy_(sent)
                guarded(lambda file, d=data: file.write(d))  # type: ignore[misc]
        if wanted:
            guarded(_to_disk)
    if fault is not None:
        raise fault


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _fill(file: BinaryIO, data: bytearray) -> None:
    if file.readinto(data) != len(data):  # type: ignore[attr-defined]
        raise OSError(f"{file.name} has become shorter")
