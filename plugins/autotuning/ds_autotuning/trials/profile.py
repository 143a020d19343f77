"""A model's profile: joined from what ranks saw, and its module built again on the meta device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ds_autotuning.records import ModuleRow, Parameter, Profile, Result

if TYPE_CHECKING:
    from torch import nn


def joined(rows: Sequence[Mapping[str, Any]], micro: int, result: Result) -> Profile:
    """What all ranks saw of a model: those of a pipeline may have built their own stages only.

    result: of the same run, on micro-batches of `micro` samples; facts ``peaks`` has its memory.
    """
    profiles = [Profile.from_json(row) for row in rows]
    modules: dict[str, ModuleRow] = {}
    for profile in profiles:
        for row in profile.modules:
            known = modules.get(row.path)
            modules[row.path] = row if known is None else _both(known, row)
    params = [p for row in modules.values() for p in row.parameters if not p.shared]
    facts = {**profiles[0].facts}
    for name in ("sequence_length", "hidden_size", "recomputed_part"):
        facts[name] = next((p.facts[name] for p in profiles if p.facts.get(name)), None)
    for name in ("device_memory", "host_memory"):
        facts[name] = min(p.facts[name] for p in profiles)
    for name in ("experts", "layers"):
        facts[name] = max(p.facts[name] for p in profiles)
    facts["peaks"] = {str(micro): {"device": result.peak_device, "host": result.peak_host}}
    seconds = {} if result.latency is None else {micro: result.latency}
    return Profile(
        sum(_count(p) for p in params),
        sum(_count(p) for p in params if p.requires_grad),
        tuple(modules.values()),
        seconds=seconds,
        facts=facts,
    )


def _both(one: ModuleRow, other: ModuleRow) -> ModuleRow:
    known = {p.name for p in one.parameters}
    return dataclasses.replace(
        one, parameters=(*one.parameters, *(p for p in other.parameters if p.name not in known))
    )


def _count(parameter: Parameter) -> int:
    count = 1
    for size in parameter.shape:
        count *= size
    return count


def fit_line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Least squares: intercept and slope, which is not below 0 (memory does not shrink with the
    batch).
    """
    rows = list(points)
    if not rows:
        return 0.0, 0.0
    mean_x = sum(x for x, _ in rows) / len(rows)
    mean_y = sum(y for _, y in rows) / len(rows)
    spread = sum((x - mean_x) ** 2 for x, _ in rows)
    slope = max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in rows) / spread) if spread else 0.0
    return mean_y - slope * mean_x, slope


# -- the module again ------------------------------------------------------------------------------


def build(
    profile: Profile,
    shape: Callable[[str, Parameter], tuple[int, ...]] | None = None,
    without: Iterable[str] = (),
) -> nn.Module:
    """A module on the meta device with the tree, the class names and the parameters of the profiled
    one.

    It cannot be run.

    shape: ``(name, parameter) -> shape`` of what one rank has of it; by default all.
    without: paths of modules that are left out, with all below them.
    """
    import torch
    from torch import nn

    left_out = tuple(without)
    params: dict[str, nn.Parameter] = {}
    # modules of one class stay so: that is how blocks are recognised
    kinds: dict[str, type[nn.Module]] = {}
    root: nn.Module | None = None
    for row in profile.modules:
        if any(row.path == path or row.path.startswith(f"{path}.") for path in left_out):
            continue
        made = kinds.setdefault(row.kind, _class_of(row.kind))()
        for parameter in row.parameters:
            name = f"{row.path}.{parameter.name}" if row.path else parameter.name
            if (known := params.get(parameter.shared)) is None:
                size = parameter.shape if shape is None else shape(name, parameter)
                value = torch.empty(size, dtype=getattr(torch, parameter.dtype), device="meta")
                known = nn.Parameter(value, requires_grad=parameter.requires_grad)
            made.register_parameter(parameter.name, known)
            params[name] = known
        if root is None:
            root = made
        else:
            parent, _, last = row.path.rpartition(".")
            root.get_submodule(parent).register_module(last, made)
    return nn.Module() if root is None else root


def _class_of(kind: str) -> type[nn.Module]:
    """A class of the name `kind` that does nothing; torch's own containers are themselves."""
    from torch import nn

    held = {"Sequential": nn.Sequential, "ModuleList": nn.ModuleList, "ModuleDict": nn.ModuleDict}
    return held.get(kind) or type(kind, (nn.Module,), {})
