"""What ds_zero answers to ``dscore plan`` and to `ds_memory`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ds_plan import Offload, PlannedRun, Planner

from ds_core.precision import make_precision
from ds_core.setup.optim import choose
from ds_zero.config import OffloadOptimizer, OffloadParam, ZeroConfig
from ds_zero.planning.predict import predict, predict_all

if TYPE_CHECKING:
    from ds_plan import Need
    from torch import nn

    from ds_core.config import RunConfig
    from ds_core.plugins import Plugins

_PLACES: dict[str, type[OffloadOptimizer | OffloadParam]] = {
    "offload_optimizer": OffloadOptimizer,
    "offload_param": OffloadParam,
}
"""The sections of offload, by their keys."""


class ZeroPlanner(Planner):
    """Every stage and offload, in the layouts of the config's section ``zero_optimization``."""

    def prepare(self, raw: dict[str, Any]) -> dict[str, Any]:
        """`raw` without the offload, which may not fit the config's stage or this host.

        Every offload is planned anyway. But ZenFlow is part of one, and refused without it.
        """
        given = _section(raw)
        left_out = set(_PLACES)
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
        places = {
            key: model.model_validate(given[key])
            for key, model in _PLACES.items()
            if given.get(key)
        }
        return section.model_copy(update=places)


def _section(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The section as given; true and false are old spellings, and all stages are planned anyway."""
    given = raw.get("zero_optimization")
    return given if isinstance(given, dict) else {}


def memory(
    config: RunConfig, plugins: Plugins, section: ZeroConfig, module: nn.Module, world: int
) -> Mapping[str, float]:
    """Bytes per rank by place.

    Raises UsageError where ranks do not divide into the config's blocks.
    """
    optimizer, _ = choose("optimizer", config, plugins)
    precision = make_precision(config, plugins)
    run = PlannedRun.of(config, optimizer, precision, module, world)
    need = predict(module, section, run, offload_of(section))
    return {"device": need.device.peak, "host": need.host.peak, "disk": need.disk}


def offload_of(section: ZeroConfig) -> Offload:
    """The offload that a section asks for; weights are offloaded in stage 3 alone."""
    states = _device(section.offload_optimizer)
    weights = _device(section.weights_offload)
    if section.stage == 0 or (states == "none" and weights == "none"):
        return Offload.NONE
    # Weights are never offloaded without the optimizer's states.
    if states in ("none", "cpu"):
        return Offload.OPTIMIZER if weights == "none" else Offload.ALL
    return Offload.DISK_ALL if weights not in ("none", "cpu") else Offload.DISK


def _device(place: OffloadOptimizer | OffloadParam | None) -> str:
    return "none" if place is None else place.device.lower()
