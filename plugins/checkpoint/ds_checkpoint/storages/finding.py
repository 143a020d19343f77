"""Which storage an address means: a path is a folder of a disk, a URL belongs to a package.

[Note: secrets in URLs] ``s3://key:secret@bucket`` and signed queries would stand in logs, in errors
and in every manifest that has the config. So a URL with either is refused, and no message ever has
more of an address than `shown` gives.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ds_checkpoint.storages.contract import Storage
from ds_checkpoint.storages.disk import DiskStorage
from ds_core.catalogue import missing, offered_by
from ds_core.entries import resolve
from ds_core.errors import CheckpointError, DSError, PluginError
from ds_core.plugins import Plugins
from ds_core.plugins.checks import blaming

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.engine import Folder

_KIND = "checkpoint_storage"
_URL = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<user>[^/?#]*@)?(?P<rest>[^?#]*)(?P<more>.*)",
    re.DOTALL,
)
# What `Path` makes of a URL: it takes two slashes for one.
_COLLAPSED = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/(?!/)")


def is_url(folder: object) -> bool:
    """Whether `folder` is text that is a URL."""
    return isinstance(folder, str) and _URL.fullmatch(folder) is not None


def shown(folder: object) -> str:
    """`folder` for a message: short, and without what may be a secret."""
    found = _URL.fullmatch(str(folder))
    if found is None:
        return f"{folder!s:.200}"
    user = "***@" if found["user"] else ""
    more = f"{found['more'][0]}***" if found["more"] else ""
    return f"{found['scheme']}://{user}{found['rest']:.200}{more}"


def check_folder(folder: object, name: str) -> str:
    """`folder` as text; CheckpointError when the argument `name` is no path and no URL, or one with
    a secret in it.
    """
    if not isinstance(folder, str | os.PathLike) or not isinstance(text := os.fspath(folder), str):
        raise CheckpointError(f"{name} is {folder!r:.100}; name a directory")
    if not text:
        raise CheckpointError(f"{name} is empty; name a directory")
    found = _URL.fullmatch(text)
    # See [Note: secrets in URLs].
    if found is not None and (found["user"] or found["more"]):
        what = "a user" if found["user"] else f"something behind {found['more'][0]!r}"
        raise CheckpointError(
            f"{name} {shown(text)} has {what} in it, which may be a secret; give the plain URL, and "
            "credentials by the environment"
        )
    scheme = None if isinstance(folder, str) else _COLLAPSED.match(text)
    if scheme is not None and offered_by("checkpoint_storages", scheme[1]) is not None:
        raise CheckpointError(
            f"{name} {text:.200} was a URL before it became a Path, which takes // for /; give it as "
            "text"
        )
    return text


def check_path(folder: object, name: str) -> Path:
    """`folder` as a path; CheckpointError as `check_folder`'s, and for a URL."""
    text = check_folder(folder, name)
    if is_url(text):
        raise CheckpointError(f"{name} {shown(text)} is a URL, and a folder is needed here")
    return Path(text)


def open_storage(folder: object, name: str, ctx: Context | None = None) -> Storage:
    """The storage that `folder` means.

    name: the argument that it was given as, for messages.
    ctx: the run; None in a command.

    CheckpointError where `folder` is none, or nobody who is installed has a storage for its URL.
    """
    text = check_folder(folder, name)
    found = _URL.fullmatch(text)
    if found is None:
        return DiskStorage(Path(text))
    plugins = Plugins() if ctx is None else ctx.plugins
    scheme = found["scheme"].lower()
    offers = plugins.named("ds_checkpoint_storages", _KIND)
    if scheme not in offers:
        told = missing("checkpoint_storages", scheme, offers, more=plugins.quarantined())
        raise CheckpointError(f"{name} {shown(text)}: {told}")
    answer = offers[scheme]
    with blaming(
        answer.plugin, f"failed to open {shown(text)} ({answer.value})", passing=(DSError,)
    ):
        storage = resolve(answer.value)(text, ctx)
    if not isinstance(storage, Storage):
        raise PluginError(
            f"plugin {answer.plugin}: the storage of {scheme}:// must be a "
            "ds_checkpoint.storages.contract.Storage"
        )
    return storage


class Storages:
    """The storages of one engine, each opened once."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._open: dict[str, Storage] = {}

    def open(self, folder: Folder, name: str, *, node_local: bool = False) -> Storage:
        """See `open_storage`.

        node_local: each host is to have a folder of its own; CheckpointError where all see one
            place.
        """
        text = check_folder(folder, name)
        if text not in self._open:
            self._open[text] = open_storage(folder, name, self._ctx)
        storage = self._open[text]
        if node_local and not isinstance(storage, DiskStorage):
            raise CheckpointError(
                "checkpoint.use_node_local_storage is for folders of each host; leave it out, since "
                f"all ranks see {storage.path()}"
            )
        return storage

    def close(self) -> None:
        """Let other jobs have them all."""
        while self._open:
            self._open.popitem()[1].close()
