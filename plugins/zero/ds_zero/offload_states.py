"""`engine.offload_states` and `engine.reload_states`, and where states are: which tensors each group has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core.errors import UsageError
from ds_core.process import STATE
from ds_zero.flat import Share
from ds_zero.state_offload import BACKWARD, FORWARD, OffloadDeviceEnum, OffloadStateTypeEnum

if TYPE_CHECKING:
    from ds_core.engine import Engine
    from ds_zero.base import ZeroPartitioner

__all__ = ["get_state_devices", "offload_states", "reload_states"]


def offload_states(
    engine: Engine,
    include: Iterable[OffloadStateTypeEnum | str] | None = None,
    device: OffloadDeviceEnum | str = OffloadDeviceEnum.cpu,
    pin_memory: bool = True,
    non_blocking: bool = False,
) -> None:
    """Move groups of states to host memory until `reload_states`, to make room for another phase of the program.

    include: None for all. With ``optim_states`` and ``hp_params`` away the model still runs, and only the step is
    refused; with gradients away forwards that build a graph are refused, with ``lp_params`` all. Where master weights
    are the weights themselves (fp32 training) they go with ``lp_params``. Graphs made before weights or gradients were
    offloaded cannot be used again. Stage 3 without offload_param; every rank calls it, outside forward and backward.
    Raises ValueError for another device than the cpu.
    """
    if OffloadDeviceEnum(device) is not OffloadDeviceEnum.cpu:
        raise ValueError(f"offload_states(device={OffloadDeviceEnum(device).value!r}): states can only go to 'cpu'")
    chosen = list(OffloadStateTypeEnum) if include is None else [OffloadStateTypeEnum(kind) for kind in include]
    partitioner = _stage3(engine)
    partitioner.release_for_moving()
    moved = partitioner.moved
    for kind in sorted(set(chosen), key=list(OffloadStateTypeEnum).index):
        tensors = list(_tensors(partitioner, engine.optimizer, kind))
        if kind is OffloadStateTypeEnum.hp_params:
            weights = {t.untyped_storage()._cdata for t in _weights(partitioner)}
            tensors = [t for t in tensors if t.untyped_storage()._cdata not in weights]
        moved.move_out(kind, tensors, pin=pin_memory, non_blocking=non_blocking)
    if moved.kinds & FORWARD:
        parted = {p for b in partitioner.buckets if b.share is Share.PART for p in b.params}
        moved.hide(p for p in engine.module.parameters() if p not in parted)
    if moved.kinds & BACKWARD:
        for param in engine.module.parameters():
            torch.autograd.graph.increment_version(param)
    moved.guard(engine.module, engine.optimizer)


def reload_states(engine: Engine, non_blocking: bool = False) -> None:
    """Bring back what `offload_states` moved; nothing when nothing was."""
    _stage3(engine).moved.bring_back(non_blocking=non_blocking)


def get_state_devices(model: Engine | nn.Module, state: OffloadStateTypeEnum | str) -> set[torch.device]:
    """The devices on which the group `state` lies now; empty when there is none of it. model: engine, or its module.

    Raises ValueError for an unknown group, UsageError when no live engine under ZeRO has this model.
    """
    kind = OffloadStateTypeEnum(state)
    engines = sorted(STATE.engines, key=lambda e: -e.serial)
    engine = next((e for e in engines if e is model or e.module is model), None)
    partitioner: Any = engine.partitioner if engine is not None else None
    if engine is None or not hasattr(partitioner, "moved"):
        raise UsageError("get_state_devices: no live engine under ZeRO has this model; give the engine itself")
    view = partitioner.moved.view
    return {view(t).device for t in _tensors(partitioner, engine.optimizer, kind)}


def _stage3(engine: Engine) -> Any:
    partitioner: Any = engine.partitioner
    if (stage := partitioner.section.stage) != 3:
        raise UsageError(f"offload_states and reload_states need zero_optimization stage 3, this is stage {stage}")
    rests = partitioner.section.offload_param
    if rests is not None and rests.device != "none":
        raise UsageError("offload_states and reload_states do not go with offload_param, which moves weights itself")
    return partitioner


def _weights(partitioner: ZeroPartitioner) -> Iterator[Tensor]:
    """Weights as they rest: parts, and parameters that stay whole."""
    parted = {p for b in partitioner.buckets if b.share is Share.PART for p in b.params}
    for bucket in partitioner.buckets:
        yield bucket.part
    for param in partitioner.module.parameters():
        if param not in parted:
            yield partitioner.moved.shown(param)


def _tensors(partitioner: ZeroPartitioner, optimizer: Any, kind: OffloadStateTypeEnum) -> Iterator[Tensor]:
    """The tensors of a group that have elements; those that offload_optimizer keeps on the host are not among them."""
    if kind is OffloadStateTypeEnum.optim_states:
        held = optimizer.state if optimizer is not None else {}
        states = (held.get(p.master, {}) for b in partitioner.buckets if not b.master_rests for p in b.optimized)
        found: Iterable[Tensor | None] = (v for s in states for v in s.values() if isinstance(v, Tensor))
    elif kind is OffloadStateTypeEnum.hp_params:
        found = (p.master for b in partitioner.buckets if not b.master_rests for p in b.optimized)
    elif kind is OffloadStateTypeEnum.lp_params:
        found = _weights(partitioner)
    else:
        here = (b for b in partitioner.buckets if not b.host_steps)
        reduced = kind is OffloadStateTypeEnum.lp_grads
        found = (t for b in here for t in partitioner.reducer.tensors(b, reduced=reduced))
    return (t for t in found if t is not None and t.numel())
