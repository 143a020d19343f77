"""From a config source to a validated config with its plugins, before ranks talk (torch-free)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ds_core.config import (
    Batch,
    ConfigSource,
    RunConfig,
    check_rules,
    load_config,
    resolve_batch,
)
from ds_core.config.build import refuse
from ds_core.config.source import read_config
from ds_core.errors import ConfigError, Problem, did_you_mean
from ds_core.kernels import Kernels
from ds_core.mesh import Mesh, plan_mesh
from ds_core.setup.optim import Choice, choose

if TYPE_CHECKING:
    from torch import nn

    from ds_core.plugins import Plugins


@dataclass(frozen=True, slots=True)
class Composition:
    """A validated config, its plugins, and what the config chose by name."""

    config: RunConfig
    plugins: Plugins
    optimizer: Choice | None
    scheduler: Choice | None

    @property
    def notes(self) -> tuple[Problem, ...]:
        """Every key that was accepted and has no effect, or has another name now; see
        `ds_core.config.build`.
        """
        chosen = [c.notes for c in (self.optimizer, self.scheduler) if c is not None]
        return tuple(
            note for notes in (self.config.notes, *chosen, self._unmet()) for note in notes
        )

    def mesh(self, world_size: int, rank: int = 0) -> Mesh:
        """The mesh of the axes that plugins add (`ds_mesh_axes`).

        ConfigError where they do not fit that many ranks.
        """
        return plan_mesh(self.plugins.mesh_axes(self.config), world_size, rank)

    def batch(self, dp_world: int) -> Batch:
        """The batch sizes on `dp_world` data-parallel ranks: a plugin's (`ds_batch`), else those of
        the batch keys.
        """
        answer = self.plugins.driver("ds_batch", config=self.config, dp_world=dp_world)
        return (
            resolve_batch(self.config.core, dp_world)
            if answer is None
            else cast("Batch", answer.value)
        )

    def _unmet(self) -> Iterator[Problem]:
        """Names in ``plugins.disable`` and ``plugins.prefer`` that nothing installed has; on
        another host it may be.
        """
        names = {name for r in self.plugins.reports() for name in (r.found.name, r.found.dist)}
        asked = self.config.core.plugins
        rows = [(f"plugins.disable[{i}]", name) for i, name in enumerate(asked.disable)]
        rows += [(f"plugins.prefer.{name}", name) for name in asked.prefer if "/" not in name]
        for path, name in rows:
            if name not in names:
                yield Problem(
                    path,
                    f"has no effect: nothing installed is called {name!r}",
                    did_you_mean(name, names),
                )


def compose(
    source: Any,
    model: nn.Module | None = None,
    *,
    fill_later: bool = False,
    given: Iterable[object] = (),
) -> Composition:
    """Read, load the plugins that the config names, validate everything and choose by name.

    model: the attribute ``ds_sections`` (section -> keys) of its modules fills in what the config
        leaves out.
    fill_later: see `ds_core.config.load_config`; `config.autos` then says what is still to be
        filled in.
    given: modules and objects that take part, besides what the config names.

    Raises ConfigError with every problem of single keys or, where there is none, with those between
    keys; PluginError when a named plugin is missing or broken.
    """
    read = read_config(source, in_part=True)
    if model is not None:
        read = _with_sections_of(model, read)
    problems: list[Problem] = []
    plugins, config = load_config(read, fill_later=fill_later, problems=problems, given=given)
    # Choosing by name brings in the plugins that offer names, which may have rules of their own.
    optimizer, unknown = choose("optimizer", config, plugins)
    scheduler, found = choose("scheduler", config, plugins)
    found = [p for p in unknown + found if p.path not in config.autos]
    if problems:  # rules may speak of what is left out
        refuse(problems + found, config)
    # A kernel that the config forces brings in its plugin, which may have rules too.
    Kernels(plugins, config.core.kernels).check_forced()
    check_rules(config, plugins, more=found)
    return Composition(config, plugins, optimizer, scheduler)


def _with_sections_of(model: nn.Module, read: ConfigSource) -> ConfigSource:
    """`read` with the sections that the model's modules ask for; "auto" leaves a key to them."""
    raw = dict(read.raw)
    problems = []
    for name, module in model.named_modules():
        for section, values in getattr(module, "ds_sections", {}).items():
            given = {} if raw.get(section) is None else raw[section]
            if not isinstance(given, Mapping):
                continue  # the section's own model reports this error
            for key, value in values.items():
                if (known := given.get(key, "auto")) not in ("auto", value):
                    why = (
                        f"is {known!r}, but {name or 'the model'} ({type(module).__name__}) was "
                        f"built for {value!r}"
                    )
                    fix = "leave the key out of the config, and build all modules the same way"
                    problems.append(Problem(f"{section}.{key}", why, fix))
            raw[section] = {**given, **values}
    if problems:
        raise ConfigError(problems, read.origin)
    return dataclasses.replace(read, raw=raw)
