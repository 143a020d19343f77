"""`initialize`: the one function in which the whole composition is visible.

config -> plugins -> accelerator -> mesh -> (ranks talk for the first time) -> transforms by phase
-> param axes -> kernels -> partitioner -> optimizer -> schedule -> engine. Everything that can be
wrong in a config is found before any process talks to another.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from ds_core import comm
from ds_core.compose import Composition, compose
from ds_core.config.source import ConfigSource, read_config
from ds_core.context import Context
from ds_core.engine import Engine
from ds_core.entries import OptimizerEntry, resolve
from ds_core.errors import ConfigError, PluginError, UsageError
from ds_core.kernels import UsesKernels
from ds_core.mesh import Mesh
from ds_core.multi_engine import give_back, keep
from ds_core.opening import open_run, transform
from ds_core.optim import torch_grain
from ds_core.params import check_grain, collect_buffers, collect_params
from ds_core.partition import Partitioner
from ds_core.precision import WIRE_DTYPES, cast_module, wire_dtypes
from ds_core.process import show_log
from ds_core.replicated import Replicated
from ds_core.runner import Sequential
from ds_core.stepping import required

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from ds_core.accelerator import Accelerator
    from ds_core.data import Loader

log = logging.getLogger("ds_core")

ParamGroups = list[dict[str, Any]]
_ANY = "torch.optim:Optimizer"  # in an entry that only declares, and loads nothing


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
    config: Any = None,
    mesh_param: tuple[int, int] | None = None,
    config_params: Any = None,
) -> tuple[Engine, Optimizer | None, Loader | None, Any]:
    """Make a model trainable as its config says; returns ``(engine, optimizer, dataloader,
    lr_scheduler)``.

    args: parsed arguments, a namespace or a mapping, whose ``deepspeed_config`` may name the config
    file. model: any module; it is moved to the accelerator, and may ask for config sections
    (`compose`). optimizer: an Optimizer, or a function ``groups -> Optimizer``; overrides the
    config's. model_parameters: parameters or group dicts; default the model's trainable ones.
    training_data: a dataset; gives the dataloader. lr_scheduler: an object with ``step`` and state,
    or a function ``optimizer -> scheduler``. mpu: an external model-parallel unit. config: dict,
    file path or base64 text (config_params is its old name). mesh_param: (data, sequence) sizes;
    the second stands for the key sequence_parallel_size. Collective: every rank calls it.

    Raises ConfigError (all problems at once), PluginError, RankMismatchError or UsageError.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"initialize needs a model, a torch.nn.Module, not {type(model).__name__}")
    chosen = compose(_with_mesh(config_source(args, config, config_params), mesh_param), model)
    _check_arguments(args, optimizer, chosen)
    core = chosen.config.core
    if core.log_level:
        log.setLevel(core.log_level.upper())
        show_log()

    entry = _entry(optimizer, chosen)
    given = mpu is not None
    ctx = open_run(
        chosen,
        functools.partial(_mesh_of, chosen, mpu)
        if given
        else functools.partial(_plan, chosen, mesh_param),
        late=given,
        model=model,
        distributed_port=distributed_port,
        dist_init_required=dist_init_required,
    )
    accelerator = ctx.accelerator
    precision = ctx.precision
    kernels = ctx.kernels
    ctx.own_optimizer = optimizer is not None and entry.load == _ANY
    ctx.grain = entry.grain
    ctx.collate_fn = collate_fn

    # The model, which is given back as it was if anything fails from here on.
    give_back(model)
    with keep(ctx.undo, model):
        accelerator.set_device(accelerator.local_index(comm.local_rank()))
        model = transform(ctx, model)
        cast_module(model, precision)
        _to_device(model, accelerator)
        ctx.module = model
        ctx.params, ctx.buffers = collect_params(model, ctx), collect_buffers(model, ctx)
        if precision.autocast is not None:
            ctx.stash[WIRE_DTYPES] = wire_dtypes(
                model, precision.autocast, precision.autocast_modules
            )

        # Who owns its states, who runs it, what updates it. What is refused on one rank ends all.
        with comm.together():
            partitioner = _partitioner(ctx, entry)
            runner = (
                answer.value
                if (answer := ctx.plugins.driver("ds_runner", ctx=ctx)) is not None
                else Sequential()
            )
        attached: list[Partitioner] = []

        def leave() -> None:
            for each in attached:
                each.detach()

        ctx.undo(leave, collective=True)
        with comm.together():
            built = _attach(ctx, partitioner, attached, model, optimizer, model_parameters, chosen)
        if built is not None:
            # What a function of the user's makes is known only now.
            grain = entry.grain if entry.grain is not None else _entry(built, chosen).grain
            check_grain(
                ctx,
                grain,
                "optimizer.type" if optimizer is None else "optimizer=",
                type(built).__name__,
            )
        with comm.together():
            if built is not None:
                if isinstance(built, UsesKernels):
                    built.use_kernels(kernels)
                partitioner.bind(built)
            scheduler = _make_scheduler(lr_scheduler, built, chosen)
            loader = None
            if training_data is not None:
                from ds_core.data import make_loader

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
        attached.clear()  # from here on it is the engine's
        _begin(engine)
    return engine, built, loader, scheduler


def _begin(engine: Engine) -> None:
    """Let plugins act on the engine; where one fails, on any rank, the engine is destroyed on
    all."""
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


def _to_device(model: nn.Module, accelerator: Accelerator) -> None:
    """Move the model. To a vendor's device torch makes new parameters, untied and unknown to the
    user's optimizer, unless it may swap."""
    swap = torch.__future__.get_swap_module_params_on_conversion()
    vendors = torch._C._get_privateuse1_backend_name()
    away = accelerator.device_type == vendors and any(
        p.device.type != vendors for p in model.parameters()
    )
    torch.__future__.set_swap_module_params_on_conversion(swap or away)
    model.to(accelerator.current_device())
    torch.__future__.set_swap_module_params_on_conversion(swap)


def _argument(args: Any, name: str) -> Any:
    """One of the user's arguments, which are a namespace or a mapping; None when it is not among
    them.
    """
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
            "(dscore run "
            "--local_rank passes the argument), or leave --local_rank out"
        )
    if optimizer is not None and not isinstance(optimizer, Optimizer) and not callable(optimizer):
        raise UsageError(
            "optimizer must be a torch.optim.Optimizer or a function of the parameters, not "
            f"{type(optimizer).__name__}"
        )
    if isinstance(optimizer, Optimizer):
        _check_step(optimizer)
    if optimizer is None and chosen.optimizer is None and chosen.scheduler is not None:
        raise ConfigError(
            "scheduler: a schedule needs an optimizer; add an optimizer section or pass optimizer=",
            chosen.config.origin,
        )


def _check_step(optimizer: Optimizer) -> None:
    # torch's schedules put another into the instance
    if needs := required(type(optimizer).step.__get__(optimizer)):
        raise UsageError(
            f"{type(optimizer).__name__}.step needs {', '.join(needs)}, and engine.step() has "
            "nothing to give: an "
            "optimizer that computes the loss again by itself (LBFGS) cannot be driven by forward, "
            "backward and step; "
            "use one whose step() goes without arguments"
        )


def _entry(optimizer: Any, chosen: Composition) -> OptimizerEntry:
    """What is declared of the optimizer; also of an object or class of the user's that is torch's
    or a plugin's own.
    """
    if optimizer is None:
        entry = chosen.optimizer.entry if chosen.optimizer is not None else OptimizerEntry(_ANY)
        assert isinstance(entry, OptimizerEntry)
        if entry.grain is not None:
            return entry
        optimizer = resolve(entry.load)  # by its dotted path
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    if issubclass(cls, Optimizer) and (grain := torch_grain(cls)) is not None:
        return OptimizerEntry(_ANY, grain=grain)
    for answer in chosen.plugins.offers("ds_optimizers") if issubclass(cls, Optimizer) else ():
        for name, entry in answer.value.items():
            # The name alone says little: anybody may call a class "Adam".
            same_package = re.split("[.:]", entry.load)[0] == cls.__module__.partition(".")[0]
            if same_package and name.lower() == cls.__name__.lower():
                chosen.plugins.join(answer.plugin)
                return cast(OptimizerEntry, entry)
    return OptimizerEntry(_ANY, grain=None)


def _partitioner(ctx: Context, optimizer: OptimizerEntry) -> Partitioner:
    """The partitioner of a plugin, of the optimizer, or else `Replicated`."""
    answer = ctx.plugins.driver("ds_partitioner", ctx=ctx)
    if optimizer.partitioner is None:
        return Replicated(ctx) if answer is None else _with_plans(answer.value)
    if answer is not None:
        raise UsageError(
            f"this optimizer reduces gradients by itself, and so does plugin {answer.plugin}; "
            "leave its section out "
            "or use another optimizer"
        )
    made = resolve(optimizer.partitioner)(ctx)
    if not isinstance(made, Partitioner):
        raise PluginError(
            f"{optimizer.partitioner} of an OptimizerEntry gave a {type(made).__name__}, not a "
            "Partitioner"
        )
    return _with_plans(made)


def _with_plans(made: Partitioner) -> Partitioner:
    """The partitioner, also where it is of a contract without plans."""
    from ds_core.old_forms import give_plans

    give_plans(made)
    return made


def _attach(
    ctx: Context,
    partitioner: Partitioner,
    attached: list[Partitioner],
    model: nn.Module,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None,
    model_parameters: Iterable[Any] | None,
    chosen: Composition,
) -> Optimizer | None:
    """Let the partitioner take the model and give the optimizer the tensors it is to update.

    attached: the partitioner is added to it once it has the model.
    """
    if isinstance(optimizer, Optimizer):
        old = optimizer.param_groups
        _note_trained(ctx, old)
        updated = partitioner.attach(model, [dict(g) for g in old], updated=True)
        attached.append(partitioner)
        for group, new in zip(old, updated, strict=True):
            for before, after in zip(group["params"], new["params"], strict=True):
                if before is not after and before in optimizer.state:
                    if kept := partitioner.adopt(before, optimizer.state.pop(before)):
                        optimizer.state[after] = kept
            group["params"] = new["params"]
        return optimizer
    wanted = _param_groups(model, model_parameters)
    _note_trained(ctx, wanted)
    if optimizer is None and chosen.optimizer is not None:
        wanted = chosen.optimizer.groups(wanted, {p: info.name for p, info in ctx.params.items()})
    make = (
        optimizer
        if optimizer is not None
        else chosen.optimizer.build
        if chosen.optimizer is not None
        else None
    )
    groups = partitioner.attach(model, wanted, updated=make is not None)
    attached.append(partitioner)
    if make is None:
        return None
    trains = any(len(g["params"]) for g in groups)
    if ctx.mesh.size("dp") < ctx.world_size:  # ranks may have different parameters
        trains = any(comm.all_gather_json(trains))
    if not trains:
        raise UsageError(
            "there is nothing to train: model_parameters is empty (or a used-up generator), or all "
            "frozen"
        )
    built = make(groups)
    if not isinstance(built, Optimizer):
        raise UsageError(
            f"the optimizer function returned {type(built).__name__}, not a torch.optim.Optimizer"
        )
    _check_step(built)
    given = {id(p) for g in groups for p in g["params"]}
    if any(id(p) not in given for g in built.param_groups for p in g["params"]):
        raise UsageError(
            "the optimizer function made an optimizer of other tensors than it was given; it must "
            "use its argument, "
            "which may hold fp32 masters or partitions of the parameters"
        )
    return built


def _note_trained(ctx: Context, groups: ParamGroups) -> None:
    """Note the optimizer's parameters.

    Raises UsageError for a tensor that is none of the model's.
    """
    ctx.trained = [p for group in groups for p in group["params"]]
    for param in ctx.trained:
        if param not in ctx.params:
            raise UsageError(
                f"model_parameters holds a tensor of shape {tuple(param.shape)} that is not a "
                "parameter of the model; "
                "pass parameters of the model given to initialize (after any transform they must "
                "still be in it)"
            )


def _param_groups(model: nn.Module, given: Iterable[Any] | None) -> ParamGroups:
    """`given` (parameters, (name, parameter) pairs or group dicts) as group dicts, each parameter
    once.
    """
    if isinstance(given, (dict, torch.Tensor)):
        raise UsageError(
            f"model_parameters is one {type(given).__name__}; give a list of parameters or of "
            "group dicts"
        )
    items: list[Any] = (
        list(given) if given is not None else [p for p in model.parameters() if p.requires_grad]
    )
    groups = (
        [dict(g) for g in items] if items and isinstance(items[0], dict) else [{"params": items}]
    )
    seen: set[torch.Tensor] = set()
    for index, group in enumerate(groups):
        params = [group["params"]] if isinstance(group["params"], torch.Tensor) else group["params"]
        group["params"] = [p[1] if isinstance(p, tuple) else p for p in params]
        for param in group["params"]:
            if param in seen:
                raise UsageError(
                    f"model_parameters: a parameter of shape {tuple(param.shape)} stands in group "
                    f"{index} and "
                    "in an earlier place; list it once"
                )
            seen.add(param)
    return groups


def _make_scheduler(given: Any, optimizer: Optimizer | None, chosen: Composition) -> Any:
    if given is None:
        return (
            chosen.scheduler.build(optimizer)
            if chosen.scheduler is not None and optimizer is not None
            else None
        )
    if hasattr(given, "step") and hasattr(given, "state_dict"):
        return given
    if callable(given):
        return given(optimizer)
    raise UsageError(
        "lr_scheduler must have step() and state_dict(), or be a function of the optimizer; got "
        f"{type(given).__name__}"
    )


def _plan(
    chosen: Composition, mesh_param: tuple[int, int] | None, rank: int, world_size: int
) -> Mesh:
    """The mesh of the config; ConfigError where its sizes are not those that were asked for."""
    mesh = chosen.mesh(world_size, rank)
    data, sequence = mesh_param or (chosen.config.core.data_parallel_size, None)
    where = "mesh_param" if mesh_param else "data_parallel_size"
    batch = mesh.size("batch")
    dp = mesh.size("dp")
    for kind, wanted, size in (("data", data, batch), ("sequence", sequence, dp // batch)):
        if wanted not in (None, size):
            raise ConfigError(
                f"{where}: {kind} parallel size {wanted}, but this run has {size} (world "
                f"{world_size}, "
                f"mesh {mesh.describe()})",
                chosen.config.origin,
            )
    return mesh


def _mesh_of(chosen: Composition, mpu: Any, rank: int, world_size: int) -> Mesh:
    """The mesh over the groups that the user has."""
    needed = f"no installed package makes a mesh of mpu, a {type(mpu).__name__}"
    found = chosen.plugins.installed_driver(
        "ds_mesh", needed, mpu=mpu, rank=rank, world_size=world_size
    )
    return cast(Mesh, found)
