"""The declaration of old-loader: its section and its loader (torch-free)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ds_core.config import Section

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.data import Loader, LoaderRequest


class Settings(Section):
    """The section ``old_loader``; it has no keys."""


def ds_config() -> type[Settings]:
    """The section's model."""
    return Settings


def ds_loader(ctx: Context, request: LoaderRequest) -> Loader | None:
    """The core's loader keeps epochs and the position; the sampler says which samples come when."""
    from ds_core.data import DistributedLoader
    from old_loader.sampler import ByLength

    return DistributedLoader(replace(request, sampler=ByLength(request)))
