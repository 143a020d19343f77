"""Where the elements of an engine's states are: what becomes of a tensor of this rank as a view."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from ds_run_state.slices import SLICES, Box, Slice, unslice
from ds_run_state.states import StateTensor
from ds_state_stores import is_evicted, memory_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ds_core import comm
from ds_core.context import StashKey
from ds_core.errors import UsageError
from ds_dtensor.layout import Window, boxes, contiguous
from ds_dtensor.ops import replicated
from ds_dtensor.tensor import PieceTensor

if TYPE_CHECKING:
    from ds_access.param_shard import ParamShard, Ranges

    from ds_core.context import Context
    from ds_core.engine import RunningEngine
    from ds_core.partition import ParamInfo

_WORLD: StashKey[DeviceMesh] = StashKey("dtensor mesh")


def check(engine: RunningEngine) -> None:
    """Raise UsageError where ranks have different states under one name, or none to look at."""
    mesh = engine.ctx.mesh
    for axis, section in (("pp", "pipeline"), ("ep", "moe")):
        if mesh.has(axis) and mesh.size(axis) > 1:
            raise UsageError(
                f"dscore-dtensor and {section!r} (mesh axis {axis!r} of size {mesh.size(axis)}) do "
                "not go together: ranks have other parameters, and a DTensor has one shape on all; "
                "use engine.save_checkpoint, which any layout loads"
            )
    zero = engine.config.raw.get("zero_optimization")
    if isinstance(zero, Mapping) and zero.get("zenflow"):
        raise UsageError(
            "dscore-dtensor and 'zero_optimization.zenflow' do not go together: its weights are "
            "ahead of its masters between updates; use engine.save_checkpoint"
        )


@contextlib.contextmanager
def alike() -> Iterator[None]:
    """Inside, an UsageError of one rank is one of all, when all are through. Collective."""
    said = None
    try:
        yield
    except UsageError as error:
        said = str(error)
    ranks = comm.all_gather_json(said)
    if (text := next((text for text in ranks if text is not None), None)) is not None:
        raise UsageError(text)


def world_mesh(ctx: Context) -> DeviceMesh | None:
    """All ranks, in one dimension; None where no process group runs, so that all is whole here."""
    if not dist.is_initialized():
        return None
    if (mesh := ctx.stash.get(_WORLD)) is None:
        kind = ctx.accelerator.device_type
        mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("ranks",))
        ctx.stash[_WORLD] = mesh
    return mesh


def slice_of(ctx: Context, name: str) -> Slice | None:
    """The part of the full parameter that this rank has; None: all."""
    return (ctx.stash.get(SLICES) or {}).get(name)


def take(ctx: Context, name: str, full: Tensor) -> Tensor:
    """What this rank has of a full parameter, where others have other parts of it."""
    piece = slice_of(ctx, name)
    return full if piece is None else piece.take(full)


def full_shape(ctx: Context, name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Of the full parameter, of which this rank has one of `shape`."""
    piece = slice_of(ctx, name)
    return tuple(shape) if piece is None else piece.shape


def windows(
    ctx: Context, name: str, shape: Sequence[int], start: int, stop: int
) -> tuple[Window, ...]:
    """The boxes of the full parameter that the range [start, stop) of this rank's is.

    shape: of what this rank has of it.
    """
    piece = slice_of(ctx, name)
    if piece is None:
        return tuple(Window(b, contiguous(b.size), at) for b, at in boxes(shape, start, stop))
    # Views of a tensor without memory say how its elements are laid out.
    marker = torch.empty(stop - start, device="meta")
    state = StateTensor(f"module/{name}", marker, piece.size, start, stop, (), True)
    found = []
    for part in unslice([state], {name: piece}, ctx.mesh):
        box = part.box if part.box is not None else Box.whole(piece.shape)
        for inside, at in boxes(box.size, part.start, part.stop):
            first = tuple(a + b for a, b in zip(box.first, inside.first, strict=True))
            view = _laid_out(part.tensor, at, inside)
            found.append(
                Window(Box(first, inside.size), tuple(view.stride()), int(view.storage_offset()))
            )
    return tuple(found)


def _laid_out(tensor: Tensor, at: int, box: Box) -> Tensor:
    """The elements of `tensor`, flat or rows of a matrix, from `at` on, in the shape of `box`."""
    if tensor.dim() == 2 and not tensor.is_contiguous():
        width = tensor.shape[1]
        return tensor[at // width : (at + box.numel) // width].view(box.size)
    return tensor.reshape(-1)[at : at + box.numel].view(box.size)


class Places:
    """Makes views of an engine's tensors.

    wraps: tensors that every rank has whole become DTensors too, else they stay plain.
    """

    def __init__(self, engine: RunningEngine, *, wraps: bool) -> None:
        check(engine)
        self.ctx = engine.ctx
        self.mesh = world_mesh(engine.ctx)
        self._wraps = wraps

    def trained(self, held: ParamShard, tensor: Tensor) -> Tensor:
        """What the optimizer updates of a parameter, or a state of one value per element."""
        return self._of(held, tensor, held.updated_ranges)

    def gradient(self, held: ParamShard, grad: Tensor) -> Tensor:
        """The reduced gradient of a parameter."""
        return self._of(held, grad, held.ranges)

    def _of(self, held: ParamShard, tensor: Tensor, ranges: Ranges) -> Tensor:
        info = self.ctx.params[held.param]
        span = ranges[held.index]
        # Of ranks with the same range the first counts.
        first = list(ranges).index(span) == held.index
        return self.view(
            info,
            tensor,
            held.shape,
            span,
            whole=held.copied(ranges),
            counts=info.counted and first and self._first_of_others(info),
        )

    def _first_of_others(self, info: ParamInfo) -> bool:
        """Whether this rank is the first along axes that are not the group of the parameter, and
        along which ranks have the same."""
        mesh = self.ctx.mesh
        apart = {*info.held, *info.replicas}
        return all(mesh.coord[a] == 0 for a in mesh.expand(mesh.names) if a not in apart)

    def view(
        self,
        info: ParamInfo,
        tensor: Tensor,
        shape: Sequence[int],
        span: tuple[int, int],
        *,
        whole: bool,
        counts: bool,
    ) -> Tensor:
        """A view of `tensor`, the range `span` of what this rank has of a parameter.

        shape: of what this rank has of it.
        whole: every rank of its group has all of it.
        """
        piece = slice_of(self.ctx, info.name)
        if left := set(info.held) - set(piece.axes if piece is not None else ()):
            raise UsageError(
                f"dscore-dtensor: ranks along mesh axis {min(left)!r} have different "
                f"parameters {info.name!r}, and a DTensor has one shape on all; use "
                "engine.save_checkpoint"
            )
        if is_evicted(tensor):
            raise UsageError(
                f"dscore-dtensor: {info.name!r} rests on a disk "
                "(zero_optimization.offload_optimizer or offload_param with device 'nvme'), so "
                "there is no memory to look at; use engine.save_checkpoint, or offload to 'cpu'"
            )
        if memory_of(tensor)[0] is not tensor:
            raise UsageError(
                f"dscore-dtensor: a state of {info.name!r} is kept as a {type(tensor).__name__}, "
                "whose elements are not in memory as they are; use engine.save_checkpoint"
            )
        local = tensor.detach()
        if whole and piece is None:
            return self.whole(local.view(tuple(shape)))
        assert self.mesh is not None
        return PieceTensor.of(
            local.view(-1),
            full_shape(self.ctx, info.name, shape),
            windows(self.ctx, info.name, shape, *span),
            self.mesh,
            counts=counts,
        )

    def whole(self, tensor: Tensor) -> Tensor:
        """A view of a tensor that every rank has whole."""
        if self._wraps and self.mesh is not None:
            return replicated(tensor.detach(), self.mesh)
        return tensor.detach()

    def owned(self, shape: Sequence[int], dtype: torch.dtype, tensor: Tensor | None) -> PieceTensor:
        """A view of a tensor that one rank has, whole; tensor: None on the others."""
        if tensor is None or not tensor.numel():
            return self.nothing(shape, dtype)
        assert self.mesh is not None
        first = tuple(0 for _ in shape)
        found = Window(Box(first, tuple(shape)), tuple(tensor.stride()), 0)
        return PieceTensor.of(tensor.detach(), shape, [found], self.mesh, counts=True)

    def nothing(self, shape: Sequence[int], dtype: torch.dtype) -> PieceTensor:
        """A view on a rank that has no element of the tensor."""
        assert self.mesh is not None
        empty = torch.empty(0, dtype=dtype, device=self.ctx.accelerator.current_device())
        return PieceTensor.of(empty, shape, (), self.mesh, counts=False)
