"""The hooks of the command ``dscore`` and of tools beside it (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ds_core import entries
from ds_core.plugins import checks

if TYPE_CHECKING:
    from torch import nn

    from ds_command_kit.run_options import RunOption
    from ds_core.config import RunConfig
    from ds_core.plugins import Plugins


@checks.gives(checks.named("ds_core.entries:LauncherEntry"))
def ds_launchers() -> Mapping[str, entries.LauncherEntry]:  # type: ignore[empty-body]
    """Driver, by name: ways to start processes for ``dscore run --launcher NAME``."""


@checks.gives(checks.named("ds_command_kit.run_options:RunOption"))
def ds_run_options() -> Mapping[str, RunOption]:  # type: ignore[empty-body]
    """Hook: options for ``dscore run``, by name ("--record").

    One that there is already is an error.
    """


@checks.gives(checks.named("ds_core.entries:CommandEntry"))
def ds_commands() -> Mapping[str, entries.CommandEntry]:  # type: ignore[empty-body]
    """Hook: sub-commands for ``dscore``, by name ("config migrate" in a group).

    One name twice is an error.
    """


@checks.gives(checks.many("ds_core.entries:Chart"))
def ds_charts(config: RunConfig, plugins: Plugins) -> Iterable[entries.Chart]:  # type: ignore[empty-body]
    """Hook: what ``dscore plan`` shows of a config besides memory and messages, such as a timeline.

    Nothing runs.

    plugins: to ask for what a name in the config means, as in `ds_check`.
    """


@checks.gives(checks.numbers)
def ds_memory(  # type: ignore[empty-body]
    config: RunConfig, plugins: Plugins, module: nn.Module, world: int
) -> Mapping[str, float]:
    """Hook: the most bytes that a plugin keeps on one rank, by "device", "host" and "disk", for
    tools. Nothing runs.

    What answers `ds_partitioner` tells of the model states, and nobody: they are replicated. Others
    tell of what they add, such as averages of the weights; all answers are added up
    (`ds_command_kit.memory.memory_of`).

    module: what a rank computes with, of meta tensors in the dtypes of training.
    world: data-parallel ranks.
    """
