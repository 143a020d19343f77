"""What an engine holds, counted by the storages that tensors refer to."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from torch import Tensor


def storages(tensors: Any) -> dict[int, int]:
    """Storage -> its bytes."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage.nbytes()
    return found


def live() -> dict[int, int]:
    """All storages that a tensor object refers to, but for objects that are frozen."""
    return storages(t for t in gc.get_objects() if issubclass(type(t), torch.Tensor))


class Held:
    """Bytes of what `engine` has made, by kind.

    `flat`: the most that was there beside weights and states.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.flat = 0

    def _known(self) -> tuple[dict[int, int], dict[int, int], list[Tensor]]:
        params: list[Any] = list(self.engine.module.parameters())
        weights = storages(
            [p.data for p in params] + [p.ds_tensor for p in params if hasattr(p, "ds_tensor")]
        )
        buckets = getattr(self.engine.partitioner, "buckets", ())
        weights |= storages(
            b.weights.second.copy
            for b in buckets
            if b.weights.second is not None and b.weights.second.copy is not None
        )
        masters = storages(p.data for g in self.engine.optimizer.param_groups for p in g["params"])
        states = [
            v
            for s in self.engine.optimizer.state.values()
            for v in s.values()
            if isinstance(v, Tensor)
        ]
        updates: Any = (
            self.engine.partitioner.updates if hasattr(self.engine.partitioner, "updates") else None
        )
        for weight in getattr(updates, "weights", []):  # of ZenFlow
            weights |= dict.fromkeys(storages([] if weight.picked is None else [weight.picked]), 0)
            if weight.part is not None:
                masters |= storages([weight.part.data])
                states += [
                    v for v in updates.device.state[weight.part].values() if isinstance(v, Tensor)
                ]
                weights |= dict.fromkeys(storages(c for _, c in weight.chosen.places), 0)
        return weights, masters, states

    def kinds(self) -> dict[str, int]:
        time.sleep(0.03)  # gloo lets go of its last tensor when its thread comes to it
        gc.collect()
        weights, masters, states = self._known()
        known = {*weights, *masters, *storages(states)}
        return {
            "parameters": sum(weights.values()),
            "masters": sum(size for key, size in masters.items() if key not in weights),
            "states": sum(t.numel() * t.element_size() for t in states if t.dim()),
            "gradients": sum(size for key, size in live().items() if key not in known),
        }

    def sample(self) -> None:
        weights, masters, states = self._known()
        gathering = getattr(self.engine.partitioner, "gathering", None)
        units = [u.bucket.full for u in gathering.units] if gathering else []
        known = {*weights, *masters, *storages([*states, *units])}
        grads = storages(p.grad for p in self.engine.module.parameters() if p.grad is not None)
        self.flat = max(
            self.flat, sum(size for key, size in {**live(), **grads}.items() if key not in known)
        )
