"""What a rank holds, by kind: the storages of all tensors that are alive, each counted once."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from ds_core.engine import RunningEngine

KINDS = ("parameters", "buffers", "masters", "states", "gradients", "other")
"""parameters, buffers: of the model. masters: what the optimizer updates, where it is a copy.
states: of the optimizer.
gradients: those of parameters, and what the partitioner keeps of them. other: batches, outputs, the
    program's own.
"""

Storages = dict[int, tuple[str, int]]


def held_by_kind(engine: RunningEngine) -> dict[str, dict[str, int]]:
    """Bytes by kind, of "device" and of "host"; on the CPU all is "device".

    Looks at every object there is.
    """
    gc.collect()  # what is garbage is not held
    device = engine.ctx.accelerator.device_type
    found = {place: dict.fromkeys(KINDS, 0) for place in ("device", "host")}
    seen: set[int] = set()
    for kind, tensors in _by_kind(engine):
        for key, (where, size) in _storages(tensors).items():
            # A storage counts once, for the first kind that has it: the kinds come in that order.
            if key not in seen and where in (device, "cpu"):
                seen.add(key)
                found["device" if where == device else "host"][kind] += size
    return found


def _by_kind(engine: RunningEngine) -> Iterator[tuple[str, Iterable[Tensor]]]:
    params = list(engine.module.parameters())
    shards: list[Any] = [
        getattr(p, key, None) for p in params for key in ("ds_tensor", "ds_secondary_tensor")
    ]
    yield "parameters", [p.data for p in params] + [s for s in shards if isinstance(s, Tensor)]
    yield "buffers", engine.module.buffers()
    if engine.optimizer is not None:
        yield (
            "masters",
            [p.data for group in engine.optimizer.param_groups for p in group["params"]],
        )
        states = engine.optimizer.state.values()
        yield "states", [v for state in states for v in state.values() if isinstance(v, Tensor)]
    yield "gradients", [p.grad for p in params if p.grad is not None]
    yield "gradients", _kept_by(engine.partitioner)
    yield "other", [t for t in gc.get_objects() if issubclass(type(t), Tensor)]


def _storages(tensors: Iterable[Tensor]) -> Storages:
    """Storage -> the type of its device and its bytes; of tensors that have one."""
    found: Storages = {}
    for tensor in tensors:
        if tensor.device.type == "meta" or tensor.layout != torch.strided:
            continue
        try:
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage.device.type, storage.nbytes()
        # a fake tensor, or a subclass without a storage of its own
        except (NotImplementedError, RuntimeError):
            continue
    return found


def _kept_by(owner: object) -> Iterator[Tensor]:
    """Tensors that `owner` reaches through containers and through objects of ds_core's packages."""
    waiting = [owner]
    seen = {id(owner)}
    while waiting:
        for item in _parts(waiting.pop()):
            if isinstance(item, Tensor):
                yield item
            elif id(item) not in seen and _is_ours(item):
                seen.add(id(item))
                waiting.append(item)


def _parts(item: Any) -> Iterable[Any]:
    if isinstance(item, dict):
        return [*item.keys(), *item.values()]
    if isinstance(item, (list, tuple, set, frozenset)):
        return list(item)
    slots = [getattr(item, name, None) for kind in type(item).__mro__ for name in _names(kind)]
    return [*getattr(item, "__dict__", {}).values(), *slots]


def _names(kind: type) -> Iterable[str]:
    slots: Any = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots


def _is_ours(item: object) -> bool:
    """Not the model, the engine, optimizers and what else is far from gradients."""
    if isinstance(item, (dict, list, tuple, set, frozenset)):
        return True
    module = type(item).__module__
    return (
        module.startswith("ds_")
        and not isinstance(item, (nn.Module, type))
        and not _leads_away(item)
    )


def _leads_away(item: object) -> bool:
    from ds_core.context import Context
    from ds_core.engine import RunningEngine

    return isinstance(item, (Context, RunningEngine))
