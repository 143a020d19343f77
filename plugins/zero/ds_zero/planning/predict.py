"""Memory and communication of each rank per stage and offload, from the layouts that training uses.

Counted are model states, gradient buckets and gathered weights; not counted are activations and
temporaries of autograd. The plan is of one data-parallel group: without ZeRO all its ranks have the
same parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from ds_plan import Kinds, Need, Offload, PlannedRun, join
from torch import nn

from ds_zero.buckets.sizes import Place, choose_dtype
from ds_zero.config import ZeroConfig
from ds_zero.planning.buckets import Laid, SimulatedBucket, SimulatedUnit, bytes_of, lay_out
from ds_zero.planning.disk import rest_on_disk
from ds_zero.planning.gathers import gather_passes
from ds_zero.planning.reductions import reduction
from ds_zero.planning.states import Dtypes, RankStates
from ds_zero.planning.traffic import Blocks, Traffic
from ds_zero.zenflow.plan import held


def predict_all(module: nn.Module, section: ZeroConfig, run: PlannedRun) -> list[Need]:
    """Every stage with every offload that it can have.

    module: may be on the meta device, in the dtypes of training.
    """
    needs = []
    for stage in (0, 1, 2, 3):
        staged = section.model_copy(update={"stage": stage})
        possible = [offload for offload in Offload if is_possible(stage, offload)]
        needs += [predict(module, staged, run, offload) for offload in possible]
    return needs


def is_possible(stage: int, offload: Offload) -> bool:
    """Whether a stage can have that offload: stage 0 shards nothing, and only stage 3 weights."""
    if stage == 0:
        return offload is Offload.NONE
    return stage == 3 or not offload.weights


def predict(
    module: nn.Module,
    section: ZeroConfig,
    run: PlannedRun,
    offload: Offload = Offload.NONE,
    rank: int = 0,
) -> Need:
    """The memory and communication of `rank` under ``section.stage``; no rank owns more than rank
    0.

    module: may be on the meta device, in the dtypes of training.
    Raises UsageError where ranks do not divide into the config's blocks.
    """
    if section.stage == 0:
        return _predict_replicated(module, run)
    blocks = Blocks.of(section, run.world)
    dtypes = Dtypes.of(module, run.precision)
    laid = lay_out(module, section, blocks.sharded, offload.weights)
    states = RankStates(
        run, offload, dtypes, rank % blocks.sharded, deferred=defers(section, offload)
    )
    device, host = _place_weights(laid, states, blocks)
    device = join(device, _count_passes(module, section, laid, blocks, states))
    more_on_device, more_on_host, disk = _place_states(section, laid, states)
    traffic = Traffic(section, blocks, states)
    traffic.count(laid)
    return Need(
        stage=section.stage,
        offload=offload,
        device=join(device, more_on_device),
        host=join(host, more_on_host),
        reduced=traffic.reduced,
        gathered=traffic.gathered,
        sent=traffic.sent,
        link=traffic.link,
        across=traffic.across,
        disk=disk,
    )


def _place_weights(laid: Laid, states: RankStates, blocks: Blocks) -> tuple[Kinds, Kinds]:
    """Weights between steps: on the device, on the host."""
    found = dict.fromkeys(Place, 0)
    found[Place.DEVICE] = bytes_of(laid.loose)
    for bucket in laid.buckets:
        found[states.weights(bucket).place] += states.weights(bucket).memory(states.sizes(bucket))
    if blocks.second:
        for bucket in (unit.bucket for unit in laid.units):
            # A second copy is kept in the dtype in which weights are gathered, on the device, also
            # where the shards are offloaded: it is cut from weights that were gathered there.
            second = bucket.layout.total // blocks.size * states.dtypes.gathered(bucket).itemsize
            found[Place.DEVICE] += second
    # What a store on disk leaves in memory is counted with its buffers.
    return Kinds(parameters=found[Place.DEVICE]), Kinds(parameters=found[Place.HOST])


def _count_passes(
    module: nn.Module, section: ZeroConfig, laid: Laid, blocks: Blocks, states: RankStates
) -> Kinds:
    """What forward and backward take on the device: gathered weights and buffers of reductions."""
    gathered = gather_passes(laid.modules, laid.units, section) if laid.units else 0
    # Units are counted in elements together; where they differ in dtype, as if all were the widest.
    widest = max((unit.bucket.dtype.itemsize for unit in laid.units), default=0)
    arrivals = _order_of_arrival(module, laid.trained)
    peak, kept = reduction(_order_of_reduction(laid), arrivals, section, states, blocks.sharded)
    return Kinds(gradients=kept, buckets=peak - kept, gathered=gathered * widest)


def defers(section: ZeroConfig, offload: Offload) -> bool:
    """Whether reduced gradients stay on the device until the step, since ZenFlow updates masters."""
    in_memory = offload is not Offload.NONE and not offload.on_disk
    return section.zenflow is not None and in_memory


def _order_of_reduction(laid: Laid) -> list[SimulatedBucket]:
    """In stage 3, units whose forward is last come first, and replicated weights come last."""
    units: list[SimulatedUnit] = sorted(laid.units, key=lambda unit: -unit.first_use)
    used = [unit.bucket for unit in units if unit.bucket.trained]
    return used + [bucket for bucket in laid.trained if bucket.replicated]


def _order_of_arrival(module: nn.Module, trained: Sequence[SimulatedBucket]) -> list[nn.Parameter]:
    awaited = {param for bucket in trained for param in bucket.params}
    return [param for param in reversed(list(module.parameters())) if param in awaited]


def _place_states(section: ZeroConfig, laid: Laid, states: RankStates) -> tuple[Kinds, Kinds, int]:
    """Masters, optimizer states and what a step needs: on the device, on the host, bytes on disk."""
    trained = laid.trained
    device = states.kept(trained, Place.DEVICE)
    staged = sum(states.masters(bucket).staged for bucket in trained)
    host = join(states.kept(trained, Place.HOST), Kinds(buckets=staged))
    if states.offload is Offload.NONE:
        return device, host, 0
    if states.offload.on_disk:
        in_memory, disk = rest_on_disk(laid.buckets, states, section)
        return device, join(host, in_memory), disk
    if section.zenflow is not None:
        chosen, sums = held(trained, section.zenflow, states)
        return join(device, chosen), join(host, sums), 0
    buffers = states.copy_buffers(trained)
    if section.offload_optimizer is not None and section.offload_optimizer.super_offload:
        buffers += sum(states.saved(bucket) for bucket in trained)
    return device, join(host, Kinds(buckets=buffers)), 0


# -- stage 0 ---------------------------------------------------------------------------------------


def _predict_replicated(module: nn.Module, run: PlannedRun) -> Need:
    """The core's data parallelism, whose gradient buckets live as long as the run."""
    dtypes = Dtypes.of(module, run.precision)
    total = Kinds(parameters=bytes_of(module.parameters()))
    elements = sent = 0
    for param in module.parameters():
        if not param.requires_grad:
            continue
        wire = dtypes.autocast.get(param) or run.precision.wire or param.dtype
        total = join(total, _replicated_states(param, wire, run))
        # A flag is sent with each gradient: whether this rank had one.
        elements += param.numel() + 1
        sent += (param.numel() + 1) * wire.itemsize
    # An all-reduce sends each element twice, but for a rank's own part.
    share = 2 * (run.world - 1) / run.world
    return Need(
        stage=0,
        offload=Offload.NONE,
        device=total,
        host=Kinds(),
        reduced=round(elements * share),
        gathered=0,
        sent=round(sent * share),
        link=0,
    )


def _replicated_states(param: nn.Parameter, wire: torch.dtype, run: PlannedRun) -> Kinds:
    """Gradients, masters and states of one parameter. wire: the dtype in which gradients are sent."""
    precision = run.precision
    size = param.numel()
    own = param.dtype
    master = choose_dtype(own, precision.master)
    grad = choose_dtype(own, precision.accumulate)
    reduction = (size + 1) * wire.itemsize if run.world > 1 else 0
    gradients = reduction
    masters = cast = fresh = 0
    if reduction and grad == own == wire:
        # Reduced gradients stay in the buffer of the reduction; those of the next backward are new.
        fresh = size * own.itemsize
    else:
        gradients += size * grad.itemsize
    if master != own:
        masters = size * master.itemsize
        gradients += size * master.itemsize if run.casts else 0
    elif grad != own:
        cast = size * own.itemsize
    states = size * run.kept(master)
    return Kinds(0, gradients, masters, states, cast, fresh)
