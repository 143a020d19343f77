"""What acme adds to ds_core; torch is loaded only by what a run chooses."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from ds_core.config import Section
from ds_core.context import StashKey
from ds_core.entries import (
    AcceleratorEntry,
    CommandEntry,
    OptimizerEntry,
    Phase,
    SchedulerEntry,
    Transform,
)
from ds_core.errors import Problem

if TYPE_CHECKING:
    from ds_command_kit.run_options import RunOption

    from ds_core.config import RunConfig
    from ds_core.context import Context
    from ds_core.engine import Monitor

STEPS = StashKey[list[int]]("acme steps")


class AcmeConfig(Section):
    """The section ``acme``."""

    journal: Path = Field(
        description="File that gets one JSON line per journalled step, and one at the end."
    )
    every: int = Field(1, ge=1, description="Journal every so many steps.")
    events: Path | None = Field(None, description="File of acme's monitor; none, no monitor.")
    freeze_biases: bool = Field(False, description="Train no bias.")


def ds_config() -> type[AcmeConfig]:
    """The model of section ``acme``."""
    return AcmeConfig


def ds_check(config: RunConfig) -> Iterable[Problem]:
    """Journal and events must be two files."""
    section = config.section("acme")
    if isinstance(section, AcmeConfig) and section.journal == section.events:
        yield Problem("acme.events", f"is the journal, {section.journal}, too", "name another file")


def ds_run_options() -> Mapping[str, RunOption]:
    """``dscore run --mood WORD`` and ``--only-greet``."""
    from ds_command_kit.run_options import RunOption

    return {
        "--mood": RunOption(
            "acme_ds.command:mood", "How acme feels in the run.", choices=("good", "bad")
        ),
        "--only-greet": RunOption(
            "acme_ds.command:only_greet", "Greet the script, and do not run it."
        ),
    }


def ds_accelerators() -> Iterable[AcceleratorEntry]:
    """A device kind that is the CPU under another name."""
    return [
        AcceleratorEntry("acme", "cpu", "acme_ds.device:AcmeAccelerator", "acme_ds.device:probe")
    ]


def ds_optimizers() -> Mapping[str, OptimizerEntry]:
    """Sign descent."""
    return {"AcmeSign": OptimizerEntry("acme_ds.optim:AcmeSign", "acme_ds.optim:AcmeSignParams")}


def ds_schedulers() -> Mapping[str, SchedulerEntry]:
    """Halving."""
    return {
        "AcmeHalving": SchedulerEntry("acme_ds.optim:make_halving", "acme_ds.optim:HalvingParams")
    }


def ds_commands() -> Mapping[str, CommandEntry]:
    """``dscore acme``."""
    return {"acme": CommandEntry("acme_ds.command:greet", "Say who made this.")}


def ds_transforms(ctx: Context) -> Iterable[Transform]:
    """Freeze the biases, when the section says so."""
    section = ctx.config.section("acme")
    if isinstance(section, AcmeConfig) and section.freeze_biases:
        from acme_ds.model import freeze_biases

        return [Transform(Phase.SUBSTITUTE, freeze_biases)]
    return []


def ds_monitors(ctx: Context) -> Iterable[Monitor]:
    """A file of events, when the section names one."""
    section = ctx.config.section("acme")
    if isinstance(section, AcmeConfig) and section.events is not None:
        from acme_ds.monitor import AcmeMonitor

        return [AcmeMonitor(section.events)]
    return []


def ds_step_begin(ctx: Context, step: int) -> None:
    """Remember the steps that began."""
    if STEPS not in ctx.stash:
        ctx.stash[STEPS] = []
    ctx.stash[STEPS].append(step)


def ds_step_end(ctx: Context, step: int, metrics: Mapping[str, float]) -> None:
    """Journal the step."""
    section = ctx.config.section("acme")
    if isinstance(section, AcmeConfig) and step % section.every == 0:
        _journal(section, {"step": step, "loss": metrics["loss"], "lr": metrics["lr"]})


def ds_close(ctx: Context) -> None:
    """Journal the end."""
    section = ctx.config.section("acme")
    if isinstance(section, AcmeConfig):
        _journal(section, {"began": ctx.stash[STEPS], "accelerator": ctx.accelerator.name})


def _journal(section: AcmeConfig, row: Mapping[str, object]) -> None:
    with section.journal.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
