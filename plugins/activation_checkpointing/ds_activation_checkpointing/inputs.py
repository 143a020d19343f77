"""How a function's inputs are kept until it runs again: in full, this rank's part, or on the host.

Only activations (floating-point tensors that require gradients) are divided or moved. Masks,
positions and the like are mostly shared by all blocks, so to keep them costs nothing. A tensor that
goes into several blocks is saved once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ds_core import comm
from ds_core.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ds_activation_checkpointing.arena import Arena

COMPARED = 2  # times that a function's inputs are compared between ranks before they are divided
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class HostCopies(Protocol):
    """Copies tensors to the host and back; `ds_state_stores.host_copies.HostCopies` is one."""

    def out(self, tensor: Tensor) -> Any:
        """Begin to copy `tensor` to the host."""

    def prefetch(self, copy: Any) -> None:
        """Begin to bring it back."""

    def settle(self) -> None:
        """Forget what was leaving."""

    def back(self, copy: Any) -> Tensor:
        """The tensor, on its device."""


class Held:
    """One tensor that is kept."""

    __slots__ = (
        "__weakref__",
        "before",
        "copy",
        "divided",
        "requires_grad",
        "shape",
        "source",
        "stride",
        "tensor",
        "version",
    )

    def __init__(self, given: Tensor) -> None:
        self.requires_grad = given.requires_grad
        self.version = given._version
        self.shape = given.shape
        # Of a tensor whose dimensions are in another order in memory, to be restored with it.
        self.stride = given.stride() if _permuted(given) else None
        # All or a part of it, flat; None where `copy` is on the host.
        self.tensor: Tensor | None = given.detach()
        self.copy: Any = None
        # Whether this rank keeps a part only.
        self.divided = False
        # The tensor that was copied; None: it is kept as it is.
        self.source: weakref.ref[Tensor] | None = None
        # The tensor that was moved before it, which backward therefore needs after it.
        self.before: weakref.ref[Held] | None = None

    def check(self, name: str, when: str) -> None:
        """Raise UsageError where a tensor that is kept as it is has been changed."""
        if self.source is None and self.tensor is not None and self.tensor._version != self.version:
            raise UsageError(
                f"an input of {name} was changed in place {when}, so it cannot run again from it; "
                "change a copy"
            )

    def num_bytes(self) -> int:
        """Bytes on the device."""
        return 0 if self.tensor is None else self.tensor.numel() * self.tensor.element_size()


class Keeper:
    """Saves inputs and restores them.

    group: ranks with the same activations, of which each keeps a part.
    copies: copies activations to the host; None: they stay.
    arena: the memory for parts; None: the allocator's.
    """

    def __init__(
        self,
        *,
        group: ProcessGroup | None = None,
        copies: HostCopies | None = None,
        arena: Arena | None = None,
    ) -> None:
        self._group = group
        self._copies = copies
        self._arena = arena
        self._size = comm.world_size(group) if group is not None else 1
        self._moves = self._size > 1 or copies is not None or arena is not None
        # How often the inputs of each function were compared between ranks.
        self._compared: dict[str, int] = {}
        # Tensors that are kept, by id, and the one that was moved last.
        self._known: weakref.WeakValueDictionary[int, Held] = weakref.WeakValueDictionary()
        self._latest: weakref.ref[Held] | None = None

    def save(self, tree: Any, name: str) -> Any:
        """`tree` with what is kept in the place of each tensor."""
        if not self._moves:
            return _map(Held, tree)
        if self._size > 1 and self._compared.get(name, 0) < COMPARED:
            self._compared[name] = self._compared.get(name, 0) + 1
            self._compare([t for t in contents(tree) if _is_activation(t)], name)
        return _map(self._move, tree)

    def restore(self, tree: Any, name: str) -> Any:
        """The inputs again, as leaves that require gradients where the given ones did."""
        found: dict[int, Tensor] = {}

        def back(item: Held) -> Tensor:
            if id(item) not in found:
                found[id(item)] = self._back(item, name)
            return found[id(item)]

        return _map(back, tree, Held)

    def reset(self) -> None:
        """Give back the memory of what was saved and never used."""
        if self._arena is not None:
            self._arena.clear()

    # -- one tensor --------------------------------------------------------------------------------

    def _move(self, given: Tensor) -> Held:
        if not _is_activation(given):
            return Held(given)
        # An input of several blocks: an id may be another tensor's by now, so the source and its
        # version are compared.
        known = self._known.get(id(given))
        if (
            known is not None
            and known.source is not None
            and known.source() is given
            and known.version == given._version
        ):
            return known
        item = Held(given)
        item.source = weakref.ref(given)
        flat = _flat(given)
        if self._size > 1 and given.numel() >= self._size:
            first, last = self._mine(given.numel())
            flat = flat[first:last]
            item.divided = True
        if self._copies is not None:
            item.copy = self._copies.out(flat.clone() if item.divided else flat)
            item.before = self._latest
            self._latest = weakref.ref(item)
            item.tensor = None
        elif self._arena is not None:
            item.tensor = self._arena.put(flat, item)
        else:
            item.tensor = flat.clone()
        self._known[id(given)] = item
        return item

    def _back(self, item: Held, name: str) -> Tensor:
        if item.source is None:
            item.check(name, "after its forward")
            assert item.tensor is not None
            return item.tensor.detach().requires_grad_(item.requires_grad)
        flat = item.tensor
        if item.copy is not None:
            assert self._copies is not None
            self._copies.settle()
            flat = self._copies.back(item.copy)
            # The next tensor that backward needs is copied while this block is computed.
            before = item.before() if item.before is not None else None
            if before is not None:
                self._copies.prefetch(before.copy)
        assert flat is not None
        if item.divided:
            flat = self._gather(flat, item.shape.numel())
        elif self._arena is not None and item.copy is None:
            # Its place in the arena may be used again before backward is through with it.
            flat = flat.clone()
        whole = (
            flat.view(item.shape)
            if item.stride is None
            else flat.as_strided(item.shape, item.stride)
        )
        return whole.requires_grad_(item.requires_grad)

    def _mine(self, count: int) -> tuple[int, int]:
        """The range of `count` elements that this rank keeps: equal parts, the last ones
        shorter."""
        step = -(-count // self._size)
        index = comm.rank(self._group)
        return min(count, index * step), min(count, (index + 1) * step)

    def _gather(self, part: Tensor, count: int) -> Tensor:
        step = -(-count // self._size)
        if len(part) < step:
            part = torch.cat([part, part.new_zeros(step - len(part))])
        whole = part.new_empty(step * self._size)
        comm.all_gather_into_tensor(whole, part, group=self._group)
        return whole[:count]

    def _compare(self, tensors: list[Tensor], name: str) -> None:
        """Raise UsageError, on all ranks, where ranks that are to keep parts of the same have
        different activations.
        """
        if not tensors:
            return
        # The sum of the bits as integers: small to send, and any difference shows.
        mine = torch.stack(
            [_flat(t).view(_BITS[t.element_size()]).sum(dtype=torch.int64) for t in tensors]
        )
        every = mine.new_empty(self._size * len(mine))
        comm.all_gather_into_tensor(every, mine, group=self._group)
        rows = every.view(self._size, -1)
        wrong = [i for i, same in enumerate((rows == rows[0]).all(0).tolist()) if not same]
        if wrong:
            shapes = ", ".join(str(list(tensors[i].shape)) for i in wrong[:3])
            raise UsageError(
                f"partition_activations: inputs of {name} (shape {shapes}) differ between the "
                f"{self._size} ranks that are to keep a part each, so they cannot be put together "
                "again. Ranks of partition_axis must work on the same activations: they have parts "
                "of them already where the sequence is divided. Set partition_activations to false"
            )


# -- trees of tensors ------------------------------------------------------------------------------


def _map(function: Callable[[Any], Any], value: Any, kind: type = Tensor) -> Any:
    """`value` with `function` of each `kind` in it; lists, tuples and plain dicts are looked into,
    nothing else is.
    """
    if isinstance(value, kind):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)([_map(function, item, kind) for item in value])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(function, item, kind) for item in value))
    if type(value) is dict:
        return {key: _map(function, item, kind) for key, item in value.items()}
    return value


def contents(value: Any, kind: type = Tensor) -> Iterator[Any]:
    """Each `kind` in `value`."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from contents(item, kind)
    elif type(value) is dict:
        for item in value.values():
            yield from contents(item, kind)


def held(value: Any) -> Iterator[Held]:
    """What is kept in a tree that `Keeper.save` gave."""
    return contents(value, Held)


def _is_activation(tensor: Tensor) -> bool:
    return (
        tensor.requires_grad
        and tensor.is_floating_point()
        and type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.numel() > 0
    )


def _permuted(tensor: Tensor) -> bool:
    """Whether it fills its memory without gaps, in another order than that of its dimensions."""
    if tensor.layout is not torch.strided or tensor.is_contiguous() or 0 in tensor.stride():
        return False
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return last + 1 == tensor.numel()


def _flat(tensor: Tensor) -> Tensor:
    """All elements in one dim, in the order of memory where they have no gaps."""
    tensor = tensor.detach()
    return tensor.as_strided((tensor.numel(),), (1,)) if _permuted(tensor) else tensor.reshape(-1)
