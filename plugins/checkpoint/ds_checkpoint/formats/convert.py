"""From any format to any other: one state is in memory at a time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ds_checkpoint.formats.finding import OURS, format_of, open_any
from ds_checkpoint.formats.foreign import CheckpointFormat, Written
from ds_checkpoint.formats.ours import write_ours
from ds_checkpoint.formats.weights import Safetensors, copy_config
from ds_checkpoint.offline import Saved
from ds_checkpoint.storages.finding import check_path, shown
from ds_core.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from ds_core.plugins import Plugins


def convert(
    source: str | Path,
    output: str | Path,
    to: str = OURS,
    *,
    tag: str | None = None,
    given: str | None = None,
    model_config: str | Path | None = None,
    plugins: Plugins | None = None,
) -> Written:
    """Write the checkpoint `source` (or ``source/tag``) to `output` in the format `to`.

    Returns its path, and what could not be taken over, each with the reason.

    source: of any format that an installed package brings; `given`: the name of it, where several
        recognise it.
    output: a folder. A checkpoint of ours gets a folder below it, which ``latest`` names, and may
        be written to a URL; for the others see their packages. Nothing that is there is replaced.
    model_config: a ``config.json``, or a folder with one, to go beside safetensors files.

    Raises CheckpointError for what cannot be read or written, UsageError for an unknown format.
    """
    if plugins is None:
        from ds_core.plugins import Plugins as AllPlugins

        plugins = AllPlugins()
    target: CheckpointFormat | None = None if to == OURS else format_of(plugins, to)
    if model_config is not None and not isinstance(target, Safetensors):
        raise UsageError(
            "a model's config.json goes beside safetensors files: use --to safetensors"
        )
    with open_any(plugins, source, tag, given) as saved:
        written = _written(saved, target, output)
        missing = dict.fromkeys((*saved.missing, *written.missing))
    if model_config is not None:
        copy_config(Path(model_config), Path(output))
    return Written(written.path, tuple(missing))


def _written(saved: Saved, target: CheckpointFormat | None, output: str | Path) -> Written:
    """CheckpointError for a disk that is full, or that has no such folder, too."""
    try:
        if target is None:
            return write_ours(saved, output)
        if saved.values is None:
            saved.source.verify(0, 1)
        return target.write(saved, check_path(output, "OUTPUT"))
    # torch's writer of zip files has a RuntimeError of several lines for a full disk.
    except (OSError, RuntimeError) as error:
        why = str(error).strip().split("\n", 1)[0]
        raise CheckpointError(f"cannot write {shown(output)}: {why}") from error
