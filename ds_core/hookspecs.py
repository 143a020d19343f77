"""Every hook of ds_core; the docstring is the contract (torch-free).

Each hook is either a *driver* (exactly one answer is chosen: by name, by probe or by section; two that cannot
be told apart are an error naming both) or a *hook* (every answer is used). A plugin implements a hook by
defining a function of that name in its declaration module; it may leave out arguments it does not need.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from pydantic import BaseModel
    from torch import nn

    from ds_core.config import RunConfig
    from ds_core.context import Context
    from ds_core.entries import (
        AcceleratorEntry,
        Axis,
        Chart,
        CommandEntry,
        KernelEntry,
        LauncherEntry,
        OptimizerEntry,
        SchedulerEntry,
        StateStoreEntry,
        Transform,
    )
    from ds_core.errors import Problem
    from ds_core.monitor import Monitor
    from ds_core.partition import Partitioner
    from ds_core.plugins import Plugins
    from ds_core.runner import Runner

__all__ = ["hookimpl", "hookspec"]

hookspec = pluggy.HookspecMarker("ds_core")
hookimpl = pluggy.HookimplMarker("ds_core")
"""Optional: names that start with ``ds_`` are hooks anyway. Use it for pluggy's ordering options."""


@hookspec
def ds_config() -> type[BaseModel]:  # type: ignore[empty-body]
    """Driver, by section: the pydantic model of the section whose name is this plugin's entry-point name.

    Called once per process before any other hook, on every rank. Forbid extra keys (inherit
    `ds_core.config.Section`). A section that is one number or string uses a ``RootModel``.
    """


@hookspec
def ds_check(config: RunConfig, plugins: Plugins) -> Iterable[Problem]:  # type: ignore[empty-body]
    """Hook: rules that span sections, checked after all sections parsed and before processes talk.

    Ask by capability ("is gradient_clipping set?"), not by another plugin's name. plugins: to ask for what a name in
    the config stands for, as in ``plugins.named("ds_state_stores", "state_store")``.
    """


@hookspec
def ds_accelerators() -> Iterable[AcceleratorEntry]:  # type: ignore[empty-body]
    """Driver, by `DS_ACCELERATOR` or by probe: the device kinds this plugin can drive."""


@hookspec
def ds_kernels() -> Iterable[KernelEntry]:  # type: ignore[empty-body]
    """Driver, by (op, device, dtype): the operations this plugin can serve."""


@hookspec
def ds_optimizers() -> Mapping[str, OptimizerEntry]:  # type: ignore[empty-body]
    """Driver, by the name in ``optimizer.type`` (case-insensitive)."""


@hookspec
def ds_schedulers() -> Mapping[str, SchedulerEntry]:  # type: ignore[empty-body]
    """Driver, by the name in ``scheduler.type`` (case-insensitive)."""


@hookspec
def ds_state_stores() -> Mapping[str, StateStoreEntry]:  # type: ignore[empty-body]
    """Driver, by the name in the ``device`` of an offload section (case-insensitive): where states can rest."""


@hookspec
def ds_monitors(ctx: Context) -> Iterable[Monitor]:  # type: ignore[empty-body]
    """Hook: the monitors that receive metric events. Called on rank 0 only, once, when the engine is built."""


@hookspec
def ds_mesh_axes(config: RunConfig) -> Iterable[Axis]:  # type: ignore[empty-body]
    """Hook: the mesh axes this plugin adds. Called on every rank before processes talk."""


@hookspec
def ds_transforms(ctx: Context) -> Iterable[Transform]:  # type: ignore[empty-body]
    """Hook: model -> model steps, applied in order of phase, then of plugin name. Every rank."""


@hookspec
def ds_param_axes(name: str, param: nn.Parameter, ctx: Context) -> Collection[str] | None:
    """Hook, merged by union: the mesh axes on which ranks hold *different* parameters under this name.

    name: the parameter's name in the transformed model. None or an empty collection: no opinion.
    Asked about buffers too (`param` is a plain tensor then).
    Gradient reduction, the global norm, partitioning and checkpoint layout all follow from the union.
    """


@hookspec
def ds_partitioner(ctx: Context) -> Partitioner | None:
    """Driver: who owns how model states lie over ranks. None: not this plugin. Nobody: `Replicated`."""


@hookspec
def ds_runner(ctx: Context) -> Runner | None:
    """Driver: who turns micro-batches into forwards and backwards. None: not this plugin. Nobody: `Sequential`."""


@hookspec
def ds_step_begin(ctx: Context, step: int) -> None:
    """Hook (observer): an optimizer step is about to happen; `step` counts from 0. Every rank.

    An exception switches the plugin's observers off after one warning; training goes on.
    """


@hookspec
def ds_step_end(ctx: Context, step: int, metrics: Mapping[str, float]) -> None:
    """Hook (observer): an optimizer step is done (or was skipped: ``metrics["skipped"]`` is 1). Every rank.

    metrics: ``lr``, ``grad_norm``, ``loss_scale``, ``skipped``, ``samples``; ``loss`` when it is known.
    """


@hookspec
def ds_close(ctx: Context) -> None:
    """Hook (observer): the engine is being destroyed. Every rank."""


@hookspec
def ds_checkpointables(ctx: Context) -> Mapping[str, Any]:  # type: ignore[empty-body]
    """Hook: objects with ``state_dict()`` and ``load_state_dict()`` to keep in every checkpoint, by name.

    A state is JSON plus tensors; names are prefixed with the plugin's name. Every rank.
    """


@hookspec
def ds_launchers() -> Mapping[str, LauncherEntry]:  # type: ignore[empty-body]
    """Driver, by name: ways to start processes for ``dscore run --launcher NAME``."""


@hookspec
def ds_commands() -> Mapping[str, CommandEntry]:  # type: ignore[empty-body]
    """Hook: sub-commands for ``dscore``, by name. Two plugins with one name are an error naming both."""


@hookspec
def ds_charts(config: RunConfig) -> Iterable[Chart]:  # type: ignore[empty-body]
    """Hook: what ``dscore plan`` shows of a config besides memory and messages, such as a timeline. Nothing runs."""
