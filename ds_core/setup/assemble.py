"""`initialize`: the composition of an engine, from its config on.

`compose`: config -> plugins. `open_run`: accelerator -> kernels -> mesh -> (ranks talk for the
first time). `_prepare`: transforms by phase -> param axes. `_assemble`: partitioner -> optimizer ->
schedule -> engine. Everything that can be wrong in a config is found before any process talks to
another.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn
from torch.optim import Optimizer

from ds_core import comm
from ds_core.config.source import ConfigSource, read_config
from ds_core.context import Context
from ds_core.engine import Engine, Sequential
from ds_core.entries import OptimizerEntry, resolve
from ds_core.errors import ConfigError, PluginError, UsageError
from ds_core.gradients import give_back, keep
from ds_core.kernels import UsesKernels
from ds_core.mesh import Mesh
from ds_core.partition import Partitioner, Replicated, collect_buffers, collect_params
from ds_core.precision import WIRE_DTYPES, cast_module, wire_dtypes
from ds_core.setup.compose import Composition, compose
from ds_core.setup.opening import open_run, transform
from ds_core.setup.optimizer_setup import (
    UNDECLARED,
    attach,
    check_step,
    check_whole,
    make_scheduler,
    optimizer_entry,
)

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from ds_core.accelerator import Accelerator
    from ds_core.engine import Loader
    from ds_core.setup.start import Config


class Initialized(NamedTuple):
    """What `initialize` returns. It can be unpacked into four; what does not apply is None."""

    engine: Engine
    optimizer: Optimizer | None
    training_dataloader: Loader | None
    lr_scheduler: Any


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Config | None = None,
    mesh_param: tuple[int, int] | None = None,
    config_params: Config | None = None,
    plugins: Iterable[object] = (),
) -> Initialized:
    """Make a model trainable as its config says. Collective: every rank calls it.

    Returns ``(engine, optimizer, training_dataloader, lr_scheduler)``; what does not apply is None.

    args: a namespace or a mapping, whose ``deepspeed_config`` may name the config file.
    model: any module; it is moved to the accelerator, and may ask for config sections (`compose`).
    optimizer: an Optimizer, or a function ``groups -> Optimizer``; overrides the config's.
    model_parameters: parameters or group dicts; default the model's trainable ones.
    training_data: a dataset; gives the dataloader.
    lr_scheduler: an object with ``step`` and state, or a function ``optimizer -> scheduler``.
    mpu: an external model-parallel unit.
    config: dict, file path or base64 text (config_params is its old name).
    mesh_param: (data, sequence) sizes; the second stands for the key sequence_parallel_size.
    plugins: modules, and objects whose methods are hooks, that take part in this run alone.

    Raises ConfigError (all problems at once), PluginError, RankMismatchError or UsageError.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"initialize needs a model, a torch.nn.Module, not {type(model).__name__}")
    # What can be worked out from the config and the arguments alone, on each rank by itself.
    source = _with_mesh(config_source(args, config, config_params), mesh_param)
    chosen = compose(source, model, given=plugins)
    _check_arguments(args, optimizer, chosen)
    entry = optimizer_entry(optimizer, chosen)
    # Ranks talk for the first time. The groups of an mpu exist only once the process group runs.
    ctx = open_run(
        chosen,
        functools.partial(_make_mesh, chosen, mpu, mesh_param),
        late=mpu is not None,
        model=model,
        distributed_port=distributed_port,
        dist_init_required=dist_init_required,
    )
    ctx.own_optimizer = optimizer is not None and entry.load == UNDECLARED
    ctx.grain = "element" if entry.collects else entry.grain
    ctx.collate_fn = collate_fn
    # The model, which is given back as it was if anything fails from here on.
    give_back(model)
    with keep(ctx.undo, model):
        _prepare(ctx, model)
        engine = _assemble(
            ctx, chosen, entry, optimizer, model_parameters, lr_scheduler, training_data
        )
    return Initialized(engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler)


# -- the parts of the composition ------------------------------------------------------------------


def _prepare(ctx: Context, model: nn.Module) -> None:
    """Note in `ctx` the model after all transforms, in the run's dtypes and on its device."""
    accelerator = ctx.accelerator
    precision = ctx.precision
    accelerator.set_device(accelerator.local_index(comm.local_rank()))
    model = transform(ctx, model)
    cast_module(model, precision)
    _to_device(model, accelerator)
    ctx.module = model
    ctx.params = collect_params(model, ctx)
    ctx.buffers = collect_buffers(model, ctx)
    if precision.autocast is not None:
        ctx.stash[WIRE_DTYPES] = wire_dtypes(model, precision.autocast, precision.autocast_modules)


def _assemble(
    ctx: Context,
    chosen: Composition,
    entry: OptimizerEntry,
    optimizer: Any,
    model_parameters: Iterable[Any] | None,
    lr_scheduler: Any,
    training_data: Any,
) -> Engine:
    """The engine of the model in `ctx`, of what was given to `initialize`. Collective."""
    # Who owns its states and who runs it. What is refused on one rank ends all.
    with comm.together():
        partitioner = _partitioner(ctx, entry)
        answer = ctx.plugins.driver("ds_runner", ctx=ctx)
        runner = Sequential() if answer is None else answer.value
    # A failure detaches the partitioner; the step is added now, so that all ranks have it.
    attached = ExitStack()
    ctx.undo(attached.close, collective=True)
    # What updates it: the tensors that the partitioner gives instead of the parameters.
    with comm.together():
        built = attach(ctx, partitioner, attached, optimizer, model_parameters, chosen)
    if built is not None:
        check_whole(ctx, built, optimizer, entry, chosen)
    loader = None
    with comm.together():
        if built is not None:
            if isinstance(built, UsesKernels):
                built.use_kernels(ctx.kernels)
            partitioner.bind(built)
        scheduler = make_scheduler(lr_scheduler, built, chosen)
        if training_data is not None:
            from ds_core.engine import make_loader

            loader = make_loader(ctx, training_data)
    with comm.together():
        engine = Engine(
            ctx,
            partitioner=partitioner,
            runner=runner,
            optimizer=built,
            lr_scheduler=scheduler,
            loader=loader,
        )
    attached.pop_all()  # from here on the engine detaches it
    _begin(engine)
    return engine


def _to_device(model: nn.Module, accelerator: Accelerator) -> None:
    """Move the model.

    To a vendor's device torch makes new parameters, untied and unknown to the user's optimizer,
    unless it may swap.
    """
    swap = torch.__future__.get_swap_module_params_on_conversion()
    vendors = torch._C._get_privateuse1_backend_name()
    away = accelerator.device_type == vendors and any(
        p.device.type != vendors for p in model.parameters()
    )
    torch.__future__.set_swap_module_params_on_conversion(swap or away)
    model.to(accelerator.current_device())
    torch.__future__.set_swap_module_params_on_conversion(swap)


def _partitioner(ctx: Context, optimizer: OptimizerEntry) -> Partitioner:
    """The partitioner of a plugin, of the optimizer, or else `Replicated`."""
    answer = ctx.plugins.driver("ds_partitioner", ctx=ctx)
    if optimizer.partitioner is None:
        if answer is None:
            return Replicated(ctx)
        made: Partitioner = answer.value
    elif answer is not None:
        raise UsageError(
            f"this optimizer reduces gradients by itself, and so does plugin {answer.plugin}; "
            "leave its section out or use another optimizer"
        )
    else:
        made = resolve(optimizer.partitioner)(ctx)
        if not isinstance(made, Partitioner):
            raise PluginError(
                f"{optimizer.partitioner} of an OptimizerEntry gave a {type(made).__name__}, not a "
                "Partitioner"
            )
    from ds_core.plugins.old_forms import give_plans

    # It may be of a contract without plans.
    give_plans(made)
    return made


def _begin(engine: Engine) -> None:
    """Call plugins' `ds_open`; if one fails on any rank, the engine is destroyed on all."""
    failed = None
    try:
        with comm.together():
            engine.begin()
    except Exception as error:
        failed = error
    if failed is not None:
        # here, where no exception passes: all ranks are here, so the whole model is given back
        engine.destroy()
        raise failed


# -- arguments -------------------------------------------------------------------------------------


def _argument(args: Any, name: str) -> Any:
    """One of the user's arguments, from a namespace or a mapping; None when it is missing."""
    return args.get(name) if isinstance(args, Mapping) else getattr(args, name, None)


def config_source(args: Any, config: Any, config_params: Any) -> Any:
    """The config that was given; ConfigError where there is none, or more than one."""
    given = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": _argument(args, "deepspeed_config")
        or _argument(args, "deepscale_config"),
    }
    named = {k: v for k, v in given.items() if v is not None}
    if len(named) == 1:
        return next(iter(named.values()))
    if named:
        raise ConfigError(f"{' and '.join(named)} are both given; give one")
    raise ConfigError(
        "no config was given; pass config=<dict or path>, or --deepspeed_config PATH on the "
        "command line"
    )


def _with_mesh(source: Any, mesh_param: tuple[int, int] | None) -> Any:
    """The config, in which the sequence size of `mesh_param` stands where it says none."""
    if mesh_param is None:
        return source
    if len(mesh_param) != 2 or any(type(size) is not int or size < 1 for size in mesh_param):
        raise UsageError(
            f"mesh_param is (data, sequence), two sizes of at least 1, not {mesh_param!r}"
        )
    found = read_config(source)
    size = mesh_param[1]
    more = {} if size == 1 else {"sequence_parallel_size": size}
    return ConfigSource({**more, **found.raw}, found.origin)


def _check_arguments(args: Any, optimizer: Any, chosen: Composition) -> None:
    local = os.environ.get("LOCAL_RANK")
    told = _argument(args, "local_rank")
    if told is not None and told >= 0 and local is not None and int(local) != told:
        raise UsageError(
            f"args.local_rank is {told}, but LOCAL_RANK is {local}; let the launcher set both "
            "(dscore run --local_rank passes the argument), or leave --local_rank out"
        )
    if optimizer is not None and not isinstance(optimizer, Optimizer) and not callable(optimizer):
        raise UsageError(
            "optimizer must be a torch.optim.Optimizer or a function of the parameters, not "
            f"{type(optimizer).__name__}"
        )
    if isinstance(optimizer, Optimizer):
        check_step(optimizer)
    if optimizer is None and chosen.optimizer is None and chosen.scheduler is not None:
        raise ConfigError(
            "scheduler: a schedule needs an optimizer; add an optimizer section or pass optimizer=",
            chosen.config.origin,
        )


def _make_mesh(
    chosen: Composition,
    mpu: Any,
    mesh_param: tuple[int, int] | None,
    rank: int,
    world_size: int,
) -> Mesh:
    """The mesh over the groups that the user has in an `mpu`, else that of the config.

    ConfigError where its sizes are not those that were asked for.
    """
    if mpu is not None:
        needed = f"no installed package makes a mesh of mpu, a {type(mpu).__name__}"
        found = chosen.plugins.installed_driver(
            "ds_mesh", needed, mpu=mpu, rank=rank, world_size=world_size
        )
        return cast(Mesh, found)
    mesh = chosen.mesh(world_size, rank)
    data, sequence = mesh_param or (chosen.config.core.data_parallel_size, None)
    where = "mesh_param" if mesh_param else "data_parallel_size"
    batch = mesh.size("batch")
    dp = mesh.size("dp")
    for kind, wanted, size in (("data", data, batch), ("sequence", sequence, dp // batch)):
        if wanted not in (None, size):
            raise ConfigError(
                f"{where}: {kind} parallel size {wanted}, but this run has {size} (world "
                f"{world_size}, mesh {mesh.describe()})",
                chosen.config.origin,
            )
    return mesh
