"""Looking into, and changing, the states of single parameters while training, under any partitioner
and precision.

"Full" functions take and give whole tensors of the parameter's shape and are **collective**: every
rank that holds a copy or a range of the parameter must call them, in the same order, with equal
values. "Local" ones are about what this rank holds, without communication; they need a partitioner
that partitions weights (ZeRO stage 3).

Weights and optimizer states may be read and set at any time outside forward and backward. Gradients
are there from backward until `step`. What is read is a copy, on the accelerator. A parameter that
no live engine's optimizer updates reads as None, and setting it is an error.

[Note: which gradient] It is the mean over data-parallel ranks of what the backwards since the last
step have given, in the dtype in which gradients accumulate, as the step will see it before it
unscales and clips: under fp16 it is multiplied by the loss scale (``engine.loss_scale``). In the
middle of an accumulation window, or while reduction is held back (``no_sync``,
``coalesce_grad_reduction``), it is the part that the backwards so far have given, and what is set
replaces that part: later backwards add to it. It is divided by the accumulation steps in every
case: `engine.backward` beforehand, or the step after a plain ``loss.backward()`` (``param.grad`` is
still the sum then). The local ones see what has been reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_access.param_shard import LocatesParams
from ds_access.replicated_shard import ReplicatedShard
from ds_access.unshard import (
    WHEN,
    agree_kind,
    flags,
    no_state,
    owner,
    put_together,
    put_whole_state,
    states_of,
    whole_grads,
    whole_state,
)
from ds_core import comm
from ds_core.errors import UsageError
from ds_core.partition import Replicated
from ds_core.process import STATE

if TYPE_CHECKING:
    from ds_access.param_shard import ParamShard, Ranges
    from ds_core.engine import RunningEngine

    _Found = tuple[ParamShard, RunningEngine]

__all__ = [
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
]

AT_ONCE = 2**27
"""The most elements of gradients that `safe_update_full_grad_vectorized` holds whole at a time (a
larger one alone).
"""


# -- whole tensors ---------------------------------------------------------------------------------


@torch.no_grad()
def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The whole master weight, in its dtype (fp32 under bf16 and fp16) and the parameter's shape.

    Collective.
    """
    found = _find(param)
    if found is None:
        return None
    return _master(found[0])


@torch.no_grad()
def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The whole gradient; see [Note: which gradient].

    None when no rank used it, or at the wrong time. Collective.
    """
    found = _find(param)
    grad = None if found is None else whole_grads([found[0]])[0]
    return grad if found is None or grad is None else _divided(grad, found[1])


@torch.no_grad()
def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """The whole state `optim_state_key`, such as ``"exp_avg"``; one value per parameter
    (``"step"``) has no dimensions.

    Collective. Raises ValueError on every rank for a key that the optimizer does not have for it.
    """
    found = _find(param)
    if found is None:
        return None
    held = found[0]
    optimizer = found[1].optimizer
    if (whole := whole_state(optimizer, held, optim_state_key)) is not None:
        return whole
    kind = agree_kind(held, optimizer, optim_state_key)
    if kind.value is not None:
        return torch.tensor(kind.value, dtype=kind.dtype, device=held.device)
    start, stop = held.updated_ranges[held.index]
    mine = states_of(held, optimizer).get(optim_state_key)
    if kind.whole:  # not one value per element: who has all of the parameter has it
        first = owner(held)
        out = torch.empty(kind.shape, dtype=kind.dtype, device=held.device)
        # Where every rank has a copy there is nothing to send.
        copied = held.copied(held.updated_ranges)
        if held.index == first or copied:
            assert isinstance(mine, Tensor)
            out.copy_(held.read(mine))
        if not copied:
            comm.broadcast(out, src=held.ranks[first], group=held.group)
        return out
    # A rank may own no element; it takes part with an empty piece.
    piece = (
        held.read(mine).reshape(-1)
        if isinstance(mine, Tensor) and stop > start
        else _nothing(held, kind.dtype)
    )
    return put_together([held], [piece], [held.updated_ranges])[0]


@torch.no_grad()
def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Make `value` the master weight, and, rounded, the module's weight wherever it is whole now.

    Collective.

    Were `value` to differ between ranks, each element's would be that of the rank that owns it, on
    all ranks.
    """
    held, _ = _found(param, "safe_set_full_fp32_param")
    _check_shape("safe_set_full_fp32_param", held, value, held.shape)
    # First the master, which the optimizer updates; then the weight, rounded from it on all ranks.
    held.write(held.updated, _mine(held, value, held.updated_ranges).to(held.updated.dtype))
    _refuse_old_graphs(held)
    held.set_weight(_master(held))


@torch.no_grad()
def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Make `value` the gradient that the step uses; see [Note: which gradient]. Collective.

    Raises UsageError when there are no gradients now, or `param` is frozen.
    """
    held, engine = _found(param, "safe_set_full_grad")
    _check_shape("safe_set_full_grad", held, value, held.shape)
    _check_trainable("safe_set_full_grad", held)
    if not any(f[-1] for f in flags([held])):
        raise UsageError(f"safe_set_full_grad: parameter {held.name!r} has no gradient now; {WHEN}")
    held.set_grad(_undivided(_mine(held, value, held.ranges).to(held.grad_dtype), engine))


@torch.no_grad()
def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Make `value` the optimizer's state `optim_state_key` (a number for one value per parameter).

    Collective.

    Raises ValueError on every rank for a key that the optimizer does not have for it.
    """
    held, engine = _found(param, "safe_set_full_optimizer_state")
    optimizer = engine.optimizer
    if (whole := whole_state(optimizer, held, optim_state_key)) is not None:
        _check_shape("safe_set_full_optimizer_state", held, value, tuple(whole.shape))
        put_whole_state(optimizer, held, optim_state_key, value)
        return
    kind = agree_kind(held, optimizer, optim_state_key)
    single = kind.value is not None
    value = torch.as_tensor(value)
    shape = () if single else kind.shape if kind.whole else held.shape
    _check_shape("safe_set_full_optimizer_state", held, value, shape)
    # After the collective above, so that all ranks have taken part in it.
    if optim_state_key not in (states := states_of(held, optimizer)):
        return  # it is another rank's
    if single or kind.whole:
        piece = _from_first(held, value) if held.copied(held.updated_ranges) else value
    else:
        piece = _mine(held, value, held.updated_ranges)
    _put(held, optimizer, states, optim_state_key, piece)


@torch.no_grad()
def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace each gradient of `param_list` by ``update_func(whole gradient, parameter)``, in few
    collectives.

    Parameters that have no gradient are left out. Collective; every rank's `update_func` must give
    the same. Raises UsageError when there are no gradients now.
    """
    chosen = [_found(p, "safe_update_full_grad_vectorized") for p in dict.fromkeys(param_list)]
    run: list[_Found] = []
    # Few collectives, and no more full gradients in memory than AT_ONCE.
    for found in chosen:
        if run and sum(held.numel for held, _ in run) + found[0].numel > AT_ONCE:
            _update(run, update_func)
            run = []
        run.append(found)
    if run:
        _update(run, update_func)


def _update(run: Sequence[_Found], update_func: Callable[[Tensor, nn.Parameter], Tensor]) -> None:
    grads = whole_grads([held for held, _ in run], needed="safe_update_full_grad_vectorized")
    for (held, engine), grad in zip(run, grads, strict=True):
        if grad is None:
            continue
        new = update_func(_divided(grad, engine), held.param)
        if not isinstance(new, Tensor):
            raise UsageError(
                f"safe_update_full_grad_vectorized: update_func gave {type(new).__name__} for "
                f"{held.name!r}; it must "
                "return the new gradient"
            )
        _check_shape("safe_update_full_grad_vectorized", held, new, held.shape)
        held.set_grad(_undivided(_mine(held, new, held.ranges).to(held.grad_dtype), engine))


# -- what this rank holds --------------------------------------------------------------------------


@torch.no_grad()
def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """This rank's range of the master weight, flat; it may be empty. No communication."""
    found = _local(param, "safe_get_local_fp32_param")
    return None if found is None else _copy(found[0], found[0].read(found[0].updated))


@torch.no_grad()
def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's range of the reduced gradient, flat; None when there is none.

    No communication.
    """
    found = _local(param, "safe_get_local_grad")
    grad = None if found is None else found[0].reduced()
    return None if found is None or grad is None else _divided(_copy(found[0], grad), found[1])


@torch.no_grad()
def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """This rank's range of an optimizer state, flat; it may be empty. No communication.

    Raises ValueError for a key that the optimizer does not have.
    """
    found = _local(param, "safe_get_local_optimizer_state")
    if found is None:
        return None
    held = found[0]
    optimizer = found[1].optimizer
    value = _local_state(held, optimizer, optim_state_key)
    return (
        _copy(held, held.read(value))
        if isinstance(value, Tensor)
        else torch.tensor(value, device=held.device)
    )


@torch.no_grad()
def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Make `value` (as many elements as this rank's range) the master weight here, and, rounded,
    the weight's range.

    No communication: other ranks see it when the weight is gathered next. So a parameter that is
    whole on all ranks (a small one) is refused.
    """
    held, _ = _local_found(param, "safe_set_local_fp32_param", value)
    if held.ranges != held.updated_ranges:
        raise UsageError(
            f"safe_set_local_fp32_param: the optimizer updates parameter {held.name!r} whole on "
            "one rank, and others "
            "hold parts of the weight; use safe_set_full_fp32_param"
        )
    if not held.local and len(held.ranks) > 1:
        raise UsageError(
            f"safe_set_local_fp32_param: parameter {held.name!r} is whole on every rank (it is "
            "below "
            "param_persistence_threshold), and other ranks would not see the change; use "
            "safe_set_full_fp32_param, or "
            "set that threshold to 0"
        )
    held.check_local_write()
    held.write(held.updated, value.reshape(-1).to(held.updated.dtype))
    _refuse_old_graphs(held)
    held.round()


@torch.no_grad()
def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Make `value` this rank's range of the gradient. No communication.

    Raises UsageError when the parameter has no reduced gradient now.
    """
    held, engine = _local_found(param, "safe_set_local_grad", value)
    grad = held.reduced()
    if grad is None:
        raise UsageError(
            f"safe_set_local_grad: parameter {held.name!r} has no reduced gradient now; {WHEN} "
            "(where no rank used the "
            "parameter, use safe_set_full_grad)"
        )
    grad.copy_(_undivided(value.reshape(-1), engine))


@torch.no_grad()
def safe_set_local_optimizer_state(
    param: nn.Parameter, value: Tensor, optim_state_key: str
) -> None:
    """Make `value` this rank's range of an optimizer state.

    No communication. See `safe_get_local_optimizer_state`.
    """
    found = _local(param, "safe_set_local_optimizer_state")
    if found is None:
        found = _found(param, "safe_set_local_optimizer_state")
    held = found[0]
    optimizer = found[1].optimizer
    old = _local_state(held, optimizer, optim_state_key)
    value = torch.as_tensor(value)
    wanted = old.numel() if isinstance(old, Tensor) else 1
    if wanted == 0 and value.numel() < 2:
        return  # nothing of it, or its one number for all elements, which ranks with elements keep
    if value.numel() != wanted:
        raise UsageError(
            f"safe_set_local_optimizer_state: {optim_state_key!r} of parameter {held.name!r} has "
            f"{wanted} elements on "
            f"this rank, the value has {value.numel()} (shape {tuple(value.shape)})"
        )
    _put(held, optimizer, states_of(held, optimizer), optim_state_key, value)


# -- finding ---------------------------------------------------------------------------------------


def _find(param: Tensor) -> _Found | None:
    """What this rank holds of `param`, and the engine whose optimizer updates it; the newest engine
    first.
    """
    if not isinstance(param, nn.Parameter):
        raise UsageError(f"expected a parameter of the model, got {type(param).__name__}")
    for engine in reversed(STATE.engines):
        if engine.optimizer is not None and (held := locate(engine, param)) is not None:
            return held, engine
    return None


def locate(engine: RunningEngine, param: nn.Parameter) -> ParamShard | None:
    """What this rank holds of `param` under `engine`; None when no optimizer updates it here."""
    partitioner = engine.partitioner
    if isinstance(partitioner, Replicated) and (slot := partitioner.slots.get(param)) is not None:
        return ReplicatedShard(partitioner, slot)
    return partitioner.locate(param) if isinstance(partitioner, LocatesParams) else None


def _found(param: Tensor, who: str) -> _Found:
    found = _find(param)
    if found is None:
        raise UsageError(
            f"{who}: no optimizer of a live engine updates this parameter of shape "
            f"{tuple(param.shape)}, so there is "
            "nothing to set; it was frozen at initialize, or not among model_parameters, or its "
            "engine was destroyed"
        )
    return found


def _local(param: Tensor, who: str) -> _Found | None:
    found = _find(param)
    if found is not None and not found[0].partitions_weights:
        raise UsageError(
            f"{who}: weights are not partitioned here, so parameter {found[0].name!r} has no local "
            "part; it needs "
            f"zero_optimization stage 3, else use {who.replace('local', 'full')}"
        )
    return found


def _local_found(param: Tensor, who: str, value: Tensor) -> _Found:
    found = _local(param, who) or _found(param, who)
    held = found[0]
    start, stop = (held.ranges if who == "safe_set_local_grad" else held.updated_ranges)[held.index]
    if value.numel() != stop - start:
        raise UsageError(
            f"{who}: this rank holds {stop - start} elements of parameter {held.name!r} (whole "
            f"shape {held.shape}), "
            f"the value has {value.numel()} (shape {tuple(value.shape)})"
        )
    return found


def _check_shape(who: str, held: ParamShard, value: Tensor, shape: Sequence[int]) -> None:
    if tuple(value.shape) != tuple(shape):
        raise UsageError(
            f"{who}: for parameter {held.name!r} the value must have shape {tuple(shape)} "
            f"({torch.Size(shape).numel()} elements), it has {tuple(value.shape)} ({value.numel()} "
            "elements)"
        )


def _check_trainable(who: str, held: ParamShard) -> None:
    if not held.param.requires_grad:
        raise UsageError(
            f"{who}: parameter {held.name!r} is frozen, so the step must not change it; thaw it "
            "first"
        )


def _divided(grad: Tensor, engine: RunningEngine) -> Tensor:
    """`grad`, a copy, divided in place by what the step still divides by; see [Note: which
    gradient].
    """
    return grad if (by := engine.partitioner.gradient_hooks.window.divisor) == 1 else grad.div_(by)


def _undivided(value: Tensor, engine: RunningEngine) -> Tensor:
    """The reverse, for what is set: the step will divide it."""
    return value if (by := engine.partitioner.gradient_hooks.window.divisor) == 1 else value * by


# -- values ----------------------------------------------------------------------------------------


def _master(held: ParamShard) -> Tensor:
    return put_together([held], [held.read(held.updated).reshape(-1)], [held.updated_ranges])[0]


def _mine(held: ParamShard, value: Tensor, ranges: Ranges) -> Tensor:
    """What of a whole `value` is this rank's, flat; where ranks hold copies, the first rank's value
    counts.
    """
    if held.copied(ranges):
        return _from_first(held, value).reshape(-1)
    return value.detach().reshape(-1)[slice(*ranges[held.index])]


def _from_first(held: ParamShard, value: Tensor) -> Tensor:
    value = value.detach().to(held.device, copy=True).contiguous()
    comm.broadcast(value, src=held.ranks[0], group=held.group)
    return value


def _refuse_old_graphs(held: ParamShard) -> None:
    """The weight changes: a graph that has used the old one can no longer go backward, and says
    so."""
    torch.autograd.graph.increment_version(held.param)


def _nothing(held: ParamShard, dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype, device=held.device)


def _copy(held: ParamShard, piece: Tensor) -> Tensor:
    return piece.to(held.device, copy=True).reshape(-1)


def _local_state(held: ParamShard, optimizer: Any, key: str) -> Any:
    """The state here: nothing of it on a rank without elements of the parameter, so that no rank is
    refused alone.
    """
    states = states_of(held, optimizer)
    if key in states:
        return states[key]
    start, stop = held.updated_ranges[held.index]
    if start == stop:
        # Whether there is such a key is to be seen by the other parameters, if this rank has
        # elements of any.
        some = any(p.numel() for group in optimizer.param_groups for p in group["params"])
        if not some or any(key in state for state in optimizer.state.values()):
            return _nothing(held, held.updated.dtype)
    raise ValueError(no_state(held, key, sorted(states)))


def _put(held: ParamShard, optimizer: Any, states: dict[str, Any], key: str, value: Tensor) -> None:
    old = states[key]
    if isinstance(old, Tensor):
        held.write(old, value.to(old.dtype))
    else:
        optimizer.state[held.updated][key] = type(old)(value.item())
