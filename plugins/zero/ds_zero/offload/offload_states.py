"""`engine.offload_states`, `engine.reload_states` and `get_state_devices`: which tensors belong to
each group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from ds_state_stores import memory_of
from torch import Tensor, nn

from ds_core.errors import UsageError
from ds_core.process import STATE
from ds_zero.base import ZeroPartitioner
from ds_zero.offload.state_offload import BACKWARD, FORWARD, OffloadDeviceEnum, OffloadStateTypeEnum

if TYPE_CHECKING:
    from ds_core.engine import Engine


def offload_states(
    engine: Engine,
    include: Iterable[OffloadStateTypeEnum | str] | None = None,
    device: OffloadDeviceEnum | str = OffloadDeviceEnum.cpu,
    pin_memory: bool = True,
    non_blocking: bool = False,
) -> None:
    """Move groups of states to host memory until `reload_states`, to make room for another phase of
    the program.

    include: None for all. Without ``optim_states`` and ``hp_params`` the model still runs, and only
        the step raises; without gradients forwards that build a graph raise, without ``lp_params``
        all forwards. Master weights that are the weights themselves (fp32 training) belong to
        ``lp_params``. Graphs from before weights or gradients were offloaded cannot be used again.
        Needs stage 3 without offload_param.

    Every rank calls it, outside forward and backward. Raises ValueError for a device other than the
    cpu.
    """
    if OffloadDeviceEnum(device) is not OffloadDeviceEnum.cpu:
        raise ValueError(
            f"offload_states(device={OffloadDeviceEnum(device).value!r}): states can only go to "
            "'cpu'"
        )
    wanted = OffloadStateTypeEnum if include is None else include
    chosen = {OffloadStateTypeEnum(kind) for kind in wanted}
    partitioner = _stage3(engine)
    partitioner.release_for_offload()
    offloaded = partitioner.offloaded
    for kind in (k for k in OffloadStateTypeEnum if k in chosen):
        tensors = list(_tensors(partitioner, engine.optimizer, kind))
        if kind is OffloadStateTypeEnum.hp_params:
            weights = {t.untyped_storage()._cdata for t in _weights(partitioner)}
            tensors = [t for t in tensors if t.untyped_storage()._cdata not in weights]
        offloaded.offload(kind, tensors, pin=pin_memory, non_blocking=non_blocking)
    if offloaded.kinds & FORWARD:
        sharded = {p for b in partitioner.buckets if b.weights.sharded for p in b.params}
        offloaded.hide(p for p in engine.module.parameters() if p not in sharded)
    if offloaded.kinds & BACKWARD:
        for param in engine.module.parameters():
            torch.autograd.graph.increment_version(param)
    offloaded.install_guards(engine.module, engine.optimizer)


def reload_states(engine: Engine, non_blocking: bool = False) -> None:
    """Move back what `offload_states` has moved; does nothing when nothing was."""
    _stage3(engine).offloaded.reload(non_blocking=non_blocking)


def get_state_devices(
    model: Engine | nn.Module, state: OffloadStateTypeEnum | str
) -> set[torch.device]:
    """The devices on which the group `state` is now; empty when there is none of it.

    model: an engine, also one that stands around another (that of `deepspeed.initialize`), or its
    module.

    Raises ValueError for an unknown group, UsageError when no live engine under ZeRO has this
    model.
    """
    kind = OffloadStateTypeEnum(state)
    module = (
        model if any(e.module is model for e in STATE.engines) else getattr(model, "module", None)
    )
    engine = next((e for e in reversed(STATE.engines) if e.module is module), None)
    partitioner: Any = engine.partitioner if engine is not None else None
    if engine is None or not hasattr(partitioner, "offloaded"):
        raise UsageError(
            "get_state_devices: no live engine under ZeRO has this model; give the engine itself"
        )
    view = partitioner.offloaded.view
    return {view(t).device for t in _tensors(partitioner, engine.optimizer, kind)}


def _stage3(engine: Engine) -> Any:
    partitioner: Any = engine.partitioner
    if (stage := partitioner.section.stage if isinstance(partitioner, ZeroPartitioner) else 0) != 3:
        raise UsageError(
            "offload_states and reload_states need zero_optimization stage 3, this is stage "
            f"{stage}"
        )
    offload = partitioner.section.weights_offload
    if offload is not None and offload.device != "none":
        raise UsageError("offload_states and reload_states cannot be combined with offload_param")
    return partitioner


def _weights(partitioner: ZeroPartitioner) -> Iterator[Tensor]:
    """Weights between steps: shards, and replicated parameters."""
    sharded = {p for b in partitioner.buckets if b.weights.sharded for p in b.params}
    for bucket in partitioner.buckets:
        if bucket.weights.evicts is None:  # else a store frees its memory already
            yield bucket.weights.shard
    for param in partitioner.module.parameters():
        if param not in sharded:
            yield partitioner.offloaded.data_of(param)


def _tensors(
    partitioner: ZeroPartitioner, optimizer: Any, kind: OffloadStateTypeEnum
) -> Iterator[Tensor]:
    """The tensors of a group that have elements, without those that offload_optimizer keeps on the
    host.
    """
    if kind is OffloadStateTypeEnum.optim_states:
        by_param = optimizer.state if optimizer is not None else {}
        movable = (p.master for b in partitioner.buckets for p in b.masters.movable)
        # And those of no parameter, such as preconditioners of whole matrices.
        others = (key for key in by_param if not isinstance(key, Tensor))
        states = (by_param.get(key, {}) for key in (*movable, *others))
        tensors = (v for state in states for v in state.values() if isinstance(v, Tensor))
        found: Iterable[Tensor | None] = (part for v in tensors for part in memory_of(v))
    elif kind is OffloadStateTypeEnum.hp_params:
        found = (p.master for b in partitioner.buckets for p in b.masters.movable)
    elif kind is OffloadStateTypeEnum.lp_params:
        found = _weights(partitioner)
    else:
        reduced = kind is OffloadStateTypeEnum.lp_grads
        source = partitioner.reducer
        found = (t for b in partitioner.buckets for t in source.tensors(b, reduced=reduced))
    return (t for t in found if t is not None and t.numel())
