"""What all stages share: taking over a module, the optimizer's pieces, the step, and the contract with the engine."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_core.errors import DSError, UsageError
from ds_core.params import GradGroup
from ds_core.partition import Partitioner, StateSource, StateTensor, broadcast_from_first
from ds_zero import states
from ds_zero.flat import FlatBucket, Piece, needs_whole
from ds_zero.grads import Reducer
from ds_zero.regroup import regroup

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ds_core.context import Context
    from ds_zero.config import ZeroConfig

__all__ = ["ZeroPartitioner"]

ParamGroups = list[dict[str, Any]]


class ZeroPartitioner(Partitioner):
    """Flat buckets over each parameter's replicas; the stages differ in what of a bucket stays whole."""

    def __init__(self, ctx: Context, section: ZeroConfig) -> None:
        self.ctx, self.section = ctx, section
        self.partitions_gradients = section.stage > 1
        self.buckets: list[FlatBucket] = []
        self.pieces: dict[nn.Parameter, Piece] = {}
        self._module: nn.Module | None = None
        self._reducer: Reducer | None = None

    # -- set-up ----------------------------------------------------------------------------------------------

    def attach(self, module: nn.Module, groups: ParamGroups) -> ParamGroups:
        """See `Partitioner.attach`."""
        _check_grain(self.ctx)
        self._module = module
        mine = [p for group in groups for p in group["params"]]
        for param in mine:
            if param not in self.ctx.params:
                raise UsageError(
                    f"model_parameters holds a tensor of shape {tuple(param.shape)} that is not a parameter of the "
                    "model; pass parameters of the model given to initialize (after any transform they must still be "
                    "in it)"
                )
        self.buckets = self._lay_out(module, mine)
        if needs_whole(self.ctx):
            trained = set(mine)
            regroup(self.ctx, [b for b in self.buckets if b.params[0] in trained])
        self.pieces = {p.param: p for b in self.buckets for p in b.optimized}
        self._broadcast_rest(module)
        self._reducer = self._make_reducer()
        self._reducer.reducing = lambda: not self.hold and (self.sync or self.partitions_gradients)
        return [{**group, "params": [self.pieces[p].master for p in group["params"]]} for group in groups]

    @abstractmethod
    def _lay_out(self, module: nn.Module, params: Sequence[nn.Parameter]) -> list[FlatBucket]:
        """The buckets of `params` (of the optimizer), and of any other that is partitioned."""

    def _make_reducer(self) -> Reducer:
        trained = [b for b in self.buckets if b.trains]
        return Reducer(self.ctx, self.section, trained, lambda b: b.group)

    def _broadcast_rest(self, module: nn.Module) -> None:
        """Give every rank the parameters that are in no bucket, and the buffers, of the first of its replicas."""
        mesh = self.ctx.mesh
        tensors = [(self.ctx.params[p].replicas, p.data) for p in module.parameters() if p not in self.pieces]
        tensors += [(self.ctx.buffers[n].replicas, b.data) for n, b in module.named_buffers()]
        broadcast_from_first(mesh, tensors)

    @property
    def reducer(self) -> Reducer:
        """Who takes gradients; there once a module is attached."""
        assert self._reducer is not None
        return self._reducer

    # -- backward and step -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """See `Partitioner.begin`."""
        self.reducer.begin()

    def add_gradient(self, param: nn.Parameter, grad: Tensor) -> None:
        """See `Partitioner.add_gradient`; a released parameter takes one too."""
        self.reducer.add(param, grad)

    def finish(self) -> None:
        """See `Partitioner.finish`."""
        self.reducer.finish()

    def gradients(self) -> Sequence[GradGroup]:
        """See `Partitioner.gradients`."""
        return self.reducer.gradients()

    def scale(self, factor: float) -> None:
        """See `Partitioner.scale`."""
        self.reducer.scale(factor)

    def zero_grad(self) -> None:
        """See `Partitioner.zero_grad`."""
        self.reducer.zero_grad()

    def axes(self) -> Iterable[tuple[str, ...]]:
        """See `Partitioner.axes`."""
        return {self.ctx.mesh.expand((*b.held, *b.axes)) for b in self.buckets} | {()}

    def _spread(self, buckets: Iterable[FlatBucket]) -> None:
        """Give every rank the weights that their owners have just written."""
        works = []
        for bucket in buckets:
            bucket.round()
            works += bucket.spread(bucket.group, gather=self.section.allgather_partitions)
        for work in works:
            work.wait()

    def _check_equal(self, buckets: Iterable[FlatBucket]) -> None:
        """For ``enable_sanity_checks``: the weights of a bucket are the same on all its ranks."""
        for bucket in buckets:
            if bucket.world == 1:
                continue
            mine = bucket.full.double().sum().view(1)
            sums = mine.new_empty(bucket.world)
            comm.all_gather_into_tensor(sums, mine, group=bucket.group)
            if not torch.equal(sums, mine.expand_as(sums)):
                raise DSError(
                    f"rank {self.ctx.rank}: weights differ between ranks after the step, in the bucket from "
                    f"{bucket.names[0]!r} to {bucket.names[-1]!r} (sums {sums.tolist()}); did a rank write to them?"
                )

    # -- checkpoints -----------------------------------------------------------------------------------------

    def adopt(self, param: nn.Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
        """See `Partitioner.adopt`."""
        return states.adopt(self.pieces[param], state, whole=needs_whole(self.ctx))

    def states(self, optimizer: Optimizer | None) -> Iterator[StateTensor]:
        """See `Partitioner.states`; weights that are whole are stored by the first rank, pieces by their owners."""
        assert self._module is not None
        return states.states(self.ctx, self._module, self.buckets, optimizer)

    def load_states(self, source: StateSource, optimizer: Optimizer | None, *, strict: bool = True) -> None:
        """See `Partitioner.load_states`."""
        assert self._module is not None
        from_fp32 = self.section.load_from_fp32_weights
        states.load(self._module, self.buckets, source, optimizer, strict=strict, from_fp32=from_fp32)

    def detach(self) -> None:
        """See `Partitioner.detach`."""
        if self._reducer is not None:
            self._reducer.detach()


def _check_grain(ctx: Context) -> None:
    """An optimizer that nobody knows is served whole tensors, but not without being asked for."""
    if ctx.grain is None and not ctx.config.core.zero_allow_untested_optimizer:
        raise UsageError(
            "zero_optimization: nobody has declared what this optimizer's arithmetic looks at. Set "
            '"zero_allow_untested_optimizer": true, and each parameter is updated whole by one rank, which is right '
            "for any optimizer that looks at one parameter at a time. Or use one that is known, by its name in the "
            "config or as an object of torch's class: Adam, AdamW, SGD and other element-wise ones can be cheaper, "
            "since every rank updates an equal part of each parameter"
        )
