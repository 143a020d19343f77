"""The contract of what ``dscore plan`` predicts, and how planners are found (torch-free)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ds_core.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from ds_core.config import ConfigSource, RunConfig
    from ds_plan.needs import Need
    from ds_plan.run import PlannedRun


class Planner(ABC):
    """Predicts what each rank holds and sends, for the ways in which one package distributes states.

    raw: the config as given; options of the command line are in it.
    """

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def prepare(self, raw: dict[str, Any]) -> dict[str, Any]:
        """`raw`, which is checked next, without what only a run needs.

        Such as a store on a disk that this host does not have.
        """
        return raw

    @abstractmethod
    def choices(self, config: RunConfig, module: nn.Module, run: PlannedRun) -> list[Need]:
        """Every way that can be chosen, in the order of the table.

        Raises UsageError where `run` does not fit the config.
        module: of meta tensors, in the dtypes of training.
        """

    @abstractmethod
    def chosen(
        self, config: RunConfig, module: nn.Module, run: PlannedRun, rank: int
    ) -> Need | None:
        """What data-parallel rank `rank` holds under the config's own choice.

        None where another planner has the config's choice.
        """


def make_planners(source: ConfigSource) -> list[Planner]:
    """The planners of every installed plugin, in plugin order, for one config.

    Raises UsageError where there is none.
    """
    from ds_core.config.build import plugin_settings
    from ds_core.plugins import Plugins

    plugins = Plugins(plugin_settings(source))
    # A plan is of what the config could choose, so plugins that it does not name are asked too.
    plugins.probe_all()
    offers = plugins.named("ds_planners", "planners")
    planners = []
    for name in offers:
        answer = offers[name]
        make = answer.resolve(answer.value, f"the planner {name!r}")
        planners.append(make(source.raw))
    if not planners:
        raise UsageError(
            "no plugin predicts memory (hook ds_planners); install dscore-zero, or enable it"
            f"{plugins.quarantined()}"
        )
    return planners
