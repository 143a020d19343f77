"""Which format a checkpoint has: ours, or one that a package brings by ``ds_checkpoint_formats``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ds_checkpoint.folder import files
from ds_checkpoint.folder.format import MANIFEST, check_tag
from ds_checkpoint.formats.foreign import CheckpointFormat
from ds_checkpoint.offline import Saved, open_saved
from ds_checkpoint.storages.finding import check_path, is_url
from ds_core.catalogue import missing
from ds_core.entries import resolve
from ds_core.errors import CheckpointError, DSError, PluginError, UsageError
from ds_core.plugins.checks import blaming

if TYPE_CHECKING:
    from ds_core.plugins import Plugins

OURS = "dscore"
"""The name of the format of ds_core."""
_HOOK = "ds_checkpoint_formats"
_KIND = "checkpoint_formats"


class Found(NamedTuple):
    """A checkpoint of another program: the format's name, the format, and where it is."""

    name: str
    format: CheckpointFormat
    path: Path


def names_of(plugins: Plugins) -> list[str]:
    """The names of all formats, ours first."""
    return [OURS, *sorted(plugins.named(_HOOK, _KIND))]


def format_of(plugins: Plugins, name: str) -> CheckpointFormat:
    """The format of that name, which is not ours.

    Raises UsageError where no package brings it, PluginError where its package is at fault.
    """
    offers = plugins.named(_HOOK, _KIND)
    if name.lower() not in offers:
        raise UsageError(
            str(missing(_KIND, name, [OURS, *offers], path="--to", more=plugins.quarantined()))
        )
    answer = offers[name.lower()]
    reference = answer.value.load
    with blaming(
        answer.plugin,
        f"failed to make the checkpoint format {name!r} ({reference})",
        passing=(DSError,),
    ):
        made = resolve(reference)()
    if not isinstance(made, CheckpointFormat):
        raise PluginError(
            f"plugin {answer.plugin}: checkpoint format {name!r} must be a "
            "ds_checkpoint.formats.foreign.CheckpointFormat"
        )
    return made


def is_ours(path: Path, tag: str | None) -> bool:
    """Whether ds_core wrote what `path` (or ``path/tag``) is, or any checkpoint below `path`."""
    if not path.is_dir():
        return False
    if tag is not None:
        return files.is_checkpoint(path / check_tag(tag))
    return files.is_checkpoint(path) or bool(files.existing_tags(path))


def recognise(
    plugins: Plugins, path: Path, tag: str | None = None, name: str | None = None
) -> Found | None:
    """The checkpoint of another program at `path`; None: there is none.

    name: of its format; None: whichever format finds one.

    Raises CheckpointError where several formats do.
    """
    names = [name] if name is not None else [n for n in names_of(plugins) if n != OURS]
    found = []
    for each in names:
        form = format_of(plugins, each)
        place = form.find(path, tag)
        if place is not None:
            found.append(Found(each, form, place))
    if len(found) > 1:
        raise CheckpointError(
            f"{path} is a checkpoint of several formats ({', '.join(f.name for f in found)}); "
            "give the folder of one of them, or its format with --from"
        )
    return found[0] if found else None


@contextlib.contextmanager
def open_any(
    plugins: Plugins, path: str | Path, tag: str | None = None, name: str | None = None
) -> Iterator[Saved]:
    """Open a checkpoint of any format; for `name` see `recognise`.

    CheckpointError if it is none.
    """
    # Those of other programs are on a disk; what a URL names is ours.
    if name == OURS or is_url(path) or (name is None and is_ours(Path(path), tag)):
        with open_saved(path, tag) as saved:
            yield saved
        return
    folder = check_path(path, "the checkpoint")
    found = recognise(plugins, folder, tag, name)
    if found is None:
        kinds = name if name is not None else f"of any format ({', '.join(names_of(plugins))})"
        raise CheckpointError(
            f"{folder if tag is None else folder / tag} is no checkpoint {kinds}: it has no "
            f"{MANIFEST} and none of their files; give the folder of a checkpoint"
        )
    with found.format.open(found.path) as foreign:
        yield foreign.saved()
