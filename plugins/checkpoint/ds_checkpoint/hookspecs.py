"""The hooks of dscore-checkpoint (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ds_core import entries
from ds_core.plugins import checks

if TYPE_CHECKING:
    from ds_checkpoint.formats.entry import FormatEntry


@checks.gives(checks.references)
def ds_checkpoint_storages() -> Mapping[str, entries.Ref]:  # type: ignore[empty-body]
    """Driver, by the scheme of a URL: where checkpoints can be kept (``"s3"``).

    Scheme -> reference to ``load(url, ctx)``, which gives a
    `ds_checkpoint.storages.contract.Storage`; ctx is None in a command. A URL has no user and no
    query in it.
    """


@checks.gives(checks.named("ds_checkpoint.formats.entry:FormatEntry"))
def ds_checkpoint_formats() -> Mapping[str, FormatEntry]:  # type: ignore[empty-body]
    """Driver, by the name that ``dscore checkpoint convert --to`` takes: formats of checkpoints of
    other programs, which ``engine.load_checkpoint`` recognises too.
    """
