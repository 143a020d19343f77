"""Who owns model states: the `Partitioner` contract, and what its implementations share."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_core.gradients import LATER, BackwardPlan
from ds_core.partition.params import GradGroup

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ds_core.context import Context
    from ds_core.gradients import GradientHooks, GradientShard
    from ds_core.mesh import Mesh

ParamGroups = list[dict[str, Any]]


class GradState(enum.Enum):
    """How far a partitioner's gradients are reduced.

    LOCAL -> RUNNING -> REDUCED, and back to LOCAL when others arrive.
    """

    LOCAL = "local"
    """This rank's own."""
    RUNNING = "running"
    """A backward that reduces them is under way."""
    REDUCED = "reduced"
    """Final, unless others come."""


class Partitioner(ABC):
    """Spreads parameters, gradients and optimizer states over ranks that would have the same.

    The core calls `attach` once. Around every backward that reaches its parameters, from the engine
    or not, it calls `begin`, `on_gradient` for each gradient, and `finish`; for an optimizer step
    `finish`, `gradients`, `step`, `publish`, `zero_grad`.
    """

    partitions_gradients = False
    """True when gradients are spread over ranks during backward, which rules out `no_sync`."""

    releases_weights = False
    """True when weights may be sharded again between a forward and its backward."""

    takes_gradients = True
    """Whether `on_gradient` is called. False where gradients just accumulate in ``param.grad``:
    then no hook on parameters is needed, and `begin` and `finish` may not be called around a plain
    ``loss.backward()``."""

    gradient_hooks: GradientHooks
    """Set by the core: what calls `on_gradient`. A partitioner with hooks on modules, which see a
    backward before there is a gradient, calls ``gradient_hooks.enter()`` in them, so that `begin`
    and `finish` are called in any case."""

    @abstractmethod
    def attach(
        self, module: nn.Module, groups: ParamGroups, *, updated: bool = True
    ) -> ParamGroups:
        """Take over `module`, whose weights are cast and on their device; ranks then agree on them.

        groups: optimizer parameter groups over the module's parameters.
        updated: whether there will be an optimizer; without one weights stay as they are.

        Returns the same groups with the tensors that the optimizer is to update instead of the
        parameters. Collective.
        """

    def adopt(self, param: nn.Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of the `state` that a user's optimizer already had for `param`.

        It becomes the state of what the optimizer updates in its place; empty: none.
        """
        return dict(state)

    def bind(self, optimizer: Optimizer) -> None:  # noqa: B027
        """Called once, when the optimizer has been made of what `attach` returned."""

    def begin(self, plan: BackwardPlan) -> None:  # noqa: B027
        """A backward begins, and `finish` will be called after it with the same plan."""

    def on_gradient(self, param: nn.Parameter) -> None:  # noqa: B027
        """``param.grad`` is complete for this backward; may move it elsewhere.

        Runs inside backward.

        Called again for the same parameter where a backward is nested in another (re-entrant
        activation checkpointing).
        """

    def add_gradient(self, param: nn.Parameter, grad: Tensor) -> None:
        """Accumulate `grad`, of the full shape of `param`, as a backward would.

        For gradients that are computed in other ways.

        No hooks on `param` run: what `grad` was made of has been through them.
        """
        self.begin(LATER)
        # Not in place: one of the two may be sparse, and the old one a view of a bucket.
        param.grad = grad if param.grad is None else grad + param.grad
        if self.takes_gradients:
            self.on_gradient(param)

    @abstractmethod
    def finish(self, plan: BackwardPlan) -> None:
        """A backward is over: complete the reduction of all gradients if the plan is to `reduce`.

        Collective.

        Also called without a backward, before a step. Does nothing where no reduction is due.
        """

    @abstractmethod
    def gradients(self) -> Sequence[GradGroup]:
        """The reduced gradients, in the dtypes in which they arrived, for the global norm.

        Called once per step, after `finish`; the optimizer then sees the same elements.
        """

    def gradient_shards(self) -> Iterable[GradientShard]:
        """What `gradients` has just returned, by parameter: the same tensors, to change in place.

        Optional: asked only where a plugin implements `ds_gradients`, and `initialize` refuses such
        a plugin beside a partitioner without it.
        """
        raise NotImplementedError

    @abstractmethod
    def step(self, optimizer: Optimizer, factor: float) -> None:
        """Let `optimizer` update its tensors from the result of `gradients`, times `factor`.

        factor: unscales and clips.

        This rank's weights are written as well: `ds_core.partition.stepping.Stepper` has all of it done in
        one pass where the optimizer can, and does it next to the optimizer's step where not.
        """

    def publish(self) -> None:  # noqa: B027
        """Give other ranks the weights that `step` has just written here, where they need them.

        May be collective.
        """

    @abstractmethod
    def zero_grad(self) -> None:
        """Drop all gradients."""

    @abstractmethod
    def axes(self) -> Iterable[tuple[str, ...]]:
        """Every set of axes that a `GradGroup` of this rank can carry."""

    def detach(self) -> None:  # noqa: B027
        """Remove hooks and free buffers; the module keeps its weights."""


def broadcast_module(ctx: Context, module: nn.Module, but: Collection[nn.Parameter] = ()) -> None:
    """Give every rank the weights, `but` these, and the buffers of the first of its replicas.

    Collective.
    """
    tensors = [(ctx.params[p].replicas, p.data) for p in module.parameters() if p not in but]
    tensors += [(ctx.buffers[n].replicas, b.data) for n, b in module.named_buffers()]
    broadcast_from_first(ctx.mesh, tensors)


def broadcast_from_first(mesh: Mesh, tensors: Iterable[tuple[tuple[str, ...], Tensor]]) -> None:
    """Give each of `tensors`, in place, the values of the first rank along its axes. Collective."""
    batches: dict[tuple[Any, ...], list[Tensor]] = {}
    for axes, tensor in tensors:
        if axes and tensor.numel():
            batches.setdefault((axes, tensor.dtype, tensor.device), []).append(tensor)
    # One broadcast for all of a kind: a model has hundreds of small tensors.
    for (axes, _, _), members in batches.items():
        flat = torch.cat([t.reshape(-1) for t in members])
        comm.broadcast(flat, src=mesh.ranks(*axes)[0], group=mesh.group(*axes))
        for tensor, part in zip(members, flat.split([t.numel() for t in members]), strict=True):
            tensor.copy_(part.view_as(tensor))
