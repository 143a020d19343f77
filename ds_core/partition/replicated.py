"""`Replicated`: data parallelism, where every rank holds all states of what it shares with others.

[Note: one reduction per boundary] Micro-batches accumulate into ``param.grad``. In a backward whose
plan is to `reduce`, a gradient that is ready goes into its bucket, and a full bucket is reduced
while backward runs; `finish` waits. Buckets are reduced in one fixed order on all ranks. A
second backward at the same boundary needs no special case: what is already averaged is the same on
a parameter's replicas, so averaging it over them again together with the new local part changes
nothing. That holds for an average over the replicas only. Where those are fewer than dp has ranks,
the step multiplies by what is left of the average over dp (`Slot.weight`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core.gradients import LATER, BackwardPlan
from ds_core.partition.params import GradGroup, ParamInfo
from ds_core.partition.partitioner import GradState, ParamGroups, Partitioner, broadcast_module
from ds_core.partition.stepping import Stepper

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ds_core.context import Context
    from ds_core.gradients import Bucket, GradientShard


@dataclass(slots=True)
class Slot:
    """A parameter of the optimizer's groups: what the optimizer updates for it, and where its
    gradient accumulates.
    """

    param: nn.Parameter
    info: ParamInfo
    master: nn.Parameter
    """What the optimizer updates: the parameter itself where no other dtype is wanted."""
    weight: float
    """Replicas / ranks of dp, by which the average over replicas becomes the one over dp."""
    total: Tensor | None = None
    """The accumulator where gradients accumulate in another dtype than the parameter's; None:
    ``param.grad`` accumulates."""

    @property
    def gradient(self) -> Tensor | None:
        """The gradient so far."""
        return self.param.grad if self.total is None else self.total


class Replicated(Partitioner):
    """Every rank keeps all states; gradients are averaged over replicas in overlapped buckets."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        # -- parameters
        self.slots: dict[nn.Parameter, Slot] = {}
        # Whether some parameter has replicas.
        self._shares = False
        # Whether the optimizer updates the module's own parameters.
        self._plain = True
        self._load_hook: Any = None

        # -- reductions
        self._plan = LATER
        self.grad_state = GradState.LOCAL
        # None: to be made before the next reduction.
        self._buckets: list[Bucket] | None = None
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        # The bucket that is reduced next; all ranks reduce them in one order.
        self._next = 0
        # Whether a gradient has arrived in parts, so that nothing is reduced before backward ends.
        self._twice = False

        # -- the step
        # Per master, from `gradients` to the step.
        self.given: list[Tensor | None] = []
        self._stepper = Stepper([], [])

    @property
    def averages(self) -> bool:
        """Whether gradients are averaged over replicas; if not, each rank keeps its own."""
        return True

    # -- set-up ------------------------------------------------------------------------------------

    def attach(
        self, module: nn.Module, groups: ParamGroups, *, updated: bool = True
    ) -> ParamGroups:
        """See `Partitioner.attach`."""
        self.module = module
        broadcast_module(self.ctx, module)
        self.slots = {p: self._slot(p) for group in groups for p in group["params"]}
        slots = self.slots.values()
        self._plain = all(s.master is s.param for s in slots)
        self._stepper = Stepper(
            [s.master for s in slots], [None if s.master is s.param else s.param for s in slots]
        )
        self._shares = any(s.info.replicas for s in slots)
        self.takes_gradients = self._shares or any(self._accumulates(p) for p in self.slots)
        if not self._plain:
            self._load_hook = module.register_load_state_dict_post_hook(
                lambda *_: self._masters_from_weights()
            )
        return [
            {**group, "params": [self.slots[p].master for p in group["params"]]} for group in groups
        ]

    @torch.no_grad()
    def _masters_from_weights(self) -> None:
        """After a load_state_dict of the user's; the next step would publish the old weights
        otherwise.
        """
        for slot in self.slots.values():
            if slot.master is not slot.param:
                slot.master.copy_(slot.param)

    def _slot(self, param: nn.Parameter) -> Slot:
        dtype = self.ctx.precision.master
        master = param
        if dtype is not None and param.is_floating_point() and param.dtype != dtype:
            master = nn.Parameter(
                param.detach().to(dtype, copy=True), requires_grad=param.requires_grad
            )
        info = self.ctx.params[param]
        mesh = self.ctx.mesh
        return Slot(param, info, master, mesh.size(*info.replicas) / mesh.size("dp"))

    def _accumulates(self, param: nn.Parameter) -> bool:
        """Whether gradients of `param` accumulate in another dtype than its own."""
        wanted = self.ctx.precision.accumulate
        return wanted is not None and param.is_floating_point() and wanted != param.dtype

    # -- backward ----------------------------------------------------------------------------------

    @property
    def _reduces(self) -> bool:
        """Whether the running backward is to reduce gradients."""
        return self._shares and self._plan.reduce and self.averages

    def begin(self, plan: BackwardPlan) -> None:
        """See `Partitioner.begin`."""
        self._plan = plan
        if plan.changed:
            self._buckets = None
        self.grad_state = GradState.LOCAL
        if self._reduces:
            self._start()

    def on_gradient(self, param: nn.Parameter) -> None:
        """See `Partitioner.on_gradient`."""
        if self._accumulates(param):
            slot = self.slots[param]
            assert param.grad is not None
            if slot.total is None:
                slot.total = torch.zeros_like(param, dtype=self.ctx.precision.accumulate)
            self.ctx.kernels.accumulate(slot.total, param.grad)
            param.grad = None
        if self.grad_state is not GradState.RUNNING:
            return
        assert self._buckets is not None
        if (bucket := self._bucket_of.get(param)) is not None:
            # [Note: gradients that arrive twice] Re-entrant recomputation runs a backward inside
            # the backward, so a shared weight's hook fires for each. A bucket on its way has then
            # missed a part: all are sent again at the end, and from now on none is sent earlier
            # (every rank runs the same program, so all decide alike).
            self._twice |= param in bucket.arrived
            bucket.arrived.add(param)
        while (
            not self._twice
            and self._next < len(self._buckets)
            and self._buckets[self._next].complete
        ):
            self._launch(self._buckets[self._next])
            self._next += 1

    def _start(self) -> None:
        """Prepare the buckets for one backward."""
        self.grad_state = GradState.RUNNING
        if self._buckets is None:
            self._buckets = self.make_buckets([p for p in self.slots if p.requires_grad])
            self._bucket_of = {p: b for b in self._buckets for p in b.params}
        self._next = 0
        for bucket in self._buckets:
            bucket.settle()

    def make_buckets(self, params: Sequence[nn.Parameter]) -> list[Bucket]:
        """The buckets of those of `params` that have replicas, in the order in which all ranks
        reduce them.
        """
        from ds_core.gradients import make_buckets

        return make_buckets(params, self.ctx)

    def _launch(self, bucket: Bucket) -> None:
        bucket.launch([self.slots[p].gradient for p in bucket.params])

    def finish(self, plan: BackwardPlan) -> None:
        """See `Partitioner.finish`."""
        self._plan = plan
        if not self._reduces or self.grad_state is GradState.REDUCED:
            return
        if self.grad_state is GradState.LOCAL:
            self._start()
        assert self._buckets is not None
        if self._twice and self._next:
            for bucket in self._buckets:
                bucket.settle()
            self._next = 0
        for bucket in self._buckets[self._next :]:
            self._launch(bucket)
        self.grad_state = GradState.REDUCED
        for bucket in self._buckets:
            for param, reduced in bucket.collect():
                slot = self.slots[param]
                if slot.total is None and reduced.dtype == param.dtype:
                    param.grad = reduced
                elif (grad := slot.gradient) is not None:
                    grad.copy_(reduced)
                else:
                    param.grad = reduced.to(param.dtype)

    # -- step --------------------------------------------------------------------------------------

    def gradients(self) -> Sequence[GradGroup]:
        """See `Partitioner.gradients`."""
        by_axes: dict[tuple[str, ...], list[Tensor]] = {}
        self.given = []
        for slot in self.slots.values():
            grad = slot.param.grad if slot.total is None else slot.total
            if grad is not None:
                if slot.total is not None and slot.master is slot.param:
                    grad = slot.param.grad = grad.to(slot.param.dtype)
                elif grad.is_sparse:  # of nn.Embedding(sparse=True); what follows is for dense ones
                    grad = slot.param.grad = grad.to_dense()
                if slot.weight != 1.0:
                    # The average is over all of dp. Not before the step: a later backward adds.
                    # A new tensor where 16 bits would round the product.
                    grad = grad.to(slot.master.dtype).mul_(slot.weight)
                if slot.info.counted:
                    by_axes.setdefault(slot.info.held, []).append(grad)
            self.given.append(grad)
        return [GradGroup(axes, tensors) for axes, tensors in by_axes.items()] or [
            GradGroup((), [])
        ]

    def gradient_shards(self) -> Iterable[GradientShard]:
        """See `Partitioner.gradient_shards`: every gradient is unsharded."""
        from ds_core.gradients import GradientShard

        for slot, grad in zip(self.slots.values(), self.given, strict=True):
            if grad is not None:
                shape = tuple(slot.param.shape)
                info = slot.info
                yield GradientShard(
                    info.name, grad, shape, 0, grad.numel(), info.held, info.held, info.counted
                )

    def step(self, optimizer: Optimizer, factor: float) -> None:
        """See `Partitioner.step`."""
        self._stepper.step(optimizer, None if self._plain else self.given, factor)

    def zero_grad(self) -> None:
        """See `Partitioner.zero_grad`."""
        if self.grad_state is GradState.RUNNING:  # a backward failed half-way
            for bucket in self._buckets or ():
                bucket.settle()
        self.grad_state = GradState.LOCAL
        self.given = []
        for param in self.slots:
            param.grad = None
        if not self._plain or self.ctx.precision.accumulate is not None:
            for slot in self.slots.values():
                slot.master.grad = slot.total = None

    def axes(self) -> Iterable[tuple[str, ...]]:
        """See `Partitioner.axes`."""
        return {s.info.held for s in self.slots.values()} | {()}

    def detach(self) -> None:
        """See `Partitioner.detach`."""
        if self._load_hook is not None:
            self._load_hook.remove()
        self._stepper.release()
        for slot in self.slots.values():
            slot.total = None
        self._buckets = None
        self._bucket_of = {}
        self._shares = False
