"""Making files durable, and a directory appear whole or not at all.

Beside the checkpoints stand ``.lock`` (see `ds_checkpoint.folder.lock`) and, for a moment,
``.tmp-<tag>-<random>`` (being written, or being deleted) and ``.old-<tag>`` (whole: the checkpoint
that a save under the same tag is about to replace).

[Note: saving under an existing tag] No call replaces a full directory, so the old one steps aside
first. A crash between the two renames leaves ``.old-<tag>`` without ``<tag>``: `find` then reads
the old one, and the next save renames it back.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from ds_checkpoint.folder.format import LATEST, MANIFEST, check_tag, read_head, read_latest_file
from ds_core.errors import CheckpointError

_DEBRIS = re.compile(r"\.tmp-[A-Za-z0-9._-]{1,128}-[0-9a-f]{16}", re.ASCII)
_ASIDE = ".old-"


def sync_directory(path: Path) -> None:
    """Bring the names in a directory to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, data: bytes) -> None:
    """Write a new file and bring it to the disk."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_with(path: Path, write: Callable[[Path], object]) -> None:
    """Give `path` the content that `write` puts into a new file (and brings to the disk).

    Readers see the old file or the new, also after a crash.
    """
    temporary = path.with_name(_temporary_name(path.name))
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def _temporary_name(name: str) -> str:
    return f".tmp-{name}-{secrets.token_hex(8)}"


def make_root(root: Path) -> None:
    """Make `root` if need be."""
    if not root.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        sync_directory(root.parent)


def make_temporary(root: Path, tag: str, name: str = "") -> Path:
    """Clear what crashed saves left in `root`, and make an empty directory there to write `tag`
    into.

    name: of the directory, as another host has it.
    """
    make_root(root)
    clean(root)
    final = root / tag
    if final.is_symlink() or (final.exists() and not is_checkpoint(final)):
        raise CheckpointError(
            f"{final} exists and is not a checkpoint of ds_core, so it is not replaced; move it "
            "away or use another tag"
        )
    temporary = root / (name or _temporary_name(tag))
    temporary.mkdir()
    return temporary


def clean(root: Path) -> None:
    """Remove what crashed saves left below `root`, and rename a checkpoint that was moved aside
    back.
    """
    for path in root.iterdir():
        if _is_aside(path):
            final = root / path.name.removeprefix(_ASIDE)
            if final.exists():
                discard(path)
            else:
                os.replace(path, final)
        elif _DEBRIS.fullmatch(path.name):
            discard(path)


def _is_aside(path: Path) -> bool:
    """Whether a save has moved it aside: any other name behind the prefix could lead elsewhere, or
    be ``latest``.
    """
    with contextlib.suppress(CheckpointError):
        # A name that is no tag, a link, or a folder without a manifest was not moved there by a
        # save.
        tag = path.name.removeprefix(_ASIDE)
        return (
            tag != path.name
            and check_tag(tag) == tag
            and not path.is_symlink()
            and is_checkpoint(path)
        )
    return False


def discard(path: Path) -> None:
    """Delete a file or directory; a directory is renamed first, so that half of it is never taken
    for a checkpoint.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    # Debris too: a process that still writes into it must find it gone, or would keep it from being
    # removed.
    tag = path.name.removeprefix(_ASIDE)
    if _DEBRIS.fullmatch(path.name):
        tag = path.name.removeprefix(".tmp-").rpartition("-")[0]
    renamed = path.with_name(_temporary_name(tag))
    os.replace(path, renamed)
    shutil.rmtree(renamed, ignore_errors=True)


def put_in_place(temporary: Path, final: Path) -> None:
    """Rename a whole checkpoint to its own name; one that is there stays until the new one has
    taken its place.
    """
    # The content must be on the disk before the name is, or a crash could leave the name alone.
    sync_directory(temporary)
    # See [Note: saving under an existing tag].
    aside = final.with_name(_ASIDE + final.name)
    replaces = final.exists()
    if replaces:
        os.replace(final, aside)
    try:
        os.replace(temporary, final)
    except OSError:
        if replaces:
            os.replace(aside, final)
        raise
    sync_directory(final.parent)
    if replaces:
        # the new one is whole and in place; the next save tries again
        with contextlib.suppress(OSError):
            discard(aside)


def find(root: Path, tag: str) -> Path:
    """The directory of checkpoint `tag`; CheckpointError with the tags that are there when it is
    not.
    """
    final = root / check_tag(tag)
    aside = root / (_ASIDE + tag)
    # A crash between two renames left the old checkpoint aside: it is the newest whole one.
    path = aside if not final.exists() and (aside / MANIFEST).is_file() else final
    if not path.is_dir():
        have = existing_tags(root)
        hint = f"there are {', '.join(have[:10])}" if have else "there is no checkpoint"
        raise CheckpointError(f"checkpoint {final} does not exist; in {root} {hint}")
    # A link could lead out of the folder, and what is loaded, locked or pruned with it.
    if path.resolve().parent != root.resolve():
        raise CheckpointError(
            f"checkpoint {final} is a link out of {root}; give the directory that it leads to"
        )
    return path


def existing_tags(root: Path) -> list[str]:
    """The tags of the checkpoints below `root`, newest first.

    Their order is in their manifests, since clocks go back and copies have new times. The file's
    time decides only between checkpoints of before there were serial numbers that have the same
    step.
    """
    found = []
    with contextlib.suppress(OSError):
        for path in root.glob(f"*/{MANIFEST}"):
            folder = path.parent
            if folder.name.startswith((".tmp-", _ASIDE)) or folder.is_symlink():
                continue
            if (head := read_head(path)) is not None:
                found.append((*head, path.stat().st_mtime_ns, folder.name))
    return [tag for *_, tag in sorted(found, reverse=True)]


def next_serial(root: Path) -> int:
    """The serial number for the checkpoint to be saved below `root` now."""
    heads = (read_head(path) for path in root.glob(f"*/{MANIFEST}"))
    return 1 + max((head[0] for head in heads if head is not None), default=0)


def is_checkpoint(path: Path) -> bool:
    """Whether a directory has a manifest that begins as ours do; nothing else is ever replaced or
    removed.
    """
    return read_head(path / MANIFEST) is not None


def write_latest(root: Path, tag: str) -> None:
    """Point ``latest`` at `tag`, at once: the tag is all that is in it, as other programs that read
    it expect.
    """
    replace_with(root / LATEST, lambda temporary: write_file(temporary, tag.encode()))


def read_latest(root: Path) -> str | None:
    """The tag that ``latest`` names; None when there is no such file."""
    try:
        return read_latest_file(root / LATEST)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(
            f"{root / LATEST} cannot be read: {error}; give the tag to load"
        ) from error
