"""A state store as somebody else's plugin would bring it: one file per storage, and no memory
between uses.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_state_stores import StateStore, is_evicted

from ds_core.config import Section
from ds_core.entries import OptimizerEntry, StateStoreEntry


class DiskSection(Section):
    path: str


def ds_config() -> type[Section]:
    return DiskSection


def ds_state_stores() -> Mapping[str, StateStoreEntry]:
    return {"disk": StateStoreEntry(f"{__name__}:DiskStore")}


def ds_optimizers() -> Mapping[str, OptimizerEntry]:
    return {"Counting": OptimizerEntry(f"{__name__}:make_counting")}


def make_counting(groups: Any, lr: float = 0.1) -> Any:
    """SGD that counts its steps where a step in tiles would count each tile."""
    import torch

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["calls"] = group.get("calls", 0) + 1
            return super().step(closure)

    return Counting(groups, lr=lr)


class DiskStore(StateStore):
    resident = False

    def __init__(self, ctx: Any, options: Mapping[str, Any]) -> None:
        super().__init__(ctx, options)
        self.folder = Path(tempfile.mkdtemp(dir=ctx.config.section("disk").path))
        self.sizes: dict[int, int] = {}  # bytes, by storage
        self.moved = {"read": 0, "written": 0}

    def _file(self, tensor: Any) -> Path:
        return self.folder / str(tensor.untyped_storage()._cdata)

    def _memory(self, tensor: Any) -> memoryview:
        storage = tensor.untyped_storage()  # torch lets nobody resize a storage that numpy has seen
        return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()))

    def fetch(self, tensors: Sequence[Any]) -> None:
        for tensor in filter(is_evicted, tensors):
            storage = tensor.untyped_storage()
            storage.resize_(self.sizes[storage._cdata])
            with open(self._file(tensor), "rb") as file:
                self.moved["read"] += file.readinto(self._memory(tensor))

    def wait(self, tensors: Sequence[Any]) -> None:
        assert not any(is_evicted(t) for t in tensors)

    def evict(self, tensors: Sequence[Any], *, changed: bool = True) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if changed:
                self.moved["written"] += self._file(tensor).write_bytes(self._memory(tensor))
            self.sizes[storage._cdata] = storage.nbytes()
            storage.resize_(0)

    def discard(self, tensors: Sequence[Any]) -> None:
        for tensor in tensors:
            self._file(tensor).unlink(missing_ok=True)
            self.sizes.pop(tensor.untyped_storage()._cdata, None)
