"""Stage 3: weights are sharded too.

A module's weights are gathered before it runs and released afterwards.

Small parameters stay replicated, as in stage 2. Gradients are reduced on process groups of their
own, so that their order is independent of gathers.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core.errors import DSError, UsageError
from ds_core.precision import WIRE_DTYPES
from ds_core.process import STATE
from ds_zero.attributes import describe_all
from ds_zero.base import ZeroPartitioner
from ds_zero.buckets.flat import FlatBucket
from ds_zero.buckets.make import make_buckets
from ds_zero.comm.collectives import AllGather, weight_gather
from ds_zero.comm.hierarchy import (
    added_outer,
    second_copy,
    sharding_axes,
    two_steps,
    wanted_anywhere,
)
from ds_zero.comm.quantised import can_quantise, quantised_gather, quantised_reduce
from ds_zero.gather.external import externals
from ds_zero.gather.grouping import Gatherer, find_leaves, gatherers, members, persistent
from ds_zero.gather.hooks import GatherHooks
from ds_zero.gather.leaves import leaf_flag, mark_leaf
from ds_zero.gather.scheduler import GatherScheduler, narrower_dtype
from ds_zero.gather.unit import BucketUnit, UnitState
from ds_zero.init.sharded_param import remove_attributes
from ds_zero.offload.placement import StatePlacement, Transfers
from ds_zero.offload.quantised_store import QuantisedStore
from ds_zero.offload.state_offload import BACKWARD

if TYPE_CHECKING:
    from ds_run_state.states import StateSource
    from torch.optim import Optimizer

    from ds_core.context import Context
    from ds_core.mesh import Mesh
    from ds_core.partition import BackwardPlan
    from ds_zero.comm.collectives import GradientReduce, WeightGather
    from ds_zero.comm.hierarchy import TwoSteps
    from ds_zero.comm.quantised import QuantisedGather, QuantisedReduce
    from ds_zero.config import ZeroConfig
    from ds_zero.reduce.source import GradientSource

log = logging.getLogger("ds_zero")


class Stage3(ZeroPartitioner):
    """Parameters are sharded; see the module's docstring."""

    def __init__(self, ctx: Context, section: ZeroConfig) -> None:
        super().__init__(ctx, section)
        if section.gather_16bit_weights_on_model_save is False:
            self.not_exported = "zero_optimization.gather_16bit_weights_on_model_save is false"

        # -- weights --
        # The buckets that are gathered and released, in the order of the modules.
        self.units: list[BucketUnit] = []
        # The modules that gather.
        self._gatherers: list[Gatherer] = []
        # The leaf modules that the config names, which get their mark here.
        self._leaves: set[nn.Module] = set()
        # Buckets that no optimizer updates.
        self._untrained: set[FlatBucket] = set()
        # Decides when units are gathered; the hooks report what runs.
        self.gathering: GatherScheduler
        self.hooks: GatherHooks

        # -- collectives --
        # The process groups of reductions, by axes.
        self._groups: dict[tuple[str, ...], Any] = {}
        # MiCS's gathers in two steps, by axes.
        self._two_steps: dict[tuple[str, ...], TwoSteps] = {}
        # qwZ and qgZ.
        self._gather_8: QuantisedGather | None = None
        self._reduce_4: QuantisedReduce | None = None

    def _lay_out(self, module: nn.Module, params: Sequence[nn.Parameter]) -> list[FlatBucket]:
        trained = set(params)
        mesh = self.ctx.mesh

        # Which parameters are sharded, and which modules gather them.
        # Weights that are offloaded are worth releasing on a single rank, too.
        offloads = self.offload.param is not None
        sizes = {
            p: mesh.size(*sharding_axes(mesh, self.ctx.params[p].replicas))
            for p in module.parameters()
        }
        shared_out = [p for p, size in sizes.items() if offloads or size > 1]
        small = persistent(shared_out, self.section)
        # With the elements of this rank's shards.
        sharded = {
            p: p.numel() // mesh.size(*self.ctx.params[p].replicas)
            for p in shared_out
            if p not in small
        }
        leaves = find_leaves(module, self.section.leaf_module)
        self._gatherers = gatherers(module, sharded, self.section, leaves)
        self._leaves = {
            m
            for m in (*leaves, *(g.module for g in self._gatherers if g.leaf))
            if leaf_flag(m) is None
        }
        for leaf in self._leaves:  # of the config, also where no weight of theirs is sharded
            mark_leaf(leaf, True)

        placement = self.offload.placements(params, sharded)
        # Small parameters share buckets, as in stage 2; the others have buckets by module.
        small_trained = [p for p in params if p not in sharded]
        replicated = make_buckets(
            small_trained,
            self.ctx,
            self.section.bucket_elements,
            placement=placement,
            small_on_host=True,
        )
        untrained = self._untrained_placement() or placement
        for gatherer, chosen, mine in members(self._gatherers, trained):
            for bucket in make_buckets(
                chosen,
                self.ctx,
                self.section.unit_elements,
                sharded=True,
                masters=mine,
                placement=placement if mine else untrained,
            ):
                self.units.append(BucketUnit(len(self.units), bucket, gatherer.leaf))
                if not mine:
                    self._untrained.add(bucket)
        return replicated + [u.bucket for u in self.units]

    def _untrained_placement(self) -> Callable[[nn.Parameter], StatePlacement] | None:
        """Where shards that no optimizer updates are kept, if the config wants them quantised.

        With weights on a disk they are kept there as they are.
        """
        host = self.offload.param
        if not self.section.zero_quantized_nontrainable_weights or (
            host is not None and not host.resident
        ):
            return None
        store = QuantisedStore(self.ctx, {"host": host is not None})
        coded = StatePlacement(None, store, Transfers(self.ctx, store))
        plain = self.offload.placements(())
        return lambda param: coded if can_quantise(param.dtype) else plain(param)

    @property
    def releases_weights(self) -> bool:  # type: ignore[override]
        """See `Partitioner.releases_weights`."""
        return bool(self.units)

    def attach(
        self, module: nn.Module, groups: list[dict[str, Any]], *, updated: bool = True
    ) -> list[dict[str, Any]]:
        """See `Partitioner.attach`."""
        for part in module.modules():
            for param in externals(part):
                if param not in self.ctx.params:
                    raise UsageError(
                        f"register_external_parameter({type(part).__name__}, ...): the parameter "
                        f"of shape {tuple(param.shape)} belongs to no module that was given to "
                        "initialize"
                    )
        out = super().attach(module, groups, updated=updated)
        self.unit_of = {p: u for u in self.units for p in u.bucket.params}
        mesh = self.ctx.mesh

        # How weights are gathered, where not by one all-gather of what there is.
        for unit in self.units:
            unit.bucket.weights.second = second_copy(unit.bucket, mesh)
        if self.section.mics_hierarchical_params_gather:
            self._two_steps = two_steps(
                mesh, {u.bucket.axes for u in self.units if u.bucket.world > 1}
            )
            if not self._two_steps and self.ctx.rank == 0:
                log.info(
                    "mics_hierarchical_params_gather has no effect here: no shard group is on "
                    "several hosts"
                )
        self._gather_8 = quantised_gather(self.ctx, self.section, [u.bucket for u in self.units])

        # When they are gathered.
        self.gathering = GatherScheduler(self.section, self.units, self.gather_of)
        self.hooks = GatherHooks(
            module, self._gatherers, self.gathering, self.unit_of, self._backward_began
        )
        describe_all(self, module)
        return out

    def gather_of(self, unit: BucketUnit) -> WeightGather | None:
        """How the weights of `unit` are gathered now for running modules; None: exactly, as the
        config says.
        """
        how = self._gather_over_ranks(unit)
        second = unit.bucket.weights.second
        return how if second is None else second.around(how or self.gathering.exact)

    def _gather_over_ranks(self, unit: BucketUnit) -> WeightGather | None:
        """How they come from their shards.

        Under autocast they are sent in the dtype to which it casts them anyway, if any.
        """
        coded = self.section.zero_quantized_weights or unit.bucket in self._untrained
        if self._gather_8 is not None and coded and can_quantise(unit.bucket.dtype):
            return self._gather_8
        if self._two_steps:
            return self._two_steps.get(unit.bucket.axes)
        listed = self.ctx.stash.get(WIRE_DTYPES)
        dtype = narrower_dtype(unit.bucket.params, unit.bucket.dtype, listed) if listed else None
        return None if dtype is None else weight_gather(self.section, dtype)

    # -- access to weights, see `weights` ----------------------------------------------------------

    def pin(self, unit: BucketUnit) -> None:
        """See `WeightOwner.pin`."""
        self.gathering.pin(unit)

    def unpin(self, unit: BucketUnit) -> None:
        """See `WeightOwner.unpin`."""
        if self.unit_of:  # else the engine was destroyed meanwhile, and its weights stay unsharded
            self.gathering.unpin(unit)

    def add_external(self, module: nn.Module, param: nn.Parameter) -> None:
        """See `WeightOwner.add_external`."""
        self.hooks.add_external(module, param)

    def remove_external(self, module: nn.Module, param: nn.Parameter) -> None:
        """See `WeightOwner.remove_external`."""
        self.hooks.remove_external(module, param)

    def gather_whole(self, module: nn.Module) -> None:
        """See `ds_run_state.blocks.GathersWhole`."""
        self.hooks.gather_whole(module)

    def activity(self) -> tuple[str, int, tuple[str, ...], tuple[str, ...]]:
        """What runs now, for messages of the package dscore-comms-guard; called by another thread."""
        return self.hooks.activity()

    def release_idle(self) -> None:
        """Release weights that were prefetched or kept for reuse."""
        self.gathering.release_idle()

    @contextlib.contextmanager
    def without_hooks(self) -> Iterator[None]:
        """Inside, modules run without gathering; the caller keeps their weights unsharded."""
        self.hooks.remove()
        try:
            yield
        finally:
            self.hooks.install()

    @property
    def weights_away(self) -> bool:
        """See `ds_run_state.blocks.HoldsWeights`."""
        return any(unit.offloaded_numel for unit in self.units)

    @contextlib.contextmanager
    def weights_held(self, at_once: int) -> Iterator[None]:
        """See `ds_run_state.blocks.HoldsWeights`."""
        with torch.no_grad():
            self.gathering.pin_all(at_once)
        try:
            with self.without_hooks():
                yield
        finally:
            for unit in self.units:
                self.unpin(unit)

    @contextlib.contextmanager
    def module_hooks_removed(self) -> Iterator[None]:
        """See `ZeroPartitioner.module_hooks_removed`."""
        with super().module_hooks_removed(), self.without_hooks():
            yield

    def load_states(
        self, source: StateSource, optimizer: Optimizer | None, *, strict: bool = True
    ) -> None:
        """See `HasStates.load_states`.

        Gathered weights are released, since they become outdated.
        """
        self.gathering.release_all()
        self._outdate()
        super().load_states(source, optimizer, strict=strict)
        self.gathering.refresh()

    def _make_reducer(self, buckets: list[FlatBucket]) -> GradientSource:
        self._groups = _own_groups(self.ctx.mesh, {b.axes for b in self.buckets if b.world > 1})
        trained = [b for b in buckets if b not in self._untrained]
        self._reduce_4 = quantised_reduce(self.ctx, self.section, trained)
        return super()._make_reducer(trained)

    def reduce_group(self, bucket: FlatBucket) -> Any:
        """See `ZeroPartitioner.reduce_group`."""
        return self._groups.get(bucket.axes)

    def reduction(self, bucket: FlatBucket) -> GradientReduce:
        """See `ZeroPartitioner.reduction`."""
        quantised = (
            self._reduce_4 if bucket.weights.sharded and can_quantise(bucket.dtype) else None
        )
        inner = quantised or super().reduction(bucket)
        if not bucket.outer:
            return inner
        return added_outer(inner, self.ctx.mesh.group(*bucket.outer))

    def reduce_order(self) -> list[FlatBucket]:
        """See `ZeroPartitioner.reduce_order`: units whose forward was last come first; replicated
        weights come last.
        """
        used = sorted(self.units, key=lambda u: -u.first_use)
        sharded = [u.bucket for u in used if u.bucket not in self._untrained]
        replicated = [b for b in self.buckets if not b.weights.sharded and b.trains]
        return sharded + replicated

    # -- backward and step -------------------------------------------------------------------------

    def begin(self, plan: BackwardPlan) -> None:
        """See `Partitioner.begin`."""
        # else hooks on modules may have seen the backward before
        if torch._C._current_graph_task_id() == -1:
            self.gathering.in_backward = False
        super().begin(plan)

    def on_gradient(self, param: nn.Parameter) -> None:
        """See `Partitioner.on_gradient`."""
        super().on_gradient(param)
        self.hooks.on_gradient(param)

    def _backward_began(self) -> None:
        """Called by the first gather hook of a backward, in its outermost graph."""
        self.offloaded.require("backward", BACKWARD)
        self.gradient_hooks.enter()
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        self.hooks.end()
        self.gathering.end_pass()

    def step(self, optimizer: Optimizer, factor: float) -> None:
        """See `Partitioner.step`. It may write weights, so no gather may be running."""
        self.gathering.release_all()
        super().step(optimizer, factor)
        if self._reduce_4 is not None and self._reduce_4.feedback is not None:
            self._reduce_4.feedback.stepped()

    @torch.no_grad()
    def publish(self) -> None:
        """See `Partitioner.publish`. Only replicated weights are sent."""
        self.gathering.release_all()
        changed = [b for b in self.buckets if b not in self._untrained and self.updates.changed(b)]
        self._outdate(but=self._untrained)
        # Sharded ones are gathered when they are needed: each rank has written its own shard.
        replicated = [b for b in changed if not b.weights.sharded]
        self._update_shards(changed)
        self._gather_weights(replicated)
        self.gathering.refresh()
        if self.section.enable_sanity_checks:
            self._check_equal(replicated)
            self._check_released()

    def _outdate(self, but: Collection[FlatBucket] = ()) -> None:
        for unit in self.units:
            if unit.bucket not in but:
                unit.bucket.weights.outdate()

    def _check_released(self) -> None:
        for unit in self.units:
            if unit.uses.callers:
                continue
            if unit.state is not UnitState.SHARDED or unit.bucket.full.untyped_storage().nbytes():
                raise DSError(
                    f"rank {self.ctx.rank}: {unit.bucket.names[0]!r} is still gathered after the "
                    "step"
                )

    def release_for_offload(self) -> None:
        """Release every unit. Raises UsageError while modules run or parameters are gathered."""
        busy = self.hooks.running or torch._C._current_graph_task_id() != -1
        if not busy:
            self.gathering.release_all()
            for unit in self.units:
                if unit.bucket.weights.second is not None:
                    unit.bucket.weights.second.free(unit.bucket)
        if busy or any(u.state is not UnitState.SHARDED for u in self.units):
            raise UsageError(
                "offload_states() inside a forward, a backward or GatheredParameters; call it "
                "outside"
            )

    def unsharded_now(self, bucket: FlatBucket) -> Tensor | None:
        """See `ZeroPartitioner.unsharded_now`."""
        unit = next((u for u in self.units if u.bucket is bucket), None)
        if unit is None:
            return bucket.full
        if unit.state is UnitState.GATHERING:
            unit.complete()
        return None if unit.state is UnitState.SHARDED else bucket.full

    def _end(self) -> None:
        """See `ZeroPartitioner._end`."""
        self.hooks.remove()
        self.unit_of = {}
        # The module keeps all its weights, with their exact values.
        for unit in self.units:
            if unit.state is UnitState.SHARDED or not unit.exact:
                unit.refresh(AllGather())
            elif unit.state is UnitState.GATHERING:
                unit.complete()
        for part in self.module.modules():
            if part in self._leaves:
                mark_leaf(part, False)
        # Two engines may share a frozen module, which the other still describes.
        elsewhere = [
            e.module
            for e in STATE.engines
            if isinstance(e.partitioner, Stage3) and e.partitioner is not self
        ]
        described = {p for module in elsewhere for p in module.parameters()}
        for param in self.module.parameters():
            if param in self.fragments or param not in described:
                remove_attributes(param)
        # The groups end with the mesh.
        self._groups.clear()
        self._two_steps.clear()


def _own_groups(mesh: Mesh, wanted: set[tuple[str, ...]]) -> dict[tuple[str, ...], Any]:
    """A second process group along each set of axes that any rank wants.

    Collective over all ranks.
    """
    if mesh.world_size == 1:
        return {}
    return {axes: mesh.own_group(*axes) for axes in wanted_anywhere(wanted)}
