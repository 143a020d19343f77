"""The first half of every run, of training and of inference: from a validated config to ranks that
talk.

`open_run` chooses accelerator, kernels, precision and collectives, places the rank in a mesh,
starts the process group and compares what ranks were started with. Everything that can be wrong in
a config is found before any process talks. `transform` is what comes next: the model after the
transforms of all plugins.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_core import __version__, comm
from ds_core.accelerator import get_accelerator
from ds_core.comm.start import add_interceptors_of
from ds_core.config import check_rules
from ds_core.context import Context
from ds_core.entries import Phase, Transform
from ds_core.errors import DSError
from ds_core.gradients import release_model
from ds_core.kernels import Kernels
from ds_core.plugins import Plugins, blaming
from ds_core.precision import make_precision
from ds_core.process import STATE, show_log

if TYPE_CHECKING:
    from ds_core.mesh import Mesh
    from ds_core.setup.compose import Composition

log = logging.getLogger("ds_core")


def open_run(
    chosen: Composition,
    mesh: Callable[[int, int], Mesh] | None = None,
    *,
    late: bool = False,
    alone: bool = False,
    model: nn.Module | None = None,
    distributed_port: int = 29500,
    dist_init_required: bool | None = None,
) -> Context:
    """Open a run: the context that plugins are given, without a model. Collective, but for `alone`.

    mesh: ``(rank, world size) -> mesh``; None: the config's own (`Composition.mesh`).
    late: it needs the process group.
    alone: this process takes part in nothing, whatever else runs.
    model: what is to be trained; an engine that has it already ends here.

    Raises ConfigError, PluginError or RankMismatchError.
    """
    make = mesh or (lambda rank, world_size: chosen.mesh(world_size, rank))
    core = chosen.config.core
    _set_log_level(core.log_level)
    # What each rank can work out alone, before it talks.
    asked = chosen.plugins.members()
    accelerator = get_accelerator(chosen.plugins)
    rank, world_size = (0, 1) if alone else _place(chosen.plugins)
    # Providers matter only where ranks communicate; a wrong name is an error in any case.
    several = not alone and (world_size > 1 or core.collectives is not None)
    providers = (
        comm.choose_providers(chosen.plugins, core.collectives, chosen.config) if several else {}
    )
    check_rules(chosen.config, chosen.plugins, newer_than=asked)
    kernels = Kernels(chosen.plugins, core.kernels)
    if chosen.notes and rank == 0:
        log.warning("%s: %s", chosen.config.origin, "; ".join(map(str, chosen.notes)))
    start = functools.partial(
        comm.init_distributed,
        accelerator.communication_backend,
        distributed_port=distributed_port,
        dist_init_required=dist_init_required,
    )

    # The first talk. What is wrong with a mesh is said before it, unless the mesh needs its groups.
    if late:
        start()
    planned = make(rank, world_size)
    batch = chosen.batch(planned.size("batch"))
    if not (late or alone):
        start()
    precision = make_precision(chosen.config, chosen.plugins)
    ctx = Context(chosen.config, chosen.plugins, planned, accelerator, kernels, precision, batch)
    # the dtype of the tensors that are updated
    updated = precision.master or precision.param or torch.float32
    if not alone:
        kernels.resolve_all(accelerator.device_type, str(updated).removeprefix("torch."))
        add_interceptors_of(chosen.plugins, chosen.config)
    # Before the model's first collective: ranks that differ would not call the same ones.
    _compare_ranks(ctx, providers)
    _build_groups(ctx, providers, model)
    return ctx


def transform(ctx: Context, model: nn.Module) -> nn.Module:
    """The model after all transforms.

    What a transform raises is its plugin's error, except a DSError.
    """
    rows = [(a.plugin, t) for a in ctx.plugins.ask("ds_transforms", ctx=ctx) for t in a.value]
    if ctx.precision.convert is not None and ctx.precision.plugin is not None:
        rows.append((ctx.precision.plugin, Transform(Phase.PRECISION, ctx.precision.convert)))
    for plugin, step in sorted(rows, key=lambda row: row[1].phase):
        what = f"failed in a transform of phase {step.phase.name} (ds_transforms)"
        together = comm.together() if ctx.world_size > 1 else contextlib.nullcontext()
        with together, blaming(plugin, what, passing=(DSError,)):
            changed = step.apply(model)
            if not isinstance(changed, nn.Module):
                raise TypeError(f"it must return the model, a torch.nn.Module, not {changed!r}")
            model = changed
    return model


def _set_log_level(level: str | None) -> None:
    """Log at the level that the config names; None leaves the program's."""
    if level:
        log.setLevel(level.upper())
        show_log()


def _place(plugins: Plugins) -> tuple[int, int]:
    """(rank, world size) of a running process group, else as the environment tells; (0, 1) when it
    tells nothing.
    """
    if comm.is_initialized():
        return comm.rank(), comm.world_size()
    where = comm.find_rendezvous(os.environ, collective=True, plugins=plugins)
    return (where.rank, where.world_size) if where is not None else (0, 1)


def _compare_ranks(ctx: Context, providers: Mapping[Any, Any]) -> None:
    """Raise RankMismatchError where ranks differ; rank 0 logs the providers of kernels, unless they are the
    references, and of collectives, and why others are not available.
    """
    served = {
        f"collectives {device}/{backend}": str(p) for (device, backend), p in providers.items()
    }
    if ctx.world_size > 1:
        comm.check_ranks_agree(_fingerprint(ctx) | served)
    if ctx.rank == 0:
        summary, missed = ctx.kernels.summary()
        if any(not name.startswith("reference ") for name in ctx.kernels.resolved().values()):
            log.info("kernels: %s", summary)
        if missed:
            log.warning("kernels: %s", "; ".join(missed))
        if served:
            log.info("%s", "; ".join(f"{what} by {who}" for what, who in served.items()))


def _build_groups(ctx: Context, providers: Mapping[Any, Any], model: nn.Module | None) -> None:
    """Make the mesh's groups, once no other engine trains `model`."""
    if model is not None:
        STATE.follow(torch.distributed.group.WORLD)
        release_model(model)
    if ctx.world_size > 1:
        comm.use_providers(providers)
        # The first step, so the last to be undone: others may use the groups.
        ctx.undo(ctx.mesh.close, collective=True)
        ctx.mesh.build_groups(own=model is not None and bool(STATE.present()))


def _fingerprint(ctx: Context) -> dict[str, str]:
    """What must be the same on every rank, key by key."""
    items = {f"config.{k}": v for k, v in ctx.config.fingerprint_items().items()}
    items |= {f"plugin {k}": v for k, v in ctx.plugins.loaded_versions().items()}
    items |= {
        "ds_core": __version__,
        "torch": torch.__version__,
        "accelerator": ctx.accelerator.name,
        "mesh": str(ctx.mesh.describe()),
        "precision": str(ctx.precision),
    }
    return items | {f"kernel {k}": v for k, v in ctx.kernels.resolved().items()}
