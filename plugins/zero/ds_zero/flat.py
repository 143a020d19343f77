"""Flat buckets: parameters in one buffer, of which each rank owns, and its optimizer updates, an equal part.

[Note: pieces] The optimizer gets one tensor per parameter: this rank's piece of it, a view into the part, possibly
empty. So a parameter that nobody used keeps its weight and its state (its piece has no gradient, and torch's
optimizers skip it), counters of steps are each parameter's own, and the groups are as long as the user made them.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_core.buckets import arrange
from ds_core.stores import is_evicted
from ds_zero.layout import Layout
from ds_zero.placement import ON_DEVICE, Home
from ds_zero.sharded_param import pop_weight

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.params import ParamInfo
    from ds_zero.owned_tensors import WholeTensors

__all__ = ["FlatBucket", "Piece", "CastOnWait", "Share", "make_buckets", "needs_whole"]

HOST_BYTES = 1 << 23
"""The most bytes of a bucket in host memory whose gradients come and go. The allocator keeps what it is given back only
up to some size, and above it every step pays for fresh pages: 70 of 410 ms CPU time for 114 MB. It is two chunks of
`ds_core.comm.gloo`, so on two ranks as many messages as in one large bucket."""


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


@dataclass(frozen=True, slots=True)
class CastOnWait:
    """A collective that runs in another dtype than its result; `wait` casts into `out`."""

    work: Any
    low: Tensor
    out: Tensor

    def wait(self) -> None:
        """Wait for the collective, and write the result."""
        self.work.wait()
        self.out.copy_(self.low)


class FlatBucket:
    """Parameters of one dtype, device and replica group, one after the other in a flat buffer.

    full: the buffer, of which parameters are views. part: this rank's part of it. master: what the optimizer updates:
    the part itself, or its copy in the dtype of master weights, or where masters rest. axes, held, counted: see
    `ParamInfo`. whole: set where the optimizer updates whole tensors (see `owned_tensors`); `master` is the part then.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        infos: Sequence[ParamInfo],
        ctx: Context,
        share: Share,
        masters: bool = True,
        home: Home = ON_DEVICE,
    ) -> None:
        mesh = ctx.mesh
        self.home = home
        self.params, self.names = list(params), [i.name for i in infos]
        self.shapes = [tuple(p.shape) for p in params]
        self.axes, self.held, self.share = infos[0].replicas, infos[0].held, share
        run = f"{self.names[0]!r}" + (f" to {self.names[-1]!r}" if len(self.names) > 1 else "")
        self.about_weights, self.about_gradients = f"weights of {run}", f"gradients of {run}"  # for comm.label
        self.counted = infos[0].counted
        self.group, self.world, self.rank = mesh.group(*self.axes), mesh.size(*self.axes), mesh.index(*self.axes)
        self.layout = Layout.of([p.numel() for p in params], self.world)
        self.full = self._flatten(mesh.ranks(*self.axes)[0])
        mine = slice(self.rank * self.layout.part, (self.rank + 1) * self.layout.part)
        self.part = self.full[mine]
        if share is Share.PART:
            self.part = self.part.clone() if home.part is None else home.part.copy_in(self.part)
        self.part_rests = share is Share.PART and home.part is not None
        self.master_rests = False
        self._staged: Tensor | None = None
        self.master = self._master(self.full[mine], ctx.precision.master) if masters else self.part
        self.pieces = [self._piece(i) for i in range(len(self.params))]
        self.whole: WholeTensors | None = None
        if self.evictable:
            assert home.masters is not None
            home.masters.evict([self.master])

    @torch.no_grad()
    def _master(self, mine: Tensor, wanted: torch.dtype | None) -> Tensor:
        """What the optimizer updates, made from this rank's part of `full`."""
        dtype = wanted if wanted is not None and mine.is_floating_point() else mine.dtype
        store = self.home.masters if self.trains else None
        if store is not None and not (self.part_rests and store.resident and dtype == mine.dtype):
            self.master_rests = True
            return store.copy_in(mine, dtype)
        if store is None and self.part_rests and self.trains:
            return mine.to(dtype, copy=True)
        return self.part if dtype == mine.dtype else self.part.to(dtype)

    @torch.no_grad()
    def _flatten(self, source: int) -> Tensor:
        """Move the parameters into one buffer and give every rank the weights of global rank `source`."""
        full = torch.zeros(self.layout.total, dtype=self.params[0].dtype, device=self.params[0].device)
        ranks = torch.distributed.get_process_group_ranks(self.group) if self.world > 1 else []
        agreed = True
        for param, view in zip(self.params, self.views(full), strict=True):
            taken = pop_weight(param, ranks)
            view.copy_(param if taken is None else taken[0])
            param.data = view
            agreed = agreed and taken is not None and taken[1]
        if self.world > 1 and not agreed:
            comm.label(self.about_weights)
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
    def host_steps(self) -> bool:
        """Whether the optimizer updates this bucket on the host, so that reduced gradients go there."""
        return self.home.masters is not None and self.trains and self.whole is None

    @property
    def evictable(self) -> bool:
        """Whether masters and optimizer states are in a store that frees memory."""
        return self.master_rests and self.home.masters is not None and not self.home.masters.resident

    @property
    def upcast(self) -> bool:
        """Whether masters are of another dtype than the weights, so that they say more."""
        return self.master.dtype != self.dtype

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Inside, `master` is in memory, and may be changed."""
        store = self.home.masters
        if store is None or not is_evicted(self.master):
            yield
            return
        store.fetch([self.master])
        store.wait([self.master])
        try:
            yield
        finally:
            store.evict([self.master])

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

    def own(self, flat: Tensor) -> Tensor:
        """This rank's part of such a buffer."""
        return flat.narrow(0, self.rank * self.layout.part, self.layout.part)

    @property
    def staged(self) -> Tensor | None:
        """Where a step writes this rank's part: the part itself, or host memory from which it goes to the device.

        None where it cannot, or masters are of the weights' dtype: then `send` copies them.
        """
        if not self.upcast:
            return None
        if _together(self.part, self.master):
            return self.part
        if self._staged is None and self.home.masters is not None:
            self._staged = self.home.masters.buffer(self.layout.part, self.dtype)
        return self._staged

    def copies(self) -> list[Tensor | None]:
        """For each of `optimized`, where its new value is written in the weights' dtype; None: see `send`."""
        if self.whole is not None:
            return self.whole.copies()
        staged = self.staged
        return [staged[p.within] if staged is not None and p.stop > p.start else None for p in self.pieces]

    @torch.no_grad()
    def send(self) -> None:
        """After a step, which has written `copies`: have the part hold the new weights; see `Transfers.to_device`.

        Masters are in memory. Collective where the optimizer updates whole tensors.
        """
        staged = self.staged
        if self.whole is not None:
            self.whole.send()
        elif staged is self.part or self.master is self.part:
            return
        elif self.master_rests and not self.part_rests:
            assert self.home.transfers is not None
            self.home.transfers.to_device(self.part, self.master if staged is None else staged)
        else:
            self.part.copy_(self.master)

    @torch.no_grad()
    def write(self, index: int, whole: Tensor) -> None:
        """Make `whole`, the same on all ranks, the weight of parameter `index`: its part, and its master.

        The parameter itself, where it is whole, must have it already.
        """
        flat, piece, owned = whole.reshape(-1), self.pieces[index], self.optimized[index]
        self._settle()
        if self.share is Share.PART:
            self.part[piece.within].copy_(flat[piece.start : piece.stop])
        with self.present():
            owned.master.data.view(-1).copy_(flat[owned.start : owned.stop])

    @torch.no_grad()
    def follow(self, param: nn.Parameter) -> None:
        """The weight of `param`, which is whole on every rank, was written: its master follows where they differ."""
        if self.share is Share.PART:
            return
        index = next(i for i, p in enumerate(self.params) if p is param)
        owned = self.optimized[index]
        self._settle()
        with self.present():
            master = owned.master.data.view(-1)
            now = self.view(self.full, index).reshape(-1)[owned.start : owned.stop].to(master.device)
            master.copy_(torch.where(master.to(now.dtype) == now, master, now))

    def _settle(self) -> None:
        """Wait for copies to and from the host that are under way."""
        if self.home.transfers is not None:
            self.home.transfers.settle()

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the master weights from the part: the reverse of `round`, and collective where that is."""
        if self.whole is not None:
            self.whole.refresh()
        elif self.master is not self.part:
            self.master.copy_(self.part)

    @torch.no_grad()
    def _own(self) -> Tensor:
        """This rank's part on the device: where it rests elsewhere, a copy in its place in `full`."""
        if not self.part_rests:
            return self.part
        assert self.home.transfers is not None
        mine = self.own(self.full)
        self.home.transfers.to_device(mine, self.part)
        return mine

    def spread(self, group: Any, *, gather: bool, dtype: torch.dtype | None = None) -> list[Any]:
        """Start giving every rank all parts, straight into `full`; the works under way.

        gather: by one all-gather, else each rank broadcasts its part. dtype: in which they travel, if not their own;
        by an all-gather then.
        """
        mine = self._own()
        if self.world == 1:
            return []
        comm.label(self.about_weights)
        if dtype is not None:
            low = torch.empty_like(self.full, dtype=dtype)
            return [
                CastOnWait(comm.all_gather_into_tensor(low, mine.to(dtype), group=group, async_op=True), low, self.full)
            ]
        if gather:
            return [comm.all_gather_into_tensor(self.full, mine, group=group, async_op=True)]
        ranks = torch.distributed.get_process_group_ranks(group)
        parts = self.parts(self.full)
        return [comm.broadcast(parts[i], src=rank, group=group, async_op=True) for i, rank in enumerate(ranks)]


def _together(part: Tensor, master: Tensor) -> bool:
    """Whether who updates the master can write the part."""
    return part.device == master.device


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
    home: Callable[[nn.Parameter], Home] = lambda param: ON_DEVICE,
    brief: bool = False,
) -> list[FlatBucket]:
    """Lay `params` into buckets, in reverse order, which is about the order in which backward finishes them.

    capacity: world size -> the most elements of a bucket. masters: whether an optimizer will update them. Frozen
    parameters have buckets of their own, which do not travel until they are thawed. home: where each parameter's states
    rest. brief: their gradients are let go of when they have been reduced, see `HOST_BYTES`.
    """
    masters = masters and not needs_whole(ctx)

    def kind(param: nn.Parameter) -> tuple[Any, ...]:
        info = ctx.params[param]
        return info.replicas, info.held, info.counted, param.dtype, param.device, param.requires_grad, home(param)

    def most(key: tuple[Any, ...]) -> int:
        axes, _, _, dtype, device, *_ = key
        limit = capacity(ctx.mesh.size(*axes))
        return min(limit, HOST_BYTES // dtype.itemsize) if brief and device.type == "cpu" else limit

    runs = arrange(params, kind, lambda key, filled, size: filled + size > most(key))
    return [FlatBucket(run, [ctx.params[p] for p in run], ctx, share, masters, home(run[0])) for run in runs]
