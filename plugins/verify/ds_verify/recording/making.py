"""Which recorder an engine gets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ds_core.errors import UsageError
from ds_verify.config import Verify
from ds_verify.recording.recorder import Driver, Recorder
from ds_verify.recording.replay import Replay, Save

if TYPE_CHECKING:
    from ds_core.context import Context


def make_recorder(ctx: Context) -> Recorder | None:
    """What records the engine's run; None for an engine that the section does not mean."""
    section = ctx.config.section(Verify)
    # A second engine without an optimizer (a frozen teacher) runs as it always does.
    if section is None or ctx.engine.optimizer is None or section.role == "compare":
        return None
    if (Path(section.folder) / f"rank{ctx.rank}").exists():
        raise UsageError(
            "verify records one engine with an optimizer, and this script makes a second one"
        )
    return begin_recording(ctx, section, Save() if section.role == "record" else Replay(section))


def begin_recording(ctx: Context, section: Verify, driver: Driver) -> Recorder:
    """A recorder that sees what the engine computes from now on; raises UsageError for an engine
    that cannot be recorded.
    """
    if ctx.engine.runner.manual:
        recorder = Recorder(ctx, section, driver)
    elif ctx.mesh.has("pp"):
        from ds_verify.recording.pipelines import PipelineRecorder

        recorder = PipelineRecorder(ctx, section, driver)
    else:
        raise UsageError(
            "verify records engines that run the whole model in one process, or stages of a "
            f"PipelineModule; this one does neither: {ctx.engine.runner.manual_reason}"
        )
    recorder.watch()
    return recorder
