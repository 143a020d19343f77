"""Where a parameter's weight is at home, and how it becomes whole for a while, with or without an engine.

Two kinds: parameters that `Init` has parked, and those of a running engine of any stage. Everything here that moves
weights is collective over the ranks that share the parameter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_core.errors import UsageError
from ds_core.process import STATE
from ds_zero.sharded_param import Parked, check_untouched, note_status, park, parked, quietly

if TYPE_CHECKING:
    from ds_zero.base import ZeroPartitioner

__all__ = ["FIRST", "Home", "engine_of", "home_of", "homes_of"]

FIRST = -1
"""In the place of a modifier rank: the first of each parameter's ranks."""


class Home(ABC):
    """Of one parameter. order: sorts homes the same way on all ranks."""

    param: nn.Parameter
    order: tuple[int, ...]
    checks = False

    @property
    @abstractmethod
    def entered(self) -> bool:
        """Whether a `GatheredParameters` holds it."""

    @entered.setter
    @abstractmethod
    def entered(self, value: bool) -> None: ...

    @property
    @abstractmethod
    def away(self) -> bool:
        """Whether the parameter is empty now."""

    @property
    @abstractmethod
    def apart(self) -> bool:
        """Whether its parts live apart, even if it is whole just now."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """Of the whole weight."""

    @property
    @abstractmethod
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that share the parameter."""

    @abstractmethod
    def hold(self) -> None:
        """Make it whole until `let_go`. Collective when it is away."""

    @abstractmethod
    def put_back(self, source: int) -> None:
        """Make what the parameter holds on global rank `source` its weight, on all ranks, masters too. Collective."""

    @abstractmethod
    def let_go(self) -> None:
        """Nobody needs it whole on behalf of the last `hold`; what was not put back may be lost."""

    @abstractmethod
    def assign(self, value: Tensor) -> None:
        """Make `value` of the first rank the weight, on all ranks, masters too. Collective."""

    def settle(self) -> None:
        """Put back what any rank may have written, as the first has it, and let go."""
        self.put_back(self.ranks[0])
        self.let_go()

    def source(self, modifier: int) -> int:
        """The global rank that `modifier` means for this parameter."""
        if modifier in self.ranks:
            return modifier
        if modifier in (FIRST, 0):
            return self.ranks[0]
        raise UsageError(
            f"modifier_rank {modifier} does not hold parameter {self.name!r}, which is on ranks {list(self.ranks)}; "
            "give one of those, or 0 for the first of each parameter's ranks"
        )

    @property
    def name(self) -> str:
        """For messages."""
        return str(getattr(self.param, "ds_id", "?"))

    def _check(self) -> None:
        """What is about to be sent fits."""
        if self.param.device.type != self.device.type:
            raise UsageError(
                f"parameter {self.name!r} was moved to {self.param.device} inside GatheredParameters; "
                f"leave it on {self.device}"
            )
        if self.param.shape != self.shape:
            raise UsageError(
                f"parameter {self.name!r} of shape {tuple(self.shape)} was given data of shape "
                f"{tuple(self.param.shape)} inside GatheredParameters; keep its shape"
            )

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Of the whole weight."""

    @property
    @abstractmethod
    def group(self) -> Any:
        """The process group of `ranks`; None for one rank."""


class _Parked(Home):
    """Made under `Init`; no engine yet."""

    def __init__(self, param: nn.Parameter, here: Parked) -> None:
        self.param, self._here = param, here
        self.order = (0, here.serial)
        self.checks = here.place.checks

    @property
    def entered(self) -> bool:
        return self._here.entered

    @entered.setter
    def entered(self, value: bool) -> None:
        self._here.entered = value

    @property
    def away(self) -> bool:
        return not self._here.holds

    @property
    def shape(self) -> torch.Size:
        return self._here.shape

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._here.place.ranks

    @property
    def device(self) -> torch.device:
        return self._here.place.device

    @property
    def group(self) -> Any:
        return self._here.place.group

    @property
    def apart(self) -> bool:
        return True

    @quietly
    def hold(self) -> None:
        here = self._here
        if not here.holds:
            check_untouched(self.param, here)
            self.param.data = here.gather().to(self.param.dtype)
        here.holds += 1
        note_status(self.param, here)

    @quietly
    def put_back(self, source: int) -> None:
        self._check()
        park(self.param, self._here.place, source)

    @quietly
    def settle(self) -> None:
        park(self.param, self._here.place)  # the constructor that wrote to it may have given it another shape
        self.let_go()

    @quietly
    def let_go(self) -> None:
        here = self._here
        here.holds -= 1
        if not here.holds:
            self.param.data = here.blank(self.param.dtype)
        elif not self.param.numel():  # put back, but somebody else still wants it
            self.param.data = here.gather().to(self.param.dtype)
        note_status(self.param, here)

    @quietly
    def assign(self, value: Tensor) -> None:
        self.param.data = value.to(self.device, self.param.dtype, copy=True)
        park(self.param, self._here.place)
        if self._here.holds:
            self.param.data = self._here.gather().to(self.param.dtype)


class _Managed(Home):
    """Of an engine of stage 1, 2 or 3."""

    def __init__(self, param: nn.Parameter, partitioner: ZeroPartitioner, serial: int) -> None:
        self.param, self._zero = param, partitioner
        self._piece = partitioner.pieces.get(param)
        self._bucket = partitioner.bucket_of.get(param)
        self._unit = partitioner.unit_of.get(param)
        self._info = partitioner.ctx.params[param]
        self.order = (1, serial, partitioner.places[param])
        self.checks = partitioner.section.enable_sanity_checks

    @property
    def entered(self) -> bool:
        return self.param in self._zero.entered

    @entered.setter
    def entered(self, value: bool) -> None:
        (self._zero.entered.add if value else self._zero.entered.discard)(self.param)

    @property
    def away(self) -> bool:
        return self._unit is not None and not self._unit.is_whole

    @property
    def shape(self) -> torch.Size:
        return self.param.shape if self._piece is None else torch.Size(self._piece.shape)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self._zero.ctx.mesh.ranks(*self._info.replicas))

    @property
    def name(self) -> str:
        return self._info.name

    @property
    def device(self) -> torch.device:
        return self.param.device if self._bucket is None else self._bucket.full.device

    @property
    def group(self) -> Any:
        return self._zero.ctx.mesh.group(*self._info.replicas)

    @property
    def apart(self) -> bool:
        return self._unit is not None

    @quietly
    def hold(self) -> None:
        if self._unit is not None:
            self._zero.keep(self._unit)

    @quietly
    def put_back(self, source: int) -> None:
        self._check()
        group, data = self.group, self.param.data
        if self._bucket is None or self._piece is None:  # frozen, and in no bucket
            flat = data.contiguous()
            if group is not None and flat.numel():
                comm.broadcast(flat, src=source, group=group)
            data.copy_(flat)
            return
        view = self._bucket.view(self._bucket.full, self._piece.index)
        if data.data_ptr() != view.data_ptr() or data.stride() != view.stride():
            view.copy_(data)
            self.param.data = view
        if group is not None and view.numel():
            comm.broadcast(view, src=source, group=group)
        self._bucket.write(self._piece.index, view)

    @quietly
    def let_go(self) -> None:
        if self._unit is not None:
            self._zero.unkeep(self._unit)

    @quietly
    def assign(self, value: Tensor) -> None:
        group = self.group
        value = value.to(self.device, self.param.dtype, copy=True).contiguous()
        if group is not None and value.numel():
            comm.broadcast(value, src=self.ranks[0], group=group)
        if not self.away:
            self.param.data.copy_(value)
        if self._bucket is not None and self._piece is not None:
            self._bucket.write(self._piece.index, value)


def engine_of(param: nn.Parameter) -> tuple[ZeroPartitioner, int] | None:
    """The live ZeRO partitioner that owns `param`, and its engine's number; None for any other parameter."""
    from ds_zero.base import ZeroPartitioner

    found = [
        (e.partitioner, e.serial)
        for e in STATE.engines
        if isinstance(e.partitioner, ZeroPartitioner) and param in e.ctx.params
    ]
    return min(found, key=lambda item: item[1]) if found else None


def home_of(param: Any) -> Home | None:
    """The home of `param`; None when ZeRO has nothing to do with it."""
    if not isinstance(param, nn.Parameter):
        return None
    if (here := parked(param)) is not None:
        return _Parked(param, here)
    owner = engine_of(param)
    return None if owner is None else _Managed(param, *owner)


def homes_of(params: Iterable[Any]) -> list[Home]:
    """The homes of `params`, each once, in the order in which all ranks go through them."""
    found = (home_of(p) for p in dict.fromkeys(params))
    return sorted((h for h in found if h is not None), key=lambda h: h.order)
