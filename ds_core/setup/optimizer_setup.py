"""The optimizer and the schedule of an engine, from what the user gave and what the config chose."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from ds_core import comm
from ds_core.entries import OptimizerEntry, resolve
from ds_core.errors import UsageError
from ds_core.partition import ParamGroups, Partitioner, check_grain, required
from ds_core.setup.optim import torch_grain

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.setup.compose import Composition

UNDECLARED = "torch.optim:Optimizer"
"""What an `OptimizerEntry` loads that only declares, of an optimizer that the user made."""


def optimizer_entry(optimizer: Any, chosen: Composition) -> OptimizerEntry:
    """What is declared of the optimizer; also of an object or class of the user's that is torch's
    or a plugin's own.
    """
    if optimizer is None:
        if chosen.optimizer is None:
            return OptimizerEntry(UNDECLARED)
        entry = cast(OptimizerEntry, chosen.optimizer.entry)
        if entry.grain is not None:
            return entry
        optimizer = resolve(entry.load)  # by its dotted path
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    if issubclass(cls, Optimizer) and (grain := torch_grain(cls)) is not None:
        return OptimizerEntry(UNDECLARED, grain=grain)
    for answer in chosen.plugins.offers("ds_optimizers") if issubclass(cls, Optimizer) else ():
        for name, entry in answer.value.items():
            # The name alone is not enough: any package may call a class "Adam".
            same_package = re.split("[.:]", entry.load)[0] == cls.__module__.partition(".")[0]
            if same_package and name.lower() == cls.__name__.lower():
                chosen.plugins.join(answer.plugin)
                return cast(OptimizerEntry, entry)
    return OptimizerEntry(UNDECLARED, grain=None)


def check_step(optimizer: Optimizer) -> None:
    """Raise UsageError where `Engine.step` could not call the optimizer's ``step()``."""
    # The class's `step`: torch's schedules wrap that of the instance.
    if needs := required(type(optimizer).step.__get__(optimizer)):
        raise UsageError(
            f"{type(optimizer).__name__}.step needs {', '.join(needs)}, and engine.step() gives "
            "none: an optimizer that computes the loss again by itself (LBFGS) cannot "
            "be driven by forward, backward and step; use one whose step() goes without arguments"
        )


def check_whole(
    ctx: Context,
    built: Optimizer,
    given: Any,
    entry: OptimizerEntry,
    chosen: Composition,
) -> None:
    """Raise ConfigError where `built` needs whole what this mesh divides over ranks. Collective.

    given: the `optimizer` of `initialize`.
    entry: what is declared of it.
    """
    grain = ctx.grain
    if grain is None:  # what a function of the user's makes is known only now
        entry = optimizer_entry(built, chosen)
        grain = "element" if entry.collects else entry.grain
    path = "optimizer.type" if given is None else "optimizer="
    check_grain(ctx, grain, path, type(built).__name__)


def attach(
    ctx: Context,
    partitioner: Partitioner,
    attached: ExitStack,
    given: Optimizer | Callable[[Any], Optimizer] | None,
    model_parameters: Iterable[Any] | None,
    chosen: Composition,
) -> Optimizer | None:
    """Let the partitioner take the model, and the optimizer the tensors that it is to update.

    attached: detaches the partitioner, once it has the model.
    given: the `optimizer` of `initialize`.

    Returns the optimizer; None where nothing is to be updated.
    """
    assert ctx.module is not None
    if isinstance(given, Optimizer):
        groups = given.param_groups
        _note_trained(ctx, groups)
        updated = partitioner.attach(ctx.module, [dict(g) for g in groups], updated=True)
        attached.callback(partitioner.detach)
        _replace_params(given, updated, partitioner)
        return given
    groups = _param_groups(ctx.module, model_parameters)
    _note_trained(ctx, groups)
    make = given
    if make is None and chosen.optimizer is not None:
        # By names and shapes of parameters, which are gone once the model is partitioned.
        groups = chosen.optimizer.groups(groups, {p: info.name for p, info in ctx.params.items()})
        make = chosen.optimizer.build
    groups = partitioner.attach(ctx.module, groups, updated=make is not None)
    attached.callback(partitioner.detach)
    return None if make is None else _build(ctx, make, groups)


def _replace_params(optimizer: Optimizer, updated: ParamGroups, partitioner: Partitioner) -> None:
    """Let an optimizer that the user made update `updated`, from the states that it has."""
    for group, new in zip(optimizer.param_groups, updated, strict=True):
        for before, after in zip(group["params"], new["params"], strict=True):
            if before is not after and before in optimizer.state:
                if kept := partitioner.adopt(before, optimizer.state.pop(before)):
                    optimizer.state[after] = kept
        group["params"] = new["params"]


def _build(ctx: Context, make: Callable[[Any], Any], groups: ParamGroups) -> Optimizer:
    """The optimizer that `make` gives; UsageError for one that would not train the model."""
    trains = any(len(g["params"]) for g in groups)
    # Ranks may have different parameters: a stage of a pipeline may have none to train.
    if ctx.mesh.size("dp") < ctx.world_size:
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
    check_step(built)
    given = {id(p) for g in groups for p in g["params"]}
    if any(id(p) not in given for g in built.param_groups for p in g["params"]):
        raise UsageError(
            "the optimizer function made an optimizer of other tensors than it was given; it must "
            "use its argument, which may hold fp32 masters or partitions of the parameters"
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
                "parameter of the model; pass parameters of the model given to initialize (after "
                "any transform they must still be in it)"
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
                    f"{index} and in an earlier place; list it once"
                )
            seen.add(param)
    return groups


def make_scheduler(given: Any, optimizer: Optimizer | None, chosen: Composition) -> Any:
    """The schedule that was given, else the config's; None where nothing is updated."""
    if given is None:
        wanted = chosen.scheduler if optimizer is not None else None
        return wanted.build(optimizer) if wanted is not None else None
    if hasattr(given, "step") and hasattr(given, "state_dict"):
        return given
    if callable(given):
        return given(optimizer)
    raise UsageError(
        "lr_scheduler must have step() and state_dict(), or be a function of the optimizer; got "
        f"{type(given).__name__}"
    )
