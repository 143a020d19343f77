"""Which provider (hook ``ds_collectives``) serves the groups of a backend instead of torch.distributed (torch-free)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_core.discovery import Answer, blaming
from ds_core.entries import CollectivesEntry, ask
from ds_core.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ds_core.comm.contract import GroupCollectives
    from ds_core.discovery import Found
    from ds_core.plugins import Plugins

__all__ = ["PLAIN", "Provider", "choose_providers"]

log = logging.getLogger("ds_core.comm")

PLAIN = "torch"
"""The name, in the config, of torch.distributed without a provider."""


@dataclass(frozen=True, slots=True)
class Provider:
    """A chosen entry, and whose it is. Called with a group, it makes the group's `GroupCollectives`."""

    name: str
    entry: CollectivesEntry
    plugin: Found

    def __str__(self) -> str:
        return f"{self.name} ({self.plugin.dist})"

    def __call__(self, group: ProcessGroup, messages: bool) -> GroupCollectives:
        """See `GroupCollectives`. Raises PluginError, naming the plugin, for whatever goes wrong."""
        from ds_core.comm.contract import GroupCollectives

        load = Answer(self.plugin, self.entry).resolve(self.entry.load, f"collectives {self.name!r}")
        with blaming(self.plugin, f"failed in {self.entry.load} (ds_collectives)"):
            made = load(group, messages)
            if not isinstance(made, GroupCollectives):
                raise TypeError(f"it must give a ds_core.comm.GroupCollectives, not {made!r}")
        return made


def choose_providers(plugins: Plugins, wanted: str | None) -> dict[tuple[str, str], Provider]:
    """(device type, backend) -> what serves its groups: the highest priority that is available, or `wanted` alone.

    Raises ConfigError when nobody offers `wanted` or it is not available, PluginError for two of one priority.
    """
    offers = plugins.named("ds_collectives", "collectives")
    if wanted is not None and wanted.lower() not in (PLAIN, *offers):
        from ds_core.catalogue import missing

        raise ConfigError([missing("collectives", wanted, [*offers, PLAIN], more=plugins.quarantined())], "collectives")
    names = offers if wanted is None else {wanted.lower()} - {PLAIN}
    found = [Provider(name, offers[name].value, offers[name].plugin) for name in sorted(names)]
    chosen: dict[tuple[str, str], Provider] = {}
    for one in sorted(found, key=lambda provider: -provider.entry.priority):
        pair = one.entry.device, one.entry.backend
        best = chosen.get(pair)
        if best is not None and best.entry.priority > one.entry.priority:
            continue
        if (reason := ask(one.entry.available)) is not None:
            if wanted is not None:
                raise ConfigError(f"{one} cannot serve: {reason}", "collectives")
            log.info("collectives are not served by %s: %s", one, reason)
        elif best is not None:
            raise PluginError(
                f"collectives on {' over '.join(pair)} are offered by {best} and {one} with equal priority; choose one "
                f'with "collectives": "{one.name}"'
            )
        else:
            chosen[pair] = one
            plugins.join(one.plugin)
    return chosen
