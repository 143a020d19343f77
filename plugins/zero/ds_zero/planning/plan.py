"""Memory and communication of each rank, per stage and offload choice, predicted from the layouts
that training uses.

Counted are model states, gradient buckets and gathered weights; not counted are activations and
temporaries of autograd. The plan is of one data-parallel group: without ZeRO all its ranks have the
same parameters.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce

import torch
from torch import nn

from ds_core.buckets import arrange
from ds_core.errors import UsageError
from ds_core.precision import Precision, wire_dtypes
from ds_zero.buckets.layout import Layout
from ds_zero.comm.quantised import GRADIENT_BITS, WEIGHT_BITS, Message, can_quantise
from ds_zero.config import ZeroConfig
from ds_zero.gather.grouping import Gatherer, find_leaves, gatherers, members, persistent
from ds_zero.gather.scheduler import narrower_dtype
from ds_zero.planning.disk import Resting, rest_on_disk
from ds_zero.planning.kinds import Kinds as Kinds
from ds_zero.planning.kinds import join
from ds_zero.planning.simulate import (
    SimulatedBucket,
    SimulatedUnit,
    Wires,
    gather_passes,
    reduction,
)
from ds_zero.zenflow.plan import held


class Offload(enum.Enum):
    """What is kept in host memory, or on disk."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    ALL = "optimizer and parameters"
    DISK = "optimizer on disk"
    DISK_ALL = "optimizer and parameters on disk"

    @property
    def weights(self) -> bool:
        """Whether sharded weights are kept there, too."""
        return self in (Offload.ALL, Offload.DISK_ALL)

    @property
    def on_disk(self) -> bool:
        """Whether a store that frees memory has it."""
        return self in (Offload.DISK, Offload.DISK_ALL)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """The properties of a run, besides model and section, that memory and communication depend on.

    states: elements that the optimizer keeps per parameter element, in the dtype of what it updates
        (Adam: 2). wide: whether those of 16-bit tensors are fp32.
    gas: micro-batches per step. casts: whether the optimizer needs gradients in its tensors' dtype;
        see `ds_core.stepping`. ahead: whether updates on the host begin in backward, see
        `ds_zero.offload.super_offload`.
    """

    world: int
    precision: Precision = field(default_factory=Precision)
    states: int = 2
    gas: int = 1
    casts: bool = True
    ahead: bool = False
    wide: bool = False

    def kept(self, updated: torch.dtype) -> int:
        """Bytes of the optimizer's states per element of a tensor that it updates."""
        return self.states * (max(4, updated.itemsize) if self.wide else updated.itemsize)


@dataclass(frozen=True, slots=True)
class Need:
    """The memory and communication of one rank. reduced, gathered: elements of gradients and of
    weights sent per step.

    sent: the sum of both, in bytes. link: bytes between device and host per step. across: with hpZ
    or MiCS, bytes of `sent` for ranks of other blocks. disk: bytes on disk.
    """

    stage: int
    offload: Offload
    device: Kinds
    host: Kinds
    reduced: int
    gathered: int
    sent: int
    link: int
    across: int = 0
    disk: int = 0


@dataclass(frozen=True, slots=True)
class Laid:
    """A model under one stage. loose: parameters in no bucket."""

    buckets: list[SimulatedBucket]
    loose: list[nn.Parameter]
    modules: list[Gatherer]
    units: list[SimulatedUnit]


def lay_out(
    module: nn.Module, section: ZeroConfig, world: int, weights_on_host: bool = False
) -> Laid:
    """The buckets in which `section.stage` (1 to 3) would lay the parameters of `module` over
    `world` ranks.

    weights_on_host: even a single rank then gathers.
    """
    everything = list(module.parameters())
    trained = [p for p in everything if p.requires_grad]
    if section.stage < 3 or (world == 1 and not weights_on_host):
        buckets = list(
            _simulated(
                trained, section.bucket_elements(world), world, replicated=True, trained=True
            )
        )
        return Laid(buckets, [p for p in everything if not p.requires_grad], [], [])
    small = persistent(everything, section)
    partitioned = {p for p in everything if p not in small}
    modules = gatherers(module, partitioned, section, find_leaves(module, section.leaf_module))
    replicated = [p for p in trained if p not in partitioned]
    buckets = list(
        _simulated(replicated, section.bucket_elements(world), world, replicated=True, trained=True)
    )
    units: list[SimulatedUnit] = []
    for gatherer, chosen, mine in members(modules, set(trained)):
        for bucket in _simulated(
            chosen, section.unit_elements(world), world, replicated=False, trained=mine
        ):
            units.append(SimulatedUnit(len(units), bucket, gatherer.leaf))
    loose = [p for p in everything if p in small and not p.requires_grad]
    return Laid(buckets + [u.bucket for u in units], loose, modules, units)


def _simulated(
    params: Sequence[nn.Parameter], capacity: int, world: int, *, replicated: bool, trained: bool
) -> Iterator[SimulatedBucket]:
    for run in arrange(
        params,
        lambda p: (p.dtype, p.requires_grad),
        lambda _, filled, size: filled + size > capacity,
    ):
        yield SimulatedBucket(
            tuple(run),
            Layout.of([p.numel() for p in run], world),
            run[0].dtype,
            replicated,
            trained,
        )


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
    """
    if section.stage == 0:
        return _replicated(module, run)
    offloaded = offload is not Offload.NONE
    weights_on_host = offload.weights
    blocks = _blocks(section, run.world)
    special = _special(module, run.precision)
    laid = lay_out(module, section, blocks.sharded, weights_on_host)
    trained = [b for b in laid.buckets if b.trained]
    deferred = section.zenflow if offloaded and not offload.on_disk else None
    wires = _wires(section, run, blocks, special, offloaded and deferred is None)
    gathered = gather_passes(laid.modules, laid.units, section) if laid.units else 0
    passes, waits = (run.gas, False) if section.stage > 1 else (1, run.gas > 1)
    flat_peak, kept = reduction(
        _queue(laid, trained), _arrivals(module, trained), wires, passes, waits
    )
    parts = sum(b.layout.shard_numel * b.dtype.itemsize for b in laid.buckets if not b.replicated)
    weights = sum(b.layout.total * b.dtype.itemsize for b in laid.buckets if b.replicated) + _bytes(
        laid.loose
    )
    if blocks.second:
        parts += sum(
            u.bucket.layout.total // blocks.size * _sent(u.bucket, special).itemsize
            for u in laid.units
        )
    device = Kinds(
        parameters=weights + (0 if weights_on_host else parts),
        gradients=kept,
        buckets=flat_peak - kept,
        gathered=_gathered_bytes(laid.units, gathered),
    )
    host = Kinds(parameters=parts if weights_on_host else 0)
    mine = rank % blocks.sharded
    states = _optimized(trained, run, offload, wires.wire, mine)
    disk = 0
    if deferred is not None:
        states = _optimized(trained, run, Offload.OPTIMIZER, wires.wire, mine)
        on_device, on_host = held(
            trained,
            deferred,
            run.kept,
            mine,
            partial(_master, run.precision),
            partial(_grad, run.precision),
        )
        device = join(device, on_device)
        host = join(host, replace(states, cast=0), on_host)
    elif offload.on_disk:
        resting = [_resting(b, run, offload, wires.wire, mine) for b in laid.buckets]
        stay, tiles, ahead, disk = rest_on_disk(resting, section)
        staged = sum(
            b.layout.shard_numel * b.dtype.itemsize for b in trained if _staged(run, b, offload)
        )
        host = Kinds(parameters=stay, buckets=staged + tiles, gathered=ahead)
    elif offloaded:
        # Two staging buffers for copies between device and host, and the weights that a step has
        # written.
        through = 2 * max(
            (b.layout.shard_numel * max(wires.wire(b).itemsize, b.dtype.itemsize) for b in trained),
            default=0,
        )
        through += sum(
            b.layout.shard_numel * b.dtype.itemsize for b in trained if _staged(run, b, offload)
        )
        through += sum(_saved(run, b, offload) for b in trained) if run.ahead else 0
        host = join(
            host, states, Kinds(gradients=_on_host(trained, run, wires.wire), buckets=through)
        )
    else:
        device = join(device, states)
    return Need(
        section.stage,
        offload,
        device,
        host,
        *_traffic(laid, section, run, blocks, offload, wires.wire, special),
        disk=disk,
    )


def _resting(
    bucket: SimulatedBucket,
    run: PlannedRun,
    offload: Offload,
    wire: Callable[[SimulatedBucket], torch.dtype],
    rank: int,
) -> Resting:
    states = _optimized([bucket], run, offload, wire, rank) if bucket.trained else Kinds()
    gradients = _on_host([bucket], run, wire) if bucket.trained else 0
    shard = bucket.layout.shard_numel
    weights = shard * bucket.dtype.itemsize if offload.weights and not bucket.replicated else 0
    return Resting(states.masters, states.states, gradients, weights, shard, run.states)


def _optimized(
    trained: Sequence[SimulatedBucket],
    run: PlannedRun,
    offload: Offload,
    wire: Callable[[SimulatedBucket], torch.dtype],
    rank: int,
) -> Kinds:
    """Masters, the optimizer's states, and gradients in the masters' dtype."""
    masters = states = cast = 0
    for bucket in trained:
        size = bucket.layout.shard_numel
        own = _master(run.precision, bucket)
        # On the host masters are copies, except of weights that are kept there too, in the masters'
        # dtype.
        copied = (
            offload.on_disk
            or offload is Offload.OPTIMIZER
            or (offload is Offload.ALL and bucket.replicated)
        )
        masters += size * own.itemsize if copied or own != bucket.dtype else 0
        states += _owned(bucket.layout, rank) * run.kept(own)
        grad = (
            _grad(run.precision, bucket)
            if offload is Offload.NONE
            else _host_grad(run, bucket, wire)
        )
        cast += size * own.itemsize if run.casts and grad != own else 0
    return Kinds(masters=masters, states=states, cast=cast)


def _host_grad(
    run: PlannedRun, bucket: SimulatedBucket, wire: Callable[[SimulatedBucket], torch.dtype]
) -> torch.dtype:
    """The dtype of gradients on the host: the masters', in which they are summed, or that of the
    reduction.
    """
    return run.precision.accumulate or (
        wire(bucket) if run.gas == 1 else _master(run.precision, bucket)
    )


def _staged(run: PlannedRun, bucket: SimulatedBucket, offload: Offload) -> bool:
    """Whether a step on the host leaves 16-bit weights there, to be copied to the device."""
    return _master(run.precision, bucket) != bucket.dtype and (
        not offload.weights or bucket.replicated
    )


def _saved(run: PlannedRun, bucket: SimulatedBucket, offload: Offload) -> int:
    """Bytes in which a bucket that is updated before the step is saved, see
    `ds_zero.offload.super_offload`.
    """
    own = _master(run.precision, bucket)
    staged = _staged(run, bucket, offload)
    if offload is Offload.ALL and not bucket.replicated and own == bucket.dtype:
        return 0
    written = bucket.dtype.itemsize if own != bucket.dtype and not staged else 0
    return bucket.layout.shard_numel * (own.itemsize + run.kept(own) + written)


def _on_host(
    trained: Sequence[SimulatedBucket],
    run: PlannedRun,
    wire: Callable[[SimulatedBucket], torch.dtype],
) -> int:
    return sum(b.layout.shard_numel * _host_grad(run, b, wire).itemsize for b in trained)


def _bytes(params: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() * p.element_size() for p in params)


def _owned(layout: Layout, rank: int) -> int:
    """Elements in the part of `rank`, without padding."""
    return sum(
        span.stop - span.start for span in (layout.span(i, rank) for i in range(len(layout.sizes)))
    )


def _master(precision: Precision, bucket: SimulatedBucket) -> torch.dtype:
    wanted = precision.master
    return wanted if wanted is not None and bucket.dtype.is_floating_point else bucket.dtype


def _grad(precision: Precision, bucket: SimulatedBucket) -> torch.dtype:
    return (
        precision.accumulate
        if precision.accumulate and bucket.dtype.is_floating_point
        else bucket.dtype
    )


def _wire(
    precision: Precision, special: Mapping[nn.Parameter, torch.dtype], bucket: SimulatedBucket
) -> torch.dtype:
    """The widest dtype that any parameter of the bucket asks for, as in `Reducer`."""
    wanted = [special.get(p) or precision.wire or p.dtype for p in bucket.params]
    return reduce(torch.promote_types, wanted)


def _special(module: nn.Module, precision: Precision) -> Mapping[nn.Parameter, torch.dtype]:
    """Parameters whose gradients are sent in the dtype of autocast."""
    return (
        wire_dtypes(module, precision.autocast, precision.autocast_modules)
        if precision.autocast
        else {}
    )


@dataclass(frozen=True, slots=True)
class _Blocks:
    """sharded: over how many ranks states are. size: ranks of a block. second: whether blocks have
    second copies.
    """

    sharded: int
    size: int
    second: bool = False


def _blocks(section: ZeroConfig, world: int) -> _Blocks:
    """Raises UsageError where ranks do not divide into the blocks of the config."""
    hpz = section.zero_hpz_partition_size
    mics = section.mics_shard_size
    if section.stage != 3 or (hpz < 2 and mics < 1):
        return _Blocks(world, world)
    key, size = ("zero_hpz_partition_size", hpz) if hpz > 1 else ("mics_shard_size", mics)
    if world % size:
        raise UsageError(
            f"zero_optimization.{key}: {size} does not divide {world} data-parallel ranks"
        )
    return _Blocks(world, size, size < world) if hpz > 1 else _Blocks(size, size)


def _wires(
    section: ZeroConfig,
    run: PlannedRun,
    blocks: _Blocks,
    special: Mapping[nn.Parameter, torch.dtype],
    offloaded: bool,
) -> Wires:
    return Wires(
        world=blocks.sharded,
        keeps=section.stage == 1,
        overlap=section.overlap,
        eager=section.contiguous_gradients or run.precision.accumulate is not None,
        scatter=section.reduce_scatter,
        to_host=offloaded,
        grad=partial(_grad, run.precision),
        wire=partial(_wire, run.precision, special),
    )


def _queue(laid: Laid, trained: Sequence[SimulatedBucket]) -> list[SimulatedBucket]:
    """In stage 3, units whose forward is last come first, and replicated weights come last."""
    used = [u.bucket for u in sorted(laid.units, key=lambda u: -u.first_use) if u.bucket.trained]
    return used + [b for b in trained if b.replicated]


def _arrivals(module: nn.Module, trained: Sequence[SimulatedBucket]) -> list[nn.Parameter]:
    awaited = {p for b in trained for p in b.params}
    return [p for p in reversed(list(module.parameters())) if p in awaited]


def _gathered_bytes(units: Sequence[SimulatedUnit], peak: int) -> int:
    """`peak` elements in bytes; where units differ in dtype, as if they were the widest."""
    return peak * max((u.bucket.dtype.itemsize for u in units), default=0)


def _sent(bucket: SimulatedBucket, special: Mapping[nn.Parameter, torch.dtype]) -> torch.dtype:
    """The dtype in which weights are gathered."""
    return narrower_dtype(bucket.params, bucket.dtype, special) or bucket.dtype


def _traffic(
    laid: Laid,
    section: ZeroConfig,
    run: PlannedRun,
    blocks: _Blocks,
    offload: Offload,
    wire: Callable[[SimulatedBucket], torch.dtype],
    special: Mapping[nn.Parameter, torch.dtype],
) -> tuple[int, int, int, int, int]:
    """Per step: elements of gradients and of weights, bytes of both, bytes between device and host,
    and across blocks.

    Each rank sends its part of a message to all others, so some of it to other blocks.
    """
    sharded = blocks.sharded
    times = run.gas if section.stage > 1 else 1
    others = sharded - 1
    outside = sharded - blocks.size
    reduced = gathered = sent = link = across = 0
    by_reduction = times * (
        1 if section.reduce_scatter or not section.use_multi_rank_bucket_allreduce else 2
    )
    for bucket in laid.buckets:
        part = bucket.layout.shard_numel
        if bucket.trained:
            # MiCS: an all-reduce over the far ranks
            over = times * part * 2 * (run.world - sharded) // run.world
            reduced += part * others * by_reduction + over
            shard = part * by_reduction * wire(bucket).itemsize
            apart = outside
            if (
                section.zero_quantized_gradients
                and not bucket.replicated
                and can_quantise(bucket.dtype)
            ):
                shard = Message.of(GRADIENT_BITS, part).size * times
                apart = sharded // blocks.size - 1
            sent += shard * others + over * wire(bucket).itemsize
            across += shard * apart + over * wire(bucket).itemsize
            if bucket.replicated:
                gathered += part * others
                sent += part * others * bucket.dtype.itemsize
                across += part * outside * bucket.dtype.itemsize
            if offload is not Offload.NONE:
                every = section.zenflow.update_interval if section.zenflow is not None else 1
                link += part * (times if section.zenflow is None else 1) * wire(bucket).itemsize
                if bucket.replicated or not offload.weights:  # the pace of "auto" is not known
                    link += part * bucket.dtype.itemsize // (every if isinstance(every, int) else 1)
    factor = 2 if section.use_all_reduce_for_fetch_params else 1
    for unit in laid.units:
        part = unit.bucket.layout.shard_numel
        count = unit.gathers * run.gas
        size = _sent(unit.bucket, special).itemsize
        # a step outdates second copies
        near = count - unit.bucket.trained if blocks.second and count else 0
        inside = unit.bucket.layout.total // blocks.size * (blocks.size - 1) * near
        gathered += part * (count - near) * factor * others + inside
        shard = part * factor * size
        coded = section.zero_quantized_nontrainable_weights and not unit.bucket.trained
        if (coded or section.zero_quantized_weights) and can_quantise(unit.bucket.dtype):
            # second copies are decoded
            shard = Message.of(WEIGHT_BITS, part).size
            size = unit.bucket.dtype.itemsize
        sent += shard * (count - near) * others + inside * size
        across += shard * (count - near) * outside
        if offload.weights:
            link += part * (count - near) * unit.bucket.dtype.itemsize
    return reduced, gathered, sent, link, across if blocks.size < run.world else 0


def _replicated(module: nn.Module, run: PlannedRun) -> Need:
    """Stage 0: the core's data parallelism, whose gradient buckets live as long as the run."""
    trained = [p for p in module.parameters() if p.requires_grad]
    precision = run.precision
    special = _special(module, run.precision)
    gradients = masters = states = cast = fresh = elements = sent = 0
    for param in trained:
        size = param.numel()
        own = param.dtype
        floating = param.is_floating_point()
        master = precision.master if precision.master and floating else own
        grad = precision.accumulate if precision.accumulate and floating else own
        wire = special.get(param) or precision.wire or own
        # a flag is sent with each gradient
        reduction = (size + 1) * wire.itemsize if run.world > 1 else 0
        if reduction and grad == own == wire:
            gradients += reduction  # reduced gradients stay in the buffer of the reduction
            fresh += size * own.itemsize
        else:
            gradients += reduction + size * grad.itemsize
        if master != own:
            masters += size * master.itemsize
            gradients += size * master.itemsize if run.casts else 0
        elif grad != own:
            cast += size * own.itemsize
        states += size * run.kept(master)
        elements += size + 1
        sent += (size + 1) * wire.itemsize
    device = Kinds(_bytes(module.parameters()), gradients, masters, states, cast, fresh)
    share = 2 * (run.world - 1) / run.world
    return Need(
        0, Offload.NONE, device, Kinds(), round(elements * share), 0, round(sent * share), 0
    )


# -- all choices -----------------------------------------------------------------------------------


def plan(module: nn.Module, section: ZeroConfig, run: PlannedRun) -> list[Need]:
    """Every stage with every offload that it can have."""
    needs = []
    for stage in (0, 1, 2, 3):
        staged = section.model_copy(update={"stage": stage})
        choices = [
            c for c in Offload if stage == 3 or (c is Offload.NONE if stage == 0 else not c.weights)
        ]
        needs += [predict(module, staged, run, choice) for choice in choices]
    return needs


@dataclass(frozen=True, slots=True)
class Advice:
    """need: what to use; None: nothing fits. reason: one sentence."""

    need: Need | None
    reason: str


def recommend(
    needs: Sequence[Need], device: int, host: int | None, ranks_per_host: int = 1
) -> Advice:
    """Of what fits into `device` bytes per rank and `host` bytes per machine: the least offload,
    then traffic.

    host: None: as much as it takes. Among those whose traffic is equal within 1 %, stage 3 comes
    last, since it gathers in every pass, and then memory decides.
    """

    def memory(need: Need) -> str:
        on_host = (
            f" and {_gb(need.host.peak * ranks_per_host)} on the host" if need.host.peak else ""
        )
        return f"{_gb(need.device.peak)} on the device{on_host}" + (
            f", {_gb(need.disk)} on disk" if need.disk else ""
        )

    def cost(need: Need) -> tuple[int, int]:
        return list(Offload).index(need.offload), need.sent

    fitting = [
        n
        for n in needs
        if n.device.peak <= device and (host is None or n.host.peak * ranks_per_host <= host)
    ]
    if not fitting:
        least = min(needs, key=lambda n: (n.device.peak, n.host.peak))
        return Advice(
            None, f"nothing fits: {_name(least)} needs least on the device, {memory(least)}"
        )
    level, sent = min(cost(n) for n in fitting)
    equal = [n for n in fitting if cost(n)[0] == level and n.sent <= sent * 1.01]
    best = min(equal, key=lambda n: (n.stage == 3, n.device.peak))
    reason = f"{_name(best)}: {memory(best)}; of what fits it offloads least and then sends least"
    cheaper = [
        n for n in needs if n not in fitting and (cost(n)[0] < level or n.sent * 1.01 < sent)
    ]
    if cheaper:
        nearest = min(cheaper, key=lambda n: n.device.peak)
        reason += f" ({_name(nearest)} would need {memory(nearest)})"
    return Advice(best, reason)


def _name(need: Need) -> str:
    where = "" if need.offload.on_disk else " on the host"
    return f"stage {need.stage}" + (
        "" if need.offload is Offload.NONE else f" with {need.offload.value}{where}"
    )


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
