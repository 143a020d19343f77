"""Parameters that were partitioned before there is an engine: what `Init` leaves in the place of a weight.

A parked parameter is an empty tensor; its weight lies in equal parts on the ranks of one group, each parameter by
itself. The partitioner of the engine that comes later takes the parts over, one bucket at a time.

[Note: bits] Plain code builds a model in fp32 and casts it when it is done, and constructors may work on a weight
several times. So a weight is parked in the dtype it was built in, and cast when the construction is over.

[Note: aliases] A tensor that was made of an empty parameter without torch telling (``nn.Parameter(linear.weight)``)
gets its values by a gather, so all ranks must agree on which tensors are such. An address says nothing about that: the
memory of an empty tensor that is gone soon belongs to another one, on one rank and not on the next. So the mark is an
attribute of the storage itself, which torch keeps for as long as the storage lives, and which goes with it; and the
storage keeps the parked weight, so that no garbage collector decides whether a gather takes place.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_core.accelerator import get_accelerator
from ds_core.errors import UsageError
from ds_zero.status import ZeroParamStatus

if TYPE_CHECKING:
    from ds_core.context import Context

__all__ = [
    "Parked",
    "Place",
    "check_untouched",
    "cast",
    "fill_alias",
    "note_status",
    "park",
    "parked",
    "prepare",
    "quietly",
    "restore",
    "take_over",
    "unpark",
]

log = logging.getLogger("ds_zero")

DESCRIBED = ("ds_id", "ds_shape", "ds_numel", "ds_tensor", "ds_status")
"""The documented attributes of a partitioned parameter."""

P = ParamSpec("P")
R = TypeVar("R")
_SERIAL = itertools.count()
_MARK = "_ds_parked"
"""The attribute of a parameter, and of the storage of an empty tensor, that leads to the weight."""


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Over which ranks parameters are parked, and how.

    group: None for one rank alone. ranks: its global ranks; the weights of the first are everybody's. index: this
    rank's place in it. device: where whole weights are. rest: where parts are. pin: in page-locked memory.
    dtype: of floating-point weights; None keeps their own. checks: see ``enable_sanity_checks``.
    """

    group: Any
    ranks: tuple[int, ...]
    index: int
    device: torch.device
    rest: torch.device
    pin: bool = False
    dtype: torch.dtype | None = None
    checks: bool = False


def quietly(function: Callable[P, R]) -> Callable[P, R]:
    """`function` without gradients, and unseen by torch function modes: ours (see `gather_on_access`) and others'."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call


class Parked:
    """The weight of one parameter, in parts.

    part: this rank's; None while the weight has no value yet (it was on the meta device). holds: how many want the
    parameter whole just now. entered: by a `GatheredParameters`. taken: an engine has the weight now, or nobody.
    serial: the same on all ranks.
    """

    def __init__(self, place: Place, shape: torch.Size, dtype: torch.dtype, serial: int) -> None:
        self.place, self.shape, self.dtype, self.serial = place, shape, dtype, serial
        self.part: Tensor | None = None
        self.holds = 0
        self.entered = self.taken = False

    @property
    def elements(self) -> int:
        """Of each rank's part, padding included."""
        return -(-self.shape.numel() // len(self.place.ranks))

    def split(self, flat: Tensor) -> None:
        """Keep this rank's part of the whole weight."""
        size, index = self.elements, self.place.index
        mine = flat[size * index : size * (index + 1)]
        part = torch.zeros(size, dtype=self.dtype, device=self.place.rest)
        if self.place.pin:
            part = get_accelerator().pin(part)
        part[: mine.numel()].copy_(mine)
        self.part = part

    def gather(self) -> Tensor:
        """The whole weight, on the device; without a value NaN (zeros where there is no NaN). Collective."""
        numel, world = self.shape.numel(), len(self.place.ranks)
        if self.part is None:
            fill = float("nan") if self.dtype.is_floating_point else 0
            return torch.full(self.shape, fill, dtype=self.dtype, device=self.place.device)
        part = self.part.to(self.place.device)
        if world == 1:
            return part.clone().view(self.shape)
        whole = torch.empty(world * part.numel(), dtype=self.dtype, device=self.place.device)
        if part.numel():
            comm.all_gather_into_tensor(whole, part, group=self.place.group)
        return whole[:numel].view(self.shape)

    def blank(self, dtype: torch.dtype | None = None) -> Tensor:
        """What a parameter holds while its weight is parked: an empty tensor of its own; see [Note: aliases]."""
        blank = torch.empty(0, dtype=dtype or self.dtype, device=self.place.device)
        setattr(blank.untyped_storage(), _MARK, self)
        return blank


def parked(param: Any) -> Parked | None:
    """How `param`, or a storage, is parked; None when it is not."""
    found = getattr(param, _MARK, None)
    return found if isinstance(found, Parked) else None


@quietly
def fill_alias(tensor: Tensor) -> None:
    """Give a tensor that was made of an empty parameter, unseen (``nn.Parameter(linear.weight)``), the weight's values.

    Collective when it is one. Raises UsageError when the weight is not parked any more.
    """
    if tensor.dim() == 1 and not tensor.numel() and tensor.layout is torch.strided and not tensor.is_meta:
        here = parked(tensor.untyped_storage())
        if here is None:
            return
        if here.taken:
            raise UsageError(
                f"this tensor was made of parameter 'init.{here.serial}' of shape {tuple(here.shape)} while that was "
                "partitioned, and got no values before an engine took the weight; make it inside "
                "ds_zero.GatheredParameters(param), or put it into a module in the same ds_zero.Init"
            )
        tensor.data = here.gather().to(tensor.dtype)


@quietly
def park(param: nn.Parameter, place: Place, source: int | None = None) -> None:
    """Keep only this rank's part of the weight in `param`; `source` (a global rank of the group) wins. Collective.

    A parameter on the meta device keeps its shape and has no value yet.
    """
    old = parked(param)
    here = Parked(place, param.shape, param.dtype, next(_SERIAL)) if old is None else old
    here.shape, here.dtype = param.shape, param.dtype
    if not param.is_meta:
        flat = param.data.to(place.device).contiguous().reshape(-1)
        if len(place.ranks) > 1 and flat.numel():
            comm.broadcast(flat, src=place.ranks[0] if source is None else source, group=place.group)
        here.split(flat)
        param.data = here.blank()
    else:
        _replace_meta(param, here.blank())
    _tag(param, here)


def _tag(param: Any, here: Parked) -> None:
    tagged: Any = param
    setattr(tagged, _MARK, here)
    tagged.ds_id = f"init.{here.serial}"
    tagged.ds_shape, tagged.ds_numel = here.shape, here.shape.numel()
    tagged.ds_tensor = here.part if here.part is not None else here.blank()
    note_status(param, here)


def note_status(param: Any, here: Parked) -> None:
    """Set ``ds_status``: somebody holds the parameter whole, or not."""
    param.ds_status = ZeroParamStatus.AVAILABLE if here.holds else ZeroParamStatus.NOT_AVAILABLE


@quietly
def cast(param: nn.Parameter) -> None:
    """Bring a parked weight to the dtype that its place wants. Only when its construction is over: see [Note: bits]."""
    here = parked(param)
    if here is None or here.place.dtype in (None, here.dtype) or not here.dtype.is_floating_point:
        return
    assert here.place.dtype is not None
    here.dtype = here.place.dtype
    if here.part is not None:
        part = here.part.to(here.dtype)
        here.part = get_accelerator().pin(part) if here.place.pin else part
    param.data = here.blank()
    _tag(param, here)


def _replace_meta(param: nn.Parameter, data: Tensor) -> None:
    """``param.data = data`` for a parameter on the meta device, which torch refuses; the object stays the same."""
    new = nn.Parameter(data, requires_grad=param.requires_grad)
    new.__dict__.update(param.__dict__)
    torch.utils.swap_tensors(param, new)


def unpark(param: nn.Parameter) -> None:
    """Forget that `param` was parked; it holds whatever it holds."""
    for name in (_MARK, *DESCRIBED):
        if hasattr(param, name):
            delattr(param, name)


@quietly
def check_untouched(param: nn.Parameter, here: Parked, name: str = "") -> None:
    """Somebody who assigns ``param.data`` while the weight is parked would not be heard."""
    if not here.holds and param.numel():
        raise UsageError(
            f"parameter {name or getattr(param, 'ds_id', '')!r} of shape {tuple(here.shape)} was given data of shape "
            f"{tuple(param.shape)} while it is partitioned; write to it inside "
            "ds_zero.GatheredParameters(param, modifier_rank=0)"
        )


@quietly
def ghost(param: nn.Parameter, here: Parked) -> None:
    """Let `param` have its shape without memory, for those who lay it out."""
    if not here.holds:
        param.data = torch.empty((), dtype=param.dtype, device=param.device).expand(here.shape)


@quietly
def take_over(param: nn.Parameter, ranks: list[int]) -> tuple[Tensor, bool] | None:
    """The whole weight of a parked parameter, which then is not parked any more, and whether all `ranks` got the same.

    None for one that is not parked. The weight has the dtype that `param` was cast to meanwhile. Collective over the
    group that it was parked over.
    """
    here = parked(param)
    if here is None:
        return None
    whole = param.data if here.holds else here.gather().to(param.device, param.dtype)
    unpark(param)
    here.part, here.taken = None, True
    return whole, set(ranks) <= set(here.place.ranks)


def prepare(module: nn.Module, ctx: Context) -> None:
    """A partitioner is about to lay out `module`: check what `Init` and others have left, and give it its shapes.

    Raises UsageError for a weight without a value, one that was assigned while it was partitioned, or one that
    another engine has partitioned.
    """
    lacking = []
    for param, info in ctx.params.items():
        here = parked(param)
        if here is None:
            if hasattr(param, "ds_id"):
                raise UsageError(
                    f"parameter {info.name!r} is partitioned by another engine; call that engine's destroy() first, or "
                    "initialize the whole model once"
                )
            continue
        check_untouched(param, here, info.name)
        if here.part is None and here.shape.numel():
            lacking.append(info.name)
        if info.held and set(ctx.mesh.ranks(*info.held)) & set(here.place.ranks) != {ctx.rank}:
            log.warning(
                "%s differs over the mesh axes %s, but was built by ds_zero.Init over ranks that differ there, so they "
                "begin with the same values; give Init a data_parallel_group, or build it outside",
                info.name,
                list(info.held),
            )
    if lacking:
        more = f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""
        raise UsageError(
            f"{', '.join(lacking[:5])}{more}: built on the meta device, and never given a value: their modules have no "
            "reset_parameters. Load weights (load_state_dict), or write them inside "
            "ds_zero.GatheredParameters(..., modifier_rank=0), before initialize"
        )
    for param in ctx.params:
        if (here := parked(param)) is not None:
            ghost(param, here)


@quietly
def restore(module: nn.Module) -> None:
    """Make all parked parameters of `module` whole. Collective."""
    for param in module.parameters():
        if (taken := take_over(param, [])) is not None:
            param.data = taken[0]
