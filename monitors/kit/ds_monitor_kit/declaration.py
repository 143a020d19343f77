"""The declaration of a monitor of a tracking service, which is the same for each (torch-free)."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_core.entries import Ref, resolve

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.config import RunConfig
    from ds_core.context import Context
    from ds_core.engine import Monitor
    from ds_core.errors import Problem


@dataclass(frozen=True)
class ServicePlugin:
    """A service's section and monitor. Its methods are the hooks of the declaration module.

    ``ds_config = PLUGIN.ds_config``, and the same for the two others.
    """

    # The section's name.
    section: str
    # The service's package, as it is imported and as pip installs it.
    package: str
    requirement: str
    # The section's model, which has a field `enabled`.
    model: Ref
    # (section, the run's config without secrets) -> Monitor. Its module may import the package.
    monitor: Ref

    def ds_config(self) -> type[BaseModel]:
        """The section's model."""
        model: type[BaseModel] = resolve(self.model)
        return model

    def ds_check(self, config: RunConfig) -> Iterable[Problem]:
        """The package is installed where the section is enabled."""
        from ds_monitor_kit.services import check_package

        return check_package(config, self.section, self.package, self.requirement)

    def ds_monitors(self, ctx: Context) -> Iterable[Monitor]:
        """One monitor in the background where the section is enabled, else none.

        Raises PluginError when the package cannot be imported.
        """
        from ds_monitor_kit.services import service_monitors

        def make(section: Any) -> Monitor:
            # Not `resolve`: the ImportError of a missing package goes to the caller, which says
            # what to install.
            module, _, name = self.monitor.partition(":")
            open_monitor = getattr(importlib.import_module(module), name)
            monitor: Monitor = open_monitor(section, ctx.config.redacted())
            return monitor

        return service_monitors(ctx, self.section, self.package, self.requirement, make)
