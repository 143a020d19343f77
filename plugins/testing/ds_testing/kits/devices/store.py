"""The conformance kit for state stores: subclass `StateStoreConformance` and give it your store."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from ds_state_stores import StateStore, is_evicted
from torch import Tensor

SIZES = (0, 1, 7, 1024, 70_001)
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool)


class StateStoreConformance:
    """Inherit, and implement `make_store`. The class's name must start with Test."""

    def make_store(self, ctx: Any, tmp_path: Path) -> StateStore:
        """A new store; files go below `tmp_path`.

        ctx: stands in for the run; it has an `accelerator`.
        """
        raise NotImplementedError

    def store(self, tmp_path: Path) -> StateStore:
        """A store on the CPU."""
        from ds_core.accelerator import get_accelerator

        made = self.make_store(SimpleNamespace(accelerator=get_accelerator()), tmp_path)
        assert isinstance(made, StateStore), (
            f"{type(made).__name__} is no ds_state_stores.StateStore"
        )
        return made

    def test_values_come_back(self, tmp_path: Path) -> None:
        """Of any size and dtype, for many tensors at once, in the same tensor objects."""
        store = self.store(tmp_path)
        originals = [_values(n, dtype) for dtype in DTYPES for n in SIZES]
        tensors = [store.copy_in(t) for t in originals]
        for _ in range(2):  # the second time nothing is new
            store.evict(tensors)
            for i, t in enumerate(tensors):
                gone = t.numel() > 0 and not store.resident
                assert is_evicted(t) is gone, (
                    f"tensor {i}: resident is {store.resident}, and its memory is "
                    f"{'' if gone else 'not '}there"
                )
            store.fetch(tensors[::-1])
            store.fetch(tensors)
            store.wait(tensors)
            for i, (t, wanted) in enumerate(zip(tensors, originals, strict=True)):
                assert torch.equal(t, wanted), (
                    f"tensor {i} ({t.dtype}, {t.numel()} elements) has other values"
                )

    def test_copy_in_copies_and_casts(self, tmp_path: Path) -> None:
        """`copy_in` gives a flat copy in host memory, in the dtype asked for."""
        store = self.store(tmp_path)
        given = torch.arange(12.0).view(3, 4).t()
        placed = store.copy_in(given, torch.float64)
        given.add_(1)
        assert (
            placed.shape == (12,) and placed.dtype is torch.float64 and placed.device.type == "cpu"
        )
        assert torch.equal(placed, (given - 1).reshape(-1).double())
        assert store.buffer(5, torch.bfloat16).shape == (5,)

    def test_changes_are_kept(self, tmp_path: Path) -> None:
        """What was changed in memory is kept by `evict`."""
        store = self.store(tmp_path)
        tensors = [store.copy_in(_values(n, torch.float32)) for n in SIZES]
        wanted = [t.clone() for t in tensors]
        for number in range(3):
            store.evict(tensors)
            some = tensors[number::2]
            store.fetch(some)
            store.wait(some)
            for t, w in zip(some, wanted[number::2], strict=True):
                t.mul_(2).add_(1)
                w.mul_(2).add_(1)
            store.evict(some)
            store.fetch(tensors)
            store.wait(tensors)
            assert all(map(torch.equal, tensors, wanted)), (
                f"round {number}: changes are lost, or went elsewhere"
            )

    def test_evict_without_a_change(self, tmp_path: Path) -> None:
        """``changed=False`` keeps the values."""
        store = self.store(tmp_path)
        tensor = store.copy_in(_values(1024, torch.float32))
        wanted = tensor.clone()
        for changed in (True, False, False):
            store.evict([tensor], changed=changed)
            store.fetch([tensor])
            store.wait([tensor])
            assert torch.equal(tensor, wanted)

    def test_views_are_read_and_written_in_place(self, tmp_path: Path) -> None:
        """`read` and `write` of a view leave the tensor where it is, evicted or not."""
        store = self.store(tmp_path)
        tensor = store.copy_in(torch.arange(10.0))
        left = tensor[:4]
        right = tensor[6:]
        for in_memory in (True, False):
            if not in_memory:
                store.evict([tensor])
            where = is_evicted(tensor)
            store.write(left, torch.full((4,), 9.0 if in_memory else 5.0))
            assert store.read(right).tolist() == [6, 7, 8, 9], "a view's values are others"
            assert is_evicted(tensor) is where, "reading or writing a view moved the tensor"
        store.fetch([tensor])
        store.wait([tensor])
        assert tensor.tolist() == [5, 5, 5, 5, 4, 5, 6, 7, 8, 9]

    def test_discarded_tensors_are_forgotten(self, tmp_path: Path) -> None:
        """`discard` takes tensors in memory, evicted ones and unknown ones, and leaves all others
        alone.
        """
        store = self.store(tmp_path)
        evicted, in_memory, kept = (store.copy_in(torch.full((1000,), float(i))) for i in range(3))
        store.evict([evicted, kept])
        store.discard([evicted, in_memory, torch.zeros(3)])
        store.fetch([kept])
        store.wait([kept])
        assert torch.equal(kept, torch.full((1000,), 2.0))
        store.discard([kept])


def _values(n: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-100, 100, (n,), generator=torch.Generator().manual_seed(n)).to(dtype)
