"""What dscore-report offers to ds_core: section ``run_record`` (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ds_core.context import StashKey
from ds_core.entries import CommandEntry, Ref

if TYPE_CHECKING:
    from ds_command_kit.run_options import RunOption
    from pydantic import BaseModel

    from ds_core.context import Context
    from ds_report.recorder import Recorder

RECORDER: StashKey[Recorder] = StashKey("the record of the run")


def ds_config() -> type[BaseModel]:
    """The section ``run_record``."""
    from ds_report.config import RunRecord

    return RunRecord


def ds_commands() -> Mapping[str, CommandEntry]:
    """What reads records."""
    return {
        "report": CommandEntry(
            "ds_report.command:report", "Write one HTML page that shows one or several runs."
        ),
        "top": CommandEntry("ds_report.top.command:top", "Watch a run in the terminal."),
    }


def ds_run_options() -> Mapping[str, RunOption]:
    """``dscore run --record``."""
    from ds_command_kit.run_options import RunOption

    text = "Keep a record of the run in FOLDER, for dscore report."
    return {
        "--record": RunOption(
            "ds_report.recording:record_into", text, metavar="FOLDER", panel="Output"
        )
    }


def ds_engine_methods() -> Mapping[str, Ref]:
    """``engine.plan_steps``."""
    return {"plan_steps": "ds_report.plugin:plan_steps"}


def ds_open(ctx: Context) -> None:
    """The record begins."""
    from ds_report.config import RunRecord
    from ds_report.recorder import Recorder

    section = ctx.config.section(RunRecord)
    if section is not None and section.enabled:
        ctx.stash[RECORDER] = Recorder.of(ctx, section)


def plan_steps(engine: Any, total: int) -> None:
    """Tell the record how many optimizer steps this run will have in all, where the config does not
    say it.
    """
    if (recorder := engine.ctx.stash.get(RECORDER)) is not None:
        recorder.add("plan", total_steps=int(total))


def ds_phase_begin(ctx: Context, phase: str) -> None:
    """Remember what this rank does in a step."""
    if phase != "eval" and (recorder := ctx.stash.get(RECORDER)) is not None:
        recorder.phase_begin(phase)


def ds_phase_end(ctx: Context, phase: str, metrics: Mapping[str, Any]) -> None:
    """It does the next thing; an evaluation is one line."""
    recorder = ctx.stash.get(RECORDER)
    if recorder is None:
        return
    if phase != "eval":
        recorder.phase_end(phase)
    elif metrics:  # else it has failed, or was of outputs alone
        recorder.add("eval", step=ctx.engine.global_steps, metrics=dict(metrics))


def ds_step_end(ctx: Context, step: int, metrics: Mapping[str, Any]) -> None:
    """One line."""
    if (recorder := ctx.stash.get(RECORDER)) is not None:
        recorder.step(step + 1, metrics)


def ds_checkpoint_saved(ctx: Context, folder: str, tag: str) -> None:
    """One line."""
    if (recorder := ctx.stash.get(RECORDER)) is not None:
        recorder.add("saved", step=ctx.engine.global_steps, tag=tag)


def ds_checkpoint_loaded(ctx: Context, path: str) -> None:
    """One line."""
    if (recorder := ctx.stash.get(RECORDER)) is not None:
        recorder.add("loaded", step=ctx.engine.global_steps, path=path)


def ds_close(ctx: Context, error: BaseException | None) -> None:
    """The last line: it is finished, or has failed."""
    if (recorder := ctx.stash.get(RECORDER)) is not None:
        recorder.end("finished" if error is None else "failed", error)
