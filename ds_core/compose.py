"""From a config source to a validated config with its plugins, before ranks talk (torch-free)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_core.config import CORE_KEYS, build_config, plugin_settings, read_config
from ds_core.errors import ConfigError, PluginError, Problem
from ds_core.optim import Choice, choose
from ds_core.plugins import Plugins

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.config import RunConfig

__all__ = ["Composition", "compose", "section_models"]


@dataclass(frozen=True, slots=True)
class Composition:
    """A validated config, its plugins, and what the config chose by name."""

    config: RunConfig
    plugins: Plugins
    optimizer: Choice | None
    scheduler: Choice | None


def compose(source: Any) -> Composition:
    """Read, load the plugins that the config names, validate everything and choose by name.

    Raises ConfigError with every problem found, or PluginError when a named plugin is missing or broken.
    """
    read = read_config(source)
    plugins = Plugins(plugin_settings(read))
    wanted = [key for key in read.raw if key not in CORE_KEYS]
    models = section_models(plugins, wanted)
    disabled = {k: r.why for k in wanted if k not in models and (r := plugins.disabled(k)) is not None}
    config = build_config(read, models, list(plugins.sections()), disabled)
    problems: list[Problem] = []
    for answer in plugins.ask("ds_check", config=config, plugins=plugins):
        problems += answer.value
    optimizer, found = choose("optimizer", config, plugins)
    problems += found
    scheduler, found = choose("scheduler", config, plugins)
    problems += found
    if problems:
        raise ConfigError(problems, config.origin)
    return Composition(config, plugins, optimizer, scheduler)


def section_models(plugins: Plugins, names: list[str]) -> dict[str, tuple[type[BaseModel], str]]:
    """Load the owners of the sections `names`; per owned section its model and its owner's name and version."""
    models = {}
    for name, found in plugins.load_sections(names).items():
        model = plugins.ask_one("ds_config", found)
        if model is None:
            raise PluginError(f"plugin {found} claims section {name!r} but has no ds_config hook to describe it")
        models[name] = (model, f"{found.dist} {found.version}")
    return models
