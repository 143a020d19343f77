"""Separating experts' parameters from the others: helpers that scripts written for DeepSpeed call.

Nothing here is needed: which ranks hold which experts follows from param axes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ds_moe.layer import MoE

Group = dict[str, Any]


def has_moe_layers(model: nn.Module) -> tuple[bool, int]:
    """Whether `model` has MoE layers, and how many experts the first of them has (0)."""
    for module in model.modules():
        if isinstance(module, MoE):
            return True, module.num_experts
    return False, 0


def is_moe_param(param: Tensor) -> bool:
    """Whether `param` belongs to the experts of a MoE layer."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(group: Group) -> bool:
    """Whether `split_params_into_different_moe_groups_for_optimizer` made `group` of experts'
    parameters.
    """
    return bool(group.get("moe", False))


def split_params_into_shared_and_expert_params(
    params: Iterable[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """(all others, experts')."""
    params = list(params)
    return [p for p in params if not is_moe_param(p)], [p for p in params if is_moe_param(p)]


def split_params_grads_into_shared_and_expert_params(
    group: Iterable[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of (all others, experts'), in their parameters' dtypes."""
    both = split_params_into_shared_and_expert_params(p for p in group if p.grad is not None)
    shared, experts = (
        [p.grad.to(p.dtype) for p in params if p.grad is not None] for params in both
    )
    return shared, experts


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Group | Iterable[Group], max_group_size: int | None = 178956971
) -> list[Group]:
    """Parameter groups in which expert parameters are separate, with the hyperparameters of their
    former group.

    max_group_size: elements; experts' groups that would be larger are divided. None: never.
    Accepted by `ds_core.initialize` as any other groups are.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    shared = []
    experts = []
    for group in groups:
        others, theirs = split_params_into_shared_and_expert_params(group["params"])
        shared.append({**group, "params": others})
        by_name: dict[str, list[Tensor]] = {}
        for param in theirs:
            by_name.setdefault(str(getattr(param, "group_name", "")), []).append(param)
        for name, members in by_name.items():
            parts = _split_by_size(members, max_group_size)
            experts += [{**group, "params": part, "moe": True, "name": name} for part in parts]
    return [g for g in shared if g["params"] or len(groups) == 1] + experts


def configure_moe_param_groups(model_parameters: Iterable[Any]) -> list[Any]:
    """Parameters, or groups, as groups with separate expert parameters; unchanged without any."""
    items = list(model_parameters)
    groups = items if items and isinstance(items[0], dict) else [{"params": items}]
    if not any(is_moe_param(p) for g in groups for p in g["params"]) or any(
        is_moe_param_group(g) for g in groups
    ):
        return items
    return split_params_into_different_moe_groups_for_optimizer(groups)


def _split_by_size(params: list[Tensor], most: int | None) -> list[list[Tensor]]:
    parts: list[list[Tensor]] = [[]]
    for param in params:
        if (
            most is not None
            and parts[-1]
            and sum(p.numel() for p in parts[-1]) + param.numel() > most
        ):
            parts.append([])
        parts[-1].append(param)
    return parts
