"""The section ``autosave``: automatic checkpoints, ``engine.resume()``, an orderly end on
SIGTERM (torch-free).
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ds_core.context import StashKey
from ds_core.entries import Ref, Request

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.context import Context
    from ds_core.engine import RunningEngine
    from ds_elasticity.config import Autosave
    from ds_elasticity.notice import Notice

PREEMPTED = 75
"""Exit code of a rank that saved because its run was told to stop: sysexits.h's "try again later".
"""
NOTICE: StashKey[Notice | None] = StashKey("who hears SIGTERM")

log = logging.getLogger("ds_core.autosave")


def ds_config() -> type[BaseModel]:
    """The section ``autosave``."""
    from ds_elasticity.config import Autosave

    return Autosave


def _section(ctx: Context) -> Autosave:
    from ds_elasticity.config import Autosave

    section = ctx.config.section(Autosave)
    assert section is not None
    return section


def ds_engine_methods() -> Mapping[str, Ref]:
    """``engine.resume``."""
    return {"resume": "ds_elasticity.autosave:resume"}


def ds_open(ctx: Context) -> None:
    """From here on SIGTERM is heard, also by the children that loaders fork."""
    from ds_elasticity.notice import listen

    ctx.stash[NOTICE] = listen() if _section(ctx).on_sigterm else None


def resume(engine: RunningEngine) -> str | None:
    """Load the newest whole checkpoint in ``autosave.folder`` and return its path; None: a new run.

    Every rank calls it. The world size may be another than when it was saved. A checkpoint that is
    damaged is passed over, with a warning.
    """
    return engine.load_checkpoint(_section(engine.ctx).folder, missing_ok=True, fallback=True)[0]


def ds_request(ctx: Context, step: int) -> Request | None:
    """Save now and then; and when this rank was told to stop, have all ranks save and end."""
    section = _section(ctx)
    notice = ctx.stash.get(NOTICE)
    # One rank's request stops all: the others may get no signal of their own.
    if notice is not None and notice.heard:
        where = f"rank {ctx.rank} on {socket.gethostname()}"
        log.warning(
            "%s was asked to stop (SIGTERM): all ranks save step %d and end", where, step + 1
        )
        return Request(stop=True, save=section.folder, exit_code=PREEMPTED)
    if section.every and (step + 1) % section.every == 0:
        return Request(save=section.folder)
    return None


def ds_close(ctx: Context) -> None:
    """SIGTERM ends the process again."""
    if (notice := ctx.stash.get(NOTICE)) is not None:
        notice.close()
