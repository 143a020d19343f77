"""Param axes: for each parameter, the mesh axes along which ranks have different ones, and what
follows from them.

[Note: the enabling rule] Plugins answer `ds_param_axes`; answers merge by union, because two
plugins may both be right about one parameter. From the union alone follow the group that gradients
are reduced over (the dp axes not in it), the divisor (all of dp), and the global norm (each element
counted once).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_core.context import Context, StashKey
from ds_core.errors import ConfigError, PluginError, Problem

if TYPE_CHECKING:
    from collections.abc import Collection

    from ds_core.entries import Grain
    from ds_core.mesh import Mesh

_dtype = attrgetter("dtype")
COUNTED_ELSEWHERE: StashKey[Collection[str]] = StashKey("counted elsewhere")
"""Names of tied parameters and buffers whose original is on another rank along an axis in `held`.
This rank updates its copy too, but the global norm and checkpoints count the original only. The
transform that adds the names here keeps the gradients of the copies equal."""


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """A parameter's (or buffer's) name, and how it is distributed over the mesh.

    held: axes along which ranks have different parameters of this name (grid order, size > 1).
    replicas: the axes of dp along which it is equal, so over which gradients are reduced.
    counted: whether the norm and checkpoints use this copy; see `COUNTED_ELSEWHERE`.
    """

    name: str
    held: tuple[str, ...]
    replicas: tuple[str, ...]
    counted: bool = True


@dataclass(frozen=True, slots=True)
class GradGroup:
    """The elements of gradients that this rank's optimizer gets, disjoint over the ranks along
    `axes`.

    weight: factor of their squares in the global norm; below 1 if several ranks have a gradient of
    one parameter.
    """

    axes: tuple[str, ...]
    tensors: list[Tensor]
    weight: float = 1.0


def collect_params(module: nn.Module, ctx: Context) -> dict[nn.Parameter, ParamInfo]:
    """Ask all plugins about every parameter of `module`; a shared weight is asked about once, under
    its first name.
    """
    return {param: _info(name, param, ctx) for name, param in module.named_parameters()}


def collect_buffers(module: nn.Module, ctx: Context) -> dict[str, ParamInfo]:
    """Ask the same of every buffer of `module`."""
    return {name: _info(name, buffer, ctx) for name, buffer in module.named_buffers()}


def _info(name: str, tensor: Tensor, ctx: Context) -> ParamInfo:
    """What follows from the union of the plugins' answers."""
    held: set[str] = set()
    for answer in ctx.plugins.ask("ds_param_axes", name=name, param=tensor, ctx=ctx):
        unknown = [a for a in answer.value if not ctx.mesh.has(a)]
        if unknown:
            raise PluginError(
                f"plugin {answer.plugin} puts parameter {name!r} on axes {unknown}, which this "
                f"mesh ({ctx.mesh.describe()}) does not have; declare them with ds_mesh_axes"
            )
        held.update(answer.value)
    counted = name not in (ctx.stash.get(COUNTED_ELSEWHERE) or ())
    return ParamInfo(name, ctx.mesh.expand(held), ctx.mesh.replicas(held), counted)


def check_grain(ctx: Context, grain: Grain | None, path: str, what: str) -> None:
    """Raise ConfigError, on all ranks, where `what` would take a part of a trained parameter for
    all of it. Collective.

    A parameter that ranks hold differently is whole where its name is this rank's alone (a layer of
    a pipeline), and a part where others along its axes have one of that name (a slice, a stack of
    experts).

    grain: of `what`; None: unknown.
    path: the key that asks for it.
    """
    if grain == "element" or ctx.world_size == 1:
        return
    model = grain == "model"
    held = [
        info
        for info in map(ctx.params.__getitem__, ctx.trained)
        if info.held and (info.counted or model)
    ]
    names = list(map(set, comm.all_gather_json([info.name for info in held])))
    parts = [[info.name, *info.held] for info in held if model or _is_part(info, names, ctx.mesh)]
    # One rank may see what others cannot: a stage of a pipeline that has no cut layers.
    found = [part for parts in comm.all_gather_json(parts[:1]) for part in parts]
    if not found:
        return
    name, *axes = found[0]
    answers = ctx.plugins.ask("ds_mesh_axes", config=ctx.config)
    makers = {axis.name: str(answer.plugin) for answer in answers for axis in answer.value}
    sizes = ", ".join(
        f"{axis} {ctx.mesh.size(axis)} of {makers.get(axis, 'the given mesh')}" for axis in axes
    )
    whole = (
        f"needs each {grain} whole"
        if grain is not None
        else "may need more than single elements (undeclared)"
    )
    kept = "other parameters of the model" if model else "another part"
    problem = f"{what} {whole}, and of {name!r} each rank along {sizes} has {kept}"
    fix = "use an optimizer of single elements, such as AdamW, or leave that axis at 1"
    if grain is None:
        fix = (
            'declare it by an OptimizerEntry with grain="element" if it is so, or leave that axis '
            "at 1"
        )
    raise ConfigError([Problem(path, problem, fix)], ctx.config.origin)


def _is_part(info: ParamInfo, names: Sequence[Collection[str]], mesh: Mesh) -> bool:
    """Whether another rank along its axes has a parameter of the same name."""
    return any(info.name in names[rank] for rank in mesh.ranks(*info.held) if rank != mesh.rank)


def squared_norm(tensors: list[Tensor]) -> Tensor:
    """The sum of squares of all elements: a 0-d tensor, fp64 for fp64 input and fp32 otherwise.

    The reference of kernel ``squared_norm``; others may give fp64 always. `tensors` live on one
    device; an empty list gives a CPU zero.
    """
    if not tensors:
        return torch.zeros(())
    tensors = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    dtypes = {t.dtype for t in tensors}
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    if dtypes == {wide}:
        norms = list(torch._foreach_norm(tensors))
    else:
        norms = [torch.linalg.vector_norm(t, dtype=wide) for t in tensors]
    stacked = torch.stack(norms)
    return stacked.dot(stacked)


class GradNorm:
    """The global L2 norm of gradients that are distributed over the mesh in any way.

    Sums of squares are added over each group's axes, so each element of the model counts once.
    Which sets of axes occur is agreed once, when it is built: a rank without parameters on some
    axes takes part in their sum.

    kernel_for: device type, dtype -> kernel ``squared_norm``.
    like: tensors on the devices and of the dtypes that gradients will mostly have, so that the
        kernels are found at once.
    """

    def __init__(
        self,
        mesh: Mesh,
        keys: Iterable[tuple[str, ...]],
        kernel_for: Callable[[str, torch.dtype], Callable[[list[Tensor]], Tensor]],
        like: Iterable[Tensor] = (),
    ) -> None:
        self._mesh = mesh
        self._kernel_for = kernel_for
        self._kernels = {
            kind: kernel_for(*kind) for kind in {(t.device.type, t.dtype) for t in like}
        }
        self._only: Callable[[list[Tensor]], Tensor] | None = None
        self._dtypes: set[torch.dtype] = set()  # of the tensors that `_only` serves
        self._settle()
        mine = sorted({mesh.expand(k) for k in keys})
        everyone = (
            comm.all_gather_json([list(k) for k in mine])
            if mesh.world_size > 1
            else [[list(k) for k in mine]]
        )
        self._keys = sorted({tuple(k) for keys in everyone for k in keys})
        # Replicated gradients are the same bits on every rank after an all-reduce; only when ranks
        # see different gradients must they agree on the verdict, or one would skip a step that
        # another takes.
        self._must_agree = any(a for k in self._keys for a in k) and self._keys != [
            mesh.expand(mesh.names)
        ]
        self._must_agree |= mesh.size("dp") != mesh.world_size

    def __call__(self, groups: Sequence[GradGroup], device: torch.device) -> float:
        """The norm, the same on all ranks; inf or nan when any gradient anywhere is not finite."""
        if len(groups) == 1 and not groups[0].axes and self._keys == [()] and not self._must_agree:
            return self._finite(math.sqrt(self._squares(groups[0].tensors, device).item()), groups)
        total = torch.zeros((), dtype=torch.float64, device=device)
        sums = {k: torch.zeros((), dtype=torch.float64, device=device) for k in self._keys}
        for group in groups:
            squares = self._squares(group.tensors, device).to(device, torch.float64)
            sums[self._mesh.expand(group.axes)] += squares * group.weight
        for key, value in sums.items():
            comm.label("norm of gradients")
            comm.all_reduce(value, group=self._mesh.group(*key))
            total += value
        if self._must_agree and self._mesh.world_size > 1:
            # MAX does not carry NaN everywhere, so a non-finite total travels as inf.
            total = torch.where(torch.isfinite(total), total, torch.full_like(total, torch.inf))
            comm.all_reduce(total, op=torch.distributed.ReduceOp.MAX)
        return math.sqrt(total.item()) if total.item() >= 0 else math.nan

    def _squares(self, tensors: list[Tensor], device: torch.device) -> Tensor:
        """Their sum of squares; where offload leaves some gradients on the device, those and the
        host's apart.
        """
        if self._only is not None and self._dtypes.issuperset(map(_dtype, tensors)):
            return self._only(tensors)
        kinds: dict[tuple[str, torch.dtype], list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.device.type, tensor.dtype), []).append(tensor)
        total = torch.zeros((), dtype=torch.float64, device=device)
        for kind, members in kinds.items():
            if kind not in self._kernels:
                self._kernels[kind] = self._kernel_for(*kind)
                self._settle()
            total += self._kernels[kind](members).to(device, torch.float64)
        return total

    def _settle(self) -> None:
        """One call for all tensors, where one function serves all of their dtypes, and they are on
        one device.
        """
        alike = (
            len(set(self._kernels.values())) == 1
            and len({device for device, _ in self._kernels}) == 1
        )
        self._only = next(iter(self._kernels.values())) if alike else None
        self._dtypes = {dtype for _, dtype in self._kernels}

    def _finite(self, norm: float, groups: Sequence[GradGroup]) -> float:
        """Tell a sum of squares that overflowed fp32 from a gradient that is not finite."""
        if math.isfinite(norm):
            return norm
        return math.sqrt(sum(float(t.double().square().sum()) for t in groups[0].tensors))
