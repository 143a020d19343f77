"""Tied weights: copies on several stages that are, and stay, equal.

[Note: diverted gradients] A tie's gradients are summed over stages before they are averaged over dp. So during a batch
a hook keeps them from the partitioner, which sees zeros; the sums are handed to it at the batch's end. It need not
know of ties, and a partitioner that reduces after each micro-batch stays right.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_core.process import log_once

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.partition import Partitioner
    from ds_pipeline.module import PipelineModule

__all__ = ["Ties", "copies_elsewhere"]

log = logging.getLogger("ds_pipeline")
ONE_MODULE = "layers of one key are one module, so that results do not depend on the stages that they fall on"


def copies_elsewhere(module: PipelineModule) -> set[str]:
    """Names of tied parameters and buffers of which an earlier stage has the copy that counts."""
    keys = [k for k, stages in module.tied_stages.items() if module.stage_id in stages[1:]]
    tensors = [(k, n) for k in keys for n, _ in (*module.tied[k].named_parameters(), *module.tied[k].named_buffers())]
    return {f"tied.{key}.{name}" for key, name in tensors}


class Ties:
    """This rank's tied parameters. Made on all ranks together, once the module is on its device."""

    def __init__(self, ctx: Context, module: PipelineModule) -> None:
        self._members: dict[str, list[nn.Parameter]] = {}
        self._groups: dict[str, Any] = {}
        self._sums: dict[Tensor, Tensor] = {}
        self._shapes: dict[Tensor, torch.Size] = {}
        self._accumulate = ctx.precision.accumulate
        self.diverting = False
        groups = _groups(ctx, {tuple(s) for s in module.tied_stages.values()})
        column = ctx.mesh.ranks("pp")
        for key, stages in module.tied_stages.items():
            if module.stage_id not in stages:
                continue
            group = self._groups[key] = groups[tuple(stages)]
            for tensor in (*module.tied[key].parameters(), *module.tied[key].buffers()):
                comm.broadcast(tensor.data, src=column[stages[0]], group=group)
            self._members[key] = [p for p in module.tied[key].parameters() if p.requires_grad]
            for param in self._members[key]:
                self._shapes[param] = param.shape
                param.register_hook(lambda grad, p=param: self._divert(p, grad))
            more = [n for n, _ in module.tied[key].named_parameters() if n not in module.tied_attrs[key]]
            if more and module.stage_id == stages[0] and ctx.mesh.index("dp") == 0:
                log_once(log, logging.INFO, f"TiedLayerSpec {key!r}: {', '.join(more)} are tied too; {ONE_MODULE}")

    def __contains__(self, param: object) -> bool:
        return param in self._shapes

    def begin(self) -> None:
        """A batch begins."""
        self._sums.clear()
        self.diverting = True

    def _divert(self, param: Tensor, grad: Tensor) -> Tensor | None:
        if not self.diverting:
            return None
        self.take(param, grad)
        return torch.zeros_like(grad)

    @torch.no_grad()
    def take(self, param: Tensor, grad: Tensor) -> None:
        """Add to the gradient that `param` has on this stage."""
        if param in self._sums:
            self._sums[param] += grad
        else:
            self._sums[param] = grad.detach().to(self._accumulate or grad.dtype, copy=True)

    @torch.no_grad()
    def reduce(self, partitioner: Partitioner) -> None:
        """Sum over the stages and hand the sums to the partitioner. Collective over each tie."""
        self.diverting = False
        for key, params in self._members.items():
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
                with torch.enable_grad():
                    partitioner.add_gradient(param, total.to(param.dtype))


def _groups(ctx: Context, wanted: set[tuple[int, ...]]) -> dict[tuple[int, ...], Any]:
    """A process group for each set of stages, of this rank's column. Collective over all ranks."""
    mesh = ctx.mesh
    return {
        stages: mesh.group("pp") if len(stages) == mesh.size("pp") else mesh.own_group("pp", only=stages)
        for stages in sorted(wanted)
    }
