"""State stores: where a partitioner keeps what it does not need now. The contract, and the host's memory (torch-free
at import).

[Note: identity] A tensor stays the same object for its whole life, so optimizers and views may hold it. A store that
gives memory back empties the tensor's storage (``untyped_storage().resize_(0)``) and fills it again later. Torch
refuses that once the storage was shared with numpy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ds_core.catalogue import install, offered_by, planned
from ds_core.entries import resolve
from ds_core.errors import DSError, PluginError, Problem, UsageError, nearest
from ds_core.plugins import blaming

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ds_core.context import Context
    from ds_core.plugins import Plugins

__all__ = ["HostStore", "StateStore", "away", "check_store", "open_store", "owns_storage"]

KIND = "state_store"


class StateStore(ABC):
    """A place for tensors that an optimizer, or a gather, reads in host memory.

    Subclasses that give memory back set `resident` to False and define `fetch`, `ready`, `stow` and `drop`. These
    four act on the whole storage that each given tensor refers to; they may be given views of it.
    ctx: the run. options: the keys of the config that chose this store, but ``device``; ``pin_memory`` is one.
    """

    resident = True
    """Whether what was placed always stays in memory; then `fetch`, `ready`, `stow` and `drop` have nothing to do."""

    def __init__(self, ctx: Context, options: Mapping[str, Any]) -> None:
        self._accelerator = ctx.accelerator
        self.pinned = bool(options.get("pin_memory"))

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Host memory of `numel` elements, not in the store's care; page-locked when that was asked for."""
        import torch

        host = torch.empty(numel, dtype=dtype)
        return self._accelerator.pin(host) if self.pinned else host

    def place(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A flat host tensor of the same values (in `dtype`), in the store's care and present; always a copy."""
        host = self.buffer(tensor.numel(), dtype or tensor.dtype)
        return host.copy_(tensor.detach().reshape(-1).cpu())  # moved first: casting would need memory of the device

    @abstractmethod
    def fetch(self, tensors: Sequence[Tensor]) -> None:
        """Start to make tensors present; those that are present already are left as they are."""

    @abstractmethod
    def ready(self, tensors: Sequence[Tensor]) -> None:
        """Wait until tensors that were fetched are present."""

    @abstractmethod
    def stow(self, tensors: Sequence[Tensor], *, changed: bool = True) -> None:
        """Give the memory of present tensors back; one that is new to the store comes into its care.

        changed: False when they are as they were when they were last stowed.
        """

    @abstractmethod
    def drop(self, tensors: Sequence[Tensor]) -> None:
        """These tensors, present or not, and in the store's care or not, will not be used again."""

    def read(self, view: Tensor) -> Tensor:
        """The values of `view`, a tensor in the store's care or a view of one, which is left where it is."""
        if not away(view):
            return view
        self.fetch([view])
        self.ready([view])
        found = view.detach().clone()
        self.stow([view], changed=False)
        return found

    def write(self, view: Tensor, values: Tensor) -> None:
        """Give `view`, a tensor in the store's care or a view of one, other values, and leave it where it is."""
        was_away = away(view)
        if was_away:
            self.fetch([view])
            self.ready([view])
        view.detach().copy_(values)
        if was_away:
            self.stow([view])


class HostStore(StateStore):
    """Store ``cpu``: host memory."""

    def fetch(self, tensors: Sequence[Tensor]) -> None:
        """Nothing to do."""

    def ready(self, tensors: Sequence[Tensor]) -> None:
        """Nothing to do."""

    def stow(self, tensors: Sequence[Tensor], *, changed: bool = True) -> None:
        """Nothing to do."""

    def drop(self, tensors: Sequence[Tensor]) -> None:
        """Nothing to do."""


def away(tensor: Tensor) -> bool:
    """Whether the tensor has elements, and the memory for them was given back."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def owns_storage(tensor: Tensor) -> bool:
    """Whether a present tensor is all that its storage holds, so that emptying it takes nothing from others."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def check_store(plugins: Plugins, device: str, path: str) -> Problem | None:
    """What is wrong with naming store `device` under the config key `path`; None when somebody offers it."""
    offers = plugins.named("ds_state_stores", KIND)
    if device.lower() in offers:
        plugins.join(offers[device.lower()].plugin)
        return None
    names = ["none", *sorted(offers)]
    if (dist := offered_by("state_stores", device)) is not None:
        message = f"the state store {device!r} is served by {dist}, which is not installed"
        return Problem(path, message, f"install it with {install(dist)}, or use {' or '.join(names)}")
    if (dist := planned("state_stores", device)) is not None:
        message = f"the state store {device!r} will come with {dist}, which is not built yet"
        return Problem(path, message, f"use {' or '.join(names)}")
    hint = nearest(device, names)
    mend = f"did you mean {hint!r}?" if hint else f"there are {', '.join(names)}"
    return Problem(path, f"no state store is called {device!r}", mend + plugins.quarantined())


def open_store(ctx: Context, device: str, options: Mapping[str, Any]) -> StateStore:
    """The store that the config calls `device`. Raises UsageError or PluginError when there is none such."""
    if (problem := check_store(ctx.plugins, device, "device")) is not None:
        raise UsageError(str(problem))
    answer = ctx.plugins.named("ds_state_stores", KIND)[device.lower()]
    with blaming(answer.plugin, f"failed to make the state store {device!r} ({answer.value.load})", passing=(DSError,)):
        store = resolve(answer.value.load)(ctx, options)
    if not isinstance(store, StateStore):
        raise PluginError(f"plugin {answer.plugin}: state store {device!r} must be a ds_core.stores.StateStore")
    return store
