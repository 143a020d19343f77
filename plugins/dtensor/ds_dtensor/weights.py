"""The weights of an engine as torch's tools see them: `state_dict` and `parameters`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from ds_access.states import locate
from ds_run_state.states import states_of
from torch import Tensor, nn

from ds_core import comm
from ds_core.errors import UsageError
from ds_dtensor.places import Places, alike, check, full_shape

if TYPE_CHECKING:
    from ds_run_state.states import StateTensor

    from ds_core.engine import Engine, RunningEngine


@dataclass(frozen=True, slots=True)
class Rest:
    """A weight as the module has it between steps, not what an optimizer updates.

    state: this rank's piece; None: no element.
    shape: of what this tensor-parallel rank has of it.
    whole: every rank has all of that.
    """

    state: StateTensor | None
    shape: tuple[int, ...]
    whole: bool


def state_dict(
    engine: Engine,
    *arguments: Any,
    view: str | None = None,
    masters: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """The weights and buffers by name, without a copy: sharded ones are DTensors.

    So `torch.distributed.checkpoint` saves and loads them where they are. After a load call
    `load_state_dict` with the result, as for any module of torch's: weights are made from masters.

    view: "dtensor": every weight is a DTensor, on one mesh, so that norms go over all of them.
        None: those that every rank has whole are plain tensors, as in a module's own state dict.
    masters: what the optimizer updates (fp32 where the config trains in 16 bit) stands for the
        weight. False: the module's weights, in their dtype.
    arguments, options: those of a module's ``state_dict``, which answers then.

    Collective where the model has frozen parameters, or without `masters`. Raises UsageError for
    pipelines, experts over ranks, and weights on a disk.
    """
    if arguments or options:
        found: dict[str, Any] = engine.module.state_dict(*arguments, **options)
        return found
    if view not in (None, "dtensor"):
        raise UsageError(f"state_dict(view={view!r}); it is 'dtensor' or None")
    check(engine)
    rests = weights_at_rest(engine, masters=masters)
    views = views_of(engine, rests, wraps=view is not None)
    # With `keep_vars` values are the parameters themselves, and no placeholders.
    return {key: _shown(value, views) for key, value in named_values(engine)}


def named_values(engine: RunningEngine) -> Iterator[tuple[str, Any]]:
    """The entries of the module's state dict: parameters, buffers and extra states by key."""
    yield from engine.module.state_dict(keep_vars=True).items()


def _shown(value: Any, views: Mapping[Any, Tensor]) -> Any:
    """What stands for a value of the module; its extra states may be anything, lists too."""
    if not isinstance(value, Tensor):
        return value
    return views[value] if value in views else value.detach()


def views_of(
    engine: RunningEngine, rests: Mapping[nn.Parameter, Rest], *, wraps: bool
) -> dict[Any, Tensor]:
    """A view of each parameter. Those of `rests` are views of what is there.

    wraps: whether those that every rank has whole become DTensors too.
    """
    places = Places(engine, wraps=wraps)
    with alike():
        return {
            param: _trained(engine, places, param)
            if (rest := rests.get(param)) is None
            else _at_rest(engine, places, param, rest)
            for param in engine.ctx.params
        }


def _trained(engine: RunningEngine, places: Places, param: nn.Parameter) -> Tensor:
    held = locate(engine, param)
    assert held is not None
    return places.trained(held, held.updated)


def _at_rest(engine: RunningEngine, places: Places, param: nn.Parameter, rest: Rest) -> Tensor:
    info = engine.ctx.params[param]
    state = rest.state
    if state is None:
        return places.nothing(full_shape(engine.ctx, info.name, rest.shape), param.dtype)
    _refuse_evicted(state)
    span = (state.start, state.stop)
    counts = state.store and engine.ctx.mesh.index(*state.copies) == 0
    return places.view(info, state.tensor, rest.shape, span, whole=rest.whole, counts=counts)


def _refuse_evicted(state: StateTensor) -> None:
    if state.read is not None:
        raise UsageError(
            f"dscore-dtensor: {state.name!r} rests on a disk or is kept quantised "
            "(zero_optimization.offload_param with device 'nvme', or "
            "zero_quantized_nontrainable_weights), so there is no memory to look at; use "
            "engine.save_checkpoint"
        )


def weights_at_rest(engine: RunningEngine, *, masters: bool) -> Mapping[nn.Parameter, Rest]:
    """The weights that no optimizer updates; without `masters` all weights.

    Collective if there are any: a rank knows the shapes of the pieces that it has.
    """
    params = {
        param: info.name
        for param, info in engine.ctx.params.items()
        if not masters or locate(engine, param) is None
    }
    if not params:
        return {}
    wanted = {f"module/{name}" for name in params.values()}
    states = {s.name: s for s in states_of(engine.partitioner).states(None) if s.name in wanted}
    mine = {
        n: [list(s.shape), s.stop - s.start == torch.Size(s.shape).numel()]
        for n, s in states.items()
    }
    ranks = comm.all_gather_json(mine)
    found = {}
    for param, name in params.items():
        key = f"module/{name}"
        shape = tuple(next(rank[key][0] for rank in ranks if key in rank))
        whole = all(key in rank and rank[key][1] for rank in ranks)
        found[param] = Rest(states.get(key), shape, whole)
    return found


def parameters(engine: Engine) -> list[Tensor]:
    """What the optimizer updates, as DTensors whose ``.grad`` is the reduced gradient.

    For `torch.nn.utils.clip_grad_norm_` and its kin between ``engine.backward`` and
    ``engine.step``: they see the global norm, and what they change the step uses.

    Raises UsageError under fp16, whose gradients are scaled; use ``gradient_clipping``.
    """
    if engine.scaler is not None:
        raise UsageError(
            "ds_dtensor.parameters and 'fp16' do not go together: gradients are multiplied by the "
            "loss scale until the step; use 'gradient_clipping' of the config"
        )
    if engine.partitioner.gradient_hooks.window.divisor != 1:
        raise UsageError(
            "ds_dtensor.parameters: the gradients of a plain loss.backward() are divided by "
            "gradient_accumulation_steps in the step; use engine.backward(loss)"
        )
    places = Places(engine, wraps=True)
    found = []
    for param in engine.ctx.trained:
        held = locate(engine, param)
        if held is None or not param.requires_grad:
            continue
        view = places.trained(held, held.updated)
        found.append(view)
        if (grad := held.reduced()) is not None:
            if grad.dtype != view.dtype:
                view.grad_dtype = grad.dtype
            view.grad = places.gradient(held, grad)
    return found
