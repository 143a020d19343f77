"""What all stages share: set-up of a module, the optimizer's fragments, the step, and the contract
with the engine.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from ds_run_state.states import StateSource, StateTensor
from torch import Tensor, nn

from ds_core import comm
from ds_core.errors import DSError, UsageError
from ds_core.gradients import GradientShard
from ds_core.partition import BackwardPlan, GradGroup, broadcast_module, check_grain
from ds_zero.buckets import states
from ds_zero.buckets.flat import FlatBucket
from ds_zero.buckets.fragment_shard import FragmentShard, LocalFragmentShard
from ds_zero.buckets.full_tensors import assign_owners
from ds_zero.buckets.make import needs_full_tensors, note_tied
from ds_zero.comm.collectives import AllGather, Broadcasts, GradientReduce, gradient_reduce
from ds_zero.config import AllowUntestedOptimizer, switch
from ds_zero.gather.module_hooks import hooks_removed, install_hooks, remove_hooks
from ds_zero.gather.weights import WeightOwner
from ds_zero.init.sharded_param import prepare_module, unshard_module
from ds_zero.offload.placement import OffloadStores, collects, not_evicted
from ds_zero.offload.state_offload import BACKWARD, FORWARD, OffloadedStates
from ds_zero.offload.tiled_step import agree_on_rounds
from ds_zero.reduce.local_grads import LocalGradients
from ds_zero.reduce.reducer import Reducer
from ds_zero.updates import Updates

if TYPE_CHECKING:
    from ds_access.param_shard import ParamShard
    from torch.optim import Optimizer

    from ds_core.context import Context
    from ds_zero.config import ZeroConfig
    from ds_zero.reduce.source import GradientSource

ParamGroups = list[dict[str, Any]]


class ZeroPartitioner(WeightOwner):
    """Flat buckets over each parameter's replicas.

    The stages differ in what of a bucket is sharded.
    """

    def __init__(self, ctx: Context, section: ZeroConfig) -> None:
        super().__init__(ctx, section)
        self.partitions_gradients = section.stage > 1

        # -- the module --
        self._module: nn.Module | None = None
        # Whether an optimizer updates it.
        self.updated = True
        # Handles of the hooks that see weights being loaded into it.
        self._load_hooks: list[Any] = []

        # -- parameters: see `WeightOwner`, too --
        self.buckets: list[FlatBucket] = []
        # What `locate` returns, made when it is first called.
        self._shards: dict[nn.Parameter, FragmentShard] = {}

        # -- who does what --
        # The stores of the config's offload sections.
        self.offload: OffloadStores
        # What `engine.offload_states` has moved.
        self.offloaded = OffloadedStates(ctx.accelerator)
        # Where gradients go.
        self._reducer: GradientSource | None = None
        # How and when the optimizer updates masters.
        self.updates = Updates(self)

    # -- set-up ------------------------------------------------------------------------------------

    def attach(
        self, module: nn.Module, groups: ParamGroups, *, updated: bool = True
    ) -> ParamGroups:
        """See `Partitioner.attach`."""
        _check_grain(self.ctx)
        self.offload = OffloadStores(
            self.ctx, self.section, full_tensors=needs_full_tensors(self.ctx)
        )
        self._module = module
        self.updated = updated
        # Without an optimizer there are no masters: a bucket is kept as one that is not trained.
        mine = [p for group in groups for p in group["params"]] if updated else []
        prepare_module(module, self.ctx)
        note_tied(self.ctx)
        self.buckets = self._lay_out(module, mine)
        # Owners are chosen over all buckets, so that no rank gets more than its share of the model.
        if needs_full_tensors(self.ctx):
            trained = set(mine)
            assign_owners(self.ctx, [b for b in self.buckets if b.params[0] in trained])
        self.fragments = {p.param: p for b in self.buckets for p in b.masters.fragments}
        self.bucket_of = {p: b for b in self.buckets for p in b.params}
        self.param_index = {p: i for i, p in enumerate(self.ctx.params)}
        # What is in no bucket: frozen parameters that stay replicated, and buffers.
        unshard_module(module)
        broadcast_module(self.ctx, module, but=self.fragments)
        self._reducer = self._make_reducer([b for b in self.buckets if b.trains])
        self.takes_gradients = not (updated and self._reducer.local)
        self.updates = self._make_updates()
        self._install_hooks(module)
        if not updated:  # weights stay as they are, for inference
            return groups
        return [
            {**group, "params": [self.fragments[p].master for p in group["params"]]}
            for group in groups
        ]

    def _install_hooks(self, module: nn.Module) -> None:
        """Install the module hooks, in place of those of `ds_zero.Init`."""
        for part in module.modules():
            install_hooks(
                part,
                apply=self.section.stage == 3 and self.section.override_module_apply,
                engine=True,
            )
        self._follow_loads(module)

    def _follow_loads(self, module: nn.Module) -> None:
        for part in module.modules():
            if any(p in self.bucket_of for p in part._parameters.values() if p is not None):
                self._load_hooks.append(part.register_load_state_dict_post_hook(self._follow))

    def _unfollow(self) -> None:
        for hook in self._load_hooks:
            hook.remove()
        self._load_hooks.clear()

    def _make_updates(self) -> Updates:
        """How updates are carried out, by the config."""
        if self.section.zenflow is not None:
            from ds_zero.zenflow.stepping import ZenFlow

            # Columns are chosen by their norms in the weight that a rank has.
            check_grain(self.ctx, "matrix", "zero_optimization.zenflow", "the choice of columns")
            return ZenFlow(self, self.section.zenflow)
        states = self.section.offload_optimizer
        if states is not None and states.on and states.super_offload:
            from ds_zero.offload.super_offload import SuperOffload

            return SuperOffload(self, states.cpuadam_cores_perc)
        return Updates(self)

    def bind(self, optimizer: Optimizer) -> None:
        """See `Partitioner.bind`."""
        store = self.offload.optimizer
        if collects(optimizer) and store is not None and not store.resident:
            if not hasattr(optimizer, "step_in_parts"):
                raise not_evicted(self.section)
            optimizer.step_in_parts(store)
            self.updates.rounds = agree_on_rounds(self.reducer)
        if collects(optimizer) and self.section.zenflow is not None:
            raise UsageError(
                f"zero_optimization.zenflow: {type(optimizer).__name__} needs more than single "
                "elements of a parameter at once, and the host updates them at other times; "
                "use Adam or AdamW, or leave the section out"
            )
        self.updates.bind(optimizer)

    @contextlib.contextmanager
    def module_hooks_removed(self) -> Iterator[None]:
        """Inside, the module has no hooks of this partitioner, so that it can be copied."""
        self.offloaded.require("copying the module", FORWARD)
        self._unfollow()
        try:
            with hooks_removed(self.module):
                yield
        finally:
            self._follow_loads(self.module)

    def _follow(self, module: nn.Module, keys: Any) -> None:
        """After weights were loaded into `module`: update their masters, which the next step
        publishes.
        """
        for param in module._parameters.values():
            if param is not None and (bucket := self.bucket_of.get(param)) is not None:
                if not bucket.weights.sharded:  # else the weight is empty now
                    self.settle()
                    index = self.fragments[param].index
                    bucket.masters.refresh_one(index, bucket.view(bucket.full, index))

    @abstractmethod
    def _lay_out(self, module: nn.Module, params: Sequence[nn.Parameter]) -> list[FlatBucket]:
        """The buckets of `params` (of the optimizer), and of any others that are sharded."""

    def _make_reducer(self, buckets: list[FlatBucket]) -> GradientSource:
        """The source of gradients for these buckets."""
        local = LocalGradients.suits(self.ctx, buckets)
        return LocalGradients(self, buckets) if local else Reducer(self, buckets)

    def reduce_group(self, bucket: FlatBucket) -> Any:
        """The process group of a bucket's reduction."""
        return bucket.group

    def reduction(self, bucket: FlatBucket) -> GradientReduce:
        """The collectives by which a bucket is reduced."""
        return gradient_reduce(self.section)

    def reduce_order(self) -> Sequence[FlatBucket]:
        """The order in which buckets are reduced, equal on all ranks; asked for at the start of each
        backward.
        """
        return self.reducer.buckets

    @property
    def module(self) -> nn.Module:
        """The attached module."""
        assert self._module is not None
        return self._module

    @property
    def trainable(self) -> bool:
        """Whether any parameter of the module requires a gradient now."""
        return any(p.requires_grad for p in self.module.parameters())

    @property
    def reducer(self) -> GradientSource:
        """The source of gradients; there once a module is attached."""
        assert self._reducer is not None
        return self._reducer

    # -- backward and step -------------------------------------------------------------------------

    def begin(self, plan: BackwardPlan) -> None:
        """See `Partitioner.begin`."""
        if not self.updated and self.trainable:
            raise UsageError(
                f"backward under zero_optimization stage {self.section.stage} needs an optimizer, "
                "which would be given the reduced gradients; name one in the config or pass "
                "optimizer= to initialize, or freeze the model with requires_grad_(False) to pass "
                "through it only"
            )
        self.offloaded.require("backward", BACKWARD)
        self.updates.begin(plan)
        self.reducer.begin(plan)

    def on_gradient(self, param: nn.Parameter) -> None:
        """See `Partitioner.on_gradient`."""
        self.reducer.on_gradient(param)

    def add_gradient(self, param: nn.Parameter, grad: Tensor) -> None:
        """See `Partitioner.add_gradient`; a released parameter accepts one, too."""
        self.updates.settle()
        self.reducer.add(param, grad)

    def finish(self, plan: BackwardPlan) -> None:
        """See `Partitioner.finish`."""
        self.offloaded.require("reducing gradients", BACKWARD)
        self.reducer.finish(plan)

    def gradients(self) -> Sequence[GradGroup]:
        """See `Partitioner.gradients`."""
        self.offloaded.require("step")
        return self.reducer.gradients()

    def gradient_shards(self) -> Iterator[GradientShard]:
        """See `Partitioner.gradient_shards`."""
        fragments = [
            (bucket, fragment)
            for bucket in self.reducer.buckets
            for fragment in bucket.masters.fragments
        ]
        for (bucket, fragment), grad in zip(fragments, self.reducer.given, strict=True):
            if grad is not None:
                place = (fragment.start, fragment.stop, bucket.held, bucket.summed)
                yield GradientShard(fragment.name, grad, fragment.shape, *place, bucket.counted)

    def zero_grad(self) -> None:
        """See `Partitioner.zero_grad`."""
        self.updates.drop()
        self.reducer.zero_grad()

    def step(self, optimizer: Optimizer, factor: float) -> None:
        """See `Partitioner.step`."""
        self.updates.step(optimizer, factor)

    def axes(self) -> Iterable[tuple[str, ...]]:
        """See `Partitioner.axes`."""
        return {b.summed for b in self.buckets} | {()}

    def _update_shards(self, buckets: Iterable[FlatBucket]) -> None:
        """Write what the step has made into the shards."""
        self.offload.synchronize()
        for bucket in buckets:
            bucket.masters.publish(self.reducer.unused(bucket))
        # The next step changes the host memory from which weights are copied.
        self.offload.synchronize()

    def _gather_weights(self, buckets: Iterable[FlatBucket]) -> None:
        """Gather the weights that their owners have just written."""
        how = AllGather() if self.section.allgather_partitions else Broadcasts()
        works = [work for bucket in buckets for work in bucket.start_gather(how)]
        # All are started first: small all-gathers overlap.
        for work in works:
            work.wait()

    def _check_equal(self, buckets: Iterable[FlatBucket]) -> None:
        """For ``enable_sanity_checks``: the weights of a bucket are the same on all ranks that have
        its parameters.
        """
        mesh = self.ctx.mesh
        for bucket in buckets:
            if not bucket.reduces:
                continue
            mine = bucket.full.double().sum().view(1)
            sums = mine.new_empty(mesh.size(*bucket.replicas))
            comm.all_gather_into_tensor(sums, mine, group=mesh.group(*bucket.replicas))
            if not torch.equal(sums, mine.expand_as(sums)):
                raise DSError(
                    f"rank {self.ctx.rank}: weights differ between ranks after the step, in the "
                    f"bucket from {bucket.names[0]!r} to {bucket.names[-1]!r} (sums "
                    f"{sums.tolist()}); did a rank write to them?"
                )

    # -- checkpoints -------------------------------------------------------------------------------

    def adopt(self, param: nn.Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
        """See `Partitioner.adopt`."""
        return states.adopt(self.fragments[param], state, full=needs_full_tensors(self.ctx))

    def states(self, optimizer: Optimizer | None) -> Iterator[StateTensor]:
        """See `HasStates.states`.

        Replicated weights are stored by the first rank, fragments by their owners.
        """
        assert self._module is not None
        self.offloaded.require("saving states")
        self.settle()
        return states.states(self.ctx, self._module, self.buckets, optimizer)

    def load_states(
        self, source: StateSource, optimizer: Optimizer | None, *, strict: bool = True
    ) -> None:
        """See `HasStates.load_states`."""
        self.offloaded.require("loading states")
        from_fp32 = self.section.load_from_fp32_weights
        self.settle()
        loaded = (self.ctx, self.module, self.buckets)
        states.load(*loaded, source, optimizer, strict=strict, from_fp32=from_fp32)
        self.updates.loaded(source, optimizer)

    # -- access ------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Others will read or write masters, states or gradients: no copy and no update of them
        runs after this.
        """
        self.updates.settle()
        self.offload.synchronize()

    def locate(self, param: nn.Parameter) -> ParamShard | None:
        """See `ds_access.param_shard.LocatesParams`."""
        if not self._shards:
            shard = LocalFragmentShard if self.reducer.local else FragmentShard
            self._shards = {
                p.param: shard(self, b, p) for b in self.reducer.buckets for p in b.fragments
            }
        self.settle()  # the optimizer has all states to look at
        return self._shards.get(param)

    def unsharded_now(self, bucket: FlatBucket) -> Tensor | None:
        """The buffer with the unsharded weights of `bucket`; None while they are sharded."""
        return bucket.full

    def detach(self) -> None:
        """See `Partitioner.detach`."""
        self.updates.close()
        self.offloaded.reload(non_blocking=False)
        if self._reducer is not None:
            self._reducer.detach()
        self._unfollow()
        if self._module is not None:
            for part in self._module.modules():
                remove_hooks(part)
            self._end()
            self.offload.close()

    def _end(self) -> None:
        """Leave the module with all its weights. Collective."""


def _check_grain(ctx: Context) -> None:
    """Raise UsageError for an optimizer of unknown arithmetic, unless the config allows it."""
    if ctx.grain is None and not switch(ctx.config, AllowUntestedOptimizer, False):
        raise UsageError(
            "zero_optimization: it is not known which elements this optimizer's arithmetic "
            'combines. Set "zero_allow_untested_optimizer": true, and one rank updates each '
            "parameter as a full tensor, which suits any optimizer that looks at one parameter at "
            "a time. Or use one that is known, by its name in the config or as an object of "
            "torch's class: Adam, AdamW, SGD and other element-wise ones can be cheaper, since "
            "every rank updates an equal shard of each parameter"
        )
