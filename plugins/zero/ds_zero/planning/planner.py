"""What ``dscore plan`` predicts of ZeRO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ds_plan import Planner

from ds_zero.config import OffloadOptimizer, OffloadParam, ZeroConfig
from ds_zero.planning.memory import offload_of
from ds_zero.planning.predict import predict, predict_all

if TYPE_CHECKING:
    from ds_plan import Need, PlannedRun
    from torch import nn

    from ds_core.config import RunConfig


class ZeroPlanner(Planner):
    """Every stage and offload, in the layouts of the config's section ``zero_optimization``."""

    def prepare(self, raw: dict[str, Any]) -> dict[str, Any]:
        """`raw` without the offload, which may not fit the config's stage or this host.

        Every offload is planned anyway. But ZenFlow is part of one, and refused without it.
        """
        given = _section(raw)
        left_out = {"offload_optimizer", "offload_param"}
        if given.get("zenflow") is not None:
            left_out.remove("offload_optimizer")
        kept = {key: value for key, value in given.items() if key not in left_out}
        return {**raw, "zero_optimization": kept}

    def choices(self, config: RunConfig, module: nn.Module, run: PlannedRun) -> list[Need]:
        """See `Planner.choices`."""
        return predict_all(module, self._restore(config), run)

    def chosen(self, config: RunConfig, module: nn.Module, run: PlannedRun, rank: int) -> Need:
        """See `Planner.chosen`; stage 0 is a run without ZeRO."""
        section = self._restore(config)
        return predict(module, section, run, offload_of(section), rank)

    def _restore(self, config: RunConfig) -> ZeroConfig:
        """The checked section, with the offload as given: its buffers are planned."""
        section = config.section(ZeroConfig)
        assert section is not None, "`prepare` puts it into every config"
        given = _section(self.raw)
        places: dict[str, OffloadOptimizer | OffloadParam] = {}
        if given.get("offload_optimizer"):
            places["offload_optimizer"] = OffloadOptimizer.model_validate(
                given["offload_optimizer"]
            )
        if given.get("offload_param"):
            places["offload_param"] = OffloadParam.model_validate(given["offload_param"])
        return section.model_copy(update=places)


def _section(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The section as given; true and false are old spellings, and all stages are planned anyway."""
    given = raw.get("zero_optimization")
    return given if isinstance(given, dict) else {}
