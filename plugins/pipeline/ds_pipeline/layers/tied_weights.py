"""Tied weights: copies on several stages that are, and stay, equal.

[Note: diverted gradients] A tie's gradients are summed over stages before they are averaged over
dp. So during a batch a hook keeps them from the partitioner, which sees zeros; the sums are handed
to it at the batch's end. It need not know of ties, and a partitioner that reduces after each
micro-batch stays right. The hook is the first of those that run when a gradient is complete, so it
sees what all hooks of the user's have made of the gradient, also later ones.

[Note: frozen copies] Weights may be frozen and unfrozen between batches. Which are trained is
looked up at the begin of each, and where that changed on any rank, ranks compare: a copy that is
trained on one stage and frozen on another is an error on all of them.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_core.errors import UsageError
from ds_core.process import log_once

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.partition import Partitioner
    from ds_pipeline.layers.module import PipelineModule

log = logging.getLogger("ds_pipeline")
ONE_MODULE = (
    "layers of one key are one module, so that results do not depend on the stages that "
    "they "
    "fall on"
)


def copies_elsewhere(module: PipelineModule) -> set[str]:
    """Names of tied parameters and buffers of which an earlier stage has the copy that counts."""
    keys = [k for k, stages in module.tied_stages.items() if module.stage_id in stages[1:]]
    tensors = [
        (k, n)
        for k in keys
        for n, _ in (*module.tied[k].named_parameters(), *module.tied[k].named_buffers())
    ]
    return {f"tied.{key}.{name}" for key, name in tensors}


class Ties:
    """This rank's tied parameters. Made on all ranks together, once the module is on its device."""

    def __init__(self, ctx: Context, module: PipelineModule) -> None:
        self._ctx = ctx
        self._any = bool(module.tied_stages)
        # by key: all that can have gradients
        self._params: dict[str, list[tuple[str, nn.Parameter]]] = {}
        self._groups: dict[str, Any] = {}
        self._sums: dict[Tensor, Tensor] = {}
        self._shapes: dict[Tensor, torch.Size] = {}
        self._accumulate = ctx.precision.accumulate
        self._agreed: dict[str, str] | None = None  # what `_told` was when ranks compared it
        self._given: set[Tensor] | None = None  # those that the optimizer has
        self._members: set[Tensor] = set()  # those that are trained now
        self.diverting = False
        groups = _groups(ctx, {tuple(s) for s in module.tied_stages.values()})
        column = ctx.mesh.ranks("pp")
        for key, stages in module.tied_stages.items():
            if module.stage_id not in stages:
                continue
            tied = module.tied[key]
            group = groups[tuple(stages)]
            self._groups[key] = group
            for tensor in (*tied.parameters(), *tied.buffers()):
                comm.broadcast(tensor.data, src=column[stages[0]], group=group)
            self._params[key] = [
                (n, p)
                for n, p in tied.named_parameters()
                if p.is_floating_point() or p.is_complex()
            ]
            for _, param in self._params[key]:
                self._shapes[param] = param.shape
                self._watch(param)
            more = [n for n, _ in tied.named_parameters() if n not in module.tied_attrs[key]]
            if more and module.stage_id == stages[0] and ctx.mesh.index("dp") == 0:
                log_once(
                    log,
                    logging.INFO,
                    f"TiedLayerSpec {key!r}: {', '.join(more)} are tied too; {ONE_MODULE}",
                )

    def _watch(self, param: nn.Parameter) -> None:
        """Hook it now, before the core's hooks; torch hooks no parameter that is frozen, though it
        may be thawed.
        """
        frozen = not param.requires_grad
        param.requires_grad_(True)
        self._ctx.undo(param.register_post_accumulate_grad_hook(self._divert).remove)
        param.requires_grad_(not frozen)

    def __contains__(self, param: object) -> bool:
        return param in self._shapes

    # -- which are trained -------------------------------------------------------------------------

    def _told(self) -> dict[str, str]:
        """How each parameter is trained now, by its name in the model."""
        if self._given is None:  # known once the optimizer is there
            self._given = self._shapes.keys() & set(self._ctx.trained)
        named = {f"tied.{key}.{n}": p for key, params in self._params.items() for n, p in params}
        return {
            name: "left out of the optimizer"
            if p not in self._given
            else "trained"
            if p.requires_grad
            else "frozen"
            for name, p in named.items()
        }

    @property
    def changed(self) -> bool:
        """Whether parameters were frozen or thawed since ranks last compared them."""
        return self._any and self._told() != self._agreed

    def agree(self) -> None:
        """Compare with the other stages which are trained; UsageError on all ranks if copies
        differ. Collective.
        """
        mine = self._told()
        stages: dict[str, dict[str, set[int]]] = {}
        for stage, told in comm.all_gather_json([self._ctx.mesh.coord["pp"], mine]):
            for name, how in told.items():
                stages.setdefault(name, {}).setdefault(how, set()).add(stage)
        for name, ways in stages.items():
            if len(ways) > 1:
                shown = ", ".join(
                    f"{how} on stage {', '.join(map(str, sorted(on)))}" for how, on in ways.items()
                )
                raise UsageError(
                    f"copies of the tied weight {name!r} are {shown}, so they would drift apart; "
                    "freeze or thaw it, "
                    "and list it in model_parameters, on all of these stages"
                )
        self._agreed = mine
        self._members = {p for p in self._given or () if p.requires_grad}

    # -- a batch -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """A batch begins, and ranks agree on what is trained."""
        self._sums.clear()
        self.diverting = True

    @torch.no_grad()
    def _divert(self, param: Tensor) -> None:
        if not self.diverting or param not in self._members:
            return
        assert param.grad is not None
        if param in self._sums:
            self._sums[param] += param.grad
        else:
            self._sums[param] = param.grad.to(self._accumulate or param.grad.dtype, copy=True)
        # A new tensor: during backward the gradient's memory may be another tensor's, too.
        param.grad = torch.zeros_like(param.grad)

    @torch.no_grad()
    def reduce(self, partitioner: Partitioner) -> None:
        """Sum over the stages and hand the sums to the partitioner. Collective over each tie."""
        self.diverting = False
        for key, named in self._params.items():
            params = [p for _, p in named if p in self._members]
            if not params:
                continue
            have = torch.tensor([float(p in self._sums) for p in params], device=params[0].device)
            comm.all_reduce(have, group=self._groups[key])
            for param, used in zip(params, have.tolist(), strict=True):
                if not used:
                    continue
                total = self._sums.pop(param, None)
                if total is None:
                    dtype = self._accumulate or param.dtype
                    total = torch.zeros(self._shapes[param], dtype=dtype, device=param.device)
                comm.all_reduce(total, group=self._groups[key])
                partitioner.add_gradient(param, total.to(param.dtype))


def _groups(ctx: Context, wanted: set[tuple[int, ...]]) -> dict[tuple[int, ...], Any]:
    """A process group for each set of stages, of this rank's column. Collective over all ranks."""
    mesh = ctx.mesh
    return {
        stages: mesh.group("pp")
        if len(stages) == mesh.size("pp")
        else mesh.own_group("pp", only=stages)
        for stages in sorted(wanted)
    }
