"""Stage 0: the optimizer knows its parameters by number only, so names follow from shapes and
values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from ds_run_state.states import StateTensor
from torch import Tensor

from ds_checkpoint_deepspeed.reading.foreign import Part, scaler_of, whole
from ds_checkpoint_deepspeed.reading.zero import expert_place

_Kind = tuple[bool, "torch.Size | None"]
"""(of a group of experts, the shape; None where the optimizer keeps no moments)."""


def shared_tensors(module: Mapping[str, Tensor]) -> dict[str, str]:
    """Further name -> first name, of weights that are one tensor."""
    shared: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in module.items():
        place = (
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
        )
        if tensor.numel() and place in first:
            shared[name] = first[place]
        first.setdefault(place, name)
    return shared


def read_stage0(module: Mapping[str, Tensor], buffers: set[str], saved: Any) -> Part:
    """The weights of `module`, and the optimizer's states; `saved`: its state dict, None without
    one.
    """
    shared = shared_tensors(module)
    module = {n: t for n, t in module.items() if n not in shared}
    pieces = [whole(f"module/{n}", t) for n, t in module.items()]
    if not isinstance(saved, dict):
        return Part(pieces, shared)
    inner = saved.get("optimizer_state_dict", saved)  # what wraps it under 16-bit modes
    names, why = _names(inner, saved.get("fp32_groups"), module, buffers)
    if why:
        return Part(pieces, shared, scaler=scaler_of(saved), missing=[why])
    masters = [m for group in saved.get("fp32_groups") or () for m in group]
    pieces += [whole(f"master/{names[i]}", m) for i, m in enumerate(masters)]
    for index, state in inner["state"].items():
        pieces += _states(names[index], state, module[names[index]].shape)
    frozen = [n for n in module if n not in buffers and n not in names.values()]
    order = [[names[i] for i in group["params"]] for group in inner["param_groups"]]
    return Part(pieces, shared, frozen, inner["param_groups"], order, scaler_of(saved))


def _states(name: str, state: Mapping[str, Any], shape: torch.Size) -> list[StateTensor]:
    found = []
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == shape:
            found.append(whole(f"optimizer/{key}/{name}", value))
        elif isinstance(value, (int, float, Tensor)):
            counter = torch.as_tensor(value, dtype=torch.float32).reshape(())
            found.append(whole(f"optimizer/{key}/{name}", counter))
    return found


def _names(
    inner: dict[str, Any], masters: Any, module: Mapping[str, Tensor], buffers: set[str]
) -> tuple[dict[int, str], str]:
    """The parameter of each number in the optimizer; or why it cannot be found."""
    free = [n for n in module if n not in buffers]
    values = [m for group in masters or () for m in group]
    kinds = _kinds(inner)
    if not values and (names := _in_order(inner, kinds, free, module)) is not None:
        return names, ""
    ambiguous = _in_several_groups(inner, kinds)
    has_experts = any(of_experts for of_experts, _ in kinds.values())
    left = Counter(kinds.values())
    names = {}
    for number, kind in kinds.items():
        of_experts, shape = kind
        # Groups of experts say so: then experts and other weights of a shape are distinguished.
        there = [n for n in free if not has_experts or (expert_place(n) is not None) == of_experts]
        if values:
            # 16-bit modes: the fp32 master rounds to exactly one weight.
            fitting = [n for n in there if _rounds_to(values[number], module[n])]
        else:
            # In one group they come in the module's order, unless there are more of a shape than
            # the optimizer has.
            fitting = [n for n in there if shape in (None, module[n].shape)]
            wanted = len(there) if shape is None else left[kind]
            if kind in ambiguous or len(fitting) != wanted:
                fitting = []
        if not fitting:
            return {}, (
                "the optimizer's states are left out: stage 0 stores them without names, and no "
                f"name fits parameter number {number}, of shape {tuple(shape or ())}; save with "
                "stage 1 to keep them"
            )
        left[kind] -= 1
        names[number] = fitting[0]
        free.remove(fitting[0])
    return names, ""


def _kinds(inner: dict[str, Any]) -> dict[int, _Kind]:
    """What is known of each parameter number: whether its group is of experts, and its shape."""
    of_experts = {n: bool(g.get("moe")) for g in inner["param_groups"] for n in g["params"]}
    return {n: (of_experts[n], shape_of(inner["state"].get(n, {}))) for n in of_experts}


def _in_order(
    inner: dict[str, Any],
    kinds: Mapping[int, _Kind],
    free: list[str],
    module: Mapping[str, Tensor],
) -> dict[int, str] | None:
    """The names where one group has all parameters, so in the module's order; else None."""
    if len(inner["param_groups"]) != 1 or len(kinds) != len(free):
        return None
    rows = list(zip(kinds.items(), free, strict=True))
    # A shape that does not fit: another order after all.
    if all(shape in (None, module[name].shape) for (_, (_, shape)), name in rows):
        return {number: name for (number, _), name in rows}
    return None


def _in_several_groups(inner: dict[str, Any], kinds: Mapping[int, _Kind]) -> set[_Kind]:
    """Kinds that are in more than one group: no order says which name is in which."""
    by_group = [{kinds[n] for n in g["params"]} for g in inner["param_groups"]]
    return {k for i, one in enumerate(by_group) for other in by_group[:i] for k in one & other}


def shape_of(state: Mapping[str, Any]) -> torch.Size | None:
    """Of a parameter, by its moments; None when it has none (plain SGD)."""
    return next((v.shape for v in state.values() if isinstance(v, Tensor) and v.dim()), None)


def _rounds_to(master: Tensor, weight: Tensor) -> bool:
    return master.shape == weight.shape and torch.equal(master.to(weight.dtype), weight)
