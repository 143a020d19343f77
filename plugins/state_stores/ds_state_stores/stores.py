"""The contract of state stores, the store ``cpu``, and how a store is found by its name (torch-free
at import).

[Note: identity] A tensor stays the same object for its whole life, so optimizers and views may
refer to it. A store that frees memory empties the tensor's storage
(``untyped_storage().resize_(0)``) and fills it again later. Torch refuses that for a storage that
was shared with numpy.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ds_core.catalogue import missing
from ds_core.entries import resolve
from ds_core.errors import DSError, PluginError, Problem, UsageError
from ds_core.moved import METHODS
from ds_core.plugins.checks import blaming

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ds_core.context import Context
    from ds_core.plugins import Plugins

_KIND = "state_store"
_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


class StateStore(ABC):
    """A place for host tensors that are not always needed.

    Subclasses that free memory set `resident` to False. `fetch`, `wait`, `evict` and `discard` act
    on the whole storage of each tensor, which may be a view.

    ctx: the run.
    options: the keys of the config section that chose this store, without ``device``;
        ``pin_memory`` is one.
    """

    resident = True
    """Whether tensors always stay in memory; then `fetch`, `wait`, `evict` and `discard` do
    nothing.
    """

    def __init_subclass__(cls) -> None:
        """A store whose methods have the names of an earlier contract keeps working, with a
        warning.
        """
        super().__init_subclass__()
        for old, new in METHODS["StateStore"].items():
            if old in vars(cls) and new not in vars(cls):
                text = f"{cls.__name__}.{old} is {new} now (ds_state_stores.StateStore)"
                warnings.warn(text, DeprecationWarning, stacklevel=2)
                setattr(cls, new, vars(cls)[old])

    def __init__(self, ctx: Context, options: Mapping[str, Any]) -> None:
        self._accelerator = ctx.accelerator
        self.pinned = bool(options.get("pin_memory"))

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Uninitialized host memory that the store does not manage; page-locked if ``pin_memory``
        is set.
        """
        import torch

        host = torch.empty(numel, dtype=dtype)
        return self._accelerator.pin(host) if self.pinned else host

    def copy_in(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A flat host copy of `tensor` (in `dtype`) that the store manages; it is in memory."""
        host = self.buffer(tensor.numel(), dtype or tensor.dtype)
        # moved first: a cast would need memory of the device
        return host.copy_(tensor.detach().reshape(-1).cpu())

    @abstractmethod
    def fetch(self, tensors: Sequence[Tensor]) -> None:
        """Start to load evicted tensors. Those in memory are left as they are."""

    @abstractmethod
    def wait(self, tensors: Sequence[Tensor]) -> None:
        """Wait until fetched tensors are in memory."""

    def allocate(self, tensors: Sequence[Tensor]) -> None:
        """Give evicted tensors memory with any values, since all of it will be written; in memory
        when it returns.

        Stores that can do it without reading override this.
        """
        self.fetch(tensors)
        self.wait(tensors)

    @abstractmethod
    def evict(self, tensors: Sequence[Tensor], *, changed: bool = True) -> None:
        """Save tensors that are in memory, and free it.

        A tensor that is new to the store is managed from now on.

        changed: False if their values are those of the last time they were evicted.
        """

    @abstractmethod
    def discard(self, tensors: Sequence[Tensor]) -> None:
        """These tensors will not be used again.

        They may be evicted or not, and unknown to the store.
        """

    def close(self) -> None:  # noqa: B027
        """Nothing is read any more, what is evicted is given up.

        Who has opened a store closes it, maybe again.
        """

    def read(self, view: Tensor) -> Tensor:
        """The values of a managed tensor or a view of one. An evicted one stays evicted."""
        if not is_evicted(view):
            return view
        memory = memory_of(view)
        self.fetch(memory)
        self.wait(memory)
        found = view.detach().clone()
        self.evict(memory, changed=False)
        return found

    def write(self, view: Tensor, values: Tensor) -> None:
        """Copy `values` into a managed tensor or a view of one. An evicted one stays evicted."""
        evicted = is_evicted(view)
        memory = memory_of(view)
        if evicted:
            self.fetch(memory)
            self.wait(memory)
        view.detach().copy_(values)
        if evicted:
            self.evict(memory)


class HostStore(StateStore):
    """Store ``cpu``: host memory."""

    def fetch(self, tensors: Sequence[Tensor]) -> None:
        """Does nothing, like the other three."""

    wait = discard = fetch

    def evict(self, tensors: Sequence[Tensor], *, changed: bool = True) -> None:
        """Does nothing."""


def memory_of(tensor: Tensor) -> list[Tensor]:
    """The tensors that a store has for `tensor`: itself, or what a wrapper is made of."""
    # torch's protocol of tensors that are made of others.
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    return [part for name in flatten()[0] for part in memory_of(getattr(tensor, name))]


def is_evicted(tensor: Tensor) -> bool:
    """Whether the tensor has elements and its memory, or part of it, was freed."""
    return any(t.numel() > 0 and t.untyped_storage().nbytes() == 0 for t in memory_of(tensor))


def owns_storage(tensor: Tensor) -> bool:
    """Whether a tensor in memory fills its storage, so that no other data is lost when that is
    emptied.
    """
    return (
        tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    )


def check_store(plugins: Plugins, device: str, path: str) -> Problem | None:
    """The problem with naming store `device` under the config key `path`; None when a plugin offers
    it.
    """
    offers = plugins.named("ds_state_stores", _KIND)
    if device.lower() in offers:
        plugins.join(offers[device.lower()].plugin)
        return None
    return missing("state_stores", device, ["none", *offers], path=path, more=plugins.quarantined())


def open_store(ctx: Context, device: str, options: Mapping[str, Any]) -> StateStore:
    """The store that the config calls `device`.

    Raises UsageError or PluginError when there is none.
    """
    if (problem := check_store(ctx.plugins, device, "device")) is not None:
        raise UsageError(str(problem))
    answer = ctx.plugins.named("ds_state_stores", _KIND)[device.lower()]
    with blaming(
        answer.plugin,
        f"failed to make the state store {device!r} ({answer.value.load})",
        passing=(DSError,),
    ):
        store = resolve(answer.value.load)(ctx, options)
    if not isinstance(store, StateStore):
        raise PluginError(
            f"plugin {answer.plugin}: state store {device!r} must be a ds_state_stores.StateStore"
        )
    if not store.resident:
        _return_large_blocks()
    return store


@functools.cache
def _return_large_blocks() -> None:
    """Have glibc map memory of over 1 MiB on its own, so that what is freed goes back to the system
    at once.

    Otherwise it keeps such blocks in its heap, up to 32 MiB each: hundreds of MB beyond what a run
    needs.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)
