"""Optimizer states of chosen elements: from the host's to the device's, and back."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_zero.zenflow.columns import Chosen

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ds_core.kernels import Kernels

_BETA = {"exp_avg": 0, "exp_avg_sq": 1, "max_exp_avg_sq": 1}


def steps_of(state: Mapping[str, Any]) -> int:
    """How often an optimizer has updated what has this state; 0 also where it does not count."""
    return int(state.get("step", 0))


def carry(key: str, group: Mapping[str, Any], old: int, new: int) -> float:
    """What to multiply an optimizer state by when its count of updates becomes another one.

    Adam divides its moments by 1 - beta^steps; the quotients, which are what the moments estimate,
    stay the same. States that are not corrected for their beginning stay as they are.
    """
    place = _BETA.get(key)
    betas = group.get("betas")
    if (
        place is None
        or betas is None
        or not old
        or not new
        or old == new
        or not group.get("bias_correction", True)
    ):
        return 1.0
    beta = float(betas[place])
    return (1.0 - beta**new) / (1.0 - beta**old)


def take_states(
    chosen: Chosen,
    host: Mapping[str, Any],
    like: Tensor,
    group: Mapping[str, Any],
    steps: int,
    device: torch.device,
) -> dict[str, Any]:
    """The states of `chosen`, as if there had been `steps` updates.

    host: those of the fragment.
    like: the tensor that has them there.
    """
    found: dict[str, Any] = {}
    for key, value in host.items():
        if isinstance(value, Tensor) and value.shape == like.shape and like.dim():
            found[key] = (
                chosen.take(value).to(device).mul_(carry(key, group, steps_of(host), steps))
            )
        else:
            found[key] = copy.deepcopy(value)
    if isinstance(found.get("step"), Tensor):
        found["step"] = torch.full_like(found["step"], float(steps))
    return found


def put_states(
    chosen: Chosen,
    part: Mapping[str, Any],
    size: int,
    host: dict[str, Tensor],
    group: Mapping[str, Any],
    steps: int,
) -> None:
    """Write the states `part`, of `size` elements, into those of a fragment, as if there had been
    `steps` updates.
    """
    for key, into in host.items():
        value = part.get(key)
        if isinstance(value, Tensor) and value.numel() == size and into.dim():
            chosen.put(into, value * carry(key, group, steps_of(part), steps))


def twin(optimizer: Optimizer, kernels: Kernels) -> Optimizer:
    """An optimizer with the same arithmetic and hooks; its parameter groups and states are still
    the same objects.
    """
    made = copy.copy(optimizer)
    for key, value in vars(optimizer).items():
        if key != "step":  # which schedules put there, bound to the other
            made.__dict__.setdefault(key, value)
    made._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
    made._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks
    if hasattr(made, "use_kernels"):
        made.use_kernels(kernels)
    return made
