"""A partitioner in which every rank holds everything: one all-reduce per gradient at the end of backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from ds_run_state.states import StateSource, StateTensor
from torch import nn

from ds_core import comm
from ds_core.gradients import GradientShard
from ds_core.params import GradGroup
from ds_core.partition import Partitioner, broadcast_module
from ds_core.stepping import Stepper

if TYPE_CHECKING:
    from ds_core.context import Context


class OldPartitioner(Partitioner):
    """Replicated states, as the core's own."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.masters: dict[nn.Parameter, nn.Parameter] = {}
        self.reduced = False

    def attach(self, module: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Ranks agree on the weights; the optimizer gets the parameters, or copies in the dtype of masters."""
        self.module = module
        broadcast_module(self.ctx, module)
        self.masters = {p: self._master(p) for group in groups for p in group["params"]}
        weights_of = [None if p is m else p for p, m in self.masters.items()]
        self.stepper = Stepper(list(self.masters.values()), weights_of)
        return [{**group, "params": [self.masters[p] for p in group["params"]]} for group in groups]

    def _master(self, param: nn.Parameter) -> nn.Parameter:
        dtype = self.ctx.precision.master or param.dtype
        return param if param.dtype == dtype else nn.Parameter(param.detach().to(dtype), param.requires_grad)

    def begin(self, changed: bool) -> None:
        """Gradients will change, so they are averaged (again) after this backward, whoever started it."""
        self.reduced = False

    def finish(self) -> None:
        """Average over replicas, unless not wanted yet or done; what no rank used keeps no gradient."""
        if not self.sync or self.reduced:
            return
        self.reduced = True
        for param in self.masters:
            group = self.ctx.mesh.group(*self.ctx.params[param].replicas)
            used = torch.tensor(float(param.grad is not None))
            comm.all_reduce(used, group=group)
            if not used:
                continue
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            comm.all_reduce(param.grad, group=group)
            # Over the replicas alone, so that averaging again after another backward leaves this as it is.
            param.grad /= self.ctx.mesh.size(*self.ctx.params[param].replicas)

    def gradients(self) -> list[GradGroup]:
        """Averages over all of dp, by the axes on which ranks hold different gradients."""
        mesh = self.ctx.mesh
        groups: dict[tuple[str, ...], list[torch.Tensor]] = {(): []}
        for param in self.masters:
            if param.grad is not None:
                param.grad *= mesh.size(*self.ctx.params[param].replicas) / mesh.size("dp")
                groups.setdefault(self.ctx.params[param].held, []).append(param.grad)
        return [GradGroup(axes, tensors) for axes, tensors in groups.items()]

    def gradient_shards(self) -> Iterator[GradientShard]:
        """The same by parameter, for plugins that change gradients; nothing is sharded here."""
        for param in self.masters:
            if param.grad is not None:
                info, shape = self.ctx.params[param], tuple(param.shape)
                yield GradientShard(info.name, param.grad, shape, 0, param.numel(), info.held, info.held, info.counted)

    def step(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        """The gradients times `factor` update the masters, which are written to the weights."""
        self.stepper.step(optimizer, [param.grad for param in self.masters], factor)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.reduced = False
        for param, master in self.masters.items():
            param.grad = master.grad = None

    def axes(self) -> Iterable[tuple[str, ...]]:
        """As the groups of `gradients`."""
        return {self.ctx.params[p].held for p in self.masters} | {()}

    def states(self, optimizer: torch.optim.Optimizer | None) -> Iterator[StateTensor]:
        """Whole tensors under their names; equal replicas share the writing, but buffers are the first rank's."""
        mesh = self.ctx.mesh
        for name, tensor, held in self._named(optimizer):
            copies = tuple(a for a in mesh.expand(mesh.names) if a not in held)
            yield StateTensor(name, tensor, tuple(tensor.shape), 0, tensor.numel(), held, True, copies)
        for name, buffer in self.module.named_buffers():
            yield StateTensor(f"module/{name}", buffer, tuple(buffer.shape), 0, buffer.numel(), (), mesh.rank == 0)

    def _named(self, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, torch.Tensor, tuple[str, ...]]]:
        for name, param in self.module.named_parameters():
            held = self.ctx.params[param].held
            yield f"module/{name}", param.data, held
            master = self.masters.get(param, param)
            if master is not param:
                yield f"master/{name}", master.data, held
            for key, value in optimizer.state.get(master, {}).items() if optimizer is not None else ():
                yield f"optimizer/{key}/{name}", value, held

    @torch.no_grad()
    def load_states(self, source: StateSource, optimizer: torch.optim.Optimizer | None, *, strict: bool = True) -> None:
        """The reverse; moments are made as they are read."""
        params = {self.ctx.params[p].name: p for p in self.module.parameters()}
        tensors = {state.name: state.tensor for state in self.states(None)}
        for name in source.names():
            kind, _, rest = name.partition("/")
            value = source.read(name).view(source.shape(name))
            if name in tensors:
                tensors[name].copy_(value)
            elif kind == "optimizer" and optimizer is not None:
                key, _, param_name = rest.partition("/")
                optimizer.state[self.masters[params[param_name]]][key] = value
            elif strict and kind == "module":
                raise KeyError(f"the checkpoint has {name!r}, the model has not")
