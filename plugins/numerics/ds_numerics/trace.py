"""Checksums of one pass: what each module, gradient and collective gave, in order of computation."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

WORD = 8  # bytes of an int64


class Kind(Enum):
    """What a checksum is of; the value is how a message says it."""

    OUTPUT = "the output of {}"
    LOCAL_GRADIENT = "this rank's own gradient of {}"
    SENT = "what was sent as {}"
    BUFFER = "the buffer {}"
    REDUCED = "the reduced gradient of {}"
    WEIGHT = "the weight {}"
    NORM = "the norm of {}"


@dataclass(frozen=True, slots=True)
class Key:
    """Names a checksum of a pass; two passes of a step have the same keys."""

    kind: Kind
    name: str
    """Of the module, parameter or buffer."""
    micro: int = -1
    """The number of the forward or backward in its step; -1: of neither."""
    time: int = 0
    """How often there was such a checksum in that forward or backward before."""

    @property
    def what(self) -> str:
        """In words."""
        quoted = repr(self.name) if self.name else "the model"
        return self.kind.value.format(self.name if self.kind is Kind.SENT else quoted)


def checksum(tensor: Tensor) -> Tensor:
    """The sum of the bit pattern of `tensor` in words of 64 bits, modulo 2**64: a 0-d int64 tensor
    on its device.

    One bit that flips changes it, whatever the dtype. Several may cancel, and an order that changes
    may not be seen. Elements count, not how they lie in memory.
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    size = flat.nbytes
    # Words are read where they lie; a view that begins between two words is copied.
    if flat.storage_offset() * flat.element_size() % WORD or flat.data_ptr() % WORD:
        flat = flat.clone()
    if size % WORD == 0:
        return flat.view(torch.int64).sum()
    octets = torch.zeros(-(-size // WORD) * WORD, dtype=torch.uint8, device=tensor.device)
    octets[:size] = flat.view(torch.uint8)
    return octets.view(torch.int64).sum()


Place = tuple[Kind, str, int]
"""What a checksum is of, its name and its micro-batch, as in `Key`."""


class Checksums:
    """The checksums of one pass, in order of computation."""

    def __init__(self, places: list[Place], numbers: list[int]) -> None:
        self._places = places
        self._numbers = numbers

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Checksums)
            and self._numbers == other._numbers
            and self._places == other._places
        )

    __hash__ = None  # type: ignore[assignment]

    @functools.cached_property
    def by_key(self) -> dict[Key, int]:
        """Each under its key. Made where passes differ, which is seldom."""
        times: Counter[Place] = Counter()
        found = {}
        for place, number in zip(self._places, self._numbers, strict=True):
            found[Key(*place, times[place])] = number
            times[place] += 1
        return found


class Trace:
    """Collects the checksums of one pass on one rank."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._sums: list[Tensor] = []

    def add(self, kind: Kind, name: str, tensor: Tensor, micro: int = -1) -> None:
        """Add the checksum of `tensor` as it is now."""
        if tensor.is_sparse:
            tensor = tensor.to_dense()
        self._places.append((kind, name, micro))
        self._sums.append(checksum(tensor))

    def read(self) -> Checksums:
        """All of them; waits for the device."""
        by_device: dict[torch.device, list[int]] = {}
        for place, value in enumerate(self._sums):
            by_device.setdefault(value.device, []).append(place)
        numbers = [0] * len(self._sums)
        # One copy from each device, not one for each checksum.
        for places in by_device.values():
            stacked = torch.stack([self._sums[place] for place in places]).tolist()
            for place, number in zip(places, stacked, strict=True):
                numbers[place] = number
        return Checksums(list(self._places), numbers)


def differing(first: Checksums, second: Checksums) -> Iterator[Key]:
    """The keys whose checksums differ, in the order of `first`; those that one pass lacks come last."""
    if first == second:
        return
    for key, number in first.by_key.items():
        if key in second.by_key and second.by_key[key] != number:
            yield key
    yield from lacking(first, second)


def lacking(first: Checksums, second: Checksums) -> Iterator[Key]:
    """The keys that one of the passes lacks.

    Of what was sent there may be more or less: the first pass may have been among other messages.
    """
    if first == second:
        return
    for key in [*first.by_key, *second.by_key]:
        if (key not in first.by_key or key not in second.by_key) and key.kind is not Kind.SENT:
            yield key
