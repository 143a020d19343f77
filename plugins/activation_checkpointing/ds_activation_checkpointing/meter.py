"""What a block would keep until backward if it were not recomputed, and what it takes to compute
it: measured once.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

if TYPE_CHECKING:
    from ds_activation_checkpointing.recompute import Region


class Meter:
    """Measures the forwards of one block while it is recomputed.

    full: bytes that autograd would save in a forward, the largest.
    held: bytes that recomputation keeps instead.
    flops: of a forward.
    peak: forwards at once that wait for their backward.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.full = self.held = self.flops = self.peak = 0
        self._waiting = 0
        self._storages: dict[StorageWeakRef, int] = {}

    @contextlib.contextmanager
    def measuring(self, region: Region) -> Iterator[None]:
        """Around one forward."""
        self._storages = {}
        counter = _Flops()
        with counter:
            yield
        self.full = max(self.full, sum(self._storages.values()))
        self.held = max(self.held, region.kept_bytes())
        self.flops = max(self.flops, counter.total)
        self._waiting += 1
        self.peak = max(self.peak, self._waiting)
        weakref.finalize(region, self._done).atexit = False

    def saw(self, tensor: Tensor) -> None:
        """Autograd saves `tensor`. Weights and buffers are there anyway."""
        storage = tensor.untyped_storage()
        key = StorageWeakRef(storage)  # an address is used again once it is let go
        own = (
            t.untyped_storage().data_ptr()
            for t in (*self._module.parameters(), *self._module.buffers())
        )
        if key not in self._storages and storage.data_ptr() not in own:
            self._storages[key] = storage.nbytes()

    def _done(self) -> None:
        self._waiting -= 1


class _Flops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(getattr(func, "overloadpacket", None))
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out
