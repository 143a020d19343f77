"""Flat buckets: parameters in one buffer, of which each rank owns, and its optimizer updates, an equal part.

[Note: pieces] The optimizer gets one tensor per parameter: this rank's piece of it, a view into the part, possibly
empty. So a parameter that nobody used keeps its weight and its state (its piece has no gradient, and torch's
optimizers skip it), counters of steps are each parameter's own, and the groups are as long as the user made them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_zero.layout import Layout, pack

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.params import ParamInfo
    from ds_zero.regroup import WholeTensors

__all__ = ["FlatBucket", "Piece", "Share", "make_buckets", "needs_whole"]


class Share(enum.Enum):
    """Where a bucket's weights live between steps: whole on every rank, or only this rank's part."""

    WHOLE = "whole"
    PART = "part"


@dataclass(slots=True, eq=False)
class Piece:
    """The elements [start, stop) of a flattened parameter, which this rank's optimizer updates through `master`.

    index: the parameter's place in its bucket. at: the piece's place in the part.
    """

    name: str
    param: nn.Parameter
    shape: tuple[int, ...]
    index: int
    start: int
    stop: int
    at: int
    master: nn.Parameter

    @property
    def within(self) -> slice:
        """The piece as a range of the part."""
        return slice(self.at, self.at + self.stop - self.start)


class FlatBucket:
    """Parameters of one dtype, device and replica group, one after the other in a flat buffer.

    full: the buffer, of which parameters are views. part: this rank's part of it. master: what the optimizer updates:
    the part itself, or its copy in the dtype of master weights. axes, held, counted: see `ParamInfo`. whole: set where
    the optimizer updates whole tensors (`ds_zero.regroup`); `master` is the part then.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        infos: Sequence[ParamInfo],
        ctx: Context,
        share: Share,
        masters: bool = True,
    ) -> None:
        mesh = ctx.mesh
        self.params, self.names = list(params), [i.name for i in infos]
        self.shapes = [tuple(p.shape) for p in params]
        self.axes, self.held, self.share = infos[0].replicas, infos[0].held, share
        self.counted = infos[0].counted
        self.group, self.world, self.rank = mesh.group(*self.axes), mesh.size(*self.axes), mesh.index(*self.axes)
        self.layout = Layout.of([p.numel() for p in params], self.world)
        self.full = self._flatten(mesh.ranks(*self.axes)[0])
        mine = slice(self.rank * self.layout.part, (self.rank + 1) * self.layout.part)
        self.part = self.full[mine] if share is Share.WHOLE else self.full[mine].clone()
        wanted = ctx.precision.master if masters else None
        separate = wanted is not None and self.full.is_floating_point() and wanted != self.full.dtype
        self.master = self.part.to(wanted) if separate else self.part
        self.pieces = [self._piece(i) for i in range(len(self.params))]
        self.whole: WholeTensors | None = None

    @torch.no_grad()
    def _flatten(self, source: int) -> Tensor:
        """Move the parameters into one buffer and give every rank the weights of global rank `source`."""
        full = torch.zeros(self.layout.total, dtype=self.params[0].dtype, device=self.params[0].device)
        for param, view in zip(self.params, self.views(full), strict=True):
            view.copy_(param)
            param.data = view
        if self.world > 1:
            comm.broadcast(full, src=source, group=self.group)
        return full

    def _piece(self, index: int) -> Piece:
        span, param = self.layout.span(index, self.rank), self.params[index]
        values = self.master[span.at : span.at + span.stop - span.start]
        master = nn.Parameter(values, requires_grad=param.requires_grad)
        return Piece(self.names[index], param, self.shapes[index], index, *span, master)

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return self.full.dtype

    @property
    def trains(self) -> bool:
        """Whether its parameters are of a kind that can have gradients."""
        return self.full.is_floating_point() or self.full.is_complex()

    @property
    def trainable(self) -> bool:
        """Whether any parameter requires a gradient now."""
        return any(p.requires_grad for p in self.params)

    @property
    def optimized(self) -> list[Piece]:
        """One piece per parameter, whose `master` is what this rank's optimizer updates."""
        return self.pieces if self.whole is None else self.whole.pieces

    def view(self, flat: Tensor, index: int) -> Tensor:
        """Parameter `index` in a buffer that is laid out as this bucket."""
        begin = self.layout.offsets[index]
        return flat[begin : begin + self.layout.sizes[index]].view(self.shapes[index])

    def views(self, flat: Tensor) -> Iterator[Tensor]:
        """All parameters in such a buffer."""
        return (self.view(flat, i) for i in range(len(self.params)))

    def parts(self, flat: Tensor) -> Sequence[Tensor]:
        """The parts of all ranks in such a buffer."""
        return flat.view(self.world, self.layout.part).unbind()

    @torch.no_grad()
    def round(self) -> None:
        """Write the master weights into the part. Collective where the optimizer updates whole tensors."""
        if self.whole is not None:
            self.whole.round()
        elif self.master is not self.part:
            self.part.copy_(self.master)

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the master weights from the part: the reverse of `round`, and collective where that is."""
        if self.whole is not None:
            self.whole.refresh()
        elif self.master is not self.part:
            self.master.copy_(self.part)

    def spread(self, group: Any, *, gather: bool) -> list[Any]:
        """Start giving every rank all parts, straight into `full`; the works under way.

        gather: by one all-gather, else each rank broadcasts its part.
        """
        if self.world == 1:
            return []
        if gather:
            return [comm.all_gather_into_tensor(self.full, self.part, group=group, async_op=True)]
        ranks = torch.distributed.get_process_group_ranks(group)
        parts = self.parts(self.full)
        return [comm.broadcast(parts[i], src=rank, group=group, async_op=True) for i, rank in enumerate(ranks)]


def needs_whole(ctx: Context) -> bool:
    """Whether the optimizer must see whole tensors: it says so, or nobody has said that elements are enough."""
    return ctx.grain != "element"


def make_buckets(
    params: Sequence[nn.Parameter],
    ctx: Context,
    capacity: Callable[[int], int],
    share: Share = Share.WHOLE,
    *,
    masters: bool = True,
) -> list[FlatBucket]:
    """Lay `params` into buckets, in reverse order, which is about the order in which backward finishes them.

    capacity: world size -> the most elements of a bucket. masters: whether an optimizer will update them. Frozen
    parameters have buckets of their own, which do not
    travel until they are thawed.
    """
    masters = masters and not needs_whole(ctx)
    kinds: dict[tuple[Any, ...], list[nn.Parameter]] = {}
    for param in reversed(params):
        info = ctx.params[param]
        kind = (info.replicas, info.held, info.counted, param.dtype, param.device, param.requires_grad)
        kinds.setdefault(kind, []).append(param)
    buckets = []
    for (axes, *_), members in kinds.items():
        for run in pack([p.numel() for p in members], capacity(ctx.mesh.size(*axes))):
            chosen = [members[i] for i in run]
            buckets.append(FlatBucket(chosen, [ctx.params[p] for p in chosen], ctx, share, masters))
    return buckets
