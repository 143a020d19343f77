"""What dscore-checkpoint-peer declares: the section ``checkpoint_peer``, and the checkpointer that
has memory before the disk (torch-free).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ds_core.entries import Request

if TYPE_CHECKING:
    from ds_checkpoint_peer.config import PeerConfig
    from ds_core.config import RunConfig
    from ds_core.context import Context
    from ds_core.engine import Checkpointer
    from ds_core.errors import Problem


def ds_config() -> type[PeerConfig]:
    """The section's model."""
    from ds_checkpoint_peer.config import PeerConfig

    return PeerConfig


def ds_check(config: RunConfig) -> Iterator[Problem]:
    """States on NVMe: they are there because memory has no room for them."""
    from ds_core.errors import Problem

    for path in _on_nvme(config.raw, ""):
        yield Problem(
            path,
            "is nvme, and checkpoint_peer copies states to memory",
            "leave out the section checkpoint_peer, or offload to the device cpu",
        )


def _on_nvme(value: Any, path: str) -> Iterator[str]:
    """The keys ``device`` that say nvme, with the keys around them."""
    if not isinstance(value, Mapping):
        return
    for key, inner in value.items():
        place = f"{path}.{key}" if path else str(key)
        if key == "device" and str(inner).lower() == "nvme":
            yield place
        yield from _on_nvme(inner, place)


def ds_checkpointer(ctx: Context) -> Checkpointer:
    """Folders of safetensors files, as without this plugin, and sets in memory."""
    from ds_checkpoint_peer.checkpointer import PeerCheckpointer

    return PeerCheckpointer(ctx)


def ds_request(ctx: Context, step: int) -> Request | None:
    """A set in memory, every few steps."""
    from ds_checkpoint_peer.config import MEMORY, PeerConfig

    section = ctx.config.section(PeerConfig)
    assert section is not None
    return Request(save=MEMORY) if (step + 1) % section.every == 0 else None
