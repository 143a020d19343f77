"""What dscore-autotuning offers to ds_core: the section ``autotuning`` and ``dscore tune``
(torch-free).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ds_core.context import StashKey
from ds_core.entries import CommandEntry, Phase, Transform

if TYPE_CHECKING:
    from ds_command_kit.run_options import RunOption
    from pydantic import BaseModel

    from ds_autotuning.trials.measuring import Measuring
    from ds_core.context import Context
    from ds_core.entries import Request

MEASURING: StashKey[Measuring] = StashKey("the measurement that a tuner asked for")


def ds_config() -> type[BaseModel]:
    """The section ``autotuning``."""
    from ds_autotuning.config import Autotuning

    return Autotuning


def ds_commands() -> Mapping[str, CommandEntry]:
    """The tuner."""
    return {
        "tune": CommandEntry(
            "ds_autotuning.command:app", "Find the fastest settings of a script by short trials."
        )
    }


def ds_run_options() -> Mapping[str, RunOption]:
    """``dscore run --autotuning``."""
    from ds_command_kit.run_options import RunOption

    text = "Find the fastest settings first; 'run' then runs with them."
    return {
        "--autotuning": RunOption(
            "ds_autotuning.command:tune_first", text, choices=("tune", "run"), panel="DeepSpeed"
        )
    }


def ds_open(ctx: Context) -> None:
    """Measuring begins."""
    from ds_autotuning.config import Autotuning

    section = ctx.config.section(Autotuning)
    if section is not None and section.measures:
        from ds_autotuning.trials.limits import limit_memory
        from ds_autotuning.trials.measuring import Measuring

        # the tuner's own limit reaches processes on its host alone
        if section.host_memory_gb is not None:
            limit_memory(int(section.host_memory_gb * 1e9))
        ctx.stash[MEASURING] = Measuring(ctx, section)


def ds_transforms(ctx: Context) -> Iterable[Transform]:
    """In a profile run: look at the model before anybody changes it."""
    from ds_autotuning.config import Autotuning

    section = ctx.config.section(Autotuning)
    if section is None or not section.measures:
        return []
    from ds_autotuning.trials.measuring import profile_path

    if profile_path(section) is None:
        return []
    from ds_autotuning.trials.looking import LOOK, Look

    ctx.stash[LOOK] = look = Look(ctx)
    return [Transform(Phase.SPLIT, look)]


def ds_step_end(ctx: Context) -> None:
    """Of a trial."""
    if (measuring := ctx.stash.get(MEASURING)) is not None:
        measuring.step_end()


def ds_request(ctx: Context) -> Request | None:
    """End the trial when enough is measured."""
    measuring = ctx.stash.get(MEASURING)
    return None if measuring is None else measuring.request()


def ds_close(ctx: Context, error: BaseException | None) -> None:
    """A trial that failed is a result."""
    if error is not None and (measuring := ctx.stash.get(MEASURING)) is not None:
        measuring.failed(error)
